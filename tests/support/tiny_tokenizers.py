"""Small tokenizers of every kind that models use, trained in a moment. They differ in their decoders."""

from __future__ import annotations

import functools
from collections.abc import Callable

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from parley.text.tokens.tokenizer import Tokenizer

TRAINING_TEXTS = [
    "The capital of France is Paris, and the capital of Japan is Tokyo.",
    "Grüße aus Köln! Ça va? Привет, мир. 你好，世界。 🎉🎉 👩‍👩‍👧",  # noqa: RUF001
    "don't do not stop . A list : 1 , 2 , 3 !\n\n\tdef f(x):\n        return x\n",
    "unaffordable unbelievable believing affording",
] * 4
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]


def _finish(backend: tokenizers.Tokenizer) -> Tokenizer:
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    backend.add_tokens([AddedToken(token, normalized=False) for token in MARKS])
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(backend, names, [backend.token_to_id("</s>")])


@functools.cache
def byte_level() -> Tokenizer:
    """Return a byte-level BPE tokenizer, as in GPT-2, Llama 3 and Qwen."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(TRAINING_TEXTS, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet))
    return _finish(backend)


@functools.cache
def byte_fallback() -> Tokenizer:
    """Return a SentencePiece BPE tokenizer, as in Llama 2, Mistral and Phi-3: unknown text becomes byte tokens."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.train_from_iterator(TRAINING_TEXTS[:1], trainers.BpeTrainer(vocab_size=80))
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {token: number for number, token in enumerate(["<unk>", *bytes_])}
    merges = []
    for token, _ in sorted(trained.get_vocab().items(), key=lambda item: item[1]):
        vocab[token] = len(vocab)
        split_at = next((n for n in range(1, len(token)) if token[:n] in vocab and token[n:] in vocab), None)
        if split_at is not None:
            merges.append((token[:split_at], token[split_at:]))
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _finish(backend)


@functools.cache
def metaspace() -> Tokenizer:
    """Return a Unigram tokenizer, as in T5 and older SentencePiece models."""
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.train_from_iterator(
        TRAINING_TEXTS, trainers.UnigramTrainer(vocab_size=150, unk_token="<unk>", special_tokens=["<unk>"])
    )
    return _finish(backend)


@functools.cache
def word_piece() -> Tokenizer:
    """Return a WordPiece tokenizer, as in BERT."""
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.train_from_iterator(TRAINING_TEXTS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]"]))
    return _finish(backend)


@functools.cache
def word_level() -> Tokenizer:
    """Return a word-level tokenizer without a decoder: words joined by spaces."""
    backend = tokenizers.Tokenizer(models.WordLevel(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.train_from_iterator(TRAINING_TEXTS, trainers.WordLevelTrainer(special_tokens=["[UNK]"]))
    return _finish(backend)


@functools.cache
def suffixed() -> Tokenizer:
    """Return a BPE tokenizer with word-end suffixes, as in GPT-1: no space follows the last word of a text."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(vocab_size=250, special_tokens=["<unk>"], end_of_word_suffix="</w>")
    backend.train_from_iterator(TRAINING_TEXTS, trainer)
    return _finish(backend)


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    maker.__name__: maker for maker in (byte_level, byte_fallback, metaspace, word_piece, word_level, suffixed)
}
