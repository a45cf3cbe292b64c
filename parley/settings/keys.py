"""Reads API keys and secrets from files. Knows neither options by name nor the places where keys are checked."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from parley.errors import failure_reason
from parley.settings.bounded_files import read_bounded_file
from parley.settings.options import ConfigError

MAX_KEY_FILE = 64 << 20  # bytes
RESERVED_GROUPS = frozenset(("users", "admins"))  # all keys, and those that may change the server


def read_keys(file: Path, option: str) -> list[str]:
    """Read the keys in a file, one per line. Empty lines and lines that begin with # are skipped.

    ``option``: the option that names the file, for errors. Raises ConfigError, also if the file holds no key.
    """
    try:
        lines = [line.strip() for line in read_bounded_file(file, MAX_KEY_FILE).decode().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option}: {file} cannot be read: {failure_reason(error)}.") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"{option}: {file} holds no key.")
    return keys


class ApiKeyLine(NamedTuple):
    """A line of a key file: a key, and words after it.

    ``priority``: its priorities count among those of all keys. ``name=NAME`` and ``groups=NAME,NAME``: its owner.
    """

    key: str
    has_priority: bool = False
    name: str = ""
    groups: tuple[str, ...] = ()


def read_api_keys(file: Path, option: str) -> list[ApiKeyLine]:
    """Read API keys with their permissions, as ``read_keys`` does. Raises ConfigError, also for other words."""
    lines = []
    for number, line in enumerate(read_keys(file, option), 1):
        key, *words = line.split()
        values = dict(word.partition("=")[::2] for word in words)
        groups = tuple(filter(None, values.get("groups", "").split(",")))
        accepted_words = {"priority"} | {f"{name}={values[name]}" for name in ("name", "groups") if values.get(name)}
        if len(values) < len(words) or not accepted_words.issuperset(words) or RESERVED_GROUPS.intersection(groups):
            raise ConfigError(
                f"{option}: {file}: only 'priority', 'name=NAME' and 'groups=NAME,NAME' may follow a key, each once, "
                f"and no group is called 'users' or 'admins'; key {number} is wrong."
            )
        lines.append(ApiKeyLine(key, "priority" in words, values.get("name", ""), groups))
    return lines


def cluster_secret(inline_secret: str | None, file: Path | None, option: str, file_option: str) -> str:
    """Return the secret that the members of a cluster share: the given one, or the first key of a file; "" for none.

    The option names are for errors. Raises ConfigError, also if a header cannot contain the secret.
    """
    if inline_secret and file is not None:
        raise ConfigError(f"{option} and {file_option}: only one of the two can be given.")
    secret = inline_secret or (read_keys(file, file_option)[0] if file is not None else "")
    if not secret.isascii() or not secret.isprintable():
        raise ConfigError(f"{option}: must be printable ASCII, since it is sent in headers.")
    return secret
