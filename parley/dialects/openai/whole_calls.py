"""Calls of a stream in one piece each, for clients that take every piece for a whole call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from parley.types import ChoiceDelta, ChoiceDone, Event, ToolCallDelta


class WholeCallReader:
    """Holds the pieces of each call until it is complete."""

    def __init__(self) -> None:
        self._open_calls: dict[int, list[ChoiceDelta]] = {}  # the pieces, by choice

    def read_events(self, events: Sequence[Event]) -> Sequence[Event]:
        """Return the events, with one for each call that is complete."""
        return [read_event for event in events for read_event in self._read_event(event)]

    def _read_event(self, event: Event) -> Iterator[Event]:
        match event:
            case ChoiceDelta(tool_call=ToolCallDelta() as call):
                if call.name is not None:  # it begins another call
                    yield from self._finish_call(event.index)
                self._open_calls.setdefault(event.index, []).append(event)
            case ChoiceDelta(output_part="tool"):  # text between calls, which no client gets
                yield event
            case ChoiceDelta() | ChoiceDone():
                yield from self._finish_call(event.index)
                yield event
            case _:
                yield event

    def _finish_call(self, choice_index: int) -> Iterator[Event]:
        pieces = self._open_calls.pop(choice_index, None)
        if not pieces:
            return
        first = pieces[0].tool_call
        assert first is not None
        arguments = "".join(piece.tool_call.arguments for piece in pieces if piece.tool_call is not None)
        tokens = [token for piece in pieces for token in piece.tokens]
        whole_call = msgspec.structs.replace(first, arguments=arguments)
        yield msgspec.structs.replace(pieces[0], tool_call=whole_call, tokens=tokens)
