"""``POST /vertex``: Google Vertex's envelope for several generations, ``instances`` in and ``predictions`` out.

As in the original, only the length and the seed of an instance's parameters count, and tokens are sampled. All
instances form one request here, so these two must be equal in all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from parley.dialects.dialect import Answer, Head, Reply
from parley.dialects.fields import Fields, decode
from parley.dialects.tgi import messages, parameters, shared
from parley.dialects.tgi.parameters import RESERVED, Parameters
from parley.dialects.tgi.shared import U32, U64, WORDS, Rules
from parley.errors import BadRequest, Invalid, Malformed, Missing, ParleyError, WrongType
from parley.types import Delta, Event, Prompt, Request, Sampling, Stop, Text, Usage, Want

MAX_INSTANCES = 1024
EMPTY = "Input validation error"  # both message and type
FAILED = "Incomplete generation"  # both message and type of every other error


def read(rules: Rules, body: bytes, head: Head) -> VertexReply | Answer:
    """Read the body of a request. Raises BadRequest."""
    try:
        return VertexReply(rules, decode(body, WORDS), head)
    except (Malformed, Missing, WrongType):
        raise
    except BadRequest as error:
        if rules.strict and error.code != EMPTY:
            return failed()
        raise


def failed() -> Answer:
    """Return the answer that strict rules give to nearly every error."""
    return Answer(500, shared.encode({"error": FAILED, "error_type": FAILED}))


class VertexReply(Reply):
    """A reply to several instances; never a stream."""

    names: ClassVar[Mapping[str, str]] = {"prompt": "inputs"}

    def __init__(self, rules: Rules, body: Fields, head: Head):
        if not isinstance(body.raw("instances"), list):
            absent = not body.has("instances") and not body.null("instances")
            raise body.missing("instances") if absent else body.mistyped("instances", "an array")
        read = [_instance(item, rules, head) for item in body.objects("instances", cap=MAX_INSTANCES)]
        if not read:
            raise Invalid(EMPTY, field="instances", code=EMPTY)
        if len({(length, seed) for _, length, seed in read}) > 1:
            raise Invalid("`max_new_tokens` and `seed` must be the same in all instances", field="instances")
        _, length, seed = read[0]
        self._rules = rules
        self.request = Request(
            id=head.id,
            model="",
            prompts=[prompt for prompt, _, _ in read],
            sampling=Sampling(seed=seed),
            stop=Stop(max_tokens=length, include=True, reserve=RESERVED),
            want=Want(plain=True),
        )
        self._texts: list[list[str]] = [[] for _ in read]

    def refusal(self, error: ParleyError) -> Answer | None:
        """Return the strict answer to an error; otherwise None, for the dialect's own."""
        return failed() if self._rules.strict else None

    def chunk(self, events: Sequence[Event]) -> bytes:
        """Not supported: there is no stream."""
        raise NotImplementedError("there are no streams here")

    def end(self, usage: Usage) -> bytes:
        """Not supported: there is no stream."""
        raise NotImplementedError("there are no streams here")

    def fail(self, error: ParleyError) -> bytes:
        """Not supported: there is no stream."""
        raise NotImplementedError("there are no streams here")

    def add(self, events: Sequence[Event]) -> None:
        """Collect the text of these events by instance."""
        for event in events:
            if isinstance(event, Delta):
                self._texts[event.index].append(event.text)

    def body(self, usage: Usage) -> bytes:
        """Return all texts as JSON."""
        return shared.encode({"predictions": ["".join(text) for text in self._texts]})


def _instance(item: Fields, rules: Rules, head: Head) -> tuple[Prompt, int | None, int | None]:
    """Return the prompt, length and seed of a generation or a conversation."""
    if item.has("messages"):
        chat = messages.talk(item)
        length, seed = item.integer("max_tokens", None, 0, U32), item.integer("seed", None, 0, U64)
        parameters.check(Parameters(max_new_tokens=length), rules, empty=False, stream=False, context=head.context)
        return chat, length, seed
    inputs = item.string("inputs", None)
    if inputs is None:
        raise WrongType("instances: data did not match any variant of untagged enum VertexInstance")
    wish = parameters.read(item, rules)
    short = Parameters(max_new_tokens=wish.max_new_tokens)
    parameters.check(short, rules, empty=not inputs, stream=False, context=head.context)
    return Text(inputs), wish.max_new_tokens, wish.seed
