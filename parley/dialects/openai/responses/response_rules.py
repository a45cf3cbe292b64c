"""Differences between the strict and the universal surface of the Responses API, and the errors of both."""

from __future__ import annotations

from dataclasses import dataclass

from parley.dialects.fields import Fields
from parley.dialects.openai.reading_rules import OPENAI_RULES, STRICT_OPENAI_RULES, ReadingRules
from parley.errors import BadRequest, Unsupported


@dataclass(frozen=True, slots=True)
class ResponsesRules:
    """How a surface reads bodies.

    * ``strict``: it has the refusals of OpenAI's own service: unknown members, tools that only that service runs, parts
      under the names of chat completions, calls without outputs, reasoning that it did not seal.
    * ``pairs_calls``: outputs without their calls are refused.
    * ``compacts``: long conversations may be summarized before the answer.
    * ``client_tools``: tools that OpenAI defines and clients run are functions to the model.
    * ``reading``: the rules of the members that chat completions have as well, among them that of ``strict`` schemas.
    """

    strict: bool = False
    pairs_calls: bool = True
    client_tools: bool = True
    compacts: bool = True
    reading: ReadingRules = OPENAI_RULES

    @property
    def min_output_tokens(self) -> int:
        """The smallest ``max_output_tokens``."""
        return 16 if self.strict else 1


LENIENT = ResponsesRules()
STRICT = ResponsesRules(strict=True, reading=STRICT_OPENAI_RULES)


def unserved_error(message: str, field: str) -> Unsupported:
    """Return the refusal of a value that this server does not serve."""
    return Unsupported(message, field=field, code="unsupported_value")


def refuse_member(body: Fields, name: str, subject: str) -> None:
    """Raise Unsupported if the member asks for something. ``subject`` with its verb, "Prompt templates are"."""
    if body.raw_value(name):
        path = body.member_path(name)
        raise Unsupported(f"Unsupported parameter: '{path}'. {subject} not available on this server.", field=path)


def conversation_error(message: str) -> BadRequest:
    """Return the error for items that do not fit each other, in the service's words."""
    return BadRequest(message, field="input")
