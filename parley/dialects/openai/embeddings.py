"""``POST /v1/embeddings``: texts or token ids in, one vector for each out, in the order of the input.

vLLM's additions are read too: conversations in place of texts, truncation of long texts, and other vector encodings.
``prompt_name`` is sentence-transformers': the name of the model's own prompt to put before each text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from parley.dialects import vectors
from parley.dialects.fields import Fields, decode_fields
from parley.dialects.json_answer import encode_json
from parley.dialects.openai import prompts, vllm_members
from parley.dialects.openai.messages import read_conversation
from parley.dialects.openai.reading_rules import OPENAI_RULES, ReadingRules
from parley.dialects.reply import HeaderList, RequestTimings, UnstreamedReply
from parley.dialects.request_context import RequestContext
from parley.types import TOKEN_TASKS, Event, PoolingOptions, PoolingTask, Prompt, PromptVector, Request, Usage

MAX_EMBEDDING_INPUTS = 2048
MAX_DIMENSIONS = 2**31 - 1
ENCODING_FORMATS = ("float", "base64", "bytes", "bytes_only")
EMBED_DTYPES = ("float32", "float16", "bfloat16", *vectors.FLOAT8)
BYTE_ORDERS = ("native", "little", "big")
OCTET_STREAM = b"application/octet-stream"


def read_embedding_request(body: bytes, context: RequestContext) -> EmbeddingReply:
    """Read an embedding request. Raises BadRequest."""
    return EmbeddingReply(decode_fields(body), context)


class EmbeddingReply(UnstreamedReply):
    """An embedding request, answered in OpenAI's form."""

    field_names: ClassVar[Mapping[str, str]] = {"prompt": "input"}
    reading_rules: ClassVar[ReadingRules] = OPENAI_RULES

    def __init__(self, body: Fields, context: RequestContext, task: PoolingTask = "embed"):
        extra_members = vllm_members.read_vllm_pooling_members(body, context)
        self._context = context
        conversations = self._split_inputs(body)
        self.request = Request(
            id=context.unique_id,
            model=body.string("model", "", cap=256),
            prompts=self._read_inputs(body, conversations.values()),
            prompt_places=list(filter(None, conversations)),
            **extra_members.request_members,
            pooling=PoolingOptions(
                body.integer("dimensions", None, 1, MAX_DIMENSIONS),
                read_normalize(body),
                body.string("prompt_name", None, cap=vllm_members.MAX_NAME_CHARACTERS),
                task,
            ),
        )
        self._encoding = body.string("encoding_format", "float", allowed=ENCODING_FORMATS)
        self._dtype = body.string("embed_dtype", "float32", allowed=EMBED_DTYPES)
        self._byte_order = body.string("endianness", "native", allowed=BYTE_ORDERS)
        body.string("user", None, cap=vllm_members.MAX_NAME_CHARACTERS)
        self._answer_id = extra_members.client_id or context.unique_id
        self._vectors: dict[int, bytes] = {}
        self._rows: dict[int, int] = {}  # vectors of each input that has one for each token
        if self._encoding.startswith("bytes"):
            self.content_type = OCTET_STREAM

    def _split_inputs(self, body: Fields) -> dict[str, Fields]:
        return split_inputs(body)

    def _read_inputs(self, body: Fields, conversations: Iterable[Fields]) -> list[Prompt]:
        return [
            prompt
            for conversation in conversations
            for prompt in read_embedding_inputs(conversation, self.reading_rules, self._context)
        ]

    def add_events(self, events: Sequence[Event]) -> None:
        """Keep the vectors of these events by input."""
        for event in events:
            if isinstance(event, PromptVector):
                self._vectors[event.prompt] = event.values
                if self.request.pooling is not None and self.request.pooling.task in TOKEN_TASKS:
                    self._rows[event.prompt] = event.rows

    def render_body(self, usage: Usage) -> bytes:
        """Return the vectors as JSON, or as raw bytes if the client asks for them."""
        if self._encoding.startswith("bytes"):
            self._usage = usage
            return b"".join(self._binary_vectors())
        data = [
            {"object": "embedding", "index": index, "embedding": vector}
            for index, vector in enumerate(self._json_vectors())
        ]
        return encode_json(self.embedding_envelope(data, usage))

    def embedding_envelope(self, data: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        """Return the answer with its vectors."""
        usage_object = {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
        return {"object": "list", "data": data, "model": self.request.model, "usage": usage_object}

    def answer_headers(self, timings: RequestTimings | None) -> HeaderList:
        """Return the metadata that an answer in raw bytes cannot contain."""
        if self._encoding != "bytes":
            return ()
        data, start = [], 0
        for index, vector in enumerate(self._binary_vectors()):
            end = start + len(vector)
            item = {"index": index, "embed_dtype": self._dtype, "endianness": self._byte_order}
            data.append(item | {"start": start, "end": end, "shape": self._vector_shape(index)})
            start = end
        metadata = self.embedding_envelope(data, self._usage) | {
            "id": f"embd-{self._answer_id}",
            "created": self._context.created,
        }
        return [(b"metadata", _ascii_json(encode_json(metadata)))]

    def _json_vectors(self) -> list[Any]:
        if self._encoding == "base64":
            return list(map(vectors.vector_base64, self._binary_vectors()))
        return [
            vectors.vector_rows(values, self._rows[index]) if index in self._rows else vectors.vector_numbers(values)
            for index, values in sorted(self._vectors.items())
        ]

    def _vector_shape(self, index: int) -> list[int]:
        size = len(self._vectors[index]) // 4
        return [self._rows[index], size // self._rows[index]] if index in self._rows else [size]

    def _binary_vectors(self) -> list[bytes]:
        big = self._byte_order == "big"
        return [
            vectors.encode_vector(self._vectors[index], self._dtype, big_endian=big)
            for index in range(len(self._vectors))
        ]


def split_inputs(body: Fields) -> dict[str, Fields]:
    """Return a body for each of several conversations, by its position, or "" and the only body. Raises BadRequest.

    ``messages`` is a conversation or a list of conversations, and so is ``input``.
    """
    name = "input" if body.has_value("input") else "messages"
    values = body.raw_value(name)
    if name == "input" and _is_conversation(values):
        body, values = body.with_members({"input": None, "messages": values}), None
    if not (isinstance(values, list) and values and isinstance(values[0], list)):
        return {"": body}
    if name == "input" and not all(map(_is_conversation, values)):
        return {"": body}  # token ids
    other_members = body.with_members({"input": None})
    conversations = {}
    for index, messages in enumerate(body.array(name, cap=MAX_EMBEDDING_INPUTS)):
        path = f"{name}[{index}]"
        conversations[path] = conversation = other_members.with_moved_member("messages", messages, path)
        if not isinstance(messages, list):
            raise conversation.mistyped_member("messages", "an array")
        if not messages:
            raise body.empty_member(path, "array")
    return conversations


def _is_conversation(value: Any) -> bool:
    """Whether a value is a list of messages, and neither texts nor token ids."""
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) and "role" in item for item in value)


def read_embedding_inputs(body: Fields, rules: ReadingRules, context: RequestContext | None = None) -> list[Prompt]:
    """Return the texts, token ids or conversation of a request for vectors. Raises BadRequest.

    Without ``context``, a conversation may have only text.
    """
    if body.has_value("messages") and not body.has_value("input"):
        chat_body = body.with_defaults({"add_generation_prompt": False})  # no answer follows
        return [read_conversation(chat_body, rules, context)[0]]
    return prompts.read_prompts(body, "input", cap=MAX_EMBEDDING_INPUTS)


def read_normalize(body: Fields) -> bool | None:
    """Return the current member ``use_activation``, or ``normalize``, its older name."""
    return body.boolean("use_activation", body.boolean("normalize", None))


def _ascii_json(data: bytes) -> bytes:
    """Return JSON in printable ASCII, as a header requires; names may contain any characters."""
    return re.sub(r"[^\x20-\x7e]", lambda match: _escape_character(match[0]), data.decode()).encode()


def _escape_character(character: str) -> str:
    units = character.encode("utf-16-be")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))
