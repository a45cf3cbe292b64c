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
from support.lora_adapters import ALL, merged, write_adapter

from parley.core.loop import Loop
from parley.core.step_budget import Fixed
from parley.engine.protocol import EngineFailed
from parley.engine.remote import RemoteEngine
from parley.errors import UnknownModel
from parley.llm import LLM
from parley.model.checkpoint.files import LoadError
from parley.model.draft_model import Draft
from parley.model.load.loader import load
from parley.model.networks import lora
from parley.model.networks.paged_kv import PagedKV
from parley.model.runner import Runner
from parley.serving.options import ServerOptions
from parley.serving.served_model import Model
from parley.types import Beam, Sampling, Settings, Work

HOME = Path(tempfile.mkdtemp(prefix="parley-adapters-"))
GREEDY = Sampling(temperature=0.0)
SLOTS = 5
EIGHT = 8  # number of adapters in a batch, of rank 1, 2, 3 ...


@pytest.fixture(scope="module", autouse=True)
def home():
    yield
    shutil.rmtree(HOME)


@functools.cache
def adapter(base: str, seed: int, **fields) -> Path:
    made = {key: list(value) if isinstance(value, tuple) else value for key, value in fields.items()}
    return write_adapter(HOME / f"{base}-{seed}-{len(list(HOME.iterdir()))}", tiny_models.model(base), seed, **made)


@functools.cache
def start(base: str, dtype: str = "float32", quantization: str = "none") -> Runner:
    settings = Settings(model=str(tiny_models.model(base)), kv_memory=8 << 20, dtype=dtype, quantization=quantization)
    return load(settings, lambda stage, fraction: None)[0]


def prompt(seed: int, length: int = 40) -> list[int]:
    return random.Random(seed).choices(range(3, tiny_models.VOCAB), k=length)


class Engine:
    """A loop with these adapters, by name, that collects the answers."""

    def __init__(
        self,
        runner: Runner,
        folders: dict[str, Path],
        *,
        pace=None,
        places: int = 8,
        blocks: int = 200,
        speculate: str = "none",
        **more,
    ):
        old = runner.pages
        pages = PagedKV(old.layers, blocks, old.dtype, old.device)
        draft = None
        if speculate.startswith("draft="):
            own = PagedKV(old.layers, blocks, old.dtype, old.device)
            draft = Draft(runner.network, own, max_model_len=runner.max_model_len)
        fresh = Runner(runner.network, pages, max_model_len=runner.max_model_len, slots=SLOTS, proposer=draft)
        self.answers: dict[str, tuple[list[int], list, list]] = {}
        self.cached: dict[str, int] = {}
        self.errors: dict[str, str] = {}
        options = Settings(
            model="m",
            max_batch=SLOTS,
            adapters={name: str(folder) for name, folder in folders.items()},
            max_adapters=places,
            speculate=speculate,
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
            self.loop.check()
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
    """Tokens and log-probabilities in float32 match those of PEFT, with its weights merged or separate."""
    engine = Engine(start(base), {"a": folder})
    engine.loop.add(ask("with", "a"))
    engine.loop.add(ask("without", ""))
    answers = engine.finish()
    assert not engine.errors
    assert answers["with/0"] != answers["without/0"]
    model = merged(tiny_models.model(base), folder, merge=merge)
    tokens = prompt(0) + answers["with/0"][0]
    want = expected(model, tokens, 40)
    assert scores_of(answers["with/0"]) == pytest.approx(want, abs=1e-4)
    greedy = model.generate(torch.tensor([prompt(0)]), max_new_tokens=12, do_sample=False)[0].tolist()
    assert tokens[: len(greedy)] == greedy


@pytest.mark.parametrize("rank", [1, 7, 256])
def test_adapter_of_any_rank_matches_peft(rank):
    check("llama", adapter("llama", rank, r=rank), merge=rank != 7)


@pytest.mark.parametrize("target", ALL)
def test_adapter_on_one_linear_layer_matches_peft(target):
    check("llama", adapter("llama", 3, r=4, target_modules=(target,)))


@pytest.mark.parametrize("base", ["qwen2", "qwen3", "mistral", "phi3", "mixtral", "gpt2"])
def test_adapters_of_all_model_types_match_peft(base):
    """Merged layers of checkpoints, heads with norms, and the Transformers backend."""
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
def test_adapter_config_sets_ranks_scales_and_layers(fields):
    folder = HOME / f"config-{len(list(HOME.iterdir()))}"
    check("llama", write_adapter(folder, tiny_models.model("llama"), 1, **fields))


# -- many adapters in one batch


@functools.cache
def crowd(base: str) -> dict[str, Path]:
    targets = ("c_attn", "c_proj", "c_fc") if base == "gpt2" else tuple(ALL)
    return {f"a{i}": adapter(base, i, r=i, target_modules=targets) for i in range(1, EIGHT + 1)}


class Moody(Fixed):
    """A step budget that changes at every step."""

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
def test_mixed_adapters_do_not_change_each_others_outputs(base, quantization, works, places, blocks, seed):
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


def test_adapters_share_prefix_pages_only_with_equal_content(tmp_path):
    """Guards against KV pages of one adapter that serve another, or an old version of the same adapter."""
    folder = tmp_path / "a"
    shutil.copytree(crowd("llama")["a3"], folder)
    engine = Engine(start("llama", "bfloat16"), {"a": folder, "same": crowd("llama")["a3"], "b": crowd("llama")["a4"]})

    def cached(id: str, name: str, **more) -> int:
        engine.loop.add(ask(id, name, length=70, prompt_logprobs=-1, **more))
        engine.finish()
        return engine.cached[id]

    assert [cached("1", ""), cached("2", "a"), cached("3", "b")] == [0, 0, 0]
    assert [cached("4", ""), cached("5", "a"), cached("6", "same"), cached("7", "a", salt="x")] == [64, 64, 64, 0]
    for path in crowd("llama")["a5"].iterdir():
        shutil.copy(path, folder)
    told: list[str] = []
    engine.loop.shelf.put("a", str(folder), told.append)
    assert told == [""] and cached("8", "a") == 0
    assert engine.answers["8/0"][0] == alone("llama", "none", "a5", 0, 70, 12)[0]


def test_requests_for_more_adapters_than_fit_are_all_served():
    """Adapters load asynchronously, in any order: no request gets another adapter, and the cache keeps its limit."""
    reading: list = []
    runner = start("llama", "bfloat16")
    engine = Engine(runner, crowd("llama"), places=2, fetch=lambda *asked: reading.append(asked))
    chance, shelf = random.Random(3), engine.loop.shelf
    names = []
    for i in range(60):
        name = f"a{chance.randrange(EIGHT) + 1}" if chance.random() < 0.9 else ""
        names.append(name)
        engine.loop.add(ask(str(i), name, i % 2, 17, 9, n=1 + i % 2))
        if i % 11 == 0:
            engine.loop.cancel(str(chance.randrange(i + 1)))
            engine.loop.cancel(str(i - 1), 0)
        for _ in range(chance.randrange(4)):
            engine.loop.step()
        if reading and chance.random() < 0.7:
            folder, done = reading.pop(0)
            done(runner.fetch(folder))
        assert len(shelf._held) <= 2
    while not engine.loop.idle or reading:
        while engine.loop.step():
            pass
        if reading:
            folder, done = reading.pop(0)
            done(runner.fetch(folder))
    assert not shelf.waiting and not engine.loop.intake._entries and not engine.loop.intake and not engine.errors
    assert not any(entry.holders for entry in shelf._held)
    whole = 0
    for i, name in enumerate(names):
        answer = engine.answers.get(f"{i}/0")
        if answer is not None and len(answer[0]) == 9:  # not cancelled
            whole += 1
            assert answer == alone("llama", "none", name, i % 2, 17, 9)
    assert whole > 45


def test_beams_and_draft_tokens_use_their_requests_adapter():
    def play(names: list[str], **more) -> dict:
        engine = Engine(start("qwen3", "bfloat16"), crowd("qwen3"), **more)
        for name in names:
            engine.loop.add(Work(f"beam {name}", prompt(0), 8, Sampling(), n=2, beam=Beam(2), adapter=name))
            engine.loop.add(Work(f"text {name}", prompt(1)[:20] * 2, 30, GREEDY, logprobs=0, adapter=name))
        answers = engine.finish()
        assert bool(more) == bool(engine.loop.stats().drafts)
        return answers

    names = ["", "a3", "a8"]
    together = play(names, speculate="ngram")
    assert play(names, speculate="draft=itself") == together  # drafts come from the model without adapters
    for name in names:
        assert {key: together[key] for key in together if f" {name}/" in key} == play([name])
    assert len({tuple(together[f"beam {name}/0"][0]) for name in names}) == 3


def test_replaced_or_removed_adapter_stays_with_running_requests():
    engine = Engine(start("llama", "bfloat16"), {"a": crowd("llama")["a1"]}, places=1)
    shelf, told = engine.loop.shelf, []
    engine.loop.add(ask("old", "a"))
    engine.loop.step()
    shelf.put("a", str(crowd("llama")["a2"]), told.append)  # the only slot is taken
    engine.loop.add(ask("new", "a"))
    engine.loop.step()
    assert shelf.waiting == 1
    shelf.put("wrong", "/nowhere", told.append)
    shelf.remove("a")
    assert not shelf.remove("a")
    engine.loop.add(ask("late", "a"))
    answers = engine.finish()
    assert answers["old/0"] == alone("llama", "none", "a1", 0, 40, 12)
    assert answers["new/0"] == alone("llama", "none", "a2", 0, 40, 12)
    assert told[0] == "" and "no adapter folder" in told[1] and "no adapter" in engine.errors["late"]
    assert not shelf._held


def test_request_waiting_for_an_adapter_slot_is_not_starved():
    """Guards against a steady stream of requests that keeps the only adapter slot for itself."""
    engine = Engine(start("llama", "bfloat16"), crowd("llama"), places=1)
    engine.loop.add(ask("0", "a1", tokens=20))
    engine.loop.step()
    engine.loop.add(ask("rare", "a2", tokens=2))
    steps = 0
    while "rare/0" not in engine.answers:
        engine.loop.add(ask(f"more {steps}", "a1", tokens=20))
        engine.loop.step()
        steps += 1
        assert steps < 40
    engine.finish()


# -- invalid adapters


def _config(**members):
    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | members))

    return change


def _weights(change):
    def rewrite(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return rewrite


A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
B = A.replace("lora_A", "lora_B")


def _pickled(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def _cut(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


WRONG = {
    "no folder": (shutil.rmtree, "no adapter folder"),
    "no config": (lambda f: (f / "adapter_config.json").unlink(), "no adapter_config.json"),
    "no weights": (lambda f: (f / "adapter_model.safetensors").unlink(), "no adapter_model.safetensors"),
    "pickle": (_pickled, "pickle"),
    "cut off": (_cut, "cut off"),
    "no JSON": (lambda f: (f / "adapter_config.json").write_text("{"), "not valid JSON"),
    "a list": (lambda f: (f / "adapter_config.json").write_text("[]"), "JSON object"),
    "huge": (lambda f: (f / "adapter_model.safetensors").open("ab").truncate(1 << 34), "larger than"),
    "kind": (_config(peft_type="IA3"), "IA3"),
    "dora": (_config(use_dora=True), "DoRA"),
    "modules": (_config(modules_to_save=["lm_head"]), "modules_to_save"),
    "bias": (_config(bias="all"), "bias"),
    "lora_bias": (_config(lora_bias=True), "lora_bias"),
    "tokens": (_config(trainable_token_indices=[1]), "trainable_token_indices"),
    "rank": (_config(r=10**6), "from 1 to 256"),
    "no rank": (_config(r=None), "whole number"),
    "alpha": (_config(lora_alpha="x"), "lora_alpha"),
    "infinite": (_config(lora_alpha=float("nan")), "lora_alpha"),
    "other rank": (_config(r=3), "fits the model"),
    "pattern": (_config(rank_pattern={"(a*)*": 3}), "too complex"),
    "bad pattern": (_config(alpha_pattern={"(": 3}), "invalid expression"),
    "no object": (_config(rank_pattern=[1]), "not an object"),
    "half": (_weights(lambda t: t.pop(A)), "only one of"),
    "layer missing": (_weights(lambda t: (t.pop(A), t.pop(B))), "no tensors for it"),
    "nothing": (_weights(lambda t: t.clear()), "no tensors"),
    "shape": (_weights(lambda t: t.update({A: torch.zeros(8, 32)})), "another model"),
    "not a number": (_weights(lambda t: t[A].fill_(float("nan"))), "not a number"),
    "too large": (_weights(lambda t: t.update({A: t[A].double().fill_(1e300)})), "infinite"),
    "head": (_weights(lambda t: t.update({"base_model.model.lm_head.lora_A.weight": torch.zeros(8, 64)})), "lm_head"),
    "embedding": (
        _weights(lambda t: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(8)})),
        "embed",
    ),
    "magnitude": (
        _weights(lambda t: t.update({A.replace("lora_A.weight", "lora_magnitude_vector"): torch.ones(8)})),
        "magnitude",
    ),
    "whole module": (_weights(lambda t: t.update({"base_model.model.lm_head.weight": torch.ones(8)})), "lm_head"),
    "twice": (_weights(lambda t: t.update({A.removeprefix("base_model.model."): t[A].clone()})), "two tensors"),
}


@pytest.mark.parametrize("what", WRONG)
def test_load_rejects_invalid_adapter_folders(what, tmp_path):
    change, message = WRONG[what]
    folder = tmp_path / "adapter"
    shutil.copytree(adapter("llama", 9), folder)
    change(folder)
    with pytest.raises(LoadError, match=message) as caught:
        start("llama").fetch(str(folder))
    assert str(tmp_path) not in str(caught.value)


def test_load_accepts_other_adapter_tensor_names(tmp_path):
    source, runner = adapter("llama", 9), start("llama")
    for i, spell in enumerate(
        [lambda n: n.removeprefix("base_model.model."), lambda n: n.replace("_A.", "_A.default.")]
    ):
        folder = tmp_path / str(i)
        shutil.copytree(source, folder)
        tensors = load_file(folder / "adapter_model.safetensors")
        save_file({spell(name): value for name, value in tensors.items()}, folder / "adapter_model.safetensors")
        check("llama", folder, merge=False) if i == 1 else runner.fetch(str(folder))


def test_load_rejects_adapter_of_another_model_or_too_high_rank():
    for base, other in (("llama", "qwen2"), ("mixtral", "llama"), ("phi3", "llama")):
        with pytest.raises(LoadError):
            start(base).fetch(str(adapter(other, 9)))
    runner = start("llama")
    linears = runner.network.linears
    with pytest.raises(LoadError, match="from 1 to 7"):
        lora.read(adapter("llama", 9), linears, 7, torch.float32, torch.device("cpu"))
    with pytest.raises(LoadError, match="not available"):
        lora.read(adapter("llama", 9), {}, 256, torch.float32, torch.device("cpu"))


# -- with complete engines


def test_llm_selects_adapter_by_name():
    folders = {name: str(folder) for name, folder in crowd("llama").items()}
    with LLM(str(tiny_models.model("llama")), adapters=folders, max_adapters=2, kv_memory=8 << 20) as llm:
        options = {"max_tokens": 9, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        for name in ("a1", "a5", "a1", None):
            answer = llm.generate(prompt(0, 17), adapter=name, logprobs=1, **options)
            ids = [token.id for token in answer.completions[0].tokens]
            assert ids == alone("llama", "none", name or "", 0, 17, 9)[0]
        with pytest.raises(UnknownModel, match="no adapter"):
            llm.generate("a", adapter="none-such")
    with pytest.raises(EngineFailed, match="wrong cannot be loaded: There is no adapter folder"):
        LLM(str(tiny_models.model("llama")), adapters={"wrong": "/nowhere"}, kv_memory=8 << 20)


async def test_restarted_engine_keeps_its_adapters():
    plan = Settings(
        model=str(tiny_models.model("llama")), kv_memory=8 << 20, adapters={"a1": str(crowd("llama")["a1"])}
    )
    engine = RemoteEngine(plan)
    model = Model(("m",), plan, engine, ServerOptions())

    async def tokens(name: str) -> list[int]:
        stream, ids = engine.submit(ask(f"{name}-{engine.pid}", name, 0, 17, 9)), []
        while outputs := await stream.next():
            assert not outputs[-1].error, outputs
            ids += [token for output in outputs for token in output.token_ids]
        return ids

    try:
        await model.load()
        assert await model.adopt("a2", str(crowd("llama")["a2"])) == ""
        assert "no adapter folder" in await model.adopt("a3", "/nowhere")
        assert await engine.unload_adapter("a3") == "There is no adapter of this name."
        for again in (True, False):
            for name in ("a1", "a2"):
                assert await tokens(name) == alone("llama", "none", name, 0, 17, 9)[0]
            if again:
                before = engine.pid
                os.kill(before, signal.SIGKILL)
                while engine.state != "ready" or engine.pid in (before, None):
                    assert engine.state != "failed", engine.failure
                    await asyncio.sleep(0.02)
    finally:
        await model.close()
