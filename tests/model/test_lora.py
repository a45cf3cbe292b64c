"""LoRA adapters match PEFT in any batch, and an adapter that does not fit the model is rejected."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import random
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support import tiny_models
from support.lora_adapters import ALL_PROJECTIONS, load_with_peft, write_adapter
from support.multimodal_models import multimodal_folder

from parley.core.engine_loop import EngineLoop
from parley.core.step_budget import FixedBudget
from parley.engine.protocol import EngineFailed
from parley.engine.remote_engine import RemoteEngine
from parley.errors import UnknownModel
from parley.llm import LLM
from parley.model.checkpoint.files import LoadError
from parley.model.draft_model import DraftModel
from parley.model.load.loader import load_runner
from parley.model.networks import lora
from parley.model.networks.paged_kv import PagedKV
from parley.model.runner import DecoderRunner
from parley.serving.served_model import ServedModel
from parley.serving.server_options import ServerOptions
from parley.types import BeamOptions, EngineRequest, ParleySettings, SamplingOptions

ADAPTERS_FOLDER = Path(tempfile.mkdtemp(prefix="parley-adapters-"))
GREEDY = SamplingOptions(temperature=0.0)
SLOTS = 5
BEAM_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")  # peft takes those of MLPs for experts
ADAPTER_COUNT = 8  # number of adapters in a batch, of rank 1, 2, 3 ...


@pytest.fixture(scope="module", autouse=True)
def remove_adapters_folder():
    yield
    shutil.rmtree(ADAPTERS_FOLDER)


@functools.cache
def cached_adapter(base: str, seed: int, **fields) -> Path:
    adapter_fields = {key: list(value) if isinstance(value, tuple) else value for key, value in fields.items()}
    return write_adapter(
        ADAPTERS_FOLDER / f"{base}-{seed}-{len(list(ADAPTERS_FOLDER.iterdir()))}",
        tiny_models.model_folder(base),
        seed,
        **adapter_fields,
    )


@functools.cache
def cached_runner(base: str, dtype: str = "float32", quantization: str = "none") -> DecoderRunner:
    settings = ParleySettings(
        model=str(tiny_models.model_folder(base)), kv_memory=8 << 20, dtype=dtype, quantization=quantization
    )
    return load_runner(settings, lambda stage, fraction: None)[0]


def random_prompt(seed: int, length: int = 40) -> list[int]:
    return random.Random(seed).choices(range(3, tiny_models.VOCAB), k=length)


class AdapterLoop:
    """A loop with these adapters, by name, that collects the answers."""

    def __init__(
        self,
        runner: DecoderRunner,
        folders: dict[str, Path],
        *,
        pace=None,
        adapter_slots: int = 8,
        blocks: int = 200,
        speculate: str = "none",
        **loop_options,
    ):
        old_pages = runner.pages
        pages = PagedKV(old_pages.kv_layers, blocks, old_pages.dtype, old_pages.device)
        draft = None
        if speculate.startswith("draft="):
            draft_pages = PagedKV(old_pages.kv_layers, blocks, old_pages.dtype, old_pages.device)
            draft = DraftModel(runner.network, draft_pages, max_model_len=runner.max_model_len)
        fresh_runner = DecoderRunner(
            runner.network, pages, max_model_len=runner.max_model_len, slots=SLOTS, proposer=draft
        )
        self.answers: dict[str, tuple[list[int], list, list]] = {}
        self.cached: dict[str, int] = {}
        self.errors: dict[str, str] = {}
        options = ParleySettings(
            model="m",
            max_batch=SLOTS,
            adapters={name: str(folder) for name, folder in folders.items()},
            max_adapters=adapter_slots,
            speculate=speculate,
        )
        self.loop = EngineLoop(fresh_runner, options, self._collect, pace or FixedBudget(64), **loop_options)

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
            self.loop.check_invariants()
        assert self.loop.pool.used_count == 0
        return self.answers


def make_request(
    request_id: str, adapter: str, seed: int = 0, length: int = 40, tokens: int = 12, **options
) -> EngineRequest:
    options = {"sampling": GREEDY, "logprobs": 1, "prompt_logprobs": 0} | options
    return EngineRequest(request_id, random_prompt(seed, length), tokens, adapter=adapter, **options)


def all_logprobs(answer) -> list[float]:
    return [score.logprob for score in answer[2][1:] + answer[1]]


@torch.inference_mode()
def peft_logprobs(model, tokens: list[int], prompt_len: int) -> list[float]:
    logits = model(torch.tensor([tokens[:-1]])).logits[0].log_softmax(-1)
    return [float(logits[i, token]) for i, token in enumerate(tokens[1:])]


def check_against_peft(base: str, folder: Path, *, merge: bool = True) -> None:
    check_answer_against_peft(cached_runner(base), tiny_models.model_folder(base), folder, merge=merge)


def check_answer_against_peft(runner: DecoderRunner, model_folder: Path, folder: Path, *, merge: bool = True) -> None:
    """Tokens and log-probabilities in float32 match those of PEFT, with its weights merged or separate."""
    engine = AdapterLoop(runner, {"a": folder})
    engine.loop.add_request(make_request("with", "a"))
    engine.loop.add_request(make_request("without", ""))
    answers = engine.finish()
    assert not engine.errors
    assert answers["with/0"] != answers["without/0"]
    model = load_with_peft(model_folder, folder, merge=merge)
    tokens = random_prompt(0) + answers["with/0"][0]
    expected_logprobs = peft_logprobs(model, tokens, 40)
    assert all_logprobs(answers["with/0"]) == pytest.approx(expected_logprobs, abs=1e-4)
    greedy = model.generate(torch.tensor([random_prompt(0)]), max_new_tokens=12, do_sample=False)[0].tolist()
    assert tokens[: len(greedy)] == greedy


@pytest.mark.parametrize("rank", [1, 7, 256])
def test_adapter_of_any_rank_matches_peft(rank):
    check_against_peft("llama", cached_adapter("llama", rank, r=rank), merge=rank != 7)


@pytest.mark.parametrize("target", ALL_PROJECTIONS)
def test_adapter_on_one_linear_layer_matches_peft(target):
    check_against_peft("llama", cached_adapter("llama", 3, r=4, target_modules=(target,)))


@pytest.mark.parametrize(
    "base",
    [
        "qwen2",
        "qwen3",
        "mistral",
        "phi3",
        "gpt_neox",
        "mixtral",
        "minicpm3",
        "gpt2",
        "beam",
        "mamba",
        "jamba",
        "falcon_h1",
        "gemma4",
        "gemma4 with inputs of layers",
        "gemma3n",
        "lfm3",
        "olmo_hybrid",
    ],
)
def test_adapters_of_all_model_types_match_peft(base):
    """Merged layers of checkpoints, heads with norms, and the Transformers backend."""
    targets = {
        "beam": BEAM_TARGETS,
        "phi3": ("qkv_proj", "gate_up_proj"),
        "gpt2": ("c_attn", "c_proj", "c_fc"),
        "gpt_neox": ("query_key_value", "dense", "dense_h_to_4h"),
        "mixtral": ("q_proj", "o_proj"),
        "mamba": ("in_proj", "x_proj", "dt_proj"),
        "jamba": ("in_proj", "x_proj", "dt_proj", "out_proj", "q_proj", "o_proj", "down_proj"),
        "falcon_h1": (*ALL_PROJECTIONS, "in_proj"),
        "gemma4": ("q_proj", "k_proj", "o_proj", "down_proj"),
        "gemma4 with inputs of layers": ("q_proj", "o_proj", "per_layer_input_gate", "per_layer_projection"),
        "gemma3n": ("q_proj", "up_proj", "per_layer_projection", "linear_left", "linear_right"),
        "lfm3": ("q_proj", "g_proj", "v_proj", "o_proj", "in_proj", "out_proj", "w2"),
        "olmo_hybrid": (*ALL_PROJECTIONS, "g_proj", "a_proj"),
        "minicpm3": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "down_proj"),
    }
    check_against_peft(base, cached_adapter(base, 5, r=5, target_modules=targets.get(base, tuple(ALL_PROJECTIONS))))


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
def test_adapter_config_sets_ranks_scales_and_layers(fields):
    folder = ADAPTERS_FOLDER / f"config-{len(list(ADAPTERS_FOLDER.iterdir()))}"
    check_against_peft("llama", write_adapter(folder, tiny_models.model_folder("llama"), 1, **fields))


# -- many adapters in one batch


@functools.cache
def adapters_by_name(base: str) -> dict[str, Path]:
    targets = BEAM_TARGETS if base == "beam" else tuple(ALL_PROJECTIONS)
    return {f"a{i}": cached_adapter(base, i, r=i, target_modules=targets) for i in range(1, ADAPTER_COUNT + 1)}


class ChangingBudget(FixedBudget):
    """A step budget that changes at every step."""

    def __init__(self, seed: int):
        super().__init__(0)
        self.random = random.Random(seed)

    def begin_step(self, decodes: int) -> None:
        self.remaining = self.random.choice([1, 7, 16, 50, 500])


@functools.cache
def answer_alone(base: str, quantization: str, name: str, seed: int, length: int, tokens: int):
    folders = {name: adapters_by_name(base)[name]} if name else {}
    engine = AdapterLoop(cached_runner(base, "bfloat16", quantization), folders, pace=FixedBudget(1 << 20))
    engine.loop.add_request(make_request("w", name, seed, length, tokens))
    return engine.finish()["w/0"]


@pytest.mark.parametrize(
    ("base", "quantization"), [("qwen3", "none"), ("llama", "int8"), ("qwen2", "int4"), ("beam", "none")]
)
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    requests=st.lists(
        st.tuples(
            st.sampled_from(["", *(f"a{i}" for i in range(1, ADAPTER_COUNT + 1))]),
            st.integers(0, 1),  # seed of the prompt
            st.sampled_from([1, 16, 17, 40, 70]),  # its length
            st.sampled_from([1, 9, 20]),  # tokens to generate
            st.integers(0, 9),  # arrives at this step
        ),
        min_size=1,
        max_size=8,
    ),
    places=st.sampled_from([1, 3, 8]),
    blocks=st.integers(7, 24),
    seed=st.integers(0, 99),
)
def test_mixed_adapters_do_not_change_each_others_outputs(base, quantization, requests, places, blocks, seed):
    """Bit for bit, in chunks, from the prefix cache, after preemptions and evictions."""
    runner = cached_runner(base, "bfloat16", quantization)
    engine = AdapterLoop(runner, adapters_by_name(base), pace=ChangingBudget(seed), adapter_slots=places, blocks=blocks)
    for step in range(10):
        for i, (name, family, length, tokens, arrives) in enumerate(requests):
            if arrives == step:
                engine.loop.add_request(make_request(str(i), name, family, length, tokens))
        engine.loop.step()
    answers = engine.finish()
    for i, (name, family, length, tokens, _) in enumerate(requests):
        assert answers[f"{i}/0"] == answer_alone(base, quantization, name, family, length, tokens)


def test_adapters_share_prefix_pages_only_with_equal_content(tmp_path):
    """Guards against KV pages of one adapter that serve another, or an old version of the same adapter."""
    folder = tmp_path / "a"
    shutil.copytree(adapters_by_name("llama")["a3"], folder)
    engine = AdapterLoop(
        cached_runner("llama", "bfloat16"),
        {"a": folder, "same": adapters_by_name("llama")["a3"], "b": adapters_by_name("llama")["a4"]},
    )

    def cached_tokens(request_id: str, name: str, **more) -> int:
        engine.loop.add_request(make_request(request_id, name, length=70, prompt_logprobs=-1, **more))
        engine.finish()
        return engine.cached[request_id]

    assert [cached_tokens("1", ""), cached_tokens("2", "a"), cached_tokens("3", "b")] == [0, 0, 0]
    assert [
        cached_tokens("4", ""),
        cached_tokens("5", "a"),
        cached_tokens("6", "same"),
        cached_tokens("7", "a", cache_salt="x"),
    ] == [64, 64, 64, 0]
    for path in adapters_by_name("llama")["a5"].iterdir():
        shutil.copy(path, folder)
    load_errors: list[str] = []
    engine.loop.adapter_cache.register_adapter("a", str(folder), load_errors.append)
    assert load_errors == [""] and cached_tokens("8", "a") == 0
    assert engine.answers["8/0"][0] == answer_alone("llama", "none", "a5", 0, 70, 12)[0]


def test_requests_for_more_adapters_than_fit_are_all_served():
    """Adapters load asynchronously, in any order: no request gets another adapter, and the cache keeps its limit."""
    pending_loads: list = []
    runner = cached_runner("llama", "bfloat16")
    engine = AdapterLoop(
        runner,
        adapters_by_name("llama"),
        adapter_slots=2,
        fetch_adapter=lambda *arguments: pending_loads.append(arguments),
    )
    rng, cache = random.Random(3), engine.loop.adapter_cache
    names = []
    for i in range(60):
        name = f"a{rng.randrange(ADAPTER_COUNT) + 1}" if rng.random() < 0.9 else ""
        names.append(name)
        engine.loop.add_request(make_request(str(i), name, i % 2, 17, 9, n=1 + i % 2))
        if i % 11 == 0:
            engine.loop.cancel_request(str(rng.randrange(i + 1)))
            engine.loop.cancel_request(str(i - 1), 0)
        for _ in range(rng.randrange(4)):
            engine.loop.step()
        if pending_loads and rng.random() < 0.7:
            folder, on_loaded = pending_loads.pop(0)
            on_loaded(runner.load_adapter(folder))
        assert len(cache.loaded_entries) <= 2
    while not engine.loop.is_idle or pending_loads:
        while engine.loop.step():
            pass
        if pending_loads:
            folder, on_loaded = pending_loads.pop(0)
            on_loaded(runner.load_adapter(folder))
    assert (
        not cache.waiting_count
        and not engine.loop.admission.adapter_use_count
        and not engine.loop.admission
        and not engine.errors
    )
    assert not any(entry.holder_count for entry in cache.loaded_entries)
    finished = 0
    for i, name in enumerate(names):
        answer = engine.answers.get(f"{i}/0")
        if answer is not None and len(answer[0]) == 9:  # not cancelled
            finished += 1
            assert answer == answer_alone("llama", "none", name, i % 2, 17, 9)
    assert finished > 45


def test_beams_and_draft_tokens_use_their_requests_adapter():
    def answer_with(names: list[str], **more) -> dict:
        engine = AdapterLoop(cached_runner("qwen3", "bfloat16"), adapters_by_name("qwen3"), **more)
        for name in names:
            engine.loop.add_request(
                EngineRequest(
                    f"beam {name}", random_prompt(0), 8, SamplingOptions(), n=2, beam=BeamOptions(2), adapter=name
                )
            )
            engine.loop.add_request(
                EngineRequest(f"text {name}", random_prompt(1)[:20] * 2, 30, GREEDY, logprobs=0, adapter=name)
            )
        answers = engine.finish()
        assert bool(more) == bool(engine.loop.collect_stats().drafts)
        return answers

    names = ["", "a3", "a8"]
    together = answer_with(names, speculate="ngram")
    assert answer_with(names, speculate="draft=itself") == together  # drafts come from the model without adapters
    for name in names:
        assert {key: together[key] for key in together if f" {name}/" in key} == answer_with([name])
    assert len({tuple(together[f"beam {name}/0"][0]) for name in names}) == 3


def test_replaced_or_removed_adapter_stays_with_running_requests():
    engine = AdapterLoop(cached_runner("llama", "bfloat16"), {"a": adapters_by_name("llama")["a1"]}, adapter_slots=1)
    cache, load_errors = engine.loop.adapter_cache, []
    engine.loop.add_request(make_request("old", "a"))
    engine.loop.step()
    cache.register_adapter("a", str(adapters_by_name("llama")["a2"]), load_errors.append)  # the only slot is taken
    engine.loop.add_request(make_request("new", "a"))
    engine.loop.step()
    assert cache.waiting_count == 1
    cache.register_adapter("wrong", "/nowhere", load_errors.append)
    cache.unregister_adapter("a")
    assert not cache.unregister_adapter("a")
    engine.loop.add_request(make_request("late", "a"))
    answers = engine.finish()
    assert answers["old/0"] == answer_alone("llama", "none", "a1", 0, 40, 12)
    assert answers["new/0"] == answer_alone("llama", "none", "a2", 0, 40, 12)
    assert load_errors[0] == "" and "no adapter folder" in load_errors[1] and "no adapter" in engine.errors["late"]
    assert not cache.loaded_entries


def test_request_waiting_for_an_adapter_slot_is_not_starved():
    """Guards against a steady stream of requests that keeps the only adapter slot for itself."""
    engine = AdapterLoop(cached_runner("llama", "bfloat16"), adapters_by_name("llama"), adapter_slots=1)
    engine.loop.add_request(make_request("0", "a1", tokens=20))
    engine.loop.step()
    engine.loop.add_request(make_request("rare", "a2", tokens=2))
    steps = 0
    while "rare/0" not in engine.answers:
        engine.loop.add_request(make_request(f"more {steps}", "a1", tokens=20))
        engine.loop.step()
        steps += 1
        assert steps < 40
    engine.finish()


# -- invalid adapters


def change_config(**members):
    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | members))

    return change


def change_weights(change):
    def rewrite(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return rewrite


LORA_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
LORA_B = LORA_A.replace("lora_A", "lora_B")


def rename_to_pickle(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def cut_weights_file(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


INVALID_ADAPTERS = {
    "no folder": (shutil.rmtree, "no adapter folder"),
    "no config": (lambda f: (f / "adapter_config.json").unlink(), "no adapter_config.json"),
    "no weights": (lambda f: (f / "adapter_model.safetensors").unlink(), "no adapter_model.safetensors"),
    "pickle": (rename_to_pickle, "pickle"),
    "cut off": (cut_weights_file, "cut off"),
    "no JSON": (lambda f: (f / "adapter_config.json").write_text("{"), "not valid JSON"),
    "a list": (lambda f: (f / "adapter_config.json").write_text("[]"), "JSON object"),
    "huge": (lambda f: os.truncate(f / "adapter_model.safetensors", 1 << 34), "larger than"),
    "kind": (change_config(peft_type="IA3"), "IA3"),
    "dora": (change_config(use_dora=True), "DoRA"),
    "modules": (change_config(modules_to_save=["lm_head"]), "modules_to_save"),
    "bias": (change_config(bias="all"), "bias"),
    "lora_bias": (change_config(lora_bias=True), "lora_bias"),
    "tokens": (change_config(trainable_token_indices=[1]), "trainable_token_indices"),
    "rank": (change_config(r=10**6), "from 1 to 256"),
    "no rank": (change_config(r=None), "whole number"),
    "alpha": (change_config(lora_alpha="x"), "lora_alpha"),
    "infinite": (change_config(lora_alpha=float("nan")), "lora_alpha"),
    "other rank": (change_config(r=3), "fits the model"),
    "pattern": (change_config(rank_pattern={"(a*)*": 3}), "too complex"),
    "bad pattern": (change_config(alpha_pattern={"(": 3}), "invalid expression"),
    "large count": (change_config(alpha_pattern={"a{99999999999}": 3}), "invalid expression"),
    "no object": (change_config(rank_pattern=[1]), "not an object"),
    "half": (change_weights(lambda t: t.pop(LORA_A)), "only one of"),
    "layer missing": (change_weights(lambda t: (t.pop(LORA_A), t.pop(LORA_B))), "no tensors for it"),
    "nothing": (change_weights(lambda t: t.clear()), "no tensors"),
    "shape": (change_weights(lambda t: t.update({LORA_A: torch.zeros(8, 32)})), "another model"),
    "not a number": (change_weights(lambda t: t[LORA_A].fill_(float("nan"))), "not a number"),
    "too large": (change_weights(lambda t: t.update({LORA_A: t[LORA_A].double().fill_(1e300)})), "infinite"),
    "head": (
        change_weights(lambda t: t.update({"base_model.model.lm_head.lora_A.weight": torch.zeros(8, 64)})),
        "lm_head",
    ),
    "embedding": (
        change_weights(lambda t: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(8)})),
        "embed",
    ),
    "magnitude": (
        change_weights(lambda t: t.update({LORA_A.replace("lora_A.weight", "lora_magnitude_vector"): torch.ones(8)})),
        "magnitude",
    ),
    "whole module": (change_weights(lambda t: t.update({"base_model.model.lm_head.weight": torch.ones(8)})), "lm_head"),
    "twice": (
        change_weights(lambda t: t.update({LORA_A.removeprefix("base_model.model."): t[LORA_A].clone()})),
        "two tensors",
    ),
}


@pytest.mark.parametrize("what", INVALID_ADAPTERS)
def test_load_rejects_invalid_adapter_folders(what, tmp_path):
    change, message = INVALID_ADAPTERS[what]
    folder = tmp_path / "adapter"
    shutil.copytree(cached_adapter("llama", 9), folder)
    change(folder)
    with pytest.raises(LoadError, match=message) as caught:
        cached_runner("llama").load_adapter(str(folder))
    assert str(tmp_path) not in str(caught.value)


def test_load_accepts_other_adapter_tensor_names(tmp_path):
    source, runner = cached_adapter("llama", 9), cached_runner("llama")
    for i, rename_tensor in enumerate(
        [lambda n: n.removeprefix("base_model.model."), lambda n: n.replace("_A.", "_A.default.")]
    ):
        folder = tmp_path / str(i)
        shutil.copytree(source, folder)
        tensors = load_file(folder / "adapter_model.safetensors")
        save_file({rename_tensor(name): value for name, value in tensors.items()}, folder / "adapter_model.safetensors")
        check_against_peft("llama", folder, merge=False) if i == 1 else runner.load_adapter(str(folder))


@pytest.mark.parametrize(("family", "lowering"), [("llava", True), ("gemma3", True), ("gemma3", False)])
def test_adapter_finds_the_layers_of_a_multimodal_models_language_model(family, lowering, tmp_path):
    base = multimodal_folder(family)
    layers = r"model\.language_model\.layers\.\d+\.(self_attn\.[qo]_proj|mlp\.up_proj)"
    folder = write_adapter(tmp_path / "adapter", base, 3, target_modules=layers, rank_pattern={
        "^model.language_model.layers.1.self_attn.q_proj": 3})  # fmt: skip
    settings = ParleySettings(model=str(base), kv_memory=8 << 20, dtype="float32", lowering=lowering)
    runner = load_runner(settings, lambda stage, fraction: None)[0]
    check_answer_against_peft(runner, base, folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    assert all("model.language_model.layers" in name for name in tensors)
    older_names = {
        name.replace("model.language_model.", "language_model.model."): tensor for name, tensor in tensors.items()
    }
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"rank_pattern": {
        "^language_model.model.layers.1.self_attn.q_proj": 3}}))  # fmt: skip
    save_file(older_names, folder / "adapter_model.safetensors")
    assert runner.load_adapter(str(folder)).rank == 8
    vision = {"base_model.model.model.vision_tower.layers.0.q_proj.lora_A.weight": torch.zeros(8, 32)}
    save_file(older_names | vision, folder / "adapter_model.safetensors")
    with pytest.raises(LoadError, match=r"changes model\.vision_tower\.layers\.0\.q_proj, which is not"):
        runner.load_adapter(str(folder))


def test_load_rejects_adapter_of_another_model_or_too_high_rank():
    for base, other in (("llama", "qwen2"), ("mixtral", "llama"), ("phi3", "llama")):
        with pytest.raises(LoadError):
            cached_runner(base).load_adapter(str(cached_adapter(other, 9)))
    runner = cached_runner("llama")
    linears = runner.network.linears
    with pytest.raises(LoadError, match="from 1 to 7"):
        lora.read_adapter(cached_adapter("llama", 9), linears, 7, torch.float32, torch.device("cpu"))
    with pytest.raises(LoadError, match="not available"):
        lora.read_adapter(cached_adapter("llama", 9), {}, 256, torch.float32, torch.device("cpu"))


# -- with complete engines


def test_llm_selects_adapter_by_name():
    folders = {name: str(folder) for name, folder in adapters_by_name("llama").items()}
    with LLM(str(tiny_models.model_folder("llama")), adapters=folders, max_adapters=2, kv_memory=8 << 20) as llm:
        options = {"max_tokens": 9, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        for name in ("a1", "a5", "a1", None):
            answer = llm.generate(random_prompt(0, 17), adapter=name, logprobs=1, **options)
            ids = [token.id for token in answer.completions[0].tokens]
            assert ids == answer_alone("llama", "none", name or "", 0, 17, 9)[0]
        with pytest.raises(UnknownModel, match="no adapter"):
            llm.generate("a", adapter="none-such")
    with pytest.raises(EngineFailed, match=r"wrong \(/nowhere\) cannot be loaded: There is no adapter folder"):
        LLM(str(tiny_models.model_folder("llama")), adapters={"wrong": "/nowhere"}, kv_memory=8 << 20)


async def test_restarted_engine_keeps_its_adapters():
    engine_settings = ParleySettings(
        model=str(tiny_models.model_folder("llama")),
        kv_memory=8 << 20,
        adapters={"a1": str(adapters_by_name("llama")["a1"])},
    )
    engine = RemoteEngine(engine_settings)
    model = ServedModel(("m",), engine_settings, engine, ServerOptions())

    async def generate_tokens(name: str) -> list[int]:
        stream, ids = engine.submit_request(make_request(f"{name}-{engine.process_id}", name, 0, 17, 9)), []
        while outputs := await stream.next_outputs():
            assert not outputs[-1].error, outputs
            ids += [token for output in outputs for token in output.token_ids]
        return ids

    try:
        await model.load_engine()
        assert await model.serve_adapter("a2", str(adapters_by_name("llama")["a2"])) == ""
        assert "no adapter folder" in await model.serve_adapter("a3", "/nowhere")
        assert await engine.unload_adapter("a3") == "There is no adapter of this name."
        for restart in (True, False):
            for name in ("a1", "a2"):
                assert await generate_tokens(name) == answer_alone("llama", "none", name, 0, 17, 9)[0]
            if restart:
                old_pid = engine.process_id
                os.kill(old_pid, signal.SIGKILL)
                while engine.state != "ready" or engine.process_id in (old_pid, None):
                    assert engine.state != "failed", engine.failure
                    await asyncio.sleep(0.02)
    finally:
        await model.close_engine()
