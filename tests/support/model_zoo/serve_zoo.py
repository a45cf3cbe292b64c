"""Serves a folder of the zoo with the engine in this process, and compares what comes out with Transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from support.run_model import load_test_runner, serve_requests
from support.tiny_models import VOCAB, decoder_class

from parley import hub
from parley.cli import doctor
from parley.model.checkpoint.files import LoadError
from parley.model.encoder_runner import EncoderRunner
from parley.model.load.check import check_model
from parley.model.runner import DecoderRunner
from parley.settings.config import SERVE_OPTIONS
from parley.settings.options import resolve_options
from parley.text.text_pipeline import TextPipeline
from parley.text.tokens.json_files import BadTokenizer
from parley.types import EngineRequest, ModelInfo, ParleySettings, PoolingOptions, SamplingOptions
from parley.worker.check import ModelCheck

PROMPTS = [
    torch.randint(3, VOCAB - 5, (size,), generator=torch.Generator().manual_seed(size)).tolist() for size in (5, 70)
]
TOKENS = 6  # of an answer


class ModelRefused(Exception):
    """The folder is not served. The message is what the user reads."""


class Served(NamedTuple):
    """What a model answered to PROMPTS: prompts with their answers, the log-probabilities of all tokens but the first
    of each, or vectors."""

    info: ModelInfo
    texts: list[list[int]]
    scores: list[torch.Tensor]
    vectors: list[torch.Tensor]


def load_folder(named: Path, dtype: str, **settings: Any) -> tuple[DecoderRunner | EncoderRunner, ModelInfo]:
    """Do what ``parley serve`` does with a model. Raises ModelRefused."""
    try:
        folder = hub.resolve_model(str(named))
        TextPipeline.from_folder(str(folder))
        return load_test_runner(folder, dtype=dtype, **settings)
    except (hub.ModelMissing, BadTokenizer, LoadError) as error:
        raise ModelRefused(str(error)) from None


def serve_folder(named: Path, dtype: str, **settings: Any) -> Served:
    """Load a model, then answer PROMPTS greedily. Raises ModelRefused."""
    runner, info = load_folder(named, dtype, **settings)
    if isinstance(runner, EncoderRunner):
        requests = [EngineRequest(str(i), prompt, 0, pooling=PoolingOptions()) for i, prompt in enumerate(PROMPTS)]
        answers, _ = serve_requests(runner, requests)
        vectors = [torch.frombuffer(bytearray(answers[str(i), 0].vector), dtype=torch.float32) for i in range(2)]
        return Served(info, PROMPTS, [], vectors)
    requests = [
        EngineRequest(str(i), prompt, TOKENS, SamplingOptions(temperature=0), logprobs=0, prompt_logprobs=0)
        for i, prompt in enumerate(PROMPTS)
    ]
    answers, _ = serve_requests(runner, requests, step=40)
    texts, scores = [], []
    for i, prompt in enumerate(PROMPTS):
        answer = answers[str(i), 0]
        texts.append(prompt + answer.token_ids)
        scores.append(
            torch.tensor([token_score.logprob for token_score in [*answer.prompt_scores[1:], *answer.scores]])
        )
    return Served(info, texts, scores, [])


class Advice(NamedTuple):
    """What ``parley doctor`` says of a folder: why it will not be served, empty if it will, and the bytes of its
    weights."""

    refusal: str
    weight_bytes: int | None


def consult_doctor(named: Path, dtype: str) -> Advice:
    """Return what ``parley doctor`` says of a folder."""
    checks = []

    def check_here(settings: ParleySettings) -> ModelCheck:
        """Do what the checking process does."""
        try:
            report = check_model(settings)
            checks.append(ModelCheck(load_caveat=report.load_caveat, memory_bytes=report.memory_bytes))
        except LoadError as error:
            checks.append(ModelCheck(str(error)))
        return checks[-1]

    flags = [str(named), "--dtype", dtype, "--kv-memory", "64MiB"]
    original, doctor.check_in_process = doctor.check_in_process, check_here
    try:
        findings = list(doctor.check_models(resolve_options(SERVE_OPTIONS, flags, {})))
    finally:
        doctor.check_in_process = original
    refusal = next((finding.observation for finding in findings if finding.level == "fail"), "")
    return Advice(refusal, checks[-1].memory_bytes if checks else None)


class Errors(NamedTuple):
    """How far log-probabilities (or the numbers of vectors) are from those of Transformers in float32: at most, and in
    the middle. ``loss``: by how much an answer's tokens are at most less probable there than the most probable."""

    largest: float
    median: float
    loss: float


@torch.inference_mode()
def measure_errors(reference: Path, served: Served) -> Errors:
    """Compare what was served with what Transformers computes from the folder ``reference``."""
    model = load_reference(reference, is_encoder=bool(served.vectors))
    if served.vectors:
        rows = [model(torch.tensor([ids])).last_hidden_state[0].mean(0) for ids in served.texts]
        off = torch.cat([(a - b / b.norm()).abs() for a, b in zip(served.vectors, rows, strict=True)])
        return Errors(float(off.max()), float(off.median()), 0.0)
    errors, loss = [], 0.0
    for prompt, ids, logprobs in zip(PROMPTS, served.texts, served.scores, strict=True):
        tokens = torch.tensor([ids])
        expected = model(tokens, use_cache=False).logits[0].float().log_softmax(-1)
        errors.append((expected[:-1].gather(1, tokens[0, 1:, None])[:, 0] - logprobs).abs())
        rows, chosen = expected[len(prompt) - 1 : -1], tokens[0, len(prompt) :, None]
        loss = max(loss, float((rows.max(-1).values - rows.gather(1, chosen)[:, 0]).max()))
    off = torch.cat(errors)
    return Errors(float(off.max()), float(off.median()), loss)


def load_reference(folder: Path, *, is_encoder: bool) -> Any:
    """Return Transformers' own model in float32."""
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.from_pretrained(folder)
    model_class = AutoModel if is_encoder else decoder_class(config)
    # Transformers' eager attention of Falcon adds the slopes of ALiBi twice.
    attention = "sdpa" if getattr(config, "alibi", False) else "eager"
    return model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention).eval()
