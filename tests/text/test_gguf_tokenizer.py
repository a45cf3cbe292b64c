"""Tokenizers in GGUF files: the same ids as the tokenizers that they were made from, for texts in every script."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, trainers

from parley import demo
from parley.gguf.architectures import ARCHITECTURES
from parley.gguf.header import GgufError
from parley.gguf.pre_tokenizers import PRE_TOKENIZERS
from parley.gguf.tokenizer import tokenizer_files
from parley.text.tokens.tokenizer import Tokenizer

# First and last characters: Latin, marks, Greek, Cyrillic, Armenian, Hebrew, Arabic, Devanagari, Bengali, Tamil, Thai,
# Tibetan, Georgian, Hangul, Ethiopic, Khmer, punctuation, signs, Kana, Han, full width, Gothic, emoji
SCRIPTS = [
    (0x20, 0x7E), (0xA0, 0x24F), (0x300, 0x36F), (0x370, 0x3FF), (0x400, 0x4FF), (0x531, 0x58A), (0x591, 0x5F4),
    (0x600, 0x6FF), (0x900, 0x97F), (0x981, 0x9FB), (0xB82, 0xBFA), (0xE01, 0xE5B), (0xF00, 0xFD4), (0x10A0, 0x10FF),
    (0x1100, 0x11FF), (0xAC00, 0xD7A3), (0x1200, 0x137C), (0x1780, 0x17F9), (0x2000, 0x206F), (0x2190, 0x23FF),
    (0x3040, 0x30FF), (0x4E00, 0x9FFF), (0xFF01, 0xFF5E), (0x10330, 0x1034A), (0x1F300, 0x1F6FF),
]  # fmt: skip
WORDS = [
    "don't",
    "I'LL",
    "it\u2019s",
    "12345",
    "3.14",
    "\n\n",
    "  ",
    "\t",
    "\r\n",
    "x=1;",
    "...",
    "</s>",
    "<think>",
    "naïve",
]
TEXTS = [
    "The capital of France is Paris; 12 of 345 don't.\n\n\tdef f(x): return x",
    "Привет, мир! 你好\uff0c世界。 Grüße 🎉",
] * 3


def random_texts(count: int) -> list[str]:
    rng = random.Random(0)
    texts = []
    for number in range(count):
        script = SCRIPTS[number % len(SCRIPTS)]
        parts = ["".join(chr(rng.randint(*script)) for _ in range(rng.randint(1, 9))) for _ in range(rng.randint(1, 4))]
        parts += rng.choices(WORDS, k=3)
        rng.shuffle(parts)
        texts.append(rng.choice(["", " "]).join(parts))
    return texts


def load(metadata: dict, folder: Path) -> Tokenizer:
    for name, content in tokenizer_files(metadata, "x.gguf").items():
        (folder / name).write_text(json.dumps(content))
    return Tokenizer.from_folder(folder)


def byte_level_metadata(backend: tokenizers.Tokenizer, pre: str, **fields) -> dict:
    """Return what llama.cpp's converter writes for a byte-level tokenizer."""
    state, ids = json.loads(backend.to_str()), backend.get_vocab()
    added = {token["id"]: 3 if token["special"] else 4 for token in state["added_tokens"]}
    values = {
        "model": "gpt2",
        "pre": pre,
        "tokens": sorted(ids, key=ids.__getitem__),
        "token_type": [added.get(number, 1) for number in range(len(ids))],
        "merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in state["model"]["merges"]],
        **fields,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def train_byte_level(splits: list, normalizer=None, **options) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(**options))
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(splits)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(TEXTS, trainer)
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    return backend


def test_reads_the_tokenizer_of_the_built_in_model(tmp_path):
    original = Tokenizer.from_folder(demo.model_folder())
    eos = original.backend.token_to_id("<|im_end|>")
    converted = load(byte_level_metadata(original.backend, "qwen2", eos_token_id=eos), tmp_path)
    for text in random_texts(2000):
        assert converted.encode(text) == original.encode(text), text
    assert converted.backend.get_vocab() == original.backend.get_vocab()
    assert (converted.special_ids, converted.marks) == (original.special_ids, original.marks)
    assert converted.eos_ids == original.eos_ids and converted.names["eos_token"] == "<|im_end|>"


def test_reads_gemma_4s_tokenizer_with_its_merges(tmp_path):
    """As Gemma's tokenizer.json has it: blanks are letters of their own, and what is unknown becomes bytes."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    specials = ["<pad>", "<eos>", "<bos>", "<unk>", "<turn|>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=specials, show_progress=False)
    backend.train_from_iterator(TEXTS, trainer)
    state, ids = json.loads(backend.to_str()), backend.get_vocab()
    kinds = [1] * len(ids)
    for number in range(5):
        kinds[number] = 3
    values = {
        "model": "gemma4",
        "tokens": sorted(ids, key=ids.__getitem__),
        "token_type": kinds,
        "scores": [0.0] * len(ids),
        "merges": [" ".join(merge) for merge in state["model"]["merges"]],
        "add_space_prefix": False,
        "add_bos_token": False,
        "eos_token_id": 1,
        "unknown_token_id": 3,
    }
    converted = load({f"tokenizer.ggml.{key}": value for key, value in values.items()}, tmp_path)
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < 5]
    original = tokenizers.Tokenizer.from_str(json.dumps(state))
    texts = random_texts(500)
    for text in texts:
        assert converted.encode(text) == original.encode(text, add_special_tokens=False).ids, text
    assert any(number < 261 for text in texts for number in converted.encode(text))  # bytes
    assert set(converted.eos_ids) == {1, 4}


@pytest.mark.parametrize(
    ("name", "splits", "options"),
    [
        ("gpt-2", [pre_tokenizers.ByteLevel(add_prefix_space=False)], {}),
        ("olmo", [pre_tokenizers.ByteLevel(add_prefix_space=False)], {"normalizer": normalizers.NFC()}),
        (
            "smollm",
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
            {},
        ),
        (
            "llama-bpe",
            [
                pre_tokenizers.Split(
                    Regex(
                        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
                        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
                    ),
                    "isolated",
                ),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ],
            {"ignore_merges": True},
        ),
    ],
)
def test_splits_texts_as_the_models_own_tokenizer_does(name, splits, options, tmp_path):
    backend = train_byte_level(splits, **options)
    converted = load(byte_level_metadata(backend, name, bos_token_id=backend.token_to_id("<s>")), tmp_path)
    begins = [backend.token_to_id("<s>")] * PRE_TOKENIZERS[name].begins
    for text in random_texts(1000):
        assert converted.encode(text) == begins + backend.encode(text).ids, text


def split_text(name: str, text: str) -> list[str]:
    """Return the pieces into which a pre-tokenizer splits a text."""
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[name].patterns]
    return [piece for piece, _ in pre_tokenizers.Sequence(splits).pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("kimi-k2", ["Hello", " World's", " HTTPServer", " ", "你好", "abc", " ", "123", "45", "…\n\n", " ", " foo"]),
        (
            "deepseek-llm",
            [
                "Hello",
                " World",
                "'",
                "s",
                " HTTPServer",
                " ",
                "你好",
                "abc",
                " ",
                *"12345",
                "…",
                "\n",
                "\n",
                " ",
                " foo",
            ],
        ),
    ],
)
def test_splits_chinese_from_letters(name, pieces):
    assert split_text(name, "".join(pieces)) == pieces


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("afmoe", ["Cost", ":", " ", "1", "234", "567", " ราคา", "世界", "abc", ",", " ", "12", "345", "!\n", "x"]),
        ("bailingmoe2", ["I", "'M", " here", ",", " ", "1", "2", "!!\n\n", "  ", " don", "'t"]),
        ("exaone-moe", ["the quick brown fox", ",", " it", "'s", " ", "1", "2", "!\n", "\n", "  ", " 나는 학생"]),
        ("jais-2", ["a", "    ", "  ", " b", "123", "4", "        ", "    ", " ", " مرحبا"]),
        ("minicpm5", ["Cost", " ", "123", "4", " it", "'s", "..."]),
        ("superbpe", ["by the way, it costs ", "1", "234", "567", " or\n", "12", "."]),
        ("viking", ["Hei", " maailma", ",", " ", "1", "2"]),
        ("tiny_aya", ["Cost", " ", "1", "234", "567", " it's", "..."]),
        ("laguna", ["it", "'s", " ", "1", "2", "!!", "\n\n", "  ", " x"]),
        ("spark2_5", ["Cost", ":", " ", *"1234", "\n", "\n", "世界", ".x", "!", "\n"]),
        ("ufakzeka", ["Ankara", "'dan", " ", "1", "2", "!\n"]),
        ("youtu", ["안녕", "你好", "\uff0c", " it's", "ㄅㄆ", " ", "1", "2"]),
    ],
)
def test_splits_texts_as_the_published_patterns_do(name, pieces):
    assert split_text(name, "".join(pieces)) == pieces


@pytest.mark.parametrize("name", ["afmoe", "superbpe"])
def test_digits_are_in_groups_of_three_from_their_end(name):
    for count in range(1, 40):
        number = 7 * 10 ** (count - 1)
        assert split_text(name, str(number)) == f"{number:_}".split("_")


# From the list of models in llama.cpp's convert_hf_to_gguf_update.py
PUBLISHED_NAMES = {
    "afmoe": ["afmoe"],
    "bailingmoe": ["bailingmoe"],
    "bailingmoe2": ["bailingmoe2"],
    "bert": ["roberta-bpe"],
    "bloom": ["bloom", "gpt3-finnish", "poro-chat"],
    "chatglm": ["chatglm-bpe"],
    "codeshell": ["codeshell"],
    "cohere2": ["tiny_aya"],
    "cohere2moe": ["cohere2moe"],
    "command-r": ["command-r"],
    "deepseek2": ["deepseek-v3", "glm4", "gigachat", "joyai-llm", "kanana2", "kimi-k2", "youtu"],
    "eurobert": ["jina-v5-nano"],
    "exaone": ["exaone"],
    "exaone-moe": ["exaone-moe"],
    "exaone4": ["exaone4"],
    "falcon": ["falcon"],
    "falcon-h1": ["falcon-h1"],
    "glm4": ["glm4"],
    "glm4moe": ["glm4"],
    "gpt-oss": ["gpt-4o"],
    "gpt2": ["gpt-2"],
    "hunyuan-dense": ["hunyuan-dense"],
    "hunyuan-moe": ["hunyuan"],
    "jais2": ["jais-2"],
    "lfm2": ["lfm2"],
    "llama": [
        "deepseek-coder",
        "deepseek-llm",
        "llama-bpe",
        "mellum",
        "midm-2.0",
        "minicpm5",
        "smollm",
        "tekken",
        "trillion",
        "viking",
        "granite-docling",
    ],
    "llama4": ["llama4"],
    "minimax-m2": ["minimax-m2"],
    "modern-bert": ["granite-embed-multi-97m", "modern-bert"],
    "mpt": ["mpt"],
    "olmo": ["olmo"],
    "olmo2": ["superbpe"],
    "phi2": ["phi-2"],
    "qwen2": ["a.x-4.0", "deepseek-r1-qwen", "qwen2"],
    "qwen3": ["f2llmv2", "qwen2"],
    "qwen35": ["qwen35"],
    "stablelm": ["stablelm2"],
    "starcoder2": ["starcoder"],
}


@pytest.mark.parametrize("architecture", PUBLISHED_NAMES)
def test_published_names_of_pre_tokenizers_are_known(architecture):
    assert architecture in ARCHITECTURES
    assert set(PUBLISHED_NAMES[architecture]) <= set(PRE_TOKENIZERS)


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_way_to_split_keeps_all_characters(name, tmp_path):
    backend = train_byte_level([pre_tokenizers.ByteLevel(add_prefix_space=False)])
    converted = load(byte_level_metadata(backend, name, add_bos_token=False), tmp_path)
    for text in random_texts(len(SCRIPTS)):
        text = normalizers.NFC().normalize_str(text)
        assert converted.decode(converted.encode(text), skip_special=False) == text


def merge_by_score(text: str, scores: dict[str, float]) -> list[str]:
    """Join the neighbours whose token has the best score, leftmost first, as SentencePiece and llama.cpp do."""
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        joined = [(scores.get(a + b), -at) for at, (a, b) in enumerate(itertools.pairwise(pieces))]
        best = max(((score, at) for score, at in joined if score is not None), default=None)
        if best is None:
            return [part for piece in pieces for part in ([piece] if piece in scores else byte_tokens(piece))]
        at = -best[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


def byte_tokens(piece: str) -> list[str]:
    return [f"<0x{byte:02X}>" for byte in piece.encode()]


@pytest.fixture(scope="module")
def sentence_piece_metadata() -> dict:
    words = sorted({piece for text in TEXTS for word in text.split() for piece in ("▁" + word, word)})
    pieces = sorted(
        {word[start:end] for word in words for start in range(len(word)) for end in range(start + 1, len(word) + 1)}
    )
    random.Random(1).shuffle(pieces)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "<think>"]
    values = {
        "model": "llama",
        "tokens": tokens,
        "token_type": [2, 3, 3, *[6] * 256, *[1] * len(pieces), 4],
        "scores": [0.0] * 259 + [-float(number) for number in range(len(pieces))] + [0.0],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def test_merges_by_score_as_sentence_piece_does(sentence_piece_metadata, tmp_path):
    tokenizer = load(sentence_piece_metadata, tmp_path)
    tokens, scores = (sentence_piece_metadata["tokenizer.ggml." + name] for name in ("tokens", "scores"))
    known = dict(zip(tokens[259:-1], scores[259:-1], strict=True))
    texts = [text.replace("</s>", "").replace("<think>", "") for text in [*TEXTS, *random_texts(600)]]
    for text in filter(None, texts):
        expected = [tokens.index(token) for token in merge_by_score(text, known)]
        assert tokenizer.encode(text) == [1, *expected], text
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("a<think></s>")[-2:] == [len(tokens) - 1, 2]


def test_adds_a_blank_bos_and_eos_as_the_file_says(sentence_piece_metadata, tmp_path):
    fields = {"add_space_prefix": False, "add_bos_token": False, "add_eos_token": True}
    changed = sentence_piece_metadata | {f"tokenizer.ggml.{key}": value for key, value in fields.items()}
    tokenizer = load(changed, tmp_path)
    assert tokenizer.encode("France") == [changed["tokenizer.ggml.tokens"].index("France"), 2]
    assert tokenizer.decode(tokenizer.encode(" France")) == " France"


def test_reads_the_ends_of_an_answer_and_the_sampling_that_a_file_recommends():
    metadata = {
        "general.sampling.temp": 0.5,
        "general.sampling.top_k": 20,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": ["a", "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<stop>"],
        "tokenizer.ggml.token_type": [1, 3, 3, 1, 3],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.eos_token_id": 4,
    }
    assert tokenizer_files(metadata, "x")["generation_config.json"] == {
        "eos_token_id": [4, 1, 2],
        "do_sample": True,
        "temperature": 0.5,
        "top_k": 20,
    }


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"token_type": [1]}, "x is damaged: tokenizer.ggml.token_type does not have one value for each token"),
        ({"tokens": ["a", "a"]}, "x is damaged: tokenizer.ggml.tokens has the same token twice"),
        ({"merges": ["a"]}, "x has no tokenizer.ggml.merges"),
        ({"pre": None}, "x names no pre-tokenizer, so texts would become wrong tokens"),
    ],
)
def test_refuses_a_tokenizer_that_would_make_wrong_tokens(changes, reason):
    values = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b"], "token_type": [1, 1], "merges": [], **changes}
    with pytest.raises(GgufError, match=f"^{reason}"):
        tokenizer_files({f"tokenizer.ggml.{key}": value for key, value in values.items()}, "x")
