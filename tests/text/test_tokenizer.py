"""Tokenizers load from folders as in Transformers; texts and bytes of single tokens."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_tokenizers import TOKENIZERS, TRAINING_TEXTS, byte_fallback, byte_level, word_piece
from tokenizers import processors

from parley.errors import InvalidValue
from parley.text.text_pipeline import TextPipeline
from parley.text.tokens.json_files import BadTokenizer
from parley.text.tokens.text_encoder import TextEncoder
from parley.text.tokens.tokenizer import Tokenizer


def write_tokenizer_files(folder: Path, tokenizer: Tokenizer, **files: Any) -> Path:
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("kind", list(TOKENIZERS))
def test_loaded_tokenizer_agrees_with_transformers(kind: str, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True, "normalized": False},
        "pad_token": "<pad>",
        "additional_special_tokens": ["<extra>"],
        "added_tokens_decoder": {"9000": {"content": "<more>", "special": False, "normalized": False}},
        "model_max_length": 77,
    }
    write_tokenizer_files(tmp_path, TOKENIZERS[kind](), tokenizer_config=config)
    ours = Tokenizer.from_folder(tmp_path)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert ours.max_length == 77
    for text in [*TRAINING_TEXTS, "", "<s>Paris<extra> <more><pad></s>", " <think> x</think>\n<|im_end|>"]:
        for special in (True, False):
            ids = theirs(text, add_special_tokens=special)["input_ids"]
            assert ours.encode(text, special) == ids
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )


@pytest.mark.parametrize("flags", [{}, {"add_bos_token": False}, {"add_bos_token": True, "add_eos_token": False}])
def test_special_tokens_around_text_come_from_tokenizer_file(flags: dict[str, bool], tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer.from_folder(write_tokenizer_files(tmp_path, byte_level())).backend
    marks = [(token, backend.token_to_id(token)) for token in ("<s>", "</s>")]
    backend.post_processor = processors.TemplateProcessing("<s> $A </s>", None, marks)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **flags}
    write_tokenizer_files(tmp_path, Tokenizer(backend), tokenizer_config=config)
    expected = PreTrainedTokenizerFast.from_pretrained(tmp_path)("Paris")["input_ids"]
    assert Tokenizer.from_folder(tmp_path).encode("Paris") == expected
    assert [expected[0], expected[-1]] == [token_id for _, token_id in marks]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, set()),
        ({"config": {"eos_token_id": 5}}, {5}),
        ({"config": {"eos_token_id": [5, 6]}}, {5, 6}),
        ({"config": {"eos_token_id": 5}, "generation_config": {"eos_token_id": [7, 8]}}, {7, 8}),
        ({"config": {"eos_token_id": 5}, "generation_config": {}}, {5}),
        ({"config": {"text_config": {"eos_token_id": 5}}}, {5}),
        ({"config": {"eos_token_id": None}}, set()),
        ({"config": {"eos_token_id": [5, 10**6, -1, "6", True]}}, {5}),
        ({"generation_config": {"eos_token_id": 5}, "tokenizer_config": {"eos_token": "</s>"}}, {5, "</s>"}),
        ({"special_tokens_map": {"eos_token": {"content": "</s>"}}}, {"</s>"}),
    ],
)
def test_eos_ids_come_from_config_files(files: dict[str, Any], expected: set[int | str], tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write_tokenizer_files(tmp_path, byte_level(), **files))
    assert tokenizer.eos_ids == {
        tokenizer.backend.token_to_id(token_id) if isinstance(token_id, str) else token_id for token_id in expected
    }


@pytest.mark.parametrize("is_listed", [False, True])
def test_tokens_of_older_files_are_those_of_transformers(is_listed: bool, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | ({"added_tokens_decoder": {}} if is_listed else {})
    write_tokenizer_files(
        tmp_path,
        byte_level(),
        tokenizer_config=config,
        special_tokens_map={"eos_token": "</s>", "additional_special_tokens": ["<tool>"]},
        added_tokens={"<late>": 1001, "<early>": 1000},
    )
    text = "a<tool>b<late>c<early>d"
    expected = PreTrainedTokenizerFast.from_pretrained(tmp_path)(text)["input_ids"]
    assert Tokenizer.from_folder(tmp_path).encode(text) == expected


def test_unusable_tokenizer_folder_raises_with_reason(tmp_path: Path) -> None:
    with pytest.raises(BadTokenizer, match="does not exist"):
        Tokenizer.from_folder(tmp_path / "none")
    with pytest.raises(BadTokenizer, match=r"no tokenizer\.json\.$"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(BadTokenizer, match=r"only tokenizer\.model; save it once"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BadTokenizer, match=r"tokenizer\.json of the model cannot be read"):
        Tokenizer.from_folder(tmp_path)
    write_tokenizer_files(tmp_path, byte_level(), config=[])
    with pytest.raises(BadTokenizer, match=r"config\.json of the model does not hold"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("tokenizer_config", {"added_tokens_decoder": {"0": "x"}}),
        ("tokenizer_config", {"added_tokens_decoder": {"²": {"content": "<x>"}}}),
        ("tokenizer_config", {"additional_special_tokens": 3}),
        ("config_sentence_transformers", {"prompts": {"a": "b"}, "default_prompt_name": []}),
    ],
)
def test_entries_of_a_wrong_type_are_ignored(name: str, fields: dict, tmp_path: Path) -> None:
    pipeline = TextPipeline.from_folder(write_tokenizer_files(tmp_path, byte_level(), **{name: fields}))
    assert pipeline.tokenizer.encode("abc") == byte_level().encode("abc")
    assert pipeline.embedding_prompts.default_name is None


def test_truncation_stored_with_tokenizer_is_ignored(tmp_path: Path) -> None:
    write_tokenizer_files(tmp_path, byte_level())
    backend = Tokenizer.from_folder(tmp_path).backend
    backend.enable_truncation(2)
    backend.enable_padding(length=5)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_folder(tmp_path).encode("abc") == byte_level().encode("abc")


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@given(st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=40))  # "<" could begin a mark
@settings(max_examples=100, deadline=None)
def test_token_bytes_concatenate_to_text(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    ids = tokenizer.encode(text, add_special_tokens=False)
    joined = b"".join(map(tokenizer.token_bytes, ids)).decode()
    assert (
        joined == text if kind == "byte_level" else joined.removeprefix(" ").replace("▁", " ") == text.replace("▁", " ")
    )


def test_single_tokens_have_text_bytes_and_kind() -> None:
    tokenizer = byte_level()
    euro = tokenizer.encode("€", add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, euro)) == "€".encode()
    assert all(tokenizer.token_text(token_id) is None for token_id in euro if len(tokenizer.token_bytes(token_id)) == 1)
    end = tokenizer.backend.token_to_id("<|im_end|>")
    assert end is not None
    assert tokenizer.token_text(end) == "<|im_end|>" and tokenizer.is_special_token(end)
    think = tokenizer.backend.token_to_id("<think>")
    assert think is not None and not tokenizer.is_special_token(think)
    for missing in (-1, tokenizer.vocab_size, 2**40):
        assert tokenizer.token_str(missing) is None and tokenizer.token_bytes(missing) == b""
    assert byte_fallback().token_bytes(byte_fallback().encode("Paris", add_special_tokens=False)[0]).startswith(b" ")
    pieces = [
        word_piece().token_text(token_id) for token_id in word_piece().encode("unbelievable", add_special_tokens=False)
    ]
    assert "".join(pieces) == " unbelievable"


def test_lone_surrogate_is_encoded_as_replacement() -> None:
    tokenizer = byte_level()
    assert tokenizer.decode(tokenizer.encode("a\ud83cb")) == "a\ufffdb"
    assert tokenizer.decode(tokenizer.encode("\ud83c\udf89")) == "🎉"


def test_text_whose_pieces_take_a_regular_expression_too_long_is_refused() -> None:
    """Otherwise the library panics, which no handler of errors expects."""
    backend = tokenizers.Tokenizer.from_str(byte_level().backend.to_str())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("(a+)+$"), "isolated")
    encoder, text = TextEncoder(backend), "a" * 40 + "b"
    expected = encoder.encode("b")
    assert expected
    for encode in (encoder.encode, encoder.encode_with_offsets, encoder._encode_piece):
        with pytest.raises(InvalidValue, match="The tokenizer of the model cannot encode this text"):
            encode(text)
    assert encoder.encode("b") == expected  # a panic spoils no later text


def test_tokenizer_works_from_many_threads() -> None:
    tokenizer = byte_level()
    expected = [tokenizer.encode(text) for text in TRAINING_TEXTS]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(tokenizer.encode, TRAINING_TEXTS * 20)) == expected * 20
        assert list(pool.map(tokenizer.decode, expected * 20)) == TRAINING_TEXTS * 20
