"""``POST /vertex``: Google Vertex's envelope for several generations, ``instances`` in and ``predictions`` out.

As in the original, only the length and the seed of an instance's parameters count, and tokens are sampled. All
instances form one request here, so these two must be equal in all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from parley.dialects.fields import MAX_U32, MAX_U64, Fields, decode_fields
from parley.dialects.json_answer import encode_json
from parley.dialects.reply import Answer, Reply
from parley.dialects.request_context import RequestContext
from parley.dialects.tgi import images, messages, parameters
from parley.dialects.tgi.answer_parts import TGI_FIELD_NAMES
from parley.dialects.tgi.api_rules import TgiRules
from parley.dialects.tgi.parameters import RESERVED_TOKENS, TgiParameters
from parley.errors import BadRequest, InvalidValue, MalformedBody, MissingField, ParleyError, WrongType
from parley.types import ChoiceDelta, Event, OutputOptions, Prompt, Request, SamplingOptions, StopConditions, Usage

MAX_INSTANCES = 1024
NO_INSTANCES = "Input validation error"  # both message and type
VERTEX_FAILURE = "Incomplete generation"  # both message and type of every other error


def read_vertex(rules: TgiRules, body: bytes, context: RequestContext) -> VertexReply | Answer:
    """Read the body of a request. Raises BadRequest."""
    try:
        return VertexReply(rules, decode_fields(body, rules.wording), context)
    except (MalformedBody, MissingField, WrongType):
        raise
    except BadRequest as error:
        if rules.strict and error.code != NO_INSTANCES:
            return vertex_failure_answer()
        raise


def vertex_failure_answer() -> Answer:
    """Return the answer that strict rules give to nearly every error."""
    return Answer(500, encode_json({"error": VERTEX_FAILURE, "error_type": VERTEX_FAILURE}))


class VertexReply(Reply):
    """A reply to several instances; never a stream."""

    field_names: ClassVar[Mapping[str, str]] = TGI_FIELD_NAMES

    def __init__(self, rules: TgiRules, body: Fields, context: RequestContext):
        if not isinstance(body.raw_value("instances"), list):
            is_absent = not body.has_value("instances") and not body.is_null("instances")
            raise body.missing_member("instances") if is_absent else body.mistyped_member("instances", "an array")
        instances = [_read_instance(item, rules, context) for item in body.objects("instances", cap=MAX_INSTANCES)]
        if not instances:
            raise InvalidValue(NO_INSTANCES, field="instances", code=NO_INSTANCES)
        if len({(length, seed) for _, length, seed in instances}) > 1:
            raise InvalidValue("`max_new_tokens` and `seed` must be the same in all instances", field="instances")
        _, length, seed = instances[0]
        self._rules = rules
        self.request = Request(
            id=context.unique_id,
            model="",
            prompts=[prompt for prompt, _, _ in instances],
            sampling=SamplingOptions(seed=seed),
            stop_conditions=StopConditions(max_tokens=length, include_in_output=True, reserved_tokens=RESERVED_TOKENS),
            output_options=OutputOptions(unparsed=True),
        )
        self._texts: list[list[str]] = [[] for _ in instances]

    def render_refusal(self, error: ParleyError) -> Answer | None:
        """Return the strict answer to an error; otherwise None, for the dialect's own."""
        return vertex_failure_answer() if self._rules.strict else None

    def render_chunk(self, events: Sequence[Event]) -> bytes:
        """Not supported: there is no stream."""
        raise NotImplementedError("there are no streams here")

    def finish_stream(self, usage: Usage) -> bytes:
        """Not supported: there is no stream."""
        raise NotImplementedError("there are no streams here")

    def fail_stream(self, error: ParleyError) -> bytes:
        """Not supported: there is no stream."""
        raise NotImplementedError("there are no streams here")

    def add_events(self, events: Sequence[Event]) -> None:
        """Collect the text of these events by instance."""
        for event in events:
            if isinstance(event, ChoiceDelta):
                self._texts[event.index].append(event.text)

    def render_body(self, usage: Usage) -> bytes:
        """Return all texts as JSON."""
        return encode_json({"predictions": ["".join(text) for text in self._texts]})


def _read_instance(item: Fields, rules: TgiRules, context: RequestContext) -> tuple[Prompt, int | None, int | None]:
    """Return the prompt, length and seed of a generation or a conversation."""
    if item.has_value("messages"):
        chat = messages.read_tgi_conversation(item, context)
        length, seed = item.integer("max_tokens", None, 0, MAX_U32), item.integer("seed", None, 0, MAX_U64)
        parameters.check_tgi_parameters(
            TgiParameters(max_new_tokens=length), rules, empty=False, stream=False, context=context.context_length
        )
        return chat, length, seed
    inputs = item.string("inputs", None)
    if inputs is None:
        raise WrongType("instances: data did not match any variant of untagged enum VertexInstance")
    params = parameters.read_tgi_parameters(item, rules)
    counted_params = TgiParameters(max_new_tokens=params.max_new_tokens)
    parameters.check_tgi_parameters(
        counted_params, rules, empty=not inputs, stream=False, context=context.context_length
    )
    prompt = images.read_text_with_images(inputs, item.member_path("inputs"), context)
    return prompt, params.max_new_tokens, params.seed
