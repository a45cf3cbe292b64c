"""``POST /v2/embed`` of Cohere's API as vLLM answers it: inputs in, their vectors in several encodings out.

The inputs are texts, images, or contents of both. Images and contents are conversations of one turn, which the
model's chat template writes. ``input_type`` is the name of the model's own prompt: it stands before a text, and is the
system message of a conversation. On the universal route a model without prompts takes the API's own names, which
Cohere's SDK always sends, and embeds all inputs alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from parley.dialects import vectors
from parley.dialects.fields import Fields
from parley.dialects.json_answer import encode_json
from parley.dialects.media import InterleavedText
from parley.dialects.openai import vllm_members
from parley.dialects.openai.common_members import MAX_TOKENS
from parley.dialects.openai.embeddings import MAX_DIMENSIONS, MAX_EMBEDDING_INPUTS
from parley.dialects.openai.media_parts import MediaReader, media_reader
from parley.dialects.openai.messages import MAX_CONTENT_PARTS
from parley.dialects.openai.prompts import MAX_PROMPT_SIZE
from parley.dialects.reply import Answer, UnstreamedReply
from parley.dialects.request_context import RequestContext
from parley.dialects.vllm import requests
from parley.dialects.vllm.error_answers import vllm_error_answer
from parley.dialects.vllm.pooling.content_parts import read_pooling_parts
from parley.dialects.vllm.refusal_wording import value_error
from parley.errors import BadRequest, InvalidValue, ParleyError, UnknownPromptName, excerpt
from parley.types import ChatPrompt, Event, Message, PoolingOptions, Prompt, PromptVector, Request, TextPrompt, Usage

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
INPUT_MEMBERS = ("texts", "images", "inputs")
CONTENT_MEMBERS = {"text": "text", "image_url": "image_url.url"}  # what a part of a content needs, by its type
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
        self._input_name = _find_input_name(body)
        self._texts = body.strings("texts", cap=MAX_EMBEDDING_INPUTS, total=MAX_PROMPT_SIZE)
        prompts = self._read_prompts(body, context)
        self._has_images = any(isinstance(prompt, ChatPrompt) and prompt.messages[0].media for prompt in prompts)
        self._types = _read_embedding_types(body) or ["float"]
        extra_members = vllm_members.read_vllm_pooling_members(_with_truncation(body, context), context)
        self.request = Request(
            id=context.unique_id,
            model=body.string("model", "", cap=256),
            prompts=prompts,
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

    def _read_prompts(self, body: Fields, context: RequestContext) -> list[Prompt]:
        if self._input_name == "texts":
            return [TextPrompt(text) for text in self._texts]
        reader = media_reader(body, requests.VLLM_RULES, context)
        if self._input_name == "images":
            return [_as_conversation(read_pooling_parts([part], reader)) for part in _image_parts(body)]
        return [self._read_content(item, reader) for item in body.objects("inputs", cap=MAX_EMBEDDING_INPUTS)]

    def _read_content(self, item: Fields, reader: MediaReader) -> ChatPrompt:
        if not item.has_value("content"):
            raise item.missing_member("content")
        parts = list(item.objects("content", cap=MAX_CONTENT_PARTS))
        for index, part in enumerate(parts):
            part_type = part.string("type", None, allowed=tuple(CONTENT_MEMBERS))
            if part_type is None:
                raise part.missing_member("type")
            image = part.object("image_url") if part_type == "image_url" else None
            if not (part.has_value("text") if part_type == "text" else image and image.raw_value("url")):
                raise self.content_error(item.member_path(f"content[{index}]"), part, part_type)
        content = read_pooling_parts(parts, reader)
        if not content.text and not content.media:
            raise item.empty_member("content", "array")
        return _as_conversation(content)

    def content_error(self, path: str, part: Fields, part_type: str) -> BadRequest:
        """Return the original's refusal of a part without its text or image."""
        sentence = f"CohereEmbedContent with type='{part_type}' requires {CONTENT_MEMBERS[part_type]}"
        return value_error(path, sentence, {name: part.raw_value(name) for name in part.member_names})

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
        return vllm_error_answer(InvalidValue(f"Unsupported input_type {error.name!r}. {reason}"))

    def add_events(self, events: Sequence[Event]) -> None:
        """Keep the vectors of these events by text."""
        for event in events:
            if isinstance(event, PromptVector):
                self._vectors[event.prompt] = event.values

    def render_body(self, usage: Usage) -> bytes:
        """Return the texts as JSON, with their vectors in every requested encoding."""
        tokens = usage.prompt_tokens
        billed = {"input_tokens": 0, "image_tokens": tokens}
        if not self._has_images:
            billed = {"input_tokens": tokens, "image_tokens": 0}
        embeddings = self.embedding_members()
        return encode_json(
            {
                "id": self.shown_id,
                "embeddings": embeddings["embeddings"],
                **({"texts": self._texts} if self._input_name == "texts" else {}),
                "meta": {"api_version": {"version": self.api_version}, "billed_units": billed},
                "response_type": embeddings["response_type"],
            }
        )

    def embedding_members(self) -> dict[str, Any]:
        """Return the vectors in every requested encoding, and the name of that form."""
        ordered_vectors = [self._vectors[index] for index in range(len(self.request.prompts))]
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


def _find_input_name(body: Fields) -> str:
    """Return the member that has the inputs. Raises WrongType if not exactly one has any."""
    given_names = [name for name in INPUT_MEMBERS if body.has_value(name)]
    if len(given_names) != 1 or not body.raw_value(given_names[0]):
        raise value_error("", NO_INPUT_SENTENCE, dict.fromkeys(body.member_names))
    return given_names[0]


def _image_parts(body: Fields) -> Iterator[Fields]:
    """Yield each image as a part of a content, which errors locate in ``images``."""
    for index, url in enumerate(body.strings("images", cap=MAX_EMBEDDING_INPUTS, total=MAX_PROMPT_SIZE)):
        part, place = body.without_members(set(body.member_names)), f"images[{index}]"
        for name, value in (("type", "image_url"), ("image_url", {"url": url})):
            part = part.with_moved_member(name, value, place)
        yield part


def _as_conversation(content: InterleavedText) -> ChatPrompt:
    return ChatPrompt([Message("user", content.text, media=content.media)], add_generation_prompt=False)


def _read_embedding_types(body: Fields) -> list[str]:
    """Return the requested encodings of each vector, without duplicates."""
    forms = body.strings("embedding_types", cap=MAX_EMBEDDING_INPUTS, total=MAX_PROMPT_SIZE)
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
