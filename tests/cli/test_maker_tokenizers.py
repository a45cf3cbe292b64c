"""Tokenizers as their makers publish them have the ids of SentencePiece and mistral_common, as recorded."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from parley import hub
from parley.hub.sentence_piece import BadTokenizerModel, convert_sentence_piece, read_sentence_piece
from parley.text.parsing.chat_template import ChatTemplate
from parley.text.tokens.tokenizer import Tokenizer
from parley.types import ChatPrompt, Media, MediaKind, Message, PlacedMedia, ToolCall, UploadedMedia

DATA = Path(__file__).parents[1] / "data" / "tokenizers"
STEP = 1 if os.environ.get("PARLEY_NIGHTLY") else 3


@cache
def recorded() -> dict[str, Any]:
    return json.loads(gzip.decompress((DATA / "recorded.json.gz").read_bytes()))


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write_folder(folder: Path, kind: str, **files: Any) -> Path:
    """Write a folder with a tokenizer of its maker, and JSON files by name."""
    folder.mkdir(exist_ok=True)
    shutil.copy(DATA / ("tekken.json" if kind == "tekken" else f"{kind}.model"), folder)
    if kind != "tekken":
        (folder / f"{kind}.model").rename(folder / "tokenizer.model")
    for name, content in {"config": {"model_type": "llama"}, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def load(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(hub.resolve_model(str(folder)))


@pytest.mark.parametrize("kind", ["llama", "gemma", "trimmed", "tekken"])
def test_ids_are_those_of_the_makers_library(kind, tmp_path):
    tokenizer = load(write_folder(tmp_path / "m", kind))
    texts, ids = recorded()["texts"], recorded()["ids"][kind]
    assert len(texts) == len(ids) > 1000
    for text, expected in list(zip(texts, ids, strict=True))[::STEP]:
        assert tokenizer.encode(text, add_special_tokens=False) == expected, text
        if kind != "trimmed":  # whose unknown characters and blanks are lost
            assert tokenizer.decode(expected).replace("\u2581", " ") == text.replace("\u2581", " ")
    assert tokenizer.encode("a") == [tokenizer.find_token(tokenizer.names["bos_token"]), *tokenizer.encode("a", False)]


@pytest.mark.parametrize("number", range(16))
def test_conversations_are_written_as_mistral_does(number, tmp_path):
    chat = recorded()["chats"][number]
    folder = write_folder(tmp_path / "m", "tekken")
    content = json.loads((folder / "tekken.json").read_text())
    content["config"]["version"] = chat["version"]
    (folder / "tekken.json").write_text(json.dumps(content))
    tokenizer = load(folder)
    messages = [
        Message(
            message["role"],
            message["content"],
            tool_call_id=message.get("tool_call_id"),
            tool_calls=[ToolCall(call["id"], **call["function"]) for call in message.get("tool_calls") or []],
        )
        for message in chat["messages"]
    ]
    template = ChatTemplate.from_folder(hub.find_model(str(folder)), tokenizer)
    text = template.render_conversation(ChatPrompt(messages, chat["tools"] or []))
    assert tokenizer.decode(tokenizer.encode(text, False), skip_special=False) == text
    assert tokenizer.encode(text, False) == chat["ids"]


def test_a_template_of_mistral_writes_marks_of_images_and_sound(tmp_path):
    """As mistral-common writes Voxtral's conversations: nothing stands between a clip and the text."""
    folder = write_folder(tmp_path / "m", "tekken")
    media: list[MediaKind] = ["audio", "image"]
    items = [PlacedMedia(3, Media(kind, UploadedMedia(b""), "file")) for kind in media]
    template = ChatTemplate.from_folder(
        hub.find_model(str(folder)), load(folder), {"audio": "[AUDIO]", "image": "[IMG]"}
    )
    text = template.render_conversation(ChatPrompt([Message("user", "one two", media=items)]))
    assert text == "<s>[INST]one[BEGIN_AUDIO][AUDIO][IMG] two[/INST]"


def test_a_template_or_names_of_the_folder_win_over_mistrals(tmp_path):
    folder = write_folder(tmp_path / "m", "tekken", tokenizer_config={"pad_token": "[PREFIX]", "chat_template": "own"})
    config = json.loads((hub.find_model(str(folder)) / "tokenizer_config.json").read_text())
    assert (config["chat_template"], config["pad_token"], config["eos_token"]) == ("own", "[PREFIX]", "</s>")


def test_special_tokens_come_from_all_files_of_the_folder(tmp_path):
    count = len(read_sentence_piece((DATA / "llama.model").read_bytes()).pieces)
    listed = {str(count + 1): {"content": "<|end|>", "special": True, "rstrip": True}}
    config = {"added_tokens_decoder": listed, "add_eos_token": True, "eos_token": "<|end|>"}
    folder = write_folder(tmp_path / "m", "llama", tokenizer_config=config, added_tokens={"<|im|>": count})
    tokenizer = load(folder)
    assert tokenizer.find_token("<|im|>") == count and tokenizer.find_token("<|end|>") == count + 1
    assert tokenizer.special_ids >= {0, 1, 2, count + 1} and count not in tokenizer.special_ids
    word = tokenizer.encode("quick", False)
    assert tokenizer.encode("quick<|im|>quick<|end|>  quick", False) == [*word, count, *word, count + 1, *word]
    assert tokenizer.eos_ids == {count + 1} and tokenizer.encode("quick") == [1, *word, 2]


def test_blanks_begin_a_text_only_or_each_part_as_the_config_says(tmp_path):
    parts = "quick</s>quick"

    def encode(**config: Any) -> list[int]:
        return load(write_folder(tmp_path / "m", "llama", tokenizer_config=config)).encode(parts, False)

    legacy, newer, bare = encode(), encode(legacy=False), encode(add_prefix_space=False)
    end = legacy.index(2)
    assert legacy[:end] == legacy[end + 1 :] == newer[:end] and bare == newer[end + 1 :] + newer[end:] != newer


def test_the_converted_tokenizer_is_kept_and_follows_the_file(tmp_path):
    folder = write_folder(tmp_path / "m", "llama")
    derived = hub.find_model(str(folder))
    assert derived == hub.find_model(str(folder)) != folder and derived.parent.name == "folders"
    shutil.copy(DATA / "gemma.model", folder / "tokenizer.model")
    assert hub.find_model(str(folder)) != derived
    (folder / "tokenizer.json").write_text("{}")
    assert hub.find_model(str(folder)) == folder


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"tokenizer.model": b"no model"}, "its tokenizer.model is no SentencePiece model"),
        ({"tokenizer.model": b""}, "has no pieces"),
        ({"tokenizer.model": b"version https://git-lfs.github.com/spec/v1"}, "is a pointer of Git LFS"),
        ({"tokenizer_config.json": b'{"tokenizer_class": "XGLMTokenizer"}'}, "belongs to XGLMTokenizer, whose ids"),
        ({"tokenizer_config.json": b"[]"}, "its tokenizer_config.json does not hold a JSON object"),
        ({"added_tokens.json": b'{"<x>": 5000}'}, "give the token 1800 no text"),
        ({"tekken.json": b"{}"}, "its tekken.json is not in Mistral's format"),
        (
            {"tekken.json": b'{"config": {"default_num_special_tokens": 1e400}}'},
            "its tekken.json is not in Mistral's format",
        ),
        (
            {
                "tekken.json": b'{"config": {"default_num_special_tokens": 1, "default_vocab_size": 1, "pattern": ""},'
                b' "vocab": [], "special_tokens": [{"rank": 0, "token_str": []}]}'
            },
            "its tekken.json is not in Mistral's format",
        ),
        ({"added_tokens.json": b'{"<x>": 1000000000000}'}, "give the token 1800 no text"),
    ],
)
def test_unusable_tokenizers_are_refused_in_one_sentence(files, why, tmp_path):
    folder = write_folder(tmp_path / "m", "llama")
    for name, content in files.items():
        (folder / name).write_bytes(content)
    with pytest.raises(hub.ModelMissing, match=r"cannot be served: [^\n]*\.$") as error:
        hub.resolve_model(str(folder))
    assert why in str(error.value)


def test_a_key_of_added_tokens_that_is_no_number_is_no_crash(tmp_path):
    config = {"added_tokens_decoder": {"\u00b2": {"content": "<x>"}}}
    odd = load(write_folder(tmp_path / "odd", "llama", tokenizer_config=config))
    assert odd.encode("a") == load(write_folder(tmp_path / "plain", "llama")).encode("a")


def test_a_number_of_more_bytes_than_the_format_allows_is_refused():
    """Each further byte would take longer than the one before, as the number grows without limit."""
    data = (DATA / "llama.model").read_bytes()
    field = bytes((4 << 3, *[0x80] * 9, 1))
    assert read_sentence_piece(data + field).pieces
    with pytest.raises(BadTokenizerModel, match="is no SentencePiece model"):
        read_sentence_piece(data + bytes((4 << 3, *[0x80] * 10, 0)))


def test_every_cut_off_model_is_refused_or_read_without_a_crash():
    data = (DATA / "llama.model").read_bytes()
    for end in range(0, len(data), 397):
        with suppress(BadTokenizerModel):
            read_sentence_piece(data[:end])


@pytest.mark.parametrize(
    ("field", "why"),
    [(bytes((0x12, 2, 0x18, 1)), "is no BPE"), (bytes((0x1A, 3, 0x12, 1, 7)), "normalizes characters")],
)
def test_models_whose_ids_would_differ_are_refused(field, why, tmp_path):
    """The last of several messages counts here, so a message at the end changes the rules."""
    data = (DATA / "llama.model").read_bytes()
    model = read_sentence_piece(data)
    assert model.model_type == 2 and not model.charsmap
    (tmp_path / "m").write_bytes(field + data)
    with pytest.raises(BadTokenizerModel, match=why):
        convert_sentence_piece(tmp_path / "m", {}, {})
