"""Kinds of option values: how text, or a value of a TOML file, becomes a number, a size, a duration or a choice.

``read`` raises ValueError with a clause that completes the sentence "<value> is not …", including the range; ``show``
returns text that reads back as the same value. Knows neither options nor sources.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Literal, NamedTuple

from parley.settings.families import family_names, find_family


@dataclass(frozen=True)
class Kind:
    """How a value is parsed and printed. ``metavar`` stands for the value in the help."""

    metavar: str
    read: Callable[[Any], Any]
    show: Callable[[Any], str] = str


def text(metavar: str = "TEXT") -> Kind:
    """Any text that is not empty."""

    def read(raw: Any) -> str:
        if not isinstance(raw, str) or not raw or "\0" in raw:  # no operating system accepts NUL in a name
            raise ValueError("text")
        return raw

    return Kind(metavar, read)


def choice(*names: str) -> Kind:
    """One of several words."""

    def read(raw: Any) -> str:
        if raw not in names:
            raise ValueError(f"one of {', '.join(names)}")
        return str(raw)

    return Kind("|".join(names), read)


def family(table: Literal["calls", "thoughts"]) -> Kind:
    """A model family by any of its names in a table, or auto, or none."""

    def read(raw: Any) -> str:
        found = find_family(raw, table) if isinstance(raw, str) else None
        if found is None:
            raise ValueError(f"one of {', '.join(family_names(table))}")
        return found

    return Kind("FAMILY", read)


def pattern(expression: str, metavar: str, wanted: str) -> Kind:
    """Text that a regular expression matches completely. ``wanted`` describes it in errors."""
    form = re.compile(expression)

    def read(raw: Any) -> str:
        if not isinstance(raw, str) or not form.fullmatch(raw):
            raise ValueError(wanted)
        return raw

    return Kind(metavar, read)


def integer(low: int, high: int | None = None, metavar: str = "N") -> Kind:
    """A whole number from ``low`` to ``high``; a ``high`` of None means no upper limit."""
    wanted = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"

    def read(raw: Any) -> int:
        try:
            value = int(raw) if isinstance(raw, str) else raw
        except ValueError:
            raise ValueError(wanted) from None
        if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
            raise ValueError(wanted)
        return value

    return Kind(metavar, read)


def number(low: float, high: float, metavar: str = "N") -> Kind:
    """A number from ``low`` to ``high``."""
    wanted = f"a number from {low:g} to {high:g}"

    def read(raw: Any) -> float:
        try:
            value = float(raw) if isinstance(raw, str | int | float) and not isinstance(raw, bool) else None
        except (ValueError, OverflowError):
            value = None
        if value is None or not low <= value <= high:  # also refuses nan
            raise ValueError(wanted)
        return value

    return Kind(metavar, read, lambda value: f"{value:g}")


def endpoint() -> Kind:
    """A named address: NAME=HOST:PORT as a triple, IPv6 addresses in brackets."""
    form = re.compile(r"([a-z0-9._-]+)=(\[[0-9A-Fa-f:.%]+\]|[^\s:/\[\]]+):(\d{1,5})")

    def read(raw: Any) -> tuple[str, str, int]:
        match = form.fullmatch(raw) if isinstance(raw, str) else None
        if match is None or int(match[3]) > 65_535:
            raise ValueError("of the form NAME=HOST:PORT, such as tgi=127.0.0.1:3000")
        return match[1], match[2].strip("[]"), int(match[3])

    def show(value: tuple[str, str, int]) -> str:
        name, host, port = value
        return f"{name}=[{host}]:{port}" if ":" in host else f"{name}={host}:{port}"

    return Kind("NAME=HOST:PORT", read, show)


def adapter() -> Kind:
    """A named folder: NAME=FOLDER as a pair."""
    form = re.compile(r"([\w.:/@-]{1,256})=(.+)", re.ASCII | re.DOTALL)

    def read(raw: Any) -> tuple[str, str]:
        match = form.fullmatch(raw) if isinstance(raw, str) else None
        if match is None:
            raise ValueError("of the form NAME=FOLDER, such as support=./adapters/support")
        return match[1], match[2]

    return Kind("NAME=FOLDER", read, "=".join)


class Named(NamedTuple):
    """A model with its names and its own options, as written."""

    names: tuple[str, ...]
    model: str
    options: Mapping[str, str]


def named(metavar: str, options: Collection[str]) -> Kind:
    """A model: MODEL or NAME[,NAME...]=MODEL, either followed by ,OPTION=VALUE for any of the given options."""
    form = re.compile(rf"(?:(?![./~])([^=]*)=)?+(.+?)((?:,(?:{'|'.join(options)})=[^,]*)*)", re.DOTALL)
    stray = re.compile(r",([a-z][a-z-]*)=")

    def read(raw: Any) -> Named:
        match = form.fullmatch(raw) if isinstance(raw, str) else None
        if match is None:
            raise ValueError("a model, or of the form NAME=MODEL")
        names = tuple(name.strip() for name in match[1].split(",")) if match[1] is not None else ()
        if wrong := stray.search(match[2]):
            raise ValueError(f"a model: {wrong[1]} is not an option of a single model")
        if not all(names) or len(set(names)) < len(names):
            raise ValueError("of the form NAME[,NAME...]=MODEL with different names")
        own: dict[str, str] = {}
        for pair in match[3].split(",")[1:]:
            name, _, value = pair.partition("=")
            own[name] = f"{own[name]},{value}" if name in own else value  # repeated options add up
        return Named(names, match[2], own)

    def show(value: Named) -> str:
        names = f"{','.join(value.names)}=" if value.names else ""
        own = [(name, each) for name, texts in value.options.items() for each in texts.split(",")]
        return names + value.model + "".join(f",{name}={text}" for name, text in own)

    return Kind(metavar, read, show)


SIZES = {"": 1, "B": 1} | {
    name: base**power
    for power, letter in enumerate("KMGT", 1)
    for name, base in ((f"{letter}B", 1000), (f"{letter}IB", 1024))
}
DURATIONS = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
QUANTITY = re.compile(r"\s*(\d{1,18}(?:\.\d{1,9})?)\s*([A-Za-z]*)\s*")


def show_size(count: int) -> str:
    """Return a number of bytes as a size that reads back as the same number."""
    for name in ("TiB", "GiB", "MiB", "KiB", "TB", "GB", "MB", "KB"):
        if count and count % SIZES[name.upper()] == 0:
            return f"{count // SIZES[name.upper()]}{name}"
    return str(count)


def size(low: int = 0) -> Kind:
    """Bytes: a number, or one with KB MB GB TB (powers of 1000) or KiB MiB GiB TiB (powers of 1024)."""
    wanted = f"a size of at least {show_size(low)}, such as 512MiB, 4GB or a number of bytes"

    def read(raw: Any) -> int:
        match = QUANTITY.fullmatch(str(raw)) if isinstance(raw, str | int) and not isinstance(raw, bool) else None
        unit = SIZES.get(match[2].upper()) if match else None
        if match is None or unit is None or (value := round(float(match[1]) * unit)) < low:
            raise ValueError(wanted)
        return value if "." in match[1] else int(match[1]) * unit

    return Kind("SIZE", read, show_size)


def duration(low: float = 0.0, high: float = inf) -> Kind:
    """Seconds: a number, or a number with ms, s, m, min or h."""
    within = f" from {low:g}s to {high:g}s" if high < inf else ""

    def read(raw: Any) -> float:
        match = (
            QUANTITY.fullmatch(str(raw)) if isinstance(raw, str | int | float) and not isinstance(raw, bool) else None
        )
        unit = DURATIONS.get(match[2].lower()) if match else None
        if match is None or unit is None or not low <= float(match[1]) * unit <= high:
            raise ValueError(f"a duration{within}, such as 30, 1.5s, 500ms, 2m or 1h")
        return float(match[1]) * unit

    return Kind("TIME", read, lambda value: f"{value:g}s")


TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def switch() -> Kind:
    """On or off: ``--name`` and ``--no-name`` as flags, true or false elsewhere."""

    def read(raw: Any) -> bool:
        if isinstance(raw, bool):
            return raw
        if isinstance(raw, str) and raw.lower() in TRUE + FALSE:
            return raw.lower() in TRUE
        raise ValueError("true or false")

    return Kind("", read, lambda value: "true" if value else "false")
