"""Vectors of decoders: the last token's hidden state, in any batch, together with requests that generate text."""

import json
import shutil
import struct

import pytest
import torch
from support import tiny_models
from support.run_model import serve, start

from parley.types import Pooling, Work


def vectors(answers):
    return {id: struct.unpack(f"<{len(answer.vector) // 4}f", answer.vector)
            for (id, _), answer in answers.items() if answer.vector is not None}  # fmt: skip


def prompts(count, vocab=tiny_models.VOCAB):
    return [[(7 * i + j * (i + 3)) % (vocab - 3) + 3 for j in range(1 + 13 * i % 90)] for i in range(count)]


def reference(folder, ids):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).get_decoder()
    with torch.inference_mode():
        return model(torch.tensor([ids])).last_hidden_state[0, -1]


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt2"])
def test_decoder_vector_is_the_last_tokens_hidden_state(architecture):
    folder = tiny_models.model(architecture)
    runner, info = start(folder, dtype="float32")
    assert info.generates and info.dimensions == 64
    texts = prompts(4)
    works = [Work(f"w{i}", ids, 0, pooling=Pooling()) for i, ids in enumerate(texts)]
    works.append(Work("raw", texts[3], 0, pooling=Pooling(normalize=False)))
    works.append(Work("short", texts[3], 0, pooling=Pooling(dimensions=10)))
    got = {id: torch.tensor(vector) for id, vector in vectors(serve(runner, works)[0]).items()}
    for i, ids in enumerate(texts):
        expected = reference(folder, ids)
        torch.testing.assert_close(got[f"w{i}"], expected / expected.norm(), atol=1e-4, rtol=0)
    torch.testing.assert_close(got["raw"], expected, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(got["short"], expected[:10] / expected[:10].norm(), atol=1e-4, rtol=0)


def test_decoder_vectors_and_texts_are_schedule_invariant():
    """One model serves both kinds of requests: each gives the result that it gives alone."""
    runner, _ = start(tiny_models.model("qwen2"))
    texts = prompts(10)
    works = []
    for i, ids in enumerate(texts):
        works += [Work(f"t{i}", ids, 40, seed=i, logprobs=0), Work(f"v{i}", ids, 0, pooling=Pooling())]
    works += [Work(f"again{i}", ids, 0, pooling=Pooling()) for i, ids in enumerate(texts)]
    alone, preempted = {}, 0
    for work in works:
        alone |= serve(runner, [work], batch=1, step=1 << 20, cache=False)[0]
    for batch, step, blocks, cache in (
        (16, 1 << 20, 300, True),
        (16, 24, 300, True),
        (7, 16, 14, True),
        (5, 40, 9, False),
    ):
        got, stats = serve(runner, works, batch=batch, step=step, blocks=blocks, cache=cache)
        assert got == alone
        preempted += stats.preemptions
    assert preempted
    assert all(alone[f"v{i}", 0].vector == alone[f"again{i}", 0].vector for i in range(10))


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(tiny_models.model("llama"), tmp_path / "m")


def describe(folder, *, normalize=True, **pooling):
    kinds = ["Transformer", "Pooling"] + ["Normalize"] * normalize
    modules = [{"idx": i, "name": str(i), "path": "" if not i else f"{i}_{kind}",
                "type": f"sentence_transformers.models.{kind}"} for i, kind in enumerate(kinds)]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def test_decoder_applies_pooling_settings_of_its_folder(folder):
    describe(folder, normalize=False, pooling_mode_lasttoken=True, pooling_mode_mean_tokens=False)
    runner, info = start(folder, dtype="float32")
    assert info.dimensions == 64
    answers, _ = serve(runner, [Work("own", [5, 6], 0, pooling=Pooling()),
                                Work("unit", [5, 6], 0, pooling=Pooling(normalize=True))])  # fmt: skip
    got = {id: torch.tensor(vector) for id, vector in vectors(answers).items()}
    assert abs(float(got["own"].norm()) - 1) > 0.1
    torch.testing.assert_close(got["own"] / got["own"].norm(), got["unit"])


def test_decoder_checkpoint_without_head_loads(tmp_path):
    """Embedding models are saved this way; a tied head is the embedding itself."""
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(tiny_models.model("qwen3"), tmp_path / "m")
    bare = {name.removeprefix("model."): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(bare, folder / "model.safetensors")
    runner, info = start(folder, dtype="float32")
    whole, _ = start(tiny_models.model("qwen3"), dtype="float32")
    assert info.lowered
    works = [Work("v", [5, 6, 7], 0, pooling=Pooling()), Work("t", [5, 6, 7], 4)]
    assert serve(runner, works)[0] == serve(whole, works)[0]


@pytest.mark.parametrize("pooling", [{"pooling_mode_mean_tokens": True}, {"pooling_mode": "dreams"}, {}])
def test_decoder_with_unsupported_pooling_only_generates(folder, pooling):
    describe(folder, **pooling)
    _, info = start(folder)
    assert info.generates and not info.dimensions
