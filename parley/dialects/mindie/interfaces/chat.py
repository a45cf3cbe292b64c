"""MindIE's ``POST /v1/chat/completions`` in both variants: with vLLM's members, or those of its own interface.

In a stream, a choice opens with an event with empty text (not for the old manual's servers), and ends with one that has
its last text, finish_reason and usage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parley.dialects.fields import Fields, decode_fields
from parley.dialects.json_answer import encode_json
from parley.dialects.mindie.api_rules import MindieRules
from parley.dialects.mindie.interfaces import openai
from parley.dialects.mindie.interfaces.answers import shared_request_members
from parley.dialects.mindie.interfaces.openai import MindieChoice, MindieOpenAIReply
from parley.dialects.mindie.members import choices, constraints, messages, parameters
from parley.dialects.mindie.refusal_wording import MINDIE_WORDING
from parley.dialects.openai import tools
from parley.dialects.openai.token_objects import finite_logprob
from parley.dialects.request_context import RequestContext
from parley.dialects.sse import DATA_START, data_event
from parley.types import ChoiceDelta, ChoiceDone, Event, OutputOptions, Request, TokenInfo, Usage

# The fast path, for nearly all events.
PLAIN_EVENT = (
    b'"choices":[{"index":%d,"delta":{"role":"assistant","content":%b},"logprobs":null,"finish_reason":null}]}\n\n'
)
FINISH_REASONS = {"length": "length", "tool": "tool_calls"}  # all other reasons are "stop"


def read_mindie_chat(rules: MindieRules, body: bytes, context: RequestContext) -> MindieChatReply:
    """Read a chat request. Raises BadRequest."""
    return MindieChatReply(rules, decode_fields(body, MINDIE_WORDING), context)


class MindieChatReply(MindieOpenAIReply):
    """A reply to one conversation, as a stream of events or in one piece."""

    def __init__(self, rules: MindieRules, body: Fields, context: RequestContext):
        self.model_name = openai.read_mindie_model_name(body, rules)
        chat, budget = messages.read_mindie_conversation(body, rules, context)
        interface = (parameters.CHAT_TABLE if rules.vllm else parameters.NATIVE_CHAT_TABLE).under_rules(rules)
        values = parameters.read_mindie_parameters(body, interface)
        counts = choices.count_choices(body, values, interface, rules)
        grammar = constraints.read_mindie_format(body) if rules.vllm or not rules.strict else None
        super().__init__(rules, context, messages.CONTENT_INPUT, counts.n)
        self.unknown_model_text = "Model not found" if rules.vllm else "Got model {}, but not found in server"
        top, stream = values["top_logprobs"], bool(values["stream"])
        with_logprobs = top is not None or bool(values["logprobs"])
        self._with_logprobs = with_logprobs
        self._has_tools = bool(chat.tools)
        self._opened_choices: set[int] = set()
        self._only_plain_events = not (with_logprobs or rules.old or rules.full_text)  # events have no optional members
        self._event_start = b""
        self.request = Request(
            **shared_request_members(rules, context),
            model=self.model_name,
            prompts=[chat],
            sampling=parameters.mindie_sampling(values, rules),
            stop_conditions=openai.mindie_stop_conditions(values),
            output_options=OutputOptions(
                logprobs=(top or 0) if with_logprobs else None,
                skip_special=values["skip_special_tokens"] is not False,
                token_costs=rules.token_costs,
            ),
            **counts._asdict(),
            grammar=grammar,
            stream=stream,
            thinking_budget=budget,
        )

    # -- streaming

    def render_chunk(self, events: Sequence[Event]) -> bytes:
        """Return an event for each piece of output."""
        parts: list[bytes] = []
        held_deltas: dict[int, ChoiceDelta] = {}  # the last output of each choice, which may be sent with its end
        for event in events:
            if isinstance(event, ChoiceDelta):
                if (previous := held_deltas.pop(event.index, None)) is not None:
                    parts.append(self._delta_event(previous))
                held_deltas[event.index] = event
            elif isinstance(event, ChoiceDone):
                parts.append(self._delta_event(held_deltas.pop(event.index, ChoiceDelta(event.index, "")), event))
        parts += [self._delta_event(delta) for delta in held_deltas.values()]
        return b"".join(parts)

    def _delta_event(self, event: ChoiceDelta, done: ChoiceDone | None = None) -> bytes:
        choice = self._choices[event.index]
        opening = self._open_choice_event(event.index)
        choice.take_tokens(event.tokens)
        if self._only_plain_events and done is None and event.output_part == "content":
            choice.tokens = []
            return opening + self._event_start + PLAIN_EVENT % (event.index, encode_json(event.text))
        choice_object: dict[str, Any] = {
            "index": event.index,
            "delta": {"role": "assistant", **self._delta_object(choice, event)},
        }
        if self._with_logprobs or not self._rules.old:
            choice_object["logprobs"] = self._chat_logprobs(event.tokens)
        choice.tokens = []
        choice_object["finish_reason"] = None if done is None else FINISH_REASONS.get(done.reason, "stop")
        chunk = self._mindie_envelope("chat.completion.chunk")
        if done is not None:
            if self._rules.full_text:
                chunk["full_text"] = "".join(choice.content)
            chunk["usage"] = self._usage_object(done.usage, choice.costs)
        return opening + data_event(chunk | {"choices": [choice_object]})

    def _open_choice_event(self, index: int) -> bytes:
        if self._rules.old or index in self._opened_choices:
            return b""
        self._opened_choices.add(index)
        # the model's name is final only after the server has looked it up
        self._event_start = (
            DATA_START + encode_json(self._mindie_envelope("chat.completion.chunk")).removesuffix(b"}") + b","
        )
        delta = {"role": "assistant", "content": ""}
        choice_object = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return data_event(self._mindie_envelope("chat.completion.chunk") | {"choices": [choice_object]})

    def _delta_object(self, choice: MindieChoice, event: ChoiceDelta) -> dict[str, Any]:
        full = self._rules.full_text  # only then is earlier output kept
        if event.tool_call is not None:
            function = {} if event.tool_call.name is None else {"name": event.tool_call.name}
            call: dict[str, Any] = {"index": event.tool_call.index}
            if event.tool_call.id is not None:
                call |= {"id": event.tool_call.id, "type": "function"}
            return {"tool_calls": [call | {"function": function | {"arguments": event.tool_call.arguments}}]}
        if event.output_part == "reasoning":
            return {"reasoning_content": _append_and_join(choice.reasoning, event.text) if full else event.text}
        text = event.text if event.output_part == "content" else ""
        return {"content": _append_and_join(choice.content, text) if full else text}

    # -- in one piece

    def add_events(self, events: Sequence[Event]) -> None:
        """Collect the output of these events by choice."""
        for event in events:
            match event:
                case ChoiceDelta(index, text, part):
                    choice = self._choices[index]
                    choice.take_tokens(event.tokens)
                    if event.tool_call is not None:
                        tools.extend_calls(choice.calls, event.tool_call)
                    elif part != "tool":
                        (choice.content if part == "content" else choice.reasoning).append(text)
                case ChoiceDone():
                    self._choices[event.index].done_event = event

    def render_body(self, usage: Usage) -> bytes:
        """Return the whole answer as JSON."""
        costs = self._longest_costs
        answer = self._mindie_envelope("chat.completion")
        answer["choices"] = [self._chat_choice_object(index, choice) for index, choice in enumerate(self._choices)]
        answer["usage"] = self._usage_object(usage, costs)
        return encode_json(answer | (openai.token_times(costs) if self._rules.token_costs else {}))

    def _chat_choice_object(self, index: int, choice: MindieChoice) -> dict[str, Any]:
        assert choice.done_event is not None
        message: dict[str, Any] = {"role": "assistant", "content": "".join(choice.content)}
        if choice.reasoning:
            message["reasoning_content"] = "".join(choice.reasoning)
        if self._has_tools or not self._rules.old:
            message["tool_calls"] = choice.calls
        choice_object: dict[str, Any] = {"index": index, "message": message}
        if self._with_logprobs or not self._rules.old:
            choice_object["logprobs"] = self._chat_logprobs(choice.tokens)
        return choice_object | {"finish_reason": FINISH_REASONS.get(choice.done_event.reason, "stop")}

    def _chat_logprobs(self, tokens: Sequence[TokenInfo]) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        return {
            "content": [
                _logprob_entry(token) | {"top_logprobs": list(map(_logprob_entry, token.top_tokens))}
                for token in tokens
            ]
        }


def _logprob_entry(token: TokenInfo) -> dict[str, Any]:
    return {"token": token.text, "logprob": finite_logprob(token.logprob), "bytes": list(token.raw_bytes)}


def _append_and_join(texts: list[str], text: str) -> str:
    """Append a text to the earlier ones, join them in place, and return the result."""
    texts[:] = ["".join((*texts, text))]
    return texts[0]
