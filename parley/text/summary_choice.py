"""A summary of a conversation that its answer follows: nothing of it is shown before it is complete."""

from __future__ import annotations

from parley.text.answer_choice import AnswerChoice
from parley.text.prepared_prompt import PreparedPrompt
from parley.text.tokens.tokenizer import Tokenizer
from parley.types import ChoiceDelta, ChoiceDone, EngineOutput, Event, FinishReason, Request


class SummaryChoice(AnswerChoice):
    """The only choice of a prompt that asks for a summary. Its one event is its end, with the text of the summary."""

    def __init__(self, request: Request, tokenizer: Tokenizer, prepared: PreparedPrompt):
        super().__init__(request, 0, tokenizer, prepared)
        self._texts: list[str] = []

    def push_output(self, output: EngineOutput) -> list[Event]:
        """Return the end of the summary, if the output ends it."""
        return self._hold_text(super().push_output(output))

    def finish_early(self, reason: FinishReason) -> list[Event]:
        """Finish the summary early for ``reason``, so that it replaces nothing."""
        return self._hold_text(super().finish_early(reason))

    def _hold_text(self, events: list[Event]) -> list[Event]:
        for event in events:
            if isinstance(event, ChoiceDelta) and event.output_part == "content":
                self._texts.append(event.text)
            elif isinstance(event, ChoiceDone):
                event.summary = "".join(self._texts).strip() if event.reason == "stop" else ""
                return [event]
        return []
