"""The prompt and the answer of a response as the model reads and writes them, which vLLM's clients may ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parley.types import ChoiceDelta, ChoiceDone, Event, PromptAccepted, TokenInfo


class RawMessages:
    """The text and the tokens of one prompt and its answer. The answer's text has neither marks nor the stop string."""

    def __init__(self, *, keeps_stop_string: bool):
        self._keeps_stop_string = keeps_stop_string
        self._prompt: PromptAccepted | None = None
        self._tokens: list[TokenInfo] = []
        self._stop: str | int | None = None

    def add_events(self, events: Sequence[Event]) -> None:
        """Keep the prompt, the tokens and the stop string of these events."""
        for event in events:
            match event:
                case PromptAccepted():
                    self._prompt = event
                case ChoiceDelta():
                    self._tokens += event.tokens
                case ChoiceDone():
                    self._stop = event.stop

    def members(self) -> dict[str, Any]:
        """Return both lists, null where nothing was read or written."""
        prompt = None if self._prompt is None else [_raw_message(self._prompt.text or "", self._prompt.token_ids)]
        answer = [_raw_message(self._text(), [token.id for token in self._tokens])] if self._tokens else None
        return {"input_messages": prompt, "output_messages": answer}

    def _text(self) -> str:
        text = b"".join(token.raw_bytes for token in self._tokens if not token.is_special).decode(errors="replace")
        if isinstance(self._stop, str) and not self._keeps_stop_string:
            # Marks are not part of the text, so a stop string that goes over one is not found.
            return text[: text.rfind(self._stop)] if self._stop in text else text
        return text


def _raw_message(text: str, token_ids: list[int]) -> dict[str, Any]:
    return {"message": text, "tokens": token_ids, "type": "raw_message_tokens"}
