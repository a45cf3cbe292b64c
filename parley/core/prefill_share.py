"""Prefill share: the part of the compute time that prefill may take while requests decode.

An account in seconds. A step that has decodes charges prefill for the prompt tokens' part of its time, and every such
step pays the prefill share of its time back. Prefill may have rows as long as it owes nothing: then it gets as much as
the step budget allows, and afterwards steps only decode until the debt is paid. So no step gets longer, and over any
period prefill takes at most its share plus two steps' worth. If only prefill or only decodes have work, they get all
the time. Encoding of media is prefill, too: it gets time after a step only if prefill may have rows.

Knows no sequences, and reads no clock.
"""

from __future__ import annotations

MAX_CHARGED_SECONDS = 10.0  # seconds charged for a step at most: a longer pause is not caused by prefill


class PrefillShare:
    """Account of prefill time in steps with decodes. ``share``: from 0 to 1. With 0, prefill waits until no request
    decodes; with 1 it never waits.

    For each step: ``begin_step``, then ``charge_prefill`` for its chunks if prefill is allowed, then ``observe_step``,
    then ``charge_encoding``.
    """

    def __init__(self, share: float = 1.0):
        self.share = share
        self.allows_prefill = True
        self._debt_seconds = 0.0  # seconds; negative: credit
        self._prefill_tokens = 0
        self._has_decodes = False

    def set_share(self, share: float) -> None:
        """Change the share from now on; the debt is forgotten."""
        self.share, self._debt_seconds = share, 0.0

    def begin_step(self, decodes: int) -> None:
        """Start planning a step with ``decodes`` decodes."""
        self._prefill_tokens, self._has_decodes = 0, decodes > 0
        self.allows_prefill = not decodes or (self.share > 0 and self._debt_seconds <= 0)

    def charge_prefill(self, count: int) -> None:
        """Record ``count`` prompt tokens in the step."""
        self._prefill_tokens += count

    def observe_step(self, seconds: float, tokens: int) -> None:
        """Charge a step of ``seconds`` and ``tokens`` in all. An unused share is saved, at most one step's part."""
        if self._has_decodes:
            seconds = min(seconds, MAX_CHARGED_SECONDS)
            debt = self._debt_seconds + seconds * (self._prefill_tokens / tokens - self.share)
            self._debt_seconds = max(debt, min(self._debt_seconds, -seconds * self.share))

    def charge_encoding(self, seconds: float) -> None:
        """Charge the time after a step while media were encoded and decodes had to wait."""
        if self._has_decodes:
            self._debt_seconds += min(seconds, MAX_CHARGED_SECONDS) * (1 - self.share)
