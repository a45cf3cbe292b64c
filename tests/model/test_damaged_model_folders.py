"""Models whose files are damaged load, or are refused in one sentence: the same by ``parley doctor`` and
``parley serve``, without an exception of another kind and in bounded memory.

``PARLEY_NIGHTLY=1`` damages more.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from support.damaged_files import damage_header, damage_json, damage_metadata
from support.gguf_files import write_gguf
from support.model_zoo.serve_zoo import ModelRefused, consult_doctor, load_folder
from support.tiny_models import VOCAB, model_folder

from parley.weight_shards import INDEX_NAME

DAMAGES = 120 if os.environ.get("PARLEY_NIGHTLY") else 6  # of each kind of file
MORE_MEMORY = 4 << 30  # bytes of address space that a check may take
SENTENCE = re.compile(r"[^\n]{20,500}[.)]")
JSON_FILES = ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Let this process take only so much more memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    old_limits = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + MORE_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, old_limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, old_limits)


def check_refusal(named: Path) -> str:
    """Check that serve and doctor agree, and return the sentence of a refusal; an empty one if the model loads."""
    with bounded_memory():
        advice = consult_doctor(named, "auto").refusal
        try:
            load_folder(named, "auto")
            refusal = ""
        except ModelRefused as error:
            refusal = str(error)
    assert bool(refusal) == bool(advice), refusal or advice
    assert refusal in advice
    assert not refusal or SENTENCE.fullmatch(refusal), refusal
    return refusal


@pytest.mark.parametrize("name", JSON_FILES)
def test_damaged_json_files_are_read_or_refused_in_a_sentence(name, tmp_path):
    for seed in range(DAMAGES):
        folder = tmp_path / str(seed)
        shutil.copytree(model_folder("llama"), folder)
        damage_json(folder / name, random.Random(seed))
        check_refusal(folder)


def test_damaged_headers_of_safetensors_are_read_or_refused_in_a_sentence(tmp_path):
    for seed in range(DAMAGES):
        folder = tmp_path / str(seed)
        shutil.copytree(model_folder("llama"), folder)
        damage_header(folder / "model.safetensors", random.Random(seed))
        check_refusal(folder)


def write_parts(folder: Path) -> Path:
    """Write a model in two files with an index."""
    shutil.copytree(model_folder("llama"), folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, places = sorted(tensors), {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        places |= dict.fromkeys(part, file)
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    return folder


def test_damaged_indexes_are_read_or_refused_in_a_sentence(tmp_path):
    intact = write_parts(tmp_path / "intact")
    for seed in range(DAMAGES):
        folder = tmp_path / str(seed)
        shutil.copytree(intact, folder)
        damage_json(folder / INDEX_NAME, random.Random(seed))
        check_refusal(folder)


@pytest.mark.parametrize(
    "name", ["../other.safetensors", "{}/other.safetensors", "part/x.safetensors", "config.json", ""]
)
def test_an_index_cannot_name_a_file_elsewhere(name, tmp_path):
    folder = write_parts(tmp_path / "model")
    (folder / "part").mkdir()
    for place in (tmp_path / "other.safetensors", folder / "part" / "x.safetensors"):
        shutil.copy(folder / "model-00001-of-00002.safetensors", place)
    index = json.loads((folder / INDEX_NAME).read_text())
    index["weight_map"]["lm_head.weight"] = name.format(tmp_path)
    (folder / INDEX_NAME).write_text(json.dumps(index))
    assert re.search(
        "which is not a safetensors file of the same folder|weight files are missing", check_refusal(folder)
    )


@pytest.mark.parametrize("damage", [damage_header, damage_metadata])
def test_damaged_gguf_files_are_read_or_refused_in_a_sentence(damage, tmp_path):
    intact = write_gguf(tmp_path / "intact.gguf", model_folder("llama"))
    for seed in range(DAMAGES):
        path = shutil.copy(intact, tmp_path / f"{seed}.gguf")
        damage(path, random.Random(seed))
        check_refusal(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rope_theta", -1),
        ("rope_theta", float("nan")),
        ("rms_norm_eps", -0.5),
        ("rms_norm_eps", float("inf")),
        ("attention_bias", float("nan")),
    ],
)
def test_numbers_that_would_make_all_results_nan_are_refused(field, value, tmp_path):
    folder = shutil.copytree(model_folder("llama"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    owner = config["rope_parameters"] if field == "rope_theta" else config
    owner[field] = value
    (folder / "config.json").write_text(json.dumps(config))
    assert check_refusal(folder) == f"The model's config.json gives {field} as {value}; that is impossible."


@pytest.mark.parametrize("token_id", [1 << 17, 1 << 31])
def test_ids_of_tokens_far_beyond_their_number_are_refused(token_id, tmp_path):
    """Each id takes memory, whether it has a token or not."""
    folder = shutil.copytree(model_folder("llama"), tmp_path / "model")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"]["{"] = VOCAB + token_id
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert check_refusal(folder).startswith("tokenizer.json of the model gives the token '{' the id ")
