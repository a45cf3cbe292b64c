"""Options, and how their values are found: flags override the environment, then the file, then defaults.

An ``Option`` is one row of a table. The table determines the flags (``--kv-memory``), the environment variables
(``PARLEY_KV_MEMORY``), the keys of a TOML file (``kv-memory``), the help text and ``--show-config``. This file knows no
option by name and imports nothing heavy, since ``parley --help`` uses it.
"""

from __future__ import annotations

import difflib
import re
import textwrap
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from parley.errors import failure_reason
from parley.settings.bounded_files import read_bounded_file
from parley.settings.option_kinds import OptionKind

VARIABLE_PREFIX = "PARLEY_"
# Kubernetes gives a pod these variables for a service whose name begins with "parley". Its PARLEY_PORT is an address.
SERVICE_VARIABLE = re.compile(
    r"PARLEY(_\w+)?_(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://.*")
HELP_WIDTH = 100
MAX_OPTIONS_FILE = 16 << 20  # bytes


class ConfigError(Exception):
    """A flag, variable or key that cannot be used. The message is one sentence for the user."""


def did_you_mean(word: str, known_words: Sequence[str]) -> str:
    """Return a did-you-mean clause for a wrong word, or "" if no known word is close."""
    close = difflib.get_close_matches(word, known_words, 1, 0.6)
    return f" Did you mean {close[0]}?" if close else ""


class UnknownFlag(ConfigError):
    """A flag that the command does not have. ``flag`` is the flag without its value."""

    def __init__(self, flag: str, hint: str):
        super().__init__(f"Unknown flag {flag}.{hint}")
        self.flag = flag


@dataclass(frozen=True)
class Option:
    """One row of a table. The value of an option with ``repeatable`` is a list: flags add up, TOML has an array, and a
    single text is split at ``separator``.

    * ``default``: None means "not set"; ``unset_text`` explains that case in the help.
    * ``configurable``: may come from the environment and from the file.
    * ``positional``: written without a flag.
    * ``secret``: its value is never printed.
    * ``takes_rest``: its value may also be all words after ``--``.
    """

    name: str
    kind: OptionKind
    help_text: str
    default: Any = None
    section: str = "options"
    unset_text: str = ""
    short: str = ""
    repeatable: bool = False
    separator: str = ","
    configurable: bool = False
    positional: bool = False
    secret: bool = False
    hidden: bool = False
    takes_rest: bool = False

    @property
    def flag(self) -> str:
        """The command-line flag."""
        return f"--{self.name}"

    @property
    def variable_name(self) -> str:
        """The environment variable."""
        return VARIABLE_PREFIX + self.name.upper().replace("-", "_")

    @property
    def is_switch(self) -> bool:
        """Whether the option is on or off and takes no value."""
        return not self.kind.metavar

    def parse_raw(self, raw: Any, source: str) -> Any:
        """Parse the value of one source. Raises ConfigError."""
        if not self.repeatable:
            return self._parse_one(raw, source)
        values = raw if isinstance(raw, list) else [raw]
        parts = [
            part for value in values for part in (value.split(self.separator) if isinstance(value, str) else [value])
        ]
        return [self._parse_one(part.strip() if isinstance(part, str) else part, source) for part in parts]

    def _parse_one(self, raw: Any, source: str) -> Any:
        try:
            return self.kind.parse_raw(raw)
        except ValueError as description:
            shown_value = "the value" if self.secret else repr(raw if not isinstance(raw, str) else raw[:60])
            raise ConfigError(f"{source}: {shown_value} is not {description}.") from None

    def format_value(self, value: Any) -> str:
        """Return the value as text that a flag or variable accepts; of a secret, only the number of values."""
        if value is None or value == []:
            return f"({self.unset_text})" if self.unset_text else "(not set)"
        if self.secret:
            return f"({len(value)} hidden)" if self.repeatable else "(hidden)"
        return (
            f"{self.separator} ".join(map(self.kind.format_value, value))
            if self.repeatable
            else self.kind.format_value(value)
        )


@dataclass(frozen=True)
class OptionValue:
    """A value and its source: ``default``, a file's name, a variable or a flag."""

    value: Any
    source: str


@dataclass(frozen=True)
class ResolvedOptions(Mapping[str, Any]):
    """All values of a table by option name, and warnings about the sources.

    ``read_again`` returns the values that the same sources have now. Raises ConfigError.
    """

    by_name: dict[str, OptionValue]
    warnings: list[str] = field(default_factory=list)
    read_again: Callable[[], ResolvedOptions] | None = field(default=None, compare=False)

    def __getitem__(self, name: str) -> Any:
        return self.by_name[name].value

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_name)

    def __len__(self) -> int:
        return len(self.by_name)

    def source_of(self, name: str) -> str:
        """Return the source of an option's value."""
        return self.by_name[name].source

    def is_set(self, name: str) -> bool:
        """Whether any source sets the option."""
        return self.source_of(name) != "default"

    def with_unset_from(self, values: Mapping[str, Any], source: str) -> ResolvedOptions:
        """Return a copy that takes these values for options that no source sets."""
        additions = {name: OptionValue(value, source) for name, value in values.items() if not self.is_set(name)}
        return ResolvedOptions(self.by_name | additions, self.warnings, self.read_again)


def read_flags(table: Sequence[Option], arguments: Sequence[str]) -> dict[str, tuple[Any, str]]:
    """Return raw values from the command line, each with its flag. Raises ConfigError."""
    flags = {option.flag: option for option in table}
    flags |= {option.short: option for option in table if option.short}
    negative_flags = {f"--no-{option.name}": option for option in table if option.is_switch}
    positionals = [option for option in table if option.positional]
    raw_values: dict[str, tuple[Any, str]] = {}
    remaining = list(arguments)
    rest_option = next((option for option in table if option.takes_rest), None)
    while remaining:
        word = remaining.pop(0)
        if word == "--" and rest_option is not None:
            raw_values[rest_option.name] = (remaining, "--")
            break
        flag, equals, raw = word.partition("=")
        if not word.startswith("-") or word == "-":
            if not positionals:
                raise ConfigError(f"Unexpected argument {word!r}.{did_you_mean('--' + word, list(flags))}")
            option = positionals.pop(0)
            flag, raw = option.name.upper(), word
        elif flag in flags or flag in negative_flags:
            option = flags.get(flag) or negative_flags[flag]
            if option.is_switch:
                if equals:
                    raise ConfigError(f"{flag} takes no value; write {option.flag} or --no-{option.name}.")
                raw = "true" if flag in flags else "false"
            elif not equals:
                raw = _take_flag_value(option, flag, remaining, flags | negative_flags)
        else:
            raise UnknownFlag(flag, did_you_mean(flag, [*flags, *negative_flags]))
        if option.repeatable:
            raw_values[option.name] = ([*raw_values.get(option.name, ([],))[0], raw], flag)
        else:
            raw_values[option.name] = (raw, flag)
    return raw_values


def _take_flag_value(option: Option, flag: str, remaining: list[str], known_flags: Collection[str]) -> str:
    """Take the value of a flag from the remaining words. Raises ConfigError if another flag follows, or nothing."""
    if not remaining or (remaining[0].startswith("--") and remaining[0].partition("=")[0] in known_flags):
        raise ConfigError(f"{flag} needs a value ({option.kind.metavar}).")
    return remaining.pop(0)


def read_toml(path: str) -> dict[str, Any]:
    """Return the content of a TOML file. Raises ConfigError."""
    try:
        return tomllib.loads(read_bounded_file(path, MAX_OPTIONS_FILE).decode())
    except OSError as error:
        raise ConfigError(f"The file {path} cannot be read: {failure_reason(error)}.") from None
    except (ValueError, RecursionError) as error:  # ValueError also for bad UTF-8 and very long numbers
        raise ConfigError(f"The file {path} is not valid TOML: {error}.") from None


def read_options_file(table: Sequence[Option], path: str) -> dict[str, tuple[Any, str]]:
    """Return raw values of a TOML file. Raises ConfigError."""
    return read_options_table(table, read_toml(path), path)


def read_options_table(table: Sequence[Option], content: Mapping[str, Any], source: str) -> dict[str, tuple[Any, str]]:
    """Return raw values of a file's content: keys at the top, or in a table named after the option's section. Raises
    ConfigError."""
    options = {option.name: option for option in table if option.configurable and option.name != "config"}
    sections = {option.section for option in options.values()}
    raw_values: dict[str, tuple[Any, str]] = {}

    def take_key(key: str, raw: Any, section: str) -> None:
        name = key.replace("_", "-")
        known_option = options.get(name)
        if known_option is None or section not in ("", known_option.section):
            where = f" in [{section}]" if section else ""
            section_keys = [option.name for option in options.values() if section in ("", option.section)]
            hint = (
                f" It belongs in [{known_option.section}]."
                if known_option
                else did_you_mean(name, [*section_keys, *sections])
            )
            raise ConfigError(f"{source}: unknown key {key}{where}.{hint}")
        if name in raw_values:
            raise ConfigError(f"{source}: {name} is given twice.")
        raw_values[name] = (raw, source)

    for key, raw in content.items():
        if isinstance(raw, dict) and key in sections:
            for inner, value in raw.items():
                take_key(inner, value, key)
        else:
            take_key(key, raw, "")
    return raw_values


def read_environment(table: Sequence[Option], environment: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    """Return raw values of environment variables; an empty variable counts as not set."""
    keys = {option.variable_name: option for option in table if option.configurable}
    return {keys[key].name: (raw, key) for key, raw in environment.items() if key in keys and raw}


def names_kubernetes_service(variable: str, value: str) -> bool:
    """Whether Kubernetes set a variable, because a service near the pod is named after parley."""
    return bool(SERVICE_VARIABLE.fullmatch(variable)) or (
        variable.endswith("_PORT") and bool(SERVICE_ADDRESS.fullmatch(value))
    )


def resolve_options(
    table: Sequence[Option],
    arguments: Sequence[str],
    environment: Mapping[str, str],
    other_variables: Sequence[str] = (),
) -> ResolvedOptions:
    """Return every option's value from the highest source that has it: flag, environment, file, default.

    The file is the value of the option ``config``, if the table has one that may come from a variable. Variables that
    begin with ``PARLEY_`` and are neither in the table nor among ``other_variables`` cause a warning; those of
    Kubernetes' services are no options. Raises ConfigError.
    """
    environment = {
        key: value
        for key, value in environment.items()
        if key.startswith(VARIABLE_PREFIX) and not names_kubernetes_service(key, value)
    }
    flags, variables = read_flags(table, arguments), read_environment(table, environment)
    layered = any(option.name == "config" and option.configurable for option in table)
    file, _ = (layered and (flags.get("config") or variables.get("config"))) or (None, "")
    layers = [flags, variables, read_options_file(table, file) if file else {}]
    values = {}
    for option in table:
        raw, source = next((layer[option.name] for layer in layers if option.name in layer), (None, "default"))
        default = list(option.default or []) if option.repeatable else option.default
        place = f"{source}: {option.name}" if source == file else source  # flags and variables contain the name
        values[option.name] = OptionValue(option.parse_raw(raw, place) if source != "default" else default, source)
    known_variables = [option.variable_name for option in table if option.configurable] + list(other_variables)
    return ResolvedOptions(
        values,
        [
            f"Unknown variable {key}.{did_you_mean(key, known_variables)}"
            for key in sorted(environment)
            if key not in known_variables
        ],
        partial(resolve_options, table, tuple(arguments), environment, other_variables),
    )


def format_options(table: Sequence[Option], config: ResolvedOptions) -> str:
    """Return every value with its source, one per line."""
    rows = [
        (option.name, option.format_value(config[option.name]), config.source_of(option.name))
        for option in table
        if not option.hidden
    ]
    column_widths = [max(len(row[i]) for row in rows) for i in range(2)]
    return "\n".join(
        f"{name:<{column_widths[0]}}  {value:<{column_widths[1]}}  {source}" for name, value, source in rows
    )


def format_help(table: Sequence[Option]) -> str:
    """Return the help text of the options, by section."""
    usages = {option.name: _usage_text(option) for option in table if not option.hidden}
    column = min(max(map(len, usages.values()), default=0) + 4, 34)
    lines: list[str] = []
    for section in dict.fromkeys(option.section for option in table if not option.hidden):
        lines += ["", f"{section}:"]
        for option in table:
            if option.section == section and not option.hidden:
                lines += _help_lines(usages[option.name], _description_text(option), column)
    return "\n".join(lines)


def _usage_text(option: Option) -> str:
    if option.positional:
        return option.name.upper()
    flag = f"--[no-]{option.name}" if option.is_switch and option.default else option.flag
    return f"{option.short + ', ' if option.short else ''}{flag} {option.kind.metavar}".rstrip()


def _description_text(option: Option) -> str:
    description = option.help_text + (" Repeatable." if option.repeatable else "")
    if option.unset_text:
        return f"{description} [{option.unset_text}]"
    if option.default is None or option.default == [] or option.is_switch:
        return description
    return f"{description} [{option.format_value(option.default)}]"


def _help_lines(usage: str, description: str, column: int) -> list[str]:
    lines = textwrap.wrap(description, HELP_WIDTH - column, break_on_hyphens=False) or [""]
    head = [f"  {usage:<{column - 2}}{lines.pop(0)}"] if len(usage) <= column - 4 else [f"  {usage}"]
    return head + [" " * column + line for line in lines]
