"""Bars in SVG: panels one below the other, each with bars from the same zero, without a library.

Colours are of middle brightness on no background, so that the picture is readable on a light and on a dark page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

TEXT, OURS, OTHERS, LINE = "#7a838d", "#d2691e", "#5b8fc9", "#9aa3ad"
WIDTH, NAMES, VALUES = 820, 290, 90  # pixels: the whole picture, the names left of the bars, the numbers right of them
BAR, GAP, HEAD = 16, 6, 34


@dataclass(frozen=True)
class Bar:
    """``value`` with the range of the runs. ``ours`` takes the other colour."""

    name: str
    value: float
    low: float
    high: float
    ours: bool


@dataclass(frozen=True)
class Panel:
    title: str
    bars: Sequence[Bar]


def draw(panels: Sequence[Panel]) -> str:
    """The picture; panels without bars are left out."""
    parts: list[str] = []
    y = 0
    for panel in panels:
        if panel.bars:
            parts += _panel(panel, y)
            y += HEAD + len(panel.bars) * (BAR + GAP) + GAP
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {max(y, 1)}" width="{WIDTH}"'
    return "\n".join([f'{head} font-family="sans-serif" font-size="13">', *parts, "</svg>", ""])


def _panel(panel: Panel, y: int) -> list[str]:
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
            f'<text x="{end + 6:.1f}" y="{middle + 4.5:g}" fill="{TEXT}">{number(bar.value)}</text>',
        ]
    return parts


def number(value: float) -> str:
    """Three figures that mean something, thousands separated."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
