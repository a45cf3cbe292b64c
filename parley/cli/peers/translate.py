"""Translate a command line of another server into one of ``parley serve``, flag by flag.

``CONVERSIONS`` holds the functions that translate values, by the names that the tables use. Each returns words of
parley's command, or raises ``NoCounterpart`` with the reason.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from parley.cli.peers.tables import PeerFlag, PeerServer
from parley.cli.serve_config.engine_options import OWN_ENGINE_OPTIONS, check_engine_options
from parley.settings.config import SERVE_OPTIONS
from parley.settings.options import ConfigError, did_you_mean, resolve_options

MODEL = "MODEL"
OUR_FLAGS = {option.flag for option in SERVE_OPTIONS} | {
    f"--no-{option.name}" for option in SERVE_OPTIONS if option.is_switch
}
REPEATABLE_FLAGS = {option.flag for option in SERVE_OPTIONS if option.repeatable}
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.ASCII | re.DOTALL)
COUNT = re.compile(r"(\d+(?:\.\d+)?)([kKmMgG]?)")
COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
PROGRAM_WORDS = 3  # python -m PROGRAM; more words belong to something else
NUMBER = re.compile(r"-?\d+(\.\d+)?")
# A port of the host in the words of ``docker run``: ``-p 8080:80``, ``--publish=127.0.0.1:8080:80/tcp``
PUBLISHED_PORT = re.compile(r"(?<!\S)(?:-p|--publish)[ =]?(?:\S*:)?(\d+):\d+(?:/tcp)?(?!\S)")


class NoCounterpart(Exception):
    """A value has no counterpart. The message is a clause that says why."""


@dataclass(frozen=True)
class FlagResult:
    """The translation of a flag and its values.

    * ``original_words``: the words of the other server's command.
    * ``parley_words``: those of parley's, if ``state`` is "translated". Other states are "needless", "missing" and
      "unknown".
    * ``reason``: a clause that says why the flag has this state, or how parley's flag differs.
    * ``peer_flag``: the flag's row in the table; None if it has none.
    """

    original_words: tuple[str, ...]
    state: str
    parley_words: tuple[str, ...] = ()
    reason: str = ""
    peer_flag: PeerFlag | None = None


@dataclass(frozen=True)
class Translation:
    """A translated command line.

    * ``results``: of each flag, in order.
    * ``added_flags``: parley's flags, with values, for defaults of the other server.
    * ``published_flags``: the same, for the only port that a container publishes.
    * ``skipped_words``: words before the name of its program that are no variables, such as those of ``docker run``.
    """

    peer: PeerServer
    results: list[FlagResult]
    added_flags: list[str]
    published_flags: list[str]
    skipped_words: list[str]

    def command(self) -> list[str]:
        """Return the words of the command, with the variables before it; MODEL stands for a model that is not named."""
        return self._command_text(self.results, [])

    def engine_command(self) -> list[str] | None:
        """Return the command that runs the other server's engine under parley; None if no further flag would apply."""
        if not any(_goes_to_engine(result) and result.state == "missing" for result in self.results):
            return None
        passed = [word for result in self.results if _goes_to_engine(result) for word in result.original_words]
        kept_results = [result for result in self.results if not _goes_to_engine(result)]
        return self._command_text(kept_results, ["--engine", self.peer.engine, "--", *passed])

    def problem(self) -> str:
        """Return why ``parley serve`` would refuse the command, as a sentence; "" if it would not."""
        words = self.command()
        try:
            check_engine_options(resolve_options(SERVE_OPTIONS, words[words.index("serve") + 1 :], {}))
        except ConfigError as error:
            return str(error)
        return ""

    def _command_text(self, results: Sequence[FlagResult], end: list[str]) -> list[str]:
        variables: list[str] = []
        models, flags = [MODEL], list[str]()
        for result in results:
            if result.peer_flag is not None and result.peer_flag.counterpart == MODEL:
                models += result.parley_words
            elif result.parley_words and ASSIGNMENT.fullmatch(result.parley_words[0]):
                variables += result.parley_words
            elif result.parley_words and not (
                result.parley_words[0] in flags and result.parley_words[0] not in REPEATABLE_FLAGS
            ):
                flags += result.parley_words
        return [*variables, "parley", "serve", models[-1], *flags, *self.added_flags, *self.published_flags, *end]


def _goes_to_engine(result: FlagResult) -> bool:
    """Whether the other server's engine takes the flag as it is, instead of ours."""
    if result.peer_flag is None or not result.peer_flag.passed_to_engine:
        return False
    return not result.parley_words or result.parley_words[0].removeprefix("--") in OWN_ENGINE_OPTIONS


def translate_command(peer: PeerServer, words: Sequence[str]) -> Translation:
    """Translate the words of a command line, which may begin with variables and the name of the program."""
    command_words, flags = _split_command(peer, words)
    variables = [word for word in command_words if ASSIGNMENT.fullmatch(word)]
    results = [
        _translate_flag(peer, peer.find_flag(name), (word,), [value])
        for word in variables
        for name, value in [word.split("=", 1)]
        if peer.find_flag(name)
    ]
    while flags:
        results.append(_take_flag(peer, flags))
    program = [word for word in command_words if not ASSIGNMENT.fullmatch(word)]
    set_flags = {word for result in results for word in result.parley_words}
    published_ports = [] if "--port" in set_flags else PUBLISHED_PORT.findall(" ".join(program))
    published_flags = ["--port", *published_ports] if len(published_ports) == 1 else []
    set_flags.update(published_flags)
    plain = {option.flag: option.format_value(option.default) for option in SERVE_OPTIONS}
    added_flags = [
        word
        for flag, value in peer.defaults.items()
        if flag not in set_flags and value != plain[flag]
        for word in (flag, value)
    ]
    skipped_words = program if len(program) > PROGRAM_WORDS else []
    return Translation(peer, results, added_flags, published_flags, skipped_words)


def _split_command(peer: PeerServer, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command after the name of its program. Return the words before its flags, and the flags."""
    start = 0
    for number, word in enumerate(words):
        if any(re.fullmatch(program, word) for program in peer.programs):
            start = number + 1
    command_words, flags = list(words[:start]), list(words[start:])
    while flags and ASSIGNMENT.fullmatch(flags[0]):
        command_words = [*command_words, flags.pop(0)]
    if flags and flags[0] in peer.subcommands:
        del flags[0]
    return command_words, flags


def _take_flag(peer: PeerServer, words: list[str]) -> FlagResult:
    """Translate the first flag of ``words``, and remove it and its values from them."""
    word = words.pop(0)
    flag, equals, value = word.partition("=")
    if not word.startswith("-"):
        row = next((row for row in peer.rows if row.name == peer.positional), None)
        return _translate_flag(peer, row, (word,), [word])
    row = peer.find_flag(flag)
    original_words = [word]
    values = [value] if equals else []
    max_values = {"?": 1, "*": len(words)}.get(str(row.args), row.args) if row else len(words)
    assert isinstance(max_values, int)
    while (
        not equals
        and len(values) < max_values
        and words
        and _is_value(words[0], required=row is not None and row.args == 1)
    ):
        values.append(words.pop(0))
        original_words.append(values[-1])
    return _translate_flag(peer, row, tuple(original_words), values)


def _is_value(word: str, *, required: bool) -> bool:
    """Whether a word is a value and no flag. ``required``: the flag before it has one; it may be a negative number."""
    return not word.startswith("-") or (required and bool(NUMBER.fullmatch(word)))


def _translate_flag(
    peer: PeerServer, row: PeerFlag | None, original_words: tuple[str, ...], values: list[str]
) -> FlagResult:
    if row is None:
        flag_names = [name for row in peer.rows for name in (row.name, *row.aliases)]
        flag = original_words[0].partition("=")[0]
        return FlagResult(
            original_words, "unknown", reason=f"{peer.title} documents no {flag}{_suggest_flag(flag, flag_names)}"
        )
    is_plain = (not row.needless_values and not row.counterpart) or (
        values and all(value in row.needless_values for value in values)
    )
    if row.needless_reason and is_plain:
        return FlagResult(original_words, "needless", reason=row.needless_reason, peer_flag=row)
    if not has_counterpart(row):
        return FlagResult(
            original_words,
            "missing",
            reason=row.missing_reason or row.unlisted_reason or row.needless_reason,
            peer_flag=row,
        )
    if row.args == 1 and not values:
        return FlagResult(original_words, "unknown", reason=f"{original_words[0]} needs a value", peer_flag=row)
    try:
        words = CONVERSIONS[row.conversion](row, values)
    except NoCounterpart as reason:
        return FlagResult(original_words, "missing", reason=str(reason), peer_flag=row)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return FlagResult(
            original_words, "missing", reason=row.missing_reason or "the value cannot be read", peer_flag=row
        )
    return FlagResult(original_words, "translated", tuple(words), row.note, row)


def _suggest_flag(flag: str, flag_names: Sequence[str]) -> str:
    return did_you_mean(flag, flag_names).rstrip("?").replace(" Did you mean", "; perhaps")


def has_counterpart(row: PeerFlag) -> bool:
    """Whether this version of parley has the option, or the variable, that the row names."""
    return bool(row.counterpart) and (
        row.conversion == "variable" or row.counterpart == MODEL or row.counterpart.split()[0] in OUR_FLAGS
    )


def describe_counterpart(row: PeerFlag) -> str:
    """Return parley's counterpart of a flag, as a clause."""
    if has_counterpart(row):
        place = f"{row.counterpart} in the environment" if row.conversion == "variable" else row.counterpart
        return f"here it is {place}" + (f" ({row.note})" if row.note else "")
    if row.missing_reason:
        return row.missing_reason
    return f"nothing is needed here: {row.needless_reason}"


# -- how values change


def _copy_values(row: PeerFlag, values: list[str]) -> list[str]:
    if row.counterpart == MODEL:
        return values
    return [word for value in values for word in (row.counterpart, value)] if values else row.counterpart.split()


def _split_at_commas(row: PeerFlag, values: list[str]) -> list[str]:
    return [
        word
        for value in values
        for item in value.split(",")
        if item.strip()
        for word in (row.counterpart, item.strip())
    ]


def _map_choice(row: PeerFlag, values: list[str]) -> list[str]:
    (value,) = values
    if value not in row.value_map:
        raise NoCounterpart(row.unlisted_reason or f"{value} is not one of {', '.join(row.value_map)}")
    return [row.counterpart, row.value_map[value]]


def _expand_count(row: PeerFlag, values: list[str]) -> list[str]:
    """A whole number, which may end with k, m or g (powers of 1000) or K, M or G (of 1024)."""
    (value,) = values
    match = COUNT.fullmatch(value)
    if match is None:
        raise ValueError(value)
    return [row.counterpart, str(int(float(match[1]) * COUNT_UNITS[match[2]]))]


def _append_gib(row: PeerFlag, values: list[str]) -> list[str]:
    size = float(values[0])
    if not math.isfinite(size):
        raise ValueError(values[0])
    return [row.counterpart, f"{size:g}GiB"]


def _set_variable(row: PeerFlag, values: list[str]) -> list[str]:
    return [f"{row.counterpart}={value}" for value in values] or [row.counterpart]


def _json_list(row: PeerFlag, values: list[str]) -> list[str]:
    return [word for value in json.loads(values[0]) for word in (row.counterpart, str(value))]


def _json_pairs(row: PeerFlag, values: list[str]) -> list[str]:
    """Limits of media: ``{"image": 2}``, ``{"video": {"count": 1, ...}}`` or ``image=2,video=1``."""
    (value,) = values
    pairs: dict[str, Any]
    if value.startswith("{"):
        pairs = {
            name: limit["count"] if isinstance(limit, dict) else limit for name, limit in json.loads(value).items()
        }
    else:
        pairs = dict(part.split("=", 1) for part in value.split(","))
    return [word for name, limit in pairs.items() for word in (row.counterpart, f"{name}={limit}")]


def _list_adapters(row: PeerFlag, values: list[str]) -> list[str]:
    """Adapters as NAME=FOLDER, several with commas, or as JSON objects with a name and a path."""
    words: list[str] = []
    for value in values:
        if value.startswith("{"):
            content = json.loads(value)
            name, folder = (
                next((content[key] for key in content if key.endswith(end)), "") for end in ("name", "path")
            )
            pairs = [f"{name}={folder}" if name and folder else ""]
        else:
            pairs = value.split(",")
        for pair in pairs:
            if "=" not in pair:
                raise NoCounterpart(f"adapters have a name and a folder here: {row.counterpart} NAME=FOLDER")
            words += [row.counterpart, pair]
    return words


def _choose_speculation(row: PeerFlag, values: list[str]) -> list[str]:
    content = json.loads(values[0])
    method, draft = content.get("method", ""), content.get("model", "")
    if method in ("ngram", "[ngram]"):
        words = [row.counterpart, "ngram"]
    elif draft and method in ("", "draft_model"):
        words = [row.counterpart, f"draft={draft}"]
    else:
        raise NoCounterpart(row.missing_reason)
    tokens = content.get("num_speculative_tokens")
    return [*words, "--speculate-tokens", str(tokens)] if tokens else words


def _draft_model(row: PeerFlag, values: list[str]) -> list[str]:
    return [row.counterpart, f"draft={values[0]}"]


def _ngram_tokens(row: PeerFlag, values: list[str]) -> list[str]:
    return ["--speculate", "ngram", row.counterpart, str(int(values[0]))]


def _cache_events(row: PeerFlag, values: list[str]) -> list[str]:
    content = json.loads(values[0])
    if content.get("publisher", "zmq") != "zmq" or not content.get("endpoint"):
        raise NoCounterpart(row.missing_reason)
    words = [row.counterpart, content["endpoint"]]
    for member, flag in (("replay_endpoint", "--kv-events-replay"), ("topic", "--kv-events-topic")):
        if content.get(member):
            words += [flag, str(content[member])]
    return words


def _complete_collector(row: PeerFlag, values: list[str]) -> list[str]:
    """The address of a collector of traces, with its protocol: gRPC, if the address names none."""
    return [row.counterpart, values[0] if "://" in values[0] else f"grpc://{values[0]}"]


def _host_port(row: PeerFlag, values: list[str]) -> list[str]:
    """An address: HOST, HOST:PORT or :PORT, perhaps after http://."""
    match = re.fullmatch(r"(?:https?://)?(\[[^\]]+\]|[^:/]*)(?::(\d+))?/?", values[0])
    if match is None:
        raise ValueError(values[0])
    host, port = match[1].strip("[]"), match[2]
    return [*([row.counterpart, host] if host else []), *(["--port", port] if port else [])]


def _hub_address(row: PeerFlag, values: list[str]) -> list[str]:
    """A model of the Hugging Face hub; a name in another library is none."""
    name = re.sub(r"^(?:https?://)?(?:hf\.co|huggingface\.co)/", "", values[0])
    if name == values[0]:
        raise NoCounterpart(row.missing_reason)
    return [name]


CONVERSIONS: dict[str, Callable[[PeerFlag, list[str]], list[str]]] = {
    "copy": _copy_values,
    "comma": _split_at_commas,
    "choice": _map_choice,
    "count": _expand_count,
    "gib": _append_gib,
    "variable": _set_variable,
    "json_list": _json_list,
    "json_pairs": _json_pairs,
    "adapter": _list_adapters,
    "speculation": _choose_speculation,
    "draft_model": _draft_model,
    "ngram_tokens": _ngram_tokens,
    "cache_events": _cache_events,
    "collector": _complete_collector,
    "host_port": _host_port,
    "hub_address": _hub_address,
}
