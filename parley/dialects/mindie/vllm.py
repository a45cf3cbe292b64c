"""MindIE's variant of vLLM's interface: ``POST /generate`` with ``prompt``.

An answer is the prompt, a space and the output; of several choices, the most probable comes first. A stream has no
events: each record is a JSON object and a NUL byte, with the new text of every choice.
"""

from __future__ import annotations

from collections.abc import Sequence

from parley.dialects.dialect import Head
from parley.dialects.fields import Fields, decode
from parley.dialects.mindie import choices, constraints, inputs, parameters
from parley.dialects.mindie.answers import MindieReply, common
from parley.dialects.mindie.rules import Rules
from parley.dialects.mindie.shared import NEITHER, Words, encode
from parley.types import Delta, Done, Event, Request, Stop, Text, Usage, Want

UNREAD = Words(NEITHER)
TOKENS = 16  # default of max_tokens, by the manual
NO_ORIGIN = "Failed to get parameter `origin_inputs` in given json body"  # refuses a recompute body without it


def read(rules: Rules, body: bytes, head: Head) -> RecordReply:
    """Read a request. Raises BadRequest."""
    return RecordReply(rules, decode(body, UNREAD), head)


class RecordReply(MindieReply):
    """A reply in vLLM's format, as a stream of records or in one piece."""

    def __init__(self, rules: Rules, body: Fields, head: Head):
        parts = inputs.texts(body, inputs.VLLM, rules)
        interface = parameters.VLLM.under(rules)
        values = parameters.read(body, interface)
        wish = choices.count(body, values, interface, rules)
        super().__init__(rules, inputs.VLLM)
        self._before = parts[0] + " "
        self._said: list[list[str]] = [[] for _ in range(wish.n)]
        stream = bool(values["stream"])
        if wish.n > 1 and not stream:
            wish = wish._replace(best_of=wish.best_of or wish.n)  # return all of them, the most probable first
        self.request = Request(
            **common(rules, head),
            model="",
            prompts=[Text("".join(parts))],
            sampling=parameters.sampling(values, rules),
            grammar=None if rules.strict else constraints.read(body),
            stop=Stop(
                strings=values["stop"],
                ids=values["stop_token_ids"],
                include=bool(values["include_stop_str_in_output"]),
                ignore_eos=bool(values["ignore_eos"]),
                max_tokens=values["max_tokens"] or (TOKENS if rules.old else None),
                reserve=1,
            ),
            want=Want(
                skip_special=values["skip_special_tokens"] is not False,
            ),
            **wish._asdict(),
            stream=stream,
            adapter=values["model"] if values["model"] != parameters.BASE else None,
        )

    def chunk(self, events: Sequence[Event]) -> bytes:
        """Return a record with the text of these events, if there is any."""
        fresh = [""] * len(self._said)
        for event in events:
            if isinstance(event, Delta):
                fresh[event.index] += event.text
        told = any(isinstance(event, Delta | Done) for event in events)
        if not self._rules.full_text:
            return encode({"text": fresh}) + b"\0" if told else b""
        self.add(events)
        return encode({"text": self._texts()}) + b"\0" if told else b""

    def add(self, events: Sequence[Event]) -> None:
        """Collect the text of these events by choice."""
        for event in events:
            if isinstance(event, Delta):
                self._said[event.index].append(event.text)

    def body(self, usage: Usage) -> bytes:
        """Return the prompt and the output of each choice as JSON."""
        return encode({"text": [self._before + text for text in self._texts()]})

    def _texts(self) -> list[str]:
        """Return the whole text of each choice; its parts are joined in place."""
        self._said = [["".join(said)] for said in self._said]
        return [said[0] for said in self._said]
