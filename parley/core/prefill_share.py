"""Prefill share: the part of the compute time that prefill may take while requests decode.

The share is kept by a debt in seconds. Each step that has decodes adds the part of its time that its prompt tokens
took, and subtracts the prefill share of its time. While the debt is positive, steps compute no prefill; otherwise
prefill gets as many tokens as the step budget allows. So no step gets longer, and over any period prefill takes at most
its share plus the time of two steps. If there are only prefills or only decodes, they get all the time. Encoding of
media counts as prefill: it gets time after a step only if prefill is allowed.

This module knows no sequences and reads no clock.
"""

from __future__ import annotations

MAX_CHARGED_SECONDS = 10.0  # most seconds that a step is charged for: a longer pause has another cause than prefill


class PrefillShare:
    """Decides whether a step may have prefill. ``share``: the part of the time of steps with decodes that prefill may
    take, from 0 (prefill waits until no request decodes) to 1 (it never waits).

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
        """Charge a computed step that took ``seconds`` and had ``tokens`` tokens, decodes included. An unused share
        becomes credit, at most that of one step."""
        if self._has_decodes:
            seconds = min(seconds, MAX_CHARGED_SECONDS)
            debt = self._debt_seconds + seconds * (self._prefill_tokens / tokens - self.share)
            self._debt_seconds = max(debt, min(self._debt_seconds, -seconds * self.share))

    def charge_encoding(self, seconds: float) -> None:
        """Charge the ``seconds`` after a step in which media were encoded while decodes had to wait."""
        if self._has_decodes:
            self._debt_seconds += min(seconds, MAX_CHARGED_SECONDS) * (1 - self.share)
