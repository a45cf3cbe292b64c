"""Makes a classifier's head of rows of a language model's head: rerankers that answer with one of two tokens.

vLLM's members of config.json say so: ``classifier_from_token`` names the tokens, and ``method`` how their logits become
classes: ``from_2_way_softmax``, one class, the second token against the first; or ``no_post_processing``, a class for
each. ``is_original_qwen3_reranker`` means the first method. The probability of the second token of two, among both, is
the sigmoid of the difference of their logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from parley.model.checkpoint.files import Checkpoint, LoadError
from parley.model.load.text_encoders.classifier import read_score_function
from parley.model.networks.classifier import ClassifierHead, PlainLinear
from parley.model.networks.decoder_config import DecoderConfig

TOKENS_MEMBER, QWEN3_MEMBER = "classifier_from_token", "is_original_qwen3_reranker"
DIFFERENCE, EACH = "from_2_way_softmax", "no_post_processing"
MAX_SCORE_TOKENS = 1024


def names_score_tokens(config: Mapping[str, Any]) -> bool:
    """Whether a config names tokens whose logits are scores."""
    return config.get(TOKENS_MEMBER) is not None or bool(config.get(QWEN3_MEMBER))


def load_token_head(
    folder: Path, checkpoint: Checkpoint, config: Mapping[str, Any], decoder_config: DecoderConfig, device: torch.device
) -> ClassifierHead:
    """Return a head that scores the tokens that ``config`` names. Raises LoadError."""
    tokens, method = config.get(TOKENS_MEMBER), config.get("method")
    if config.get(QWEN3_MEMBER):
        method = method or DIFFERENCE
    if not isinstance(tokens, list) or not 0 < len(tokens) <= MAX_SCORE_TOKENS:
        raise LoadError(f"{TOKENS_MEMBER} must be a list of 1 to {MAX_SCORE_TOKENS} tokens.")
    if method not in (DIFFERENCE, EACH):
        raise LoadError(f"With {TOKENS_MEMBER}, method must be {DIFFERENCE} or {EACH}.")
    if method == DIFFERENCE and len(tokens) != 2:
        raise LoadError(f"{DIFFERENCE} compares 2 tokens, but {TOKENS_MEMBER} has {len(tokens)}.")
    if decoder_config.logit_softcap is not None or "head" in decoder_config.biases:
        raise LoadError(f"{TOKENS_MEMBER} is not supported for models whose logits are capped or have a bias.")
    rows = _read_head_rows(checkpoint, decoder_config, _find_token_ids(folder, tokens)).to(device)
    labels = [str(token) for token in tokens]
    if method == DIFFERENCE:
        rows, labels = rows[1:] - rows[:1], labels[1:]
    return ClassifierHead(
        hidden_layer=None,
        activate=torch.tanh,
        output_layer=PlainLinear(rows * decoder_config.logit_scale, None),
        labels=labels,
        score_function=read_score_function(config, len(labels)),
        reads="last",
    )


def _find_token_ids(folder: Path, tokens: list[Any]) -> list[int]:
    """Return the ids of tokens. Raises LoadError if the tokenizer lacks one."""
    from parley.text.tokens.json_files import BadTokenizer
    from parley.text.tokens.tokenizer import Tokenizer  # engines without such a head start faster

    try:
        backend = Tokenizer.from_folder(folder).backend
    except BadTokenizer as error:
        raise LoadError(f"The tokens of {TOKENS_MEMBER} cannot be read: {error}") from None
    ids = []
    for token in tokens:
        token_id = backend.token_to_id(token) if isinstance(token, str) else None
        if token_id is None:
            raise LoadError(f"{TOKENS_MEMBER} names {str(token)[:100]}, which is no token of the model.")
        ids.append(token_id)
    return ids


def _read_head_rows(checkpoint: Checkpoint, config: DecoderConfig, ids: list[int]) -> torch.Tensor:
    """Return rows of the head, or of the embedding in its place: float32 [ids, hidden]. Raises LoadError."""
    names = [f"{name}.weight" for name in (config.tensors.head, config.tensors.embedding)]
    name = next((name for name in names if checkpoint.has_plain_numbers(name)), None)
    if name is None:
        raise LoadError(f"{TOKENS_MEMBER} needs a head of plain weights.")
    return checkpoint.view_tensor(name, config.vocab_size, config.hidden_size)[ids].float()
