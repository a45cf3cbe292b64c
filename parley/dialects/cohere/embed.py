"""``POST /v2/embed`` in Cohere's form of refusals. vLLM reads the same members, and so they are read there."""

from __future__ import annotations

from typing import ClassVar

from parley.dialects.cohere.answer_ids import id_as_uuid
from parley.dialects.cohere.refusal_wording import COHERE_WORDING
from parley.dialects.fields import Fields, decode_fields
from parley.dialects.reply import Answer
from parley.dialects.request_context import RequestContext
from parley.dialects.vllm.pooling.cohere import INPUT_MEMBERS, UniversalCohereReply
from parley.errors import BadRequest, InvalidValue, ParleyError

NO_INPUT = "invalid request: exactly one of 'texts', 'images' and 'inputs' must be given, and it must not be empty."


def read_cohere_embed(body: bytes, context: RequestContext) -> CohereEmbedReply:
    """Read texts to embed. Raises BadRequest."""
    return CohereEmbedReply(decode_fields(body, COHERE_WORDING), context)


class CohereEmbedReply(UniversalCohereReply):
    """A reply to texts to embed."""

    needs_model: ClassVar[bool] = True

    def __init__(self, body: Fields, context: RequestContext):
        if self.needs_model and not body.string("model", ""):
            raise body.missing_member("model")
        given_names = [name for name in INPUT_MEMBERS if body.has_value(name)]
        if len(given_names) != 1 or not body.raw_value(given_names[0]):
            raise InvalidValue(NO_INPUT, field="texts")
        super().__init__(body, context)

    @property
    def shown_id(self) -> str:
        """The id of the answer."""
        return id_as_uuid(self.request.id)

    def content_error(self, path: str, part: Fields, part_type: str) -> BadRequest:
        """Return the refusal of a part without its text or image."""
        return part.missing_member(part_type)

    def render_refusal(self, error: ParleyError) -> Answer | None:
        """Return None: every refusal has the form of the API's errors."""
        return None
