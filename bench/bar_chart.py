"""Bar charts in SVG without a library: panels below each other, with bars from a common zero.

Colours have medium brightness and there is no background, so the chart is readable on light and dark pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

TEXT, OURS, OTHERS, LINE = "#7a838d", "#d2691e", "#5b8fc9", "#9aa3ad"
WIDTH, NAMES, VALUES = 820, 290, 90  # pixels: the whole chart, the names left of the bars, the numbers right of them
BAR, GAP, HEAD = 16, 6, 34


@dataclass(frozen=True)
class Bar:
    """One bar: ``value``, with the range of the runs. ``ours`` selects the highlight colour."""

    name: str
    value: float
    low: float
    high: float
    ours: bool


@dataclass(frozen=True)
class Panel:
    """A titled group of bars with a common scale."""

    title: str
    bars: Sequence[Bar]


def draw_chart(panels: Sequence[Panel]) -> str:
    """Return the SVG. Panels without bars are omitted."""
    parts: list[str] = []
    y = 0
    for panel in panels:
        if panel.bars:
            parts += _draw_panel(panel, y)
            y += HEAD + len(panel.bars) * (BAR + GAP) + GAP
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {max(y, 1)}" width="{WIDTH}"'
    return "\n".join([f'{head} font-family="sans-serif" font-size="13">', *parts, "</svg>", ""])


def _draw_panel(panel: Panel, y: int) -> list[str]:
    full = max(max(bar.high, bar.value) for bar in panel.bars) or 1.0
    scale = (WIDTH - NAMES - VALUES) / full
    parts = [f'<text x="0" y="{y + HEAD - 12}" fill="{TEXT}" font-weight="bold">{escape(panel.title)}</text>']
    for i, bar in enumerate(panel.bars):
        top = y + HEAD + i * (BAR + GAP)
        middle, end = top + BAR / 2, NAMES + scale * max(bar.high, bar.value)
        parts += [
            f'<text x="{NAMES - 8}" y="{middle + 4.5:g}" fill="{TEXT}" text-anchor="end">{escape(bar.name)}</text>',
            f'<rect x="{NAMES}" y="{top}" width="{scale * bar.value:.1f}" height="{BAR}" '
            f'fill="{OURS if bar.ours else OTHERS}"/>',
            f'<line x1="{NAMES + scale * bar.low:.1f}" x2="{NAMES + scale * bar.high:.1f}" y1="{middle:g}" '
            f'y2="{middle:g}" stroke="{LINE}" stroke-width="2"/>',
            f'<text x="{end + 6:.1f}" y="{middle + 4.5:g}" fill="{TEXT}">{format_number(bar.value)}</text>',
        ]
    return parts


def format_number(value: float) -> str:
    """Return a number with three significant digits and thousands separators."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
