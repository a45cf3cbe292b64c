"""``POST /v2/embed`` of Cohere's API as vLLM answers it: texts in, their vectors in several encodings out.

``input_type`` is the name of the model's own prompt to put before each text. On the universal route a model without
prompts takes the API's own names, which Cohere's SDK always sends, and embeds all texts alike. Only texts are
supported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from parley.dialects import vectors
from parley.dialects.dialect import Answer, RequestContext, UnstreamedReply
from parley.dialects.fields import Fields
from parley.dialects.json_answer import encode_json
from parley.dialects.openai import vllm_members
from parley.dialects.openai.common_members import MAX_TOKENS, unsupported_member_error
from parley.dialects.openai.embeddings import MAX_DIMENSIONS, MAX_EMBEDDING_INPUTS
from parley.dialects.openai.prompts import MAX_PROMPT_SIZE
from parley.dialects.vllm import requests
from parley.dialects.vllm.error_answers import vllm_error_answer
from parley.dialects.vllm.refusal_wording import value_error
from parley.errors import Invalid, ParleyError, UnknownPromptName, excerpt
from parley.types import Event, PoolingOptions, PromptVector, Request, Text, Usage

EMBEDDING_TYPES = ("float", "base64", "binary", "ubinary")
TRUNCATED_SIDES = {"END": "right", "START": "left"}  # the side to cut of a text that is too long
# Cohere's input types, each with the names that models give to a prompt of that purpose.
INPUT_TYPES: dict[str, tuple[str, ...]] = {
    "search_document": ("document", "passage"),
    "search_query": ("query",),
    "classification": (),
    "clustering": (),
    "image": (),
}
NO_INPUT_SENTENCE = "Exactly one of texts, images, or inputs must be provided, and it must be non-empty"


def read_cohere_request(body: bytes, context: RequestContext) -> CohereReply | Answer:
    """Read an embedding request in Cohere's form. Raises BadRequest."""
    return requests.read_vllm_request(CohereReply, body, context)


def read_universal_request(body: bytes, context: RequestContext) -> UniversalCohereReply | Answer:
    """Read an embedding request in Cohere's form, also of a client that knows no vLLM. Raises BadRequest."""
    return requests.read_vllm_request(UniversalCohereReply, body, context)


class CohereReply(UnstreamedReply):
    """An embedding request in Cohere's form."""

    field_names: ClassVar[Mapping[str, str]] = {
        "prompt": "texts", "prompt_name": "input_type", "dimensions": "output_dimension"
    }  # fmt: skip
    api_version: ClassVar[str] = "2"

    def __init__(self, body: Fields, context: RequestContext):
        self._texts = _read_cohere_texts(body)
        self._types = _read_embedding_types(body) or ["float"]
        extra_members = vllm_members.read_vllm_pooling_members(_with_truncation(body, context), context)
        self.request = Request(
            id=context.unique_id,
            model=body.string("model", "", cap=256),
            prompts=[Text(text) for text in self._texts],
            **extra_members.request_members,
            pooling=self._pooling_options(
                body.string("input_type", None, cap=vllm_members.MAX_NAME_CHARACTERS),
                body.integer("output_dimension", None, 1, MAX_DIMENSIONS),
            ),
        )
        self._answer_id = requests.choose_answer_id(context, extra_members.client_id or context.unique_id)
        self._vectors: dict[int, bytes] = {}

    def _pooling_options(self, input_type: str | None, dimensions: int | None) -> PoolingOptions:
        return PoolingOptions(dimensions, prompt=input_type)

    @property
    def shown_id(self) -> str:
        """The id of the answer."""
        return f"embd-{self._answer_id}"

    def render_refusal(self, error: ParleyError) -> Answer | None:
        """Return the original's refusal of an unknown ``input_type``; None for other errors."""
        if not isinstance(error, UnknownPromptName):
            return None
        supported = f"Supported values: {', '.join(error.known)}"
        reason = supported if error.known else "This model does not define any input_type task instructions."
        return vllm_error_answer(Invalid(f"Unsupported input_type {error.name!r}. {reason}"))

    def add_events(self, events: Sequence[Event]) -> None:
        """Keep the vectors of these events by text."""
        for event in events:
            if isinstance(event, PromptVector):
                self._vectors[event.prompt] = event.values

    def render_body(self, usage: Usage) -> bytes:
        """Return the texts as JSON, with their vectors in every requested encoding."""
        billed = {"input_tokens": usage.prompt_tokens, "image_tokens": 0}
        embeddings = self.embedding_members()
        return encode_json(
            {
                "id": self.shown_id,
                "embeddings": embeddings["embeddings"],
                "texts": self._texts,
                "meta": {"api_version": {"version": self.api_version}, "billed_units": billed},
                "response_type": embeddings["response_type"],
            }
        )

    def embedding_members(self) -> dict[str, Any]:
        """Return the vectors in every requested encoding, and the name of that form."""
        ordered_vectors = [self._vectors[index] for index in range(len(self._texts))]
        embeddings = {form: [_typed_vector(values, form) for values in ordered_vectors] for form in self._types}
        return {"embeddings": embeddings, "response_type": "embeddings_by_type"}


class UniversalCohereReply(CohereReply):
    """An embedding request of a client that expects Cohere's API: every model takes its input types."""

    def _pooling_options(self, input_type: str | None, dimensions: int | None) -> PoolingOptions:
        aliases, is_known = INPUT_TYPES.get(input_type or "", ()), input_type in INPUT_TYPES
        return PoolingOptions(dimensions, prompt=input_type, prompt_aliases=aliases, prompt_optional=is_known)

    def render_refusal(self, error: ParleyError) -> Answer | None:
        """Return Cohere's refusal of an unknown ``input_type``; None for other errors."""
        if not isinstance(error, UnknownPromptName):
            return None
        return Answer(error.status, encode_json({"message": input_type_sentence(error)}))


def input_type_sentence(error: UnknownPromptName) -> str:
    """Return Cohere's refusal of an unknown ``input_type``, with the values that are possible."""
    names = " or ".join(f"'{name}'" for name in error.known or INPUT_TYPES)
    return f"invalid request: input_type must be one of {names}, but got {excerpt(error.name)}."


def _read_cohere_texts(body: Fields) -> list[str]:
    texts = body.strings("texts", cap=MAX_EMBEDDING_INPUTS, total=MAX_PROMPT_SIZE)
    given_names = [name for name in ("texts", "images", "inputs") if body.has_value(name)]
    if len(given_names) != 1 or not body.raw_value(given_names[0]):
        raise value_error("", NO_INPUT_SENTENCE, dict.fromkeys(body.member_names))
    if given_names != ["texts"]:
        raise unsupported_member_error(body, given_names[0], "Anything but texts is")
    return texts


def _read_embedding_types(body: Fields) -> list[str]:
    """Return the requested encodings of each vector, without duplicates."""
    forms = body.strings("embedding_types", cap=len(EMBEDDING_TYPES), total=MAX_PROMPT_SIZE)
    for index, form in enumerate(forms):
        item_path = f"embedding_types[{index}]"
        body.with_defaults({item_path: form}).string(item_path, None, allowed=EMBEDDING_TYPES)
    return list(dict.fromkeys(forms))


def _with_truncation(body: Fields, context: RequestContext) -> Fields:
    """Return the body with its truncation in vLLM's own members; ``NONE`` refuses long texts instead."""
    truncate = body.string("truncate", "END", allowed=("NONE", *TRUNCATED_SIDES))
    max_tokens = body.integer("max_tokens", -1, 1, MAX_TOKENS)
    if truncate in TRUNCATED_SIDES:
        count = min(max_tokens, context.context_length) if context.context_length else max_tokens
        return body.with_defaults({"truncate_prompt_tokens": count, "truncation_side": TRUNCATED_SIDES[truncate]})
    if max_tokens > 0:
        raise body.member_error("max_tokens", "needs a 'truncate' of START or END.")
    return body


def _typed_vector(values: bytes, form: str) -> Any:
    if form == "base64":
        return vectors.vector_base64(values)
    numbers = vectors.vector_numbers(values)
    if form == "float":
        return numbers
    bits = "".join("1" if number >= 0 else "0" for number in numbers)
    octets = int(bits.ljust(-(-len(bits) // 8) * 8, "0"), 2).to_bytes(-(-len(bits) // 8), "big")
    return [octet - 128 if form == "binary" else octet for octet in octets]
