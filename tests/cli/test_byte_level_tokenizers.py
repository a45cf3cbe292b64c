"""Tokenizers given as vocab.json and merges.txt have the ids of Transformers' class for them."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support import tiny_models

from parley import hub
from parley.text.tokens.tokenizer import Tokenizer

RECORDED = Path(__file__).parents[1] / "data" / "tokenizers" / "recorded.json.gz"
ROBERTA_TOKENS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@cache
def byte_level_files() -> tuple[dict[str, int], list[str]]:
    """A trained vocabulary with the special tokens of all classes, and its merges."""
    folder = tiny_models.models_home() / "byte-level"
    folder.mkdir()
    tiny_models.write_tokenizer(folder)
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    ids = dict(model["vocab"])
    for token in (*ROBERTA_TOKENS, *tiny_models.SPECIAL_TOKENS):
        ids.setdefault(token, len(ids))
    return ids, [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]


def write_folder(folder: Path, **files: Any) -> Path:
    """Write a folder with vocab.json and merges.txt, and JSON files by name."""
    folder.mkdir(exist_ok=True)
    ids, merges = byte_level_files()
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    for name, content in {"config": {"model_type": "gpt2"}, "vocab": ids, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def load(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(hub.resolve_model(str(folder)))


CASES = {
    "gpt2": ("GPT2Tokenizer", {"config": {"model_type": "gpt2"}}, {}),
    "prefix": ("GPT2Tokenizer", {"tokenizer_config": {"add_prefix_space": True}}, {"add_prefix_space": True}),
    "roberta": ("RobertaTokenizer", {"config": {"model_type": "roberta"}}, {}),
    "bart": ("RobertaTokenizer", {"tokenizer_config": {"tokenizer_class": "BartTokenizer"}}, {}),
    "qwen2": ("Qwen2Tokenizer", {"tokenizer_config": {"tokenizer_class": "Qwen2Tokenizer"}}, {}),
}


@pytest.mark.parametrize("kind", CASES)
def test_ids_are_those_of_transformers(kind, tmp_path):
    import transformers

    class_name, files, options = CASES[kind]
    ids, merges = byte_level_files()
    pairs = [tuple(merge.split(" ")) for merge in merges]
    expected = getattr(transformers, class_name)(vocab=dict(ids), merges=pairs, **options)
    tokenizer = load(write_folder(tmp_path / "m", **files))
    texts = [*json.loads(gzip.decompress(RECORDED.read_bytes()))["texts"][::9], "a <mask> b</s>  <|endoftext|>c", ""]
    for text in texts:
        assert tokenizer.encode(text) == expected(text)["input_ids"], text
        assert (
            tokenizer.encode(text, add_special_tokens=False) == expected(text, add_special_tokens=False)["input_ids"]
        ), text
    pair = tokenizer.backend.encode("one", "two")
    assert pair.ids == expected("one", "two")["input_ids"]


def test_opt_begins_texts_with_its_token(tmp_path):
    config = {"add_bos_token": True, "bos_token": {"content": "</s>", "normalized": True}, "eos_token": "</s>"}
    tokenizer = load(write_folder(tmp_path / "m", config={"model_type": "opt"}, tokenizer_config=config))
    end = tokenizer.find_token("</s>")
    assert tokenizer.encode("a") == [end, *tokenizer.encode("a", add_special_tokens=False)]
    assert tokenizer.eos_ids == {end}


def test_added_tokens_stay_whole(tmp_path):
    count = len(byte_level_files()[0])
    tokenizer = load(write_folder(tmp_path / "m", added_tokens={"<|tool|>": count}))
    assert tokenizer.encode("a<|tool|>a", add_special_tokens=False)[1] == count


@pytest.mark.parametrize(
    ("files", "why"),
    [
        (
            {"config.json": b'{"model_type": "made_up"}'},
            "belong to the class of a made_up model, whose ids they do not",
        ),
        ({"tokenizer_config.json": b'{"tokenizer_class": "CLIPTokenizer"}'}, "belong to CLIPTokenizer, whose ids"),
        ({"vocab.json": b"[]"}, "its vocab.json does not give each token an id"),
        ({"vocab.json": b"{"}, "its vocab.json is not valid JSON"),
        ({"vocab.json": b"version https://git-lfs.github.com/spec/v1"}, "its vocab.json is not valid JSON"),
        ({"merges.txt": b"a b\na b c\n"}, "its merges.txt has the line 'a b c', which is no pair of tokens"),
        ({"merges.txt": b"\xff"}, "its merges.txt is not UTF-8"),
        (
            {"vocab.json": b'{"a": 0}', "config.json": b'{"model_type": "roberta"}'},
            "its files give its cls_token no id",
        ),
    ],
)
def test_unusable_files_are_refused_in_one_sentence(files, why, tmp_path):
    folder = write_folder(tmp_path / "m")
    for name, content in files.items():
        (folder / name).write_bytes(content)
    with pytest.raises(hub.ModelMissing, match=r"cannot be served: [^\n]*\.$") as error:
        hub.resolve_model(str(folder))
    assert why in str(error.value)
    (folder / "vocab.json").unlink()
    with pytest.raises(hub.ModelMissing, match=r"has merges\.txt, but neither tokenizer\.json nor vocab\.json"):
        hub.resolve_model(str(folder))
