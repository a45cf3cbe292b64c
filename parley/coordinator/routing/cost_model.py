"""The cost model: durations as a linear function of size, fitted to observations. Independent of their meaning."""

from __future__ import annotations

OBSERVATION_DECAY = 0.97  # factor on the weight of earlier observations, per new observation
MIN_SPREAD = 0.05  # relative spread of sizes below which no slope is fitted


class CostModel:
    """y = a + b·x with a, b ≥ 0, by least squares over observations with exponentially decaying weights.

    If all sizes are alike, y is taken as proportional to x, or as constant if ``flat``.
    """

    __slots__ = ("_fitted", "_flat", "_n", "_x", "_xx", "_xy", "_y", "seen")

    def __init__(self, *, flat: bool = False) -> None:
        self._flat = flat
        self.seen = 0
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self._fitted: tuple[float, float] | None = (0.0, 0.0)  # None after a new observation

    def add_observation(self, x: float, y: float) -> None:
        """Add an observation."""
        self.seen += 1
        self._n = self._n * OBSERVATION_DECAY + 1
        self._x = self._x * OBSERVATION_DECAY + x
        self._y = self._y * OBSERVATION_DECAY + y
        self._xx = self._xx * OBSERVATION_DECAY + x * x
        self._xy = self._xy * OBSERVATION_DECAY + x * y
        self._fitted = None

    def predict_cost(self, x: float) -> float | None:
        """Return the fitted y; None before any observation."""
        if not self.seen:
            return None
        a, b = self.fitted_line()
        return a + b * x

    def fitted_line(self) -> tuple[float, float]:
        """Return a and b; both 0 before any observation."""
        if self._fitted is None:
            self._fitted = self._fit_line()
        return self._fitted

    def _fit_line(self) -> tuple[float, float]:
        x, y = self._x / self._n, self._y / self._n
        variance = self._xx / self._n - x * x
        if variance > (MIN_SPREAD * x) ** 2 and variance > 0:
            slope = max(0.0, (self._xy / self._n - x * y) / variance)
            if slope * x <= y:
                return y - slope * x, slope
        return (0.0, y / x) if x > 0 and not self._flat else (y, 0.0)


def moving_average(before: float, value: float, weight: float = 0.1) -> float:
    """Return the moving average ``before`` updated with ``value``. An average of 0 is replaced by the value."""
    return value if before == 0 else before + weight * (value - before)
