"""How byte-level tokenizers split texts before they merge, by the name in ``tokenizer.ggml.pre``.

The names are llama.cpp's (src/llama-vocab.cpp), the patterns those of the models' own tokenizer.json, in the syntax of
the tokenizers library. Patterns apply one after another, each to the pieces that the one before it has left.
"""

from __future__ import annotations

from typing import NamedTuple

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
WORDS_AND_DIGITS = (
    CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WORDS = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS_AND_MARKS = (
    CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SEED_CODER = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
# Blanks in pieces of set lengths, from the tokenizer of Jais 2
JAIS_2 = (
    WORDS_AND_DIGITS.removesuffix(r"\s+(?!\S)|\s+")
    + "".join(rf"\s{{{count}}}(?!\S)|" for count in (512, 256, 128, 64, 32, 16, 8, 4))
    + r"\s{1,2}(?!\S)|\s"
)
LING_2 = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
# Words with single blanks between them are one piece, from the tokenizer of K-EXAONE
EXAONE_MOE = (
    CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"  # noqa: RUF001
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT_4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
YOUTU = GPT_4O.replace(r"\p{N}{1,3}", r"\p{N}")
DEEPSEEK_3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Line breaks are pieces of their own, and marks do not take those after them. From llama.cpp.
SPARK_2_5 = DEEPSEEK_3.replace(r"[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|", r"[\p{P}\p{S}]+|[\r\n]|")
# Chinese characters are pieces of their own, so letters are all others. From the tokenizer of Kimi K2.
OTHER_UPPER, OTHER_LOWER = (rf"[{letter_class[1:-1]}&&[^\p{{Han}}]]" for letter_class in (UPPER, LOWER))
KIMI_2 = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{OTHER_UPPER}*{OTHER_LOWER}+{CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{OTHER_UPPER}+{OTHER_LOWER}*{CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Not split, and not in bytes: SentencePiece's blanks, and merges over whole texts
WHOLE_TEXT_NAMES = ("gemma4", "granite-embed-multi-311m", "sarvam-moe")


class PreTokenizer(NamedTuple):
    """A way to split texts before they are tokenized.

    * ``patterns``: expressions that split a text.
    * ``nfc``: texts are normalized to NFC first.
    * ``whole_words``: a word of the vocabulary is one token, even if the merges divide it.
    * ``begins``: texts begin with BOS unless the file says otherwise.
    """

    patterns: tuple[str, ...]
    nfc: bool = False
    whole_words: bool = False
    begins: bool = False


_LLAMA_3 = PreTokenizer((WORDS_AND_DIGITS,), whole_words=True, begins=True)
_GPT_2 = PreTokenizer((GPT2,))
_DIGITS_FIRST = PreTokenizer((r"\p{N}", GPT2))
_QWEN_2 = PreTokenizer((WORDS,), nfc=True)
_GPT_4O = PreTokenizer((GPT_4O,))
_DEEPSEEK_LLM = PreTokenizer(
    (
        r"[\r\n]",
        r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
        r"\s?[!-/:-~！-／：-～‘-‟　-。]+",  # noqa: RUF001
        r"\s+$",
        "[一-龥ࠀ-一가-퟿]+",
        r"\p{N}",
    )
)
_DEEPSEEK_3 = PreTokenizer((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK_3))  # noqa: RUF001
# Numbers in groups of three from their end; \A and \z are the ends of a piece, so the time is linear
_NUMBERS_FROM_END = (r"\p{N}+", r"\A\p{N}{1,2}(?=(?:\p{N}{3})+\z)", r"\p{N}{1,3}")
# Then runs of Han, Kana, Thai, Lao, Khmer, Myanmar and Hangul
_AFMOE = PreTokenizer(
    (
        *_NUMBERS_FROM_END,
        "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0eff\u1780-\u17ff"
        "\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+",
        DEEPSEEK_3,
    )
)
# Hangul, marks of Chinese texts, Bopomofo, and Han with Kana are pieces of their own
_YOUTU = PreTokenizer(
    (
        "[\uac00-\ud7a3\u3131-\u318e]+"
        "|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
        "|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u30ff]+",
        YOUTU,
    ),
    whole_words=True,
)
PRE_TOKENIZERS = {
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
        _LLAMA_3,
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), PreTokenizer((WORDS_AND_DIGITS,))),
    **dict.fromkeys(
        (
            "gpt-2",
            "phi-2",
            "mpt",
            "a.x-4.0",
            "mellum",
            "exaone4",
            "trillion",
            "roberta-bpe",
            "gigachat",
            "granite-docling",
            "jina-v1-en",
            "jina-v2-code",
            "jina-v2-de",
            "jina-v2-es",
            "jina-de",
            "jina-es",
            "jais",
        ),
        _GPT_2,
    ),
    **dict.fromkeys(("olmo", "modern-bert"), PreTokenizer((GPT2,), nfc=True)),
    **dict.fromkeys(
        ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"), _DIGITS_FIRST
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "kormo", "f2llmv2", "kolibri"), _QWEN_2),
    "qwen35": PreTokenizer((WORDS_AND_MARKS,), nfc=True),
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open", "grok-2"), PreTokenizer((WORDS,))),
    "laguna": PreTokenizer((r"[^\n]+|\n+", WORDS)),
    "ufakzeka": PreTokenizer((WORDS.removeprefix(CONTRACTIONS + "|"),)),  # Turkish endings follow apostrophes
    "seed-coder": PreTokenizer((SEED_CODER,)),
    "tekken": PreTokenizer((TEKKEN,), whole_words=True, begins=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2", "talkie"), _GPT_4O),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _DEEPSEEK_3),
    "spark2_5": PreTokenizer((*_DEEPSEEK_3.patterns[:2], SPARK_2_5, r"\p{N}")),
    "granite-embed-multi-97m": _GPT_4O._replace(whole_words=True),
    "deepseek-llm": _DEEPSEEK_LLM,
    "kimi-k2": PreTokenizer((KIMI_2,)),
    "afmoe": _AFMOE,
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), PreTokenizer((LING_2,))),
    "exaone-moe": PreTokenizer((EXAONE_MOE,)),
    "jais-2": PreTokenizer((JAIS_2,)),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", GPT_4O))),
    "youtu": _YOUTU,
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), PreTokenizer((BLOOM,))),
    "viking": PreTokenizer((BLOOM, r"\p{N}")),
    "superbpe": PreTokenizer(_NUMBERS_FROM_END),  # its tokens may be several words
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", WORDS_AND_DIGITS), whole_words=True),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")),
}
