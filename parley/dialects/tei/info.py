"""``GET /info``: the model, its kind, and the server's limits."""

from __future__ import annotations

from typing import Any

from parley.dialects.facts import ServerFacts
from parley.dialects.json_answer import encode_json
from parley.dialects.reply import Answer
from parley.dialects.request_context import RequestContext
from parley.dialects.tei.api_rules import TeiRules
from parley.types import ModelInfo

TEI_VERSION = "1.9.3"  # version of the original that this API follows


POOLING_NAMES = {"lasttoken": "last_token"}  # names that differ from those of sentence-transformers


def answer_info(rules: TeiRules, body: bytes, context: RequestContext, facts: ServerFacts) -> Answer:
    """Describe the main model and the server. A batch is a step, which has at most ``max_batch`` texts."""
    card, status = facts.cards[0], facts.status
    length = context.context_length
    return Answer(
        body=encode_json(
            {
                "model_id": card.name,
                "model_sha": None,
                "model_dtype": status.info.dtype if status.info is not None else "float32",
                "served_model_name": card.name,
                "model_type": _describe_kind(status.info),
                "max_concurrent_requests": status.slots,
                "max_input_length": length,
                "max_batch_tokens": length * status.max_batch,
                "max_batch_requests": status.max_batch,
                "max_client_batch_size": rules.max_batch,
                "auto_truncate": rules.auto_truncate,
                "tokenization_workers": 1,
                "version": TEI_VERSION,
                "sha": None,
                "docker_label": f"parley-{facts.version}",
            }
        )
    )


def _describe_kind(info: ModelInfo | None) -> dict[str, Any]:
    """Return the original's tagged description of a model: a re-ranker is a classifier with one class."""
    labels = info.labels if info is not None else []
    if not labels:
        return {"embedding": {"pooling": _pooling_name(info)}}
    classes = {
        "id2label": {str(number): label for number, label in enumerate(labels)},
        "label2id": {label: number for number, label in enumerate(labels)},
    }
    return {"classifier" if len(labels) > 1 else "reranker": classes}


def _pooling_name(info: ModelInfo | None) -> str:
    """Return the original's name of a model's pooling. Where its files name none, as those of ColBERT models, the
    original takes the first token; a decoder's vector is that of the last."""
    pooling = info.pooling if info is not None else ""
    if info is not None and not pooling:
        pooling = "lasttoken" if info.generates else "cls"
    return POOLING_NAMES.get(pooling, pooling)
