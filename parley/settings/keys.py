"""API keys and secrets as files hold them. Knows no option by name, and nobody who is asked for a key."""

from __future__ import annotations

from pathlib import Path

from parley.settings.options import ConfigError


def read_keys(file: Path, option: str) -> list[str]:
    """The keys in a file, one per line; empty lines and lines that begin with # do not count.

    ``option``: what named the file, for errors. Raises ConfigError, also where there is no key.
    """
    try:
        lines = [line.strip() for line in file.read_text("utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option}: {file} cannot be read ({type(error).__name__}).") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"{option}: {file} holds no key.")
    return keys


def cluster_secret(given: str | None, file: Path | None, option: str, file_option: str) -> str:
    """What the members of a cluster know each other by: as it is given, or the first key of a file; empty for none.

    The options say who gave what, for errors. Raises ConfigError, also for what cannot stand in a header.
    """
    if given and file is not None:
        raise ConfigError(f"{option} and {file_option}: only one of the two can be given.")
    secret = given or (read_keys(file, file_option)[0] if file is not None else "")
    if not secret.isascii() or not secret.isprintable():
        raise ConfigError(f"{option}: it has to be of printable ASCII, for it travels in headers.")
    return secret
