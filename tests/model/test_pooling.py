"""Vectors of decoders: the last token's hidden state, in any batch, together with requests that generate text."""

import json
import shutil
import struct

import pytest
import torch
from support import tiny_models
from support.run_model import load_test_runner, serve_requests

from parley.types import EngineRequest, PoolingOptions


def unpack_vectors(answers):
    return {request_id: struct.unpack(f"<{len(answer.vector) // 4}f", answer.vector)
            for (request_id, _), answer in answers.items() if answer.vector is not None}  # fmt: skip


def make_prompts(count, vocab=tiny_models.VOCAB):
    return [[(7 * i + j * (i + 3)) % (vocab - 3) + 3 for j in range(1 + 13 * i % 90)] for i in range(count)]


def last_hidden_state(folder, ids):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).get_decoder()
    with torch.inference_mode():
        return model(torch.tensor([ids])).last_hidden_state[0, -1]


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "beam"])
def test_decoder_vector_is_the_last_tokens_hidden_state(architecture):
    folder = tiny_models.model_folder(architecture)
    runner, info = load_test_runner(folder, dtype="float32")
    assert info.generates and info.dimensions == 64
    texts = make_prompts(4)
    requests = [EngineRequest(f"w{i}", ids, 0, pooling=PoolingOptions()) for i, ids in enumerate(texts)]
    requests.append(EngineRequest("raw", texts[3], 0, pooling=PoolingOptions(normalize=False)))
    requests.append(EngineRequest("short", texts[3], 0, pooling=PoolingOptions(dimensions=10)))
    actual = {
        request_id: torch.tensor(vector)
        for request_id, vector in unpack_vectors(serve_requests(runner, requests)[0]).items()
    }
    for i, ids in enumerate(texts):
        expected = last_hidden_state(folder, ids)
        torch.testing.assert_close(actual[f"w{i}"], expected / expected.norm(), atol=1e-4, rtol=0)
    torch.testing.assert_close(actual["raw"], expected, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(actual["short"], expected[:10] / expected[:10].norm(), atol=1e-4, rtol=0)


def test_decoder_vectors_and_texts_are_schedule_invariant():
    """One model serves both kinds of requests: each gives the result that it gives alone."""
    runner, _ = load_test_runner(tiny_models.model_folder("qwen2"))
    texts = make_prompts(10)
    requests = []
    for i, ids in enumerate(texts):
        requests += [
            EngineRequest(f"t{i}", ids, 40, seed=i, logprobs=0),
            EngineRequest(f"v{i}", ids, 0, pooling=PoolingOptions()),
        ]
    requests += [EngineRequest(f"again{i}", ids, 0, pooling=PoolingOptions()) for i, ids in enumerate(texts)]
    alone, preempted = {}, 0
    for request in requests:
        alone |= serve_requests(runner, [request], batch=1, step=1 << 20, cache=False)[0]
    for batch, step, blocks, cache in (
        (16, 1 << 20, 300, True),
        (16, 24, 300, True),
        (7, 16, 14, True),
        (5, 40, 9, False),
    ):
        actual, stats = serve_requests(runner, requests, batch=batch, step=step, blocks=blocks, cache=cache)
        assert actual == alone
        preempted += stats.preemptions
    assert preempted
    assert all(alone[f"v{i}", 0].vector == alone[f"again{i}", 0].vector for i in range(10))


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(tiny_models.model_folder("llama"), tmp_path / "m")


def write_pooling_config(folder, *, normalize=True, **pooling):
    kinds = ["Transformer", "Pooling"] + ["Normalize"] * normalize
    modules = [{"idx": i, "name": str(i), "path": "" if not i else f"{i}_{kind}",
                "type": f"sentence_transformers.models.{kind}"} for i, kind in enumerate(kinds)]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def test_decoder_applies_pooling_settings_of_its_folder(folder):
    write_pooling_config(folder, normalize=False, pooling_mode_lasttoken=True, pooling_mode_mean_tokens=False)
    runner, info = load_test_runner(folder, dtype="float32")
    assert info.dimensions == 64
    answers, _ = serve_requests(runner, [EngineRequest("own", [5, 6], 0, pooling=PoolingOptions()),
                                EngineRequest("unit", [5, 6], 0, pooling=PoolingOptions(normalize=True))])  # fmt: skip
    actual = {request_id: torch.tensor(vector) for request_id, vector in unpack_vectors(answers).items()}
    assert abs(float(actual["own"].norm()) - 1) > 0.1
    torch.testing.assert_close(actual["own"] / actual["own"].norm(), actual["unit"])


def test_decoder_checkpoint_without_head_loads(tmp_path):
    """Embedding models are saved this way; a tied head is the embedding itself."""
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(tiny_models.model_folder("qwen3"), tmp_path / "m")
    bare = {name.removeprefix("model."): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(bare, folder / "model.safetensors")
    runner, info = load_test_runner(folder, dtype="float32")
    full_runner, _ = load_test_runner(tiny_models.model_folder("qwen3"), dtype="float32")
    assert info.fused
    requests = [EngineRequest("v", [5, 6, 7], 0, pooling=PoolingOptions()), EngineRequest("t", [5, 6, 7], 4)]
    assert serve_requests(runner, requests)[0] == serve_requests(full_runner, requests)[0]


@pytest.mark.parametrize("pooling", [{"pooling_mode": "dreams"}, {}])
def test_decoder_with_unsupported_pooling_only_generates(folder, pooling):
    write_pooling_config(folder, **pooling)
    _, info = load_test_runner(folder)
    assert info.generates and not info.dimensions
