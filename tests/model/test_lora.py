"""Adapters: what PEFT computes with them, whatever else is in the batch; what is none for the model is refused."""

from __future__ import annotations

import functools
import random
import shutil
import tempfile
from pathlib import Path

import models
import pytest
import torch
from adapters import ALL, merged, write_adapter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parley.core.loop import Loop
from parley.core.pace import Fixed
from parley.model.kv import PagedKV
from parley.model.loader import load
from parley.model.runner import Runner
from parley.types import Sampling, Settings, Work

HOME = Path(tempfile.mkdtemp(prefix="parley-adapters-"))
GREEDY = Sampling(temperature=0.0)
SLOTS = 5
EIGHT = 8  # ranks of the adapters that are batched: 1, 2, 3 ...


@pytest.fixture(scope="module", autouse=True)
def home():
    yield
    shutil.rmtree(HOME)


@functools.cache
def adapter(base: str, seed: int, **fields) -> Path:
    made = {key: list(value) if isinstance(value, tuple) else value for key, value in fields.items()}
    return write_adapter(HOME / f"{base}-{seed}-{len(list(HOME.iterdir()))}", models.model(base), seed, **made)


@functools.cache
def start(base: str, dtype: str = "float32", quantization: str = "none") -> Runner:
    settings = Settings(model=str(models.model(base)), kv_memory=8 << 20, dtype=dtype, quantization=quantization)
    return load(settings, lambda stage, fraction: None)[0]


def prompt(seed: int, length: int = 40) -> list[int]:
    return random.Random(seed).choices(range(3, models.VOCAB), k=length)


class Engine:
    """A loop that has these adapters, by name, and whose answers are collected."""

    def __init__(
        self, runner: Runner, folders: dict[str, Path], *, pace=None, places: int = 8, blocks: int = 200, **more
    ):
        old = runner.pages
        pages = PagedKV(old.layers, blocks, old.dtype, old.device)
        fresh = Runner(runner.network, pages, max_model_len=runner.max_model_len, slots=SLOTS)
        self.answers: dict[str, tuple[list[int], list, list]] = {}
        self.cached: dict[str, int] = {}
        self.errors: dict[str, str] = {}
        options = Settings(
            model="m",
            max_batch=SLOTS,
            adapters={name: str(folder) for name, folder in folders.items()},
            max_adapters=places,
        )
        self.loop = Loop(fresh, options, self._collect, pace or Fixed(64), **more)

    def _collect(self, outputs, stats) -> None:
        for output in outputs:
            ids, scores, prompts = self.answers.setdefault(f"{output.id}/{output.index}", ([], [], []))
            ids += output.token_ids
            scores += output.scores or []
            prompts += output.prompt_scores or []
            self.cached.setdefault(output.id, output.cached_tokens)
            if output.error:
                self.errors[output.id] = output.error

    def finish(self):
        while self.loop.step():
            self.loop.scheduler.check()
        assert self.loop.pool.used == 0
        return self.answers


def ask(id: str, adapter: str, seed: int = 0, length: int = 40, tokens: int = 12, **more) -> Work:
    more = {"sampling": GREEDY, "logprobs": 1, "prompt_logprobs": 0} | more
    return Work(id, prompt(seed, length), tokens, adapter=adapter, **more)


def scores_of(answer) -> list[float]:
    return [score.logprob for score in answer[2][1:] + answer[1]]


@torch.inference_mode()
def expected(model, tokens: list[int], prompt_len: int) -> list[float]:
    logits = model(torch.tensor([tokens[:-1]])).logits[0].log_softmax(-1)
    return [float(logits[i, token]) for i, token in enumerate(tokens[1:])]


def check(base: str, folder: Path, *, merge: bool = True) -> None:
    """Tokens and log-probabilities in float32 are those of PEFT, with its weights merged or beside the model's."""
    engine = Engine(start(base), {"a": folder})
    engine.loop.add(ask("with", "a"))
    engine.loop.add(ask("without", ""))
    answers = engine.finish()
    assert not engine.errors
    assert answers["with/0"] != answers["without/0"]
    model = merged(models.model(base), folder, merge=merge)
    tokens = prompt(0) + answers["with/0"][0]
    want = expected(model, tokens, 40)
    assert scores_of(answers["with/0"]) == pytest.approx(want, abs=1e-4)
    greedy = model.generate(torch.tensor([prompt(0)]), max_new_tokens=12, do_sample=False)[0].tolist()
    assert tokens[: len(greedy)] == greedy


@pytest.mark.parametrize("rank", [1, 7, 256])
def test_an_adapter_of_any_rank_computes_what_peft_does(rank):
    check("llama", adapter("llama", rank, r=rank), merge=rank != 7)


@pytest.mark.parametrize("target", ALL)
def test_each_linear_layer_alone(target):
    check("llama", adapter("llama", 3, r=4, target_modules=(target,)))


@pytest.mark.parametrize("base", ["qwen2", "qwen3", "mistral", "phi3", "mixtral", "gpt2"])
def test_every_kind_of_model(base):
    """Merged layers of checkpoints, heads with norms, and Transformers' own code."""
    targets = {
        "phi3": ("qkv_proj", "gate_up_proj"),
        "gpt2": ("c_attn", "c_proj", "c_fc"),
        "mixtral": ("q_proj", "o_proj"),
    }
    check(base, adapter(base, 5, r=5, target_modules=targets.get(base, tuple(ALL))))


@pytest.mark.parametrize(
    "fields",
    [
        {"use_rslora": True, "r": 6},
        {"target_modules": "all-linear"},
        {"layers_to_transform": [1]},
        {"target_modules": r".*\.1\.mlp\.(up|down)_proj"},
        {"r": 4, "rank_pattern": {"q_proj": 9, r"model\.layers\.1\.mlp\..*": 2}, "alpha_pattern": {"v_proj": 3.5}},
        {
            "r": 4,
            "use_rslora": True,
            "rank_pattern": {"^model.layers.0.self_attn.k_proj": 3},
            "exclude_modules": ["up_proj"],
        },
    ],
    ids=["rslora", "all-linear", "layers", "expression", "patterns", "rslora and patterns"],
)
def test_what_the_config_says_of_ranks_scales_and_layers(fields):
    folder = HOME / f"config-{len(list(HOME.iterdir()))}"
    check("llama", write_adapter(folder, models.model("llama"), 1, **fields))


# -- many in one batch


@functools.cache
def crowd(base: str) -> dict[str, Path]:
    targets = ("c_attn", "c_proj", "c_fc") if base == "gpt2" else tuple(ALL)
    return {f"a{i}": adapter(base, i, r=i, target_modules=targets) for i in range(1, EIGHT + 1)}


class Moody(Fixed):
    """A pace that changes its mind at every step."""

    def __init__(self, seed: int):
        super().__init__(0)
        self.random = random.Random(seed)

    def begin(self, decodes: int) -> None:
        self.left = self.random.choice([1, 7, 16, 50, 500])


@functools.cache
def alone(base: str, quantization: str, name: str, seed: int, length: int, tokens: int):
    folders = {name: crowd(base)[name]} if name else {}
    engine = Engine(start(base, "bfloat16", quantization), folders, pace=Fixed(1 << 20))
    engine.loop.add(ask("w", name, seed, length, tokens))
    return engine.finish()["w/0"]


@pytest.mark.parametrize(
    ("base", "quantization"), [("qwen3", "none"), ("llama", "int8"), ("qwen2", "int4"), ("gpt2", "none")]
)
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    works=st.lists(
        st.tuples(
            st.sampled_from(["", *(f"a{i}" for i in range(1, EIGHT + 1))]),
            st.integers(0, 1),  # of the prompt
            st.sampled_from([1, 16, 17, 40, 70]),  # its length
            st.sampled_from([1, 9, 20]),  # tokens
            st.integers(0, 9),  # arrives after so many steps
        ),
        min_size=1,
        max_size=8,
    ),
    places=st.sampled_from([1, 3, 8]),
    blocks=st.integers(7, 24),
    seed=st.integers(0, 99),
)
def test_any_mixture_gives_each_what_it_gets_alone(base, quantization, works, places, blocks, seed):
    """Bit for bit, in chunks, from the prefix cache, after preemptions and evictions."""
    runner = start(base, "bfloat16", quantization)
    engine = Engine(runner, crowd(base), pace=Moody(seed), places=places, blocks=blocks)
    for step in range(10):
        for i, (name, family, length, tokens, arrives) in enumerate(works):
            if arrives == step:
                engine.loop.add(ask(str(i), name, family, length, tokens))
        engine.loop.step()
    answers = engine.finish()
    for i, (name, family, length, tokens, _) in enumerate(works):
        assert answers[f"{i}/0"] == alone(base, quantization, name, family, length, tokens)
