"""The error of decoding. It never quotes a decoder's message, which may contain paths and memory addresses."""

from __future__ import annotations

from parley.errors import MediaFault


class UnusableMedia(Exception):
    """An item cannot be used. ``predicate``: the end of a sentence that begins with the item, without a full stop.

    ``reason`` and ``detail``: as in ``BadMedia``.
    """

    def __init__(self, predicate: str, reason: MediaFault, **detail: int | float | str):
        super().__init__(predicate)
        self.predicate = predicate
        self.reason = reason
        self.detail = detail


def damaged_media() -> UnusableMedia:
    """Return the error of a file that its decoder gave up on."""
    return UnusableMedia("is damaged and cannot be decoded", "undecodable")


def is_out_of_memory(error: Exception) -> bool:
    """Whether torch could not allocate memory."""
    return isinstance(error, RuntimeError) and "allocate memory" in str(error)
