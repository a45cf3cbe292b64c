"""Options, and how their values are found: flags override the environment, then the file, then defaults.

An ``Option`` is one row of a table. The table determines the flags (``--kv-memory``), the environment variables
(``PARLEY_KV_MEMORY``), the keys of a TOML file (``kv-memory``), the help text and ``--show-config``. This file knows no
option by name and imports nothing heavy, since ``parley --help`` uses it.
"""

from __future__ import annotations

import difflib
import textwrap
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parley.settings.kinds import Kind

PREFIX = "PARLEY_"
WIDTH = 100


class ConfigError(Exception):
    """A flag, variable or key that cannot be used. The message is one sentence for the user."""


def nearest(word: str, known: Sequence[str]) -> str:
    """Return a did-you-mean clause for a wrong word, or "" if no known word is close."""
    close = difflib.get_close_matches(word, known, 1, 0.6)
    return f" Did you mean {close[0]}?" if close else ""


@dataclass(frozen=True)
class Option:
    """One row of a table. The value of an option with ``many`` is a list: flags add up, TOML has an array, and a single
    text is split at ``separator``.

    ``default`` None means "not set"; ``unset`` explains in the help what applies then. ``variable``: may come from the
    environment and from the file. ``positional``: written without a flag. ``secret``: never printed.
    """

    name: str
    kind: Kind
    help: str
    default: Any = None
    section: str = "options"
    unset: str = ""
    short: str = ""
    many: bool = False
    separator: str = ","
    variable: bool = False
    positional: bool = False
    secret: bool = False
    hidden: bool = False

    @property
    def flag(self) -> str:
        """The command-line flag."""
        return f"--{self.name}"

    @property
    def key(self) -> str:
        """The environment variable."""
        return PREFIX + self.name.upper().replace("-", "_")

    @property
    def is_switch(self) -> bool:
        """Whether the option is on or off and takes no value."""
        return not self.kind.metavar

    def read(self, raw: Any, source: str) -> Any:
        """Parse the value of one source. Raises ConfigError."""
        if not self.many:
            return self._one(raw, source)
        values = raw if isinstance(raw, list) else [raw]
        parts = [
            part for value in values for part in (value.split(self.separator) if isinstance(value, str) else [value])
        ]
        return [self._one(part.strip() if isinstance(part, str) else part, source) for part in parts]

    def _one(self, raw: Any, source: str) -> Any:
        try:
            return self.kind.read(raw)
        except ValueError as wanted:
            given = "the value" if self.secret else repr(raw if not isinstance(raw, str) else raw[:60])
            raise ConfigError(f"{source}: {given} is not {wanted}.") from None

    def show(self, value: Any) -> str:
        """Return the value as text that a flag or variable accepts; of a secret, only the number of values."""
        if value is None or value == []:
            return f"({self.unset})" if self.unset else "(not set)"
        if self.secret:
            return f"({len(value)} hidden)" if self.many else "(hidden)"
        return f"{self.separator} ".join(map(self.kind.show, value)) if self.many else self.kind.show(value)


@dataclass(frozen=True)
class Value:
    """A value and its source: ``default``, a file's name, a variable or a flag."""

    value: Any
    source: str


@dataclass(frozen=True)
class Config(Mapping[str, Any]):
    """All values of a table by option name, and warnings about the sources."""

    found: dict[str, Value]
    warnings: list[str] = field(default_factory=list)

    def __getitem__(self, name: str) -> Any:
        return self.found[name].value

    def __iter__(self) -> Iterator[str]:
        return iter(self.found)

    def __len__(self) -> int:
        return len(self.found)

    def source(self, name: str) -> str:
        """Return the source of an option's value."""
        return self.found[name].source

    def given(self, name: str) -> bool:
        """Whether any source sets the option."""
        return self.source(name) != "default"

    def over(self, values: Mapping[str, Any], source: str) -> Config:
        """Return a copy that takes these values for options that no source sets."""
        below = {name: Value(value, source) for name, value in values.items() if not self.given(name)}
        return Config(self.found | below, self.warnings)


def read_flags(table: Sequence[Option], arguments: Sequence[str]) -> dict[str, tuple[Any, str]]:
    """Return raw values from the command line, each with its flag. Raises ConfigError."""
    flags = {option.flag: option for option in table}
    flags |= {option.short: option for option in table if option.short}
    negative = {f"--no-{option.name}": option for option in table if option.is_switch}
    places = [option for option in table if option.positional]
    found: dict[str, tuple[Any, str]] = {}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        flag, equals, raw = word.partition("=")
        if not word.startswith("-") or word == "-":
            if not places:
                raise ConfigError(f"Unexpected argument {word!r}.{nearest('--' + word, list(flags))}")
            option = places.pop(0)
            flag, raw = option.name.upper(), word
        elif flag in flags or flag in negative:
            option = flags.get(flag) or negative[flag]
            if option.is_switch:
                if equals:
                    raise ConfigError(f"{flag} takes no value; write {option.flag} or --no-{option.name}.")
                raw = "true" if flag in flags else "false"
            elif not equals:
                if not rest or (rest[0].startswith("--") and rest[0].partition("=")[0] in flags | negative):
                    raise ConfigError(f"{flag} needs a value ({option.kind.metavar}).")
                raw = rest.pop(0)
        else:
            raise ConfigError(f"Unknown flag {flag}.{nearest(flag, [*flags, *negative])}")
        if option.many:
            found[option.name] = ([*found.get(option.name, ([],))[0], raw], flag)
        else:
            found[option.name] = (raw, flag)
    return found


def read_toml(path: str) -> dict[str, Any]:
    """Return the content of a TOML file. Raises ConfigError."""
    try:
        return tomllib.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"The file {path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:  # ValueError also for bad UTF-8 and very long numbers
        raise ConfigError(f"The file {path} is not valid TOML: {error}.") from None


def read_file(table: Sequence[Option], path: str) -> dict[str, tuple[Any, str]]:
    """Return raw values of a TOML file. Raises ConfigError."""
    return read_content(table, read_toml(path), path)


def read_content(table: Sequence[Option], content: Mapping[str, Any], source: str) -> dict[str, tuple[Any, str]]:
    """Return raw values of a file's content: keys at the top, or in a table named after the option's section. Raises
    ConfigError."""
    options = {option.name: option for option in table if option.variable and option.name != "config"}
    sections = {option.section for option in options.values()}
    found: dict[str, tuple[Any, str]] = {}

    def take(key: str, raw: Any, section: str) -> None:
        name = key.replace("_", "-")
        known = options.get(name)
        if known is None or section not in ("", known.section):
            where = f" in [{section}]" if section else ""
            wanted = [option.name for option in options.values() if section in ("", option.section)]
            hint = f" It belongs in [{known.section}]." if known else nearest(name, [*wanted, *sections])
            raise ConfigError(f"{source}: unknown key {key}{where}.{hint}")
        if name in found:
            raise ConfigError(f"{source}: {name} is given twice.")
        found[name] = (raw, source)

    for key, raw in content.items():
        if isinstance(raw, dict) and key in sections:
            for inner, value in raw.items():
                take(inner, value, key)
        else:
            take(key, raw, "")
    return found


def read_environment(table: Sequence[Option], environment: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    """Return raw values of environment variables; an empty variable counts as not set."""
    keys = {option.key: option for option in table if option.variable}
    return {keys[key].name: (raw, key) for key, raw in environment.items() if key in keys and raw}


def resolve(
    table: Sequence[Option],
    arguments: Sequence[str],
    environment: Mapping[str, str],
    others: Sequence[str] = (),
) -> Config:
    """Return every option's value from the highest source that has it: flag, environment, file, default.

    The file is the value of the option ``config``, if the table has one that may come from a variable. Variables that
    begin with ``PARLEY_`` and are neither in the table nor among ``others`` cause a warning. Raises ConfigError.
    """
    flags, variables = read_flags(table, arguments), read_environment(table, environment)
    layered = any(option.name == "config" and option.variable for option in table)
    file, _ = (layered and (flags.get("config") or variables.get("config"))) or (None, "")
    layers = [flags, variables, read_file(table, file) if file else {}]
    values = {}
    for option in table:
        raw, source = next((layer[option.name] for layer in layers if option.name in layer), (None, "default"))
        default = list(option.default or []) if option.many else option.default
        place = f"{source}: {option.name}" if source == file else source  # flags and variables contain the name
        values[option.name] = Value(option.read(raw, place) if source != "default" else default, source)
    known = [option.key for option in table if option.variable] + list(others)
    return Config(
        values,
        [
            f"Unknown variable {key}.{nearest(key, known)}"
            for key in sorted(environment)
            if key.startswith(PREFIX) and key not in known
        ],
    )


def show(table: Sequence[Option], config: Config) -> str:
    """Return every value with its source, one per line."""
    rows = [(o.name, o.show(config[o.name]), config.source(o.name)) for o in table if not o.hidden]
    wide = [max(len(row[i]) for row in rows) for i in range(2)]
    return "\n".join(f"{name:<{wide[0]}}  {value:<{wide[1]}}  {source}" for name, value, source in rows)


def explain(table: Sequence[Option]) -> str:
    """Return the help text of the options, by section."""
    left = {o.name: _usage(o) for o in table if not o.hidden}
    column = min(max(map(len, left.values()), default=0) + 4, 34)
    lines: list[str] = []
    for section in dict.fromkeys(o.section for o in table if not o.hidden):
        lines += ["", f"{section}:"]
        for option in table:
            if option.section == section and not option.hidden:
                lines += _entry(left[option.name], _about(option), column)
    return "\n".join(lines)


def _usage(option: Option) -> str:
    if option.positional:
        return option.name.upper()
    flag = f"--[no-]{option.name}" if option.is_switch and option.default else option.flag
    return f"{option.short + ', ' if option.short else ''}{flag} {option.kind.metavar}".rstrip()


def _about(option: Option) -> str:
    about = option.help + (" Repeatable." if option.many else "")
    if option.unset:
        return f"{about} [{option.unset}]"
    if option.default is None or option.default == [] or option.is_switch:
        return about
    return f"{about} [{option.show(option.default)}]"


def _entry(left: str, about: str, column: int) -> list[str]:
    lines = textwrap.wrap(about, WIDTH - column) or [""]
    head = [f"  {left:<{column - 2}}{lines.pop(0)}"] if len(left) <= column - 4 else [f"  {left}"]
    return head + [" " * column + line for line in lines]
