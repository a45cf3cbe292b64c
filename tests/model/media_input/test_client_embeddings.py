"""Embeddings that clients send pass through to the decoder; files of other shapes and kinds are refused."""

from __future__ import annotations

import base64
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from support.media_items import media_item
from support.multimodal_models import multimodal_folder

from parley.engine.media_messages import DecodingLimits, MediaJobRequest, MediaJobResult, MediaRefused
from parley.model.media.encoder import TransformersEncoder
from parley.model.media_input.jobs import MediaJobs
from parley.model.media_input.processor import load_jobs
from parley.serving.media.memory_files import MemoryBudget, MemoryFile

BUDGET = MemoryBudget(1 << 30)
HIDDEN = 64
_jobs: dict[str, MediaJobs] = {}


def send(
    family: str, data: bytes, kind: Any = "image"
) -> tuple[MediaJobResult | MediaRefused, dict[str, torch.Tensor]]:
    if family not in _jobs:
        _jobs[family] = load_jobs(multimodal_folder(family))
    source, target = MemoryFile(BUDGET), MemoryFile(BUDGET)
    source.write_bytes(base64.b64encode(data))
    job = MediaJobRequest(
        kind, "base64_embeddings", source.feature_file, target.feature_file, False, "[{},{}]", DecodingLimits()
    )
    result = _jobs[family].process_media(job)
    written = Path(f"/proc/self/fd/{target.feature_file.fd}").read_bytes()
    return result, load(written) if written else {}


def refusal(family: str, data: bytes) -> str:
    result, _ = send(family, data)
    assert isinstance(result, MediaRefused)
    assert result.reason == "bad_embeddings"
    return result.predicate


def random_rows(count: int, width: int = HIDDEN) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(0))


def test_writes_the_text_of_the_family_around_embeddings():
    rows = random_rows(3)
    result, tensors = send("gemma3", save({"embeddings": rows}))
    assert isinstance(result, MediaJobResult)
    item = result.item
    assert item.replacement == "\n\n<start_of_image>" + "<image_soft_token>" * 3 + "<end_of_image>\n\n"
    assert (item.embedding_count, item.placeholder, item.sees_both_ways) == (3, "<image_soft_token>", True)
    assert torch.equal(tensors["embeddings"], rows)


def test_reads_grids_with_embeddings_for_models_that_need_them():
    grid = torch.tensor([[1, 4, 6]])
    result, tensors = send("qwen2_vl", save({"embeddings": random_rows(6), "image_grid_thw": grid}))
    assert isinstance(result, MediaJobResult)
    assert result.item.grids == [(1, 2, 3)]
    assert tensors.keys() == {"embeddings", "image_grid_thw"}
    wrong, _ = send("qwen2_vl", save({"embeddings": random_rows(7), "image_grid_thw": grid}))
    assert isinstance(wrong, MediaRefused)


def test_divides_the_rows_of_models_with_deepstack():
    rows, grid = random_rows(6, 4 * HIDDEN), torch.tensor([[1, 4, 6]])
    _, tensors = send("qwen3_vl", save({"embeddings": rows, "image_grid_thw": grid}))
    assert torch.equal(tensors["embeddings"], rows[:, :HIDDEN])
    assert torch.equal(tensors["deep_embeddings"][2], rows[:, 3 * HIDDEN :])


def test_the_encoder_passes_embeddings_through_without_loading_a_model():
    def load_model() -> Any:
        raise AssertionError("the model was loaded")

    encoder = TransformersEncoder(load_model, torch.bfloat16, torch.device("cpu"))
    rows, deep = random_rows(5), random_rows(10).view(2, 5, HIDDEN)
    with media_item("image", {"embeddings": rows, "deep_embeddings": deep}, 5) as item:
        encoded = encoder.encode_item(item, lambda: None)
    assert torch.equal(encoded.rows, rows.bfloat16())
    assert torch.equal(torch.stack(list(encoded.deepstack)), deep.bfloat16())


class Trap:
    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('pickle was read')",))


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (b"", "safetensors"),
        (pickle.dumps(Trap()), "safetensors"),
        ((1 << 62).to_bytes(8, "little") + b"{}", "safetensors"),
        (save({"rows": random_rows(1)}), "must be a safetensors file with embeddings, and nothing else"),
        (save({"embeddings": random_rows(1), "pixel_values": random_rows(1)}), "nothing else"),
        (save({"embeddings": random_rows(2, 63)}), "shape 2 x 63, and this model reads 1 to 131072 rows of 64 numbers"),
        (save({"embeddings": random_rows(1)[0]}), "shape 64"),
        (save({"embeddings": random_rows(0)}), "shape 0 x 64"),
        (save({"embeddings": random_rows(1).double()}), "not float32, float16 or bfloat16"),
        (save({"embeddings": random_rows(1).int()}), "not float32"),
        (save({"embeddings": random_rows(1) / 0}), "not finite"),
    ],
)
def test_refuses_other_files(data: bytes, part: str):
    assert part in refusal("llava", data)


def test_refuses_grids_of_other_shapes():
    for grid in (
        torch.tensor([[1, 4]]),
        torch.tensor([[1, 4, -6]]),
        torch.tensor([[1.0, 4, 6]]),
        torch.ones(2, 3).long(),
    ):
        assert "image_grid_thw" in refusal("qwen2_vl", save({"embeddings": random_rows(6), "image_grid_thw": grid}))


def test_refuses_embeddings_where_the_model_reads_text_between_them():
    assert "text between them" in refusal("idefics3", save({"embeddings": random_rows(4)}))
