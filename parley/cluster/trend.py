"""How long something takes as a function of its size, learnt from what it took. Knows nothing of what is measured."""

from __future__ import annotations

KEEP = 0.97  # of the weight of what was seen, for each further observation
SPREAD = 0.05  # sizes must differ by so much of their mean before a slope is read from them


class Trend:
    """y = a + b·x with a, b ≥ 0, by least squares over observations of which older ones weigh less.

    Where all sizes were alike, y is taken to be proportional to x, or the same for all if it is ``flat``.
    """

    __slots__ = ("_fitted", "_flat", "_n", "_x", "_xx", "_xy", "_y", "seen")

    def __init__(self, *, flat: bool = False) -> None:
        self._flat = flat
        self.seen = 0
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self._fitted: tuple[float, float] | None = (0.0, 0.0)  # since the last observation

    def observe(self, x: float, y: float) -> None:
        self.seen += 1
        self._n = self._n * KEEP + 1
        self._x = self._x * KEEP + x
        self._y = self._y * KEEP + y
        self._xx = self._xx * KEEP + x * x
        self._xy = self._xy * KEEP + x * y
        self._fitted = None

    def predict(self, x: float) -> float | None:
        """None before anything was seen."""
        if not self.seen:
            return None
        a, b = self.fit()
        return a + b * x

    def fit(self) -> tuple[float, float]:
        """a and b; of no observation 0."""
        if self._fitted is None:
            self._fitted = self._fit()
        return self._fitted

    def _fit(self) -> tuple[float, float]:
        x, y = self._x / self._n, self._y / self._n
        variance = self._xx / self._n - x * x
        if variance > (SPREAD * x) ** 2 and variance > 0:
            slope = max(0.0, (self._xy / self._n - x * y) / variance)
            if slope * x <= y:
                return y - slope * x, slope
        return (0.0, y / x) if x > 0 and not self._flat else (y, 0.0)


def ewma(before: float, value: float, weight: float = 0.1) -> float:
    """The mean with ``value`` in it; the first one is taken as it is."""
    return value if before == 0 else before + weight * (value - before)
