"""Draws loads of ``parley bench`` without a library: how latencies are distributed, and tokens per second over time.

Colours have medium brightness and there is no background, so that a chart is readable on light and on dark pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import floor, log10
from xml.sax.saxutils import escape

from parley.cli.load.generator import RequestSample
from parley.cli.load.summary import collect_times, token_rates

TEXT, GRID = "#71777e", "#9aa3ad"
COLOURS = ("#3b82c4", "#d2691e", "#2e9e6b", "#a86bc9", "#b08d1e", "#d1495b", "#4d9a9c", "#8f7a66")
WIDTH, PANEL_WIDTH, PANEL_HEIGHT = 860, 360, 150  # pixels
LEFT, TOP, ROW = 60, 34, 230  # pixels: left of a panel for its scale, above it for its title, from one row to the next
LEGEND_LINE = 20
CURVE_POINTS = 200
TIMES = {"ttft_ms": "Time to first token", "tpot_ms": "Time per output token", "itl_ms": "Between events"}
TIMES["latency_ms"] = "Whole request"

Point = tuple[float, float]
Scale = Callable[[float], float]


@dataclass(frozen=True)
class MeasuredLoad:
    """One load of a chart: its name, the samples of its requests, and the seconds that all took."""

    name: str
    samples: Sequence[RequestSample]
    wall: float

    @property
    def successes(self) -> list[RequestSample]:
        """The samples of the requests that did not fail."""
        return [sample for sample in self.samples if not sample.error]


def draw_loads(loads: Sequence[MeasuredLoad]) -> str:
    """Return an SVG: for each latency the share of requests (or events) that are at most as slow, then the rates."""
    top = LEGEND_LINE * len(loads) + 12
    height = top + 3 * ROW
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img" '
        f'aria-label="Latencies and tokens per second" font-family="sans-serif" font-size="12" fill="{TEXT}">'
    ]
    for number, load in enumerate(loads):
        y = LEGEND_LINE * number + 14
        parts.append(f'<line x1="{LEFT}" x2="{LEFT + 28}" y1="{y - 4}" y2="{y - 4}" {_stroke_style(number)}/>')
        parts.append(f'<text x="{LEFT + 36}" y="{y}">{escape(load.name)}</text>')
    times = [collect_times(load.successes) for load in loads]
    for number, (name, title) in enumerate(TIMES.items()):
        curves = [_distribution_points([value * 1000 for value in load_times[name]]) for load_times in times]
        origin = (LEFT + number % 2 * (PANEL_WIDTH + LEFT), top + number // 2 * ROW + TOP)
        parts += _draw_latencies(f"{title}, ms", curves, origin)
    parts += _draw_rates([_rates_over_time(load) for load in loads], (LEFT, top + 2 * ROW + TOP))
    return "\n".join([*parts, "</svg>", ""])


def draw_page(loads: Sequence[MeasuredLoad], table: str) -> str:
    """Return a page with the chart and a table of text, which needs no other file."""
    return (
        '<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>parley bench</title>\n'
        "<style>:root{color-scheme:light dark}body{font-family:sans-serif;margin:2em}"
        "svg{max-width:100%;height:auto}pre{overflow-x:auto}</style>\n"
        f"<h1>parley bench</h1>\n{draw_loads(loads)}<pre>{escape(table)}</pre>\n</html>\n"
    )


def _distribution_points(values: Sequence[float]) -> list[Point]:
    """Return the points of a cumulative distribution: a value, and the share of all that do not exceed it."""
    if not values:
        return []
    ordered, last = sorted(values), len(values) - 1
    places = sorted({round(last * point / CURVE_POINTS) for point in range(CURVE_POINTS + 1)})
    return [(ordered[place], (place + 1) / len(ordered)) for place in places]


def _rates_over_time(load: MeasuredLoad) -> list[Point]:
    """Return the tokens per second at the middle of each slice of time; a slice has about 20 events or more."""
    events = sum(len(sample.arrivals) for sample in load.successes)
    if not events or load.wall <= 0:
        return []
    count = max(5, min(60, events // 20))
    begin = min(sample.start for sample in load.samples)
    rates = token_rates(load.successes, begin, load.wall, count)
    return [((number + 0.5) * load.wall / count, rate) for number, rate in enumerate(rates)]


def _draw_latencies(title: str, curves: Sequence[Sequence[Point]], origin: Point) -> list[str]:
    """Draw distributions over a logarithmic scale of at most four decades."""
    values = [x for curve in curves for x, _ in curve if x > 0]
    high = max(values, default=1.0)
    low = max(min(values, default=0.1), high / 1e4)
    marks = [step * 10.0**power for power in range(floor(log10(low)), floor(log10(high)) + 2) for step in (1, 2, 5)]
    low = max(mark for mark in marks if mark <= low * (1 + 1e-9))
    high = min(mark for mark in marks if mark >= high and mark > low)
    marks = [mark for mark in marks if low <= mark <= high]
    if len(marks) > 7:
        marks = [mark for mark in marks if f"{mark:e}"[0] == "1"]

    def across(x: float) -> float:
        return origin[0] + PANEL_WIDTH * log10(max(x, low) / low) / log10(high / low)

    def up(share: float) -> float:
        return origin[1] + PANEL_HEIGHT * (1 - share)

    shares = [(share, f"{share:.0%}") for share in (0, 0.25, 0.5, 0.75, 1)]
    frame = _draw_frame(
        title, PANEL_WIDTH, origin, [(across(x), f"{x:g}") for x in marks], [(up(y), t) for y, t in shares]
    )
    return frame + _draw_curves(curves, across, up)


def _draw_rates(curves: Sequence[Sequence[Point]], origin: Point) -> list[str]:
    width = 2 * PANEL_WIDTH + LEFT
    longest = max((x for curve in curves for x, _ in curve), default=0) or 1.0
    highest = max((y for curve in curves for _, y in curve), default=0) or 1.0

    def across(x: float) -> float:
        return origin[0] + width * x / longest

    def up(y: float) -> float:
        return origin[1] + PANEL_HEIGHT * (1 - y / highest)

    columns = [(across(x), f"{x:g}") for x in _round_marks(longest)]
    rows = [(up(y), f"{y:,.10g}") for y in _round_marks(highest)]
    frame = _draw_frame("Output tokens per second, over the seconds of the load", width, origin, columns, rows)
    return frame + _draw_curves(curves, across, up)


def _round_marks(high: float) -> list[float]:
    """Return round numbers from 0 to ``high``, about five."""
    power = 10.0 ** floor(log10(high))
    step = next(step * power for step in (0.1, 0.2, 0.5, 1.0, 2.0) if high <= step * power * 6)
    return [float(f"{step * number:.12g}") for number in range(int(high / step + 1e-9) + 1)]


def _draw_frame(
    title: str, width: float, origin: Point, columns: Sequence[tuple[float, str]], rows: Sequence[tuple[float, str]]
) -> list[str]:
    x, y = origin
    bottom = y + PANEL_HEIGHT
    parts = [f'<text x="{x:g}" y="{y - 12:g}" font-weight="bold">{escape(title)}</text>']
    line = f'stroke="{GRID}" stroke-opacity="0.4"'
    for place, label in columns:
        parts.append(f'<line x1="{place:.1f}" x2="{place:.1f}" y1="{y:g}" y2="{bottom:g}" {line}/>')
        parts.append(f'<text x="{place:.1f}" y="{bottom + 16:g}" text-anchor="middle">{label}</text>')
    for place, label in rows:
        parts.append(f'<line x1="{x:g}" x2="{x + width:g}" y1="{place:.1f}" y2="{place:.1f}" {line}/>')
        parts.append(f'<text x="{x - 6:g}" y="{place + 4:.1f}" text-anchor="end">{label}</text>')
    return parts


def _draw_curves(curves: Sequence[Sequence[Point]], across: Scale, up: Scale) -> list[str]:
    return [
        f'<polyline points="{" ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in curve)}" {_stroke_style(number)}/>'
        for number, curve in enumerate(curves)
        if curve
    ]


def _stroke_style(number: int) -> str:
    """Return the look of a load's lines. After the last colour they begin again, with dashes."""
    dashes = f' stroke-dasharray="{2 + 2 * (number // len(COLOURS))} 3"' if number >= len(COLOURS) else ""
    return f'fill="none" stroke="{COLOURS[number % len(COLOURS)]}" stroke-width="1.8"{dashes}'
