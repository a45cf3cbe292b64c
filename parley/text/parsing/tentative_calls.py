"""Tentative calls: calls inside open reasoning. They are real if the answer ends with them, else part of the reasoning.

Models that reason may call a tool without closing their reasoning first, and others write in their reasoning how they
could call. Only the text that follows decides, so everything is held until then. Knows call forms and texts, but not
the answer around them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from parley.text.parsing.calls import CallForm, CallReader, RequestTools
from parley.types import ToolCallDelta

BLANK_CHARACTERS = " \t\r\n"


class TentativeCalls:
    """Blocks of calls with nothing between them. ``refuted``: one is not a call, or other text follows.

    The text starts with the trigger of one of the ``forms``; of those with the same trigger the first is used.
    ``index``: the number of the first call.
    """

    def __init__(self, forms: Sequence[CallForm], index: int, new_id: Callable[[], str], tools: RequestTools):
        self.refuted = False
        self._forms = {form.trigger_mark: form for form in reversed(forms)}
        self._index = index
        self._new_id = new_id
        self._tools = tools
        self._call_count = 0
        self._reader: CallReader | None = None
        self._deltas: list[ToolCallDelta] = []
        self._held_pieces: list[str] = []
        self._text = ""
        self._at = 0

    @property
    def held_text(self) -> str:
        """Return all text read so far, as it was written."""
        return "".join(self._held_pieces)

    def read_blocks(self, text: str, start: int) -> int:
        """Read from ``start``. Return the position reached; pass the rest again next time, unless refuted."""
        self._text, self._at = text, start
        while (
            self._at < len(text)
            and not self.refuted
            and (self._read_call_block() if self._reader else self._find_next_block())
        ):
            pass
        self._held_pieces.append(text[start : self._at])
        return self._at

    def finish_calls(self, unread_text: str) -> list[ToolCallDelta]:
        """Return the calls if the text ends with them; none if ``unread_text`` is not part of them."""
        if self._reader is not None:
            deltas, unread_text = self._reader.finish_text(unread_text)
            self._add_deltas(deltas)
        return [] if self.refuted or unread_text.strip() else self._deltas

    def _read_call_block(self) -> bool:
        """Read a block of calls. Return whether it ended."""
        reader = self._reader
        assert reader is not None
        self._at, deltas = reader.read_calls(self._text, self._at)
        self._add_deltas(deltas)
        if reader.ended:
            self.refuted = self.refuted or not reader.call_count or bool(reader.raw_text.strip())
            self._reader = None
        return reader.ended

    def _find_next_block(self) -> bool:
        """Skip blanks. Return whether another block starts after them; if none can, the calls are refuted."""
        unread_text = self._text[self._at :].lstrip(BLANK_CHARACTERS)
        self._at = len(self._text) - len(unread_text)
        trigger = next((trigger for trigger in self._forms if unread_text.startswith(trigger)), "")
        if trigger:
            self._reader = CallReader(self._forms[trigger], self._index + self._call_count, self._new_id, self._tools)
        elif not any(trigger.startswith(unread_text) for trigger in self._forms):
            self.refuted = True
        return bool(trigger)

    def _add_deltas(self, deltas: list[ToolCallDelta]) -> None:
        names = [delta.name for delta in deltas if delta.name is not None]
        self._call_count += len(names)
        self.refuted = self.refuted or any(name not in self._tools for name in names)
        self._deltas += deltas
