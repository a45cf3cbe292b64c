"""Kinds of option values: how text, or a value of a TOML file, becomes a number, a size, a duration or a choice.

``OptionKind.parse_raw`` raises ValueError with a clause that completes the sentence "<value> is not …", including the
range; ``format_value`` returns text that is parsed as the same value. Knows neither options nor sources.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import shlex
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from parley.settings.families import find_family, option_families
from parley.settings.media_hosts import MediaHost, parse_media_host


@dataclass(frozen=True)
class OptionKind:
    """How a value is parsed and printed. ``metavar`` stands for the value in the help."""

    metavar: str
    parse_raw: Callable[[Any], Any]
    format_value: Callable[[Any], str] = str


def text_kind(metavar: str = "TEXT") -> OptionKind:
    """Any text that is not empty."""

    def parse_text(raw: Any) -> str:
        if not isinstance(raw, str) or not raw or "\0" in raw:  # no operating system accepts NUL in a name
            raise ValueError("text")
        return raw

    return OptionKind(metavar, parse_text)


def json_object_kind() -> OptionKind:
    """A JSON object, as text or as a table of a TOML file."""

    def parse_json_object(raw: Any) -> dict[str, Any]:
        try:
            value = json.loads(raw) if isinstance(raw, str) else raw
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise ValueError("a JSON object")
        return value

    return OptionKind("JSON", parse_json_object, json.dumps)


def words_kind(metavar: str) -> OptionKind:
    """Words of a command line: a list of them, or a text that a shell would split into them."""

    def parse_words(raw: Any) -> list[str]:
        try:
            words = shlex.split(raw) if isinstance(raw, str) else raw
        except ValueError:  # a quotation mark without its counterpart
            words = None
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise ValueError("a text of words and quoted words, or a list of texts")
        return words

    return OptionKind(metavar, parse_words, shlex.join)


def choice_kind(*names: str) -> OptionKind:
    """One of several words."""

    def parse_choice(raw: Any) -> str:
        if raw not in names:
            raise ValueError(f"one of {', '.join(names)}")
        return str(raw)

    return OptionKind("|".join(names), parse_choice)


def engine_kind(*names: str) -> OptionKind:
    """One of several words, or the address of a server: http:// or https://, a host, a port and perhaps a path."""

    def parse_engine(raw: Any) -> str:
        if raw in names:
            return str(raw)
        try:
            address = urlsplit(raw if isinstance(raw, str) else "")
            is_address = address.scheme in ("http", "https") and address.hostname and address.port != 0
        except ValueError:  # of the port
            is_address = False
        if not is_address or address.username is not None or address.query or address.fragment:
            raise ValueError(f"one of {', '.join(names)}, http://HOST:PORT")
        return str(raw).rstrip("/")

    return OptionKind("|".join((*names, "URL")), parse_engine)


def family_kind(table: Literal["calls", "thoughts"]) -> OptionKind:
    """A model family by any of its names in a table, or auto, or none."""

    def parse_family(raw: Any) -> str:
        family_name = find_family(raw, table) if isinstance(raw, str) else None
        if family_name is None:
            raise ValueError(f"one of {', '.join(option_families(table))}")
        return family_name

    return OptionKind("FAMILY", parse_family)


def pattern_kind(expression: str, metavar: str, description: str) -> OptionKind:
    """Text that a regular expression matches completely. ``description`` describes it in errors."""
    compiled_pattern = re.compile(expression)

    def parse_pattern(raw: Any) -> str:
        if not isinstance(raw, str) or not compiled_pattern.fullmatch(raw):
            raise ValueError(description)
        return raw

    return OptionKind(metavar, parse_pattern)


def otlp_endpoint_kind() -> OptionKind:
    """The URL of an endpoint of OpenTelemetry's protocol."""
    return pattern_kind(
        r"(grpcs?|https?)://(\[[0-9A-Fa-f:.%]+\]|[^\s:/?#\[\]@]+)(:[0-9]{1,5})?(/[!-~]*)?",
        "URL",
        "grpc://, grpcs://, http:// or https:// and HOST:PORT",
    )


def integer_kind(low: int, high: int | None = None, metavar: str = "N") -> OptionKind:
    """A whole number from ``low`` to ``high``; a ``high`` of None means no upper limit."""
    description = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"

    def parse_integer(raw: Any) -> int:
        try:
            value = int(raw) if isinstance(raw, str) else raw
        except ValueError:
            raise ValueError(description) from None
        if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
            raise ValueError(description)
        return value

    return OptionKind(metavar, parse_integer)


def number_kind(low: float, high: float, metavar: str = "N") -> OptionKind:
    """A number from ``low`` to ``high``."""
    description = f"a number from {low:g} to {high:g}"

    def parse_number(raw: Any) -> float:
        try:
            value = float(raw) if isinstance(raw, str | int | float) and not isinstance(raw, bool) else None
        except (ValueError, OverflowError):
            value = None
        if value is None or not low <= value <= high:  # also refuses nan
            raise ValueError(description)
        return value

    return OptionKind(metavar, parse_number, lambda value: f"{value:g}")


def network_kind() -> OptionKind:
    """An IP network in CIDR form, or a single address."""

    def parse_network(raw: Any) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
        try:
            return ipaddress.ip_network(raw if isinstance(raw, str) else "")
        except ValueError:
            raise ValueError("a network such as 10.0.0.0/24, or an address") from None

    return OptionKind("NETWORK", parse_network)


def media_host_kind() -> OptionKind:
    """A host that media may be fetched from, as a ``MediaHost``."""

    def parse_entry(raw: Any) -> MediaHost:
        return parse_media_host(raw if isinstance(raw, str) else "")

    return OptionKind("HOST", parse_entry)


MEDIA_KIND_NAMES = ("image", "video", "audio")


def media_limit_kind(limit: OptionKind) -> OptionKind:
    """A limit for one kind of media: KIND=LIMIT as a pair."""

    def parse_limit(raw: Any) -> tuple[str, Any]:
        name, _, text = raw.partition("=") if isinstance(raw, str) else ("", "", "")
        try:
            value = limit.parse_raw(text)
        except ValueError as problem:
            raise ValueError(f"of the form KIND={limit.metavar}: {text!r} is not {problem}") from None
        if name not in MEDIA_KIND_NAMES:
            raise ValueError(f"of the form KIND={limit.metavar}, for a kind of image, video or audio")
        return name, value

    return OptionKind(f"KIND={limit.metavar}", parse_limit, lambda value: f"{value[0]}={limit.format_value(value[1])}")


UNIX_PREFIX = "unix:"  # before the path of a Unix socket that stands where a host may
MAX_SOCKET_PATH = 107  # bytes; Linux has room for no more


def parse_socket_path(raw: Any) -> str:
    """Return the absolute path of a Unix socket. Raises ValueError."""
    if not isinstance(raw, str) or not raw or "\0" in raw or len(os.fsencode(os.path.abspath(raw))) > MAX_SOCKET_PATH:
        raise ValueError(f"the path of a Unix socket, of at most {MAX_SOCKET_PATH} bytes")
    return os.path.abspath(raw)


def root_path_kind() -> OptionKind:
    """The path below which a proxy shows a server: it begins with a slash and does not end with one."""

    def parse_root_path(raw: Any) -> str:
        if not isinstance(raw, str) or not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+/?", raw):
            raise ValueError("a path such as /llm")
        return raw.rstrip("/")

    return OptionKind("PATH", parse_root_path)


def proxy_kind() -> OptionKind:
    """A network of proxies, or ``unix`` for those that connect over a Unix socket."""
    network = network_kind()
    return OptionKind(
        "NETWORK|unix", lambda raw: raw if raw == "unix" else network.parse_raw(raw), lambda value: str(value)
    )


def endpoint_kind() -> OptionKind:
    """A named address: NAME=HOST:PORT as a triple, IPv6 addresses in brackets; or NAME=unix:PATH with port 0."""
    endpoint_pattern = re.compile(r"([a-z0-9._-]+)=(\[[0-9A-Fa-f:.%]+\]|[^\s:/\[\]]+):(\d{1,5})")

    def parse_endpoint(raw: Any) -> tuple[str, str, int]:
        name, equals, place = raw.partition("=") if isinstance(raw, str) else ("", "", "")
        if equals and place.startswith(UNIX_PREFIX):
            return name, UNIX_PREFIX + parse_socket_path(place[len(UNIX_PREFIX) :]), 0
        match = endpoint_pattern.fullmatch(raw) if isinstance(raw, str) else None
        if match is None or int(match[3]) > 65_535:
            raise ValueError("of the form NAME=HOST:PORT or NAME=unix:PATH, with the name of an API")
        return match[1], match[2].strip("[]"), int(match[3])

    def format_endpoint(value: tuple[str, str, int]) -> str:
        name, host, port = value
        if host.startswith(UNIX_PREFIX):
            return f"{name}={host}"
        return f"{name}=[{host}]:{port}" if ":" in host else f"{name}={host}:{port}"

    return OptionKind("NAME=HOST:PORT", parse_endpoint, format_endpoint)


def adapter_kind() -> OptionKind:
    """A named folder: NAME=FOLDER as a pair."""
    adapter_pattern = re.compile(r"([\w.:/@-]{1,256})=(.+)", re.ASCII | re.DOTALL)

    def parse_adapter(raw: Any) -> tuple[str, str]:
        match = adapter_pattern.fullmatch(raw) if isinstance(raw, str) else None
        if match is None:
            raise ValueError("of the form NAME=FOLDER, such as support=./adapters/support")
        return match[1], match[2]

    return OptionKind("NAME=FOLDER", parse_adapter, "=".join)


class NamedModel(NamedTuple):
    """A model with its names and its own options, as written."""

    names: tuple[str, ...]
    model: str
    options: Mapping[str, str]


def named_model_kind(metavar: str, options: Collection[str]) -> OptionKind:
    """A model: MODEL or NAME[,NAME...]=MODEL, either followed by ,OPTION=VALUE for any of the given options.

    A value has no comma, unless it is a JSON object.
    """
    name_pattern = "|".join(options)
    pair = rf",(?:{name_pattern})=(?:\{{.*?\}}(?=,(?:{name_pattern})=|$)|[^,]*)"
    model_pattern = re.compile(rf"(?:(?![./~])([^=]*)=)?+(.+?)((?:{pair})*)", re.DOTALL)
    pair_pattern = re.compile(pair, re.DOTALL)
    other_option = re.compile(r",([a-z][a-z-]*)=")

    def parse_named_model(raw: Any) -> NamedModel:
        match = model_pattern.fullmatch(raw) if isinstance(raw, str) else None
        if match is None:
            raise ValueError("a model, or of the form NAME=MODEL")
        names = tuple(name.strip() for name in match[1].split(",")) if match[1] is not None else ()
        if wrong_option := other_option.search(match[2]):
            raise ValueError(f"a model: {wrong_option[1]} is not an option of a single model")
        if not all(names) or len(set(names)) < len(names):
            raise ValueError("of the form NAME[,NAME...]=MODEL with different names")
        model_options: dict[str, str] = {}
        for text in pair_pattern.findall(match[3]):
            name, _, value = text[1:].partition("=")
            # Repeated options add up.
            model_options[name] = f"{model_options[name]},{value}" if name in model_options else value
        return NamedModel(names, match[2], model_options)

    def format_named_model(value: NamedModel) -> str:
        names = f"{','.join(value.names)}=" if value.names else ""
        option_pairs = [
            (name, item)
            for name, text in value.options.items()
            for item in ([text] if text.startswith("{") else text.split(","))
        ]
        return names + value.model + "".join(f",{name}={text}" for name, text in option_pairs)

    return OptionKind(metavar, parse_named_model, format_named_model)


SIZE_UNITS = {"": 1, "B": 1} | {
    name: base**power
    for power, letter in enumerate("KMGT", 1)
    for name, base in ((f"{letter}B", 1000), (f"{letter}IB", 1024))
}
DURATION_UNITS = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
QUANTITY = re.compile(r"\s*(\d{1,18}(?:\.\d{1,9})?)\s*([A-Za-z]*)\s*")


def format_size(count: int) -> str:
    """Return a number of bytes as a size that reads back as the same number."""
    for name in ("TiB", "GiB", "MiB", "KiB", "TB", "GB", "MB", "KB"):
        if count and count % SIZE_UNITS[name.upper()] == 0:
            return f"{count // SIZE_UNITS[name.upper()]}{name}"
    return str(count)


def size_kind(low: int = 0) -> OptionKind:
    """Bytes: a number, or one with KB MB GB TB (powers of 1000) or KiB MiB GiB TiB (powers of 1024)."""
    description = f"a size of at least {format_size(low)}, such as 512MiB, 4GB or a number of bytes"

    def parse_size(raw: Any) -> int:
        match = QUANTITY.fullmatch(str(raw)) if isinstance(raw, str | int) and not isinstance(raw, bool) else None
        unit = SIZE_UNITS.get(match[2].upper()) if match else None
        if match is None or unit is None or (value := round(float(match[1]) * unit)) < low:
            raise ValueError(description)
        result: int = value if "." in match[1] else int(match[1]) * unit
        return result

    return OptionKind("SIZE", parse_size, format_size)


def duration_kind(low: float = 0.0, high: float = inf, *, or_zero: bool = False) -> OptionKind:
    """Seconds: a number, or a number with ms, s, m, min, h or d. ``or_zero``: 0 is allowed as well as ``low``."""
    range_text = f" from {low:g}s to {high:g}s" if high < inf else f" of 0 or at least {low:g}s" if or_zero else ""

    def parse_duration(raw: Any) -> float:
        match = (
            QUANTITY.fullmatch(str(raw)) if isinstance(raw, str | int | float) and not isinstance(raw, bool) else None
        )
        unit = DURATION_UNITS.get(match[2].lower()) if match else None
        seconds = float(match[1]) * unit if match and unit is not None else -1.0
        if not (low <= seconds <= high or (or_zero and seconds == 0)):
            raise ValueError(f"a duration{range_text}, such as 30, 1.5s, 500ms, 2m, 1h or 7d")
        return seconds

    def format_duration(seconds: float) -> str:
        unit = "d" if seconds and not seconds % DURATION_UNITS["d"] else "s"
        return f"{seconds / DURATION_UNITS[unit]:g}{unit}"

    return OptionKind("TIME", parse_duration, format_duration)


TRUE_WORDS, FALSE_WORDS = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def switch_kind() -> OptionKind:
    """On or off: ``--name`` and ``--no-name`` as flags, true or false elsewhere."""

    def parse_switch(raw: Any) -> bool:
        if isinstance(raw, bool):
            return raw
        if isinstance(raw, str) and raw.lower() in TRUE_WORDS + FALSE_WORDS:
            return raw.lower() in TRUE_WORDS
        raise ValueError("true or false")

    return OptionKind("", parse_switch, lambda value: "true" if value else "false")
