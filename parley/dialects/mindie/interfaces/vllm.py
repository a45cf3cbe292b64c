"""MindIE's variant of vLLM's interface: ``POST /generate`` with ``prompt``.

An answer is the prompt, a space and the output; of several choices, the most probable comes first. A stream has no
events: each record is a JSON object and a NUL byte, with the new text of every choice.
"""

from __future__ import annotations

from collections.abc import Sequence

from parley.dialects.fields import Fields, decode_fields
from parley.dialects.json_answer import encode_json
from parley.dialects.mindie.api_rules import MindieRules
from parley.dialects.mindie.interfaces.answers import MindieReply, shared_request_members
from parley.dialects.mindie.members import choices, constraints, inputs, parameters
from parley.dialects.mindie.refusal_wording import NO_PROMPT_MESSAGE, MindieErrorWording
from parley.dialects.request_context import RequestContext
from parley.types import ChoiceDelta, ChoiceDone, Event, OutputOptions, Request, StopConditions, Usage

VLLM_WORDING = MindieErrorWording(NO_PROMPT_MESSAGE)
OLD_DEFAULT_TOKENS = 16  # default of max_tokens, by the manual
NO_ORIGIN_INPUTS = "Failed to get parameter `origin_inputs` in given json body"  # refuses a recompute body without it


def read_mindie_vllm(rules: MindieRules, body: bytes, context: RequestContext) -> RecordReply:
    """Read a request. Raises BadRequest."""
    return RecordReply(rules, decode_fields(body, VLLM_WORDING), context)


class RecordReply(MindieReply):
    """A reply in vLLM's format, as a stream of records or in one piece."""

    def __init__(self, rules: MindieRules, body: Fields, context: RequestContext):
        parts = inputs.read_prompt_parts(body, inputs.VLLM_INPUT, rules, context)
        interface = parameters.VLLM_TABLE.under_rules(rules)
        values = parameters.read_mindie_parameters(body, interface)
        counts = choices.count_choices(body, values, interface, rules)
        base_names = (parameters.NO_ADAPTER, *context.model_names)  # clients of vLLM send the served name
        super().__init__(rules, inputs.VLLM_INPUT)
        self._text_start = next((part for part in parts if isinstance(part, str)), "") + " "
        self._text_parts: list[list[str]] = [[] for _ in range(counts.n)]
        stream = bool(values["stream"])
        if counts.n > 1 and not stream:
            counts = counts._replace(best_of=counts.best_of or counts.n)  # return all of them, the most probable first
        self.request = Request(
            **shared_request_members(rules, context),
            model="",
            prompts=[inputs.join_prompt_parts(parts)],
            sampling=parameters.mindie_sampling(values, rules),
            grammar=None if rules.strict else constraints.read_mindie_format(body),
            stop_conditions=StopConditions(
                strings=values["stop"],
                ids=values["stop_token_ids"],
                include_in_output=bool(values["include_stop_str_in_output"]),
                ignore_eos=bool(values["ignore_eos"]),
                max_tokens=values["max_tokens"] or (OLD_DEFAULT_TOKENS if rules.old else None),
                reserved_tokens=1,
            ),
            output_options=OutputOptions(
                skip_special=values["skip_special_tokens"] is not False,
            ),
            **counts._asdict(),
            stream=stream,
            adapter=None if values["model"] in base_names else values["model"],
        )

    def render_chunk(self, events: Sequence[Event]) -> bytes:
        """Return a record with the text of these events, if there is any."""
        new_texts = [""] * len(self._text_parts)
        for event in events:
            if isinstance(event, ChoiceDelta):
                new_texts[event.index] += event.text
        has_output = any(isinstance(event, ChoiceDelta | ChoiceDone) for event in events)
        if not self._rules.full_text:
            return encode_json({"text": new_texts}) + b"\0" if has_output else b""
        self.add_events(events)
        return encode_json({"text": self._whole_texts()}) + b"\0" if has_output else b""

    def add_events(self, events: Sequence[Event]) -> None:
        """Collect the text of these events by choice."""
        for event in events:
            if isinstance(event, ChoiceDelta):
                self._text_parts[event.index].append(event.text)

    def render_body(self, usage: Usage) -> bytes:
        """Return the prompt and the output of each choice as JSON."""
        return encode_json({"text": [self._text_start + text for text in self._whole_texts()]})

    def _whole_texts(self) -> list[str]:
        """Return the whole text of each choice; its parts are joined in place."""
        self._text_parts = [["".join(parts)] for parts in self._text_parts]
        return [parts[0] for parts in self._text_parts]
