"""The tokenizer of the built-in model: byte-level BPE with Qwen's rules, trained on the generated text.

It has Qwen's split pattern and the special tokens of its chat format, but its own small vocabulary, which contains all
bytes and can therefore encode any Unicode text. `encode_sample` turns a sample into token ids and a mask of the tokens
to learn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from parley.demo import corpus
from parley.demo.template import END_OF_TEXT, render_pieces

VOCABULARY_SIZE = 3072
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
END_OF_TURN = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, "<|im_start|>", END_OF_TURN)
MARK_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
TOKENIZER_SAMPLES = 20_000


def _training_texts(seed: int) -> Iterator[str]:
    for sample in islice(corpus.draw_training(seed), TOKENIZER_SAMPLES):
        yield sample.text or "".join(text for text, _ in render_pieces(sample.messages, sample.tools, sample.thinking))


def train_tokenizer(seed: int) -> Tokenizer:
    """Learn the merges from the first samples of the training stream."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, use_regex=False, trim_offsets=False)
    added = len(SPECIAL_TOKENS) + len(MARK_TOKENS)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - added,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_without_marks(_training_texts(seed)), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARK_TOKENS])
    return tokenizer


def _without_marks(texts: Iterable[str]) -> Iterator[str]:
    """Remove the spelling of added tokens from texts: they never reach the merges, which must not learn from them."""
    for text in texts:
        for mark in SPECIAL_TOKENS + MARK_TOKENS:
            text = text.replace(mark, "\n\n")
        yield text


def require_token_id(tokenizer: Tokenizer, token: str) -> int:
    """Return the id of a token. Raises ValueError if there is none."""
    number = tokenizer.token_to_id(token)
    if number is None:
        raise ValueError(f"the tokenizer has no token {token}")
    return number


def encode_sample(tokenizer: Tokenizer, sample: corpus.Sample) -> tuple[list[int], list[bool]]:
    """Return the token ids of a sample and, for each, whether the model learns to write it."""
    ids: list[int] = []
    learnt: list[bool] = []
    if sample.text:
        pieces = [(sample.text[: sample.prompt], False), (sample.text[sample.prompt :], True)]
    else:
        pieces = render_pieces(sample.messages, sample.tools, sample.thinking)
    for text, written_by_model in pieces:
        encoded = tokenizer.encode(text).ids
        ids += encoded
        learnt += [written_by_model] * len(encoded)
    return ids, learnt
