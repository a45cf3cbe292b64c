"""The key file in TOML: API keys with their limits, stored as salted hashes.

A key is ``parley-ID-SECRET``. The file has the id, which finds a key, and a hash of the secret. The secret is 256
random bits and cannot be guessed, so a fast hash is enough. Other lines stay as they are when keys are added and
removed. Knows neither requests nor APIs.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import json
import os
import re
import secrets
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from datetime import UTC, date, datetime, time
from pathlib import Path
from typing import Any

from parley.errors import failure_reason
from parley.settings.bounded_files import read_bounded_file
from parley.settings.keys import MAX_KEY_FILE, RESERVED_GROUPS
from parley.settings.options import ConfigError

KEY_PREFIX = "parley-"
ID_BYTES, SECRET_BYTES, SALT_BYTES = 6, 32, 16
KEY_TABLE = re.compile(r"^[ \t]*\[\[[ \t]*keys[ \t]*\]\]", re.MULTILINE)
KEY_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
HEX_DIGITS = re.compile(r"[0-9a-f]+")
MAX_LIMIT = 10**15
MAX_PRIORITY = 1_000_000
COUNT_MEMBERS = ("requests_per_minute", "tokens_per_minute", "tokens_per_day", "concurrent_requests")
LIST_MEMBERS = ("models", "apis", "groups")
SWITCH_MEMBERS = ("admin", "chooses_priority")


@dataclass(frozen=True, kw_only=True)
class HashedKey:
    """One key of the file, a table ``[[keys]]``.

    * ``hash``: the SHA-256 digest of salt and secret; both are hexadecimal.
    * ``models``, ``apis``: the models and APIs that it may use; none: all.
    * ``admin``: it may change the server.
    * ``priority``: that of its requests among those of all keys; a lower number runs sooner.
    * ``chooses_priority``: requests may choose their priority themselves.
    * ``expires``: from this time on the key is refused.
    """

    name: str
    id: str
    salt: str
    hash: str
    models: tuple[str, ...] = ()
    apis: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    admin: bool = False
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    concurrent_requests: int | None = None
    priority: int = 0
    chooses_priority: bool = False
    expires: datetime | None = None

    def matches(self, secret: str) -> bool:
        """Whether this is the key's secret. The comparison takes the same time for any secret."""
        return hmac.compare_digest(hash_secret(self.salt, secret), self.hash)


NO_KEY = HashedKey(name="", id="", salt="00", hash="00" * 32)  # takes as long to refuse as a real one


def hash_secret(salt: str, secret: str) -> str:
    """Return the hexadecimal hash of a key's secret. ``salt``: hexadecimal."""
    return hashlib.sha256(bytes.fromhex(salt) + secret.encode("utf-8", "surrogateescape")).hexdigest()


def split_key(key: str) -> tuple[str, str]:
    """Return the id and the secret of a key; two empty texts for a key of another form."""
    if not key.startswith(KEY_PREFIX):
        return "", ""
    key_id, dash, secret = key[len(KEY_PREFIX) :].partition("-")
    return (key_id, secret) if dash else ("", "")


def make_key(name: str, **members: Any) -> tuple[str, HashedKey]:
    """Return a new key and its entry in the file. ``members``: those of ``HashedKey``. Raises ConfigError."""
    key_id = secrets.token_hex(ID_BYTES)
    secret = secrets.token_urlsafe(SECRET_BYTES)
    salt = secrets.token_hex(SALT_BYTES)
    table = {"name": name, "id": key_id, "salt": salt, "hash": hash_secret(salt, secret), **members}
    return f"{KEY_PREFIX}{key_id}-{secret}", _read_key(table, f"The key {name}")


def read_key_table(file: Path, option: str) -> tuple[HashedKey, ...]:
    """Read all keys of a file, which may have none. ``option`` names the file in errors. Raises ConfigError."""
    return parse_keys(_read_text(file, option), f"{option}: {file}")


def parse_keys(text: str, source: str) -> tuple[HashedKey, ...]:
    """Return the keys in the text of a file. Raises ConfigError, which names ``source``, key and member."""
    try:
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source} is not valid TOML: {error}.") from None
    tables = content.pop("keys", [])
    if content:
        raise ConfigError(f"{source}: unknown key {next(iter(content))}; the file has only tables [[keys]].")
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"{source}: keys is not a list of tables; write [[keys]] above each.")
    keys = tuple(_read_key(table, f"{source}: key {number}") for number, table in enumerate(tables, 1))
    for member in ("name", "id"):
        counts = Counter(getattr(key, member) for key in keys)
        if repeated_name := next((value for value, count in counts.items() if count > 1), None):
            raise ConfigError(f"{source}: two keys have the {member} {repeated_name}.")
    return keys


def add_key(file: Path, key: HashedKey) -> None:
    """Add a key to a file, which is made if it does not exist. Raises ConfigError, also for a name that is taken."""
    with _locked_folder(file):
        text = _read_text(file, "--file") if file.exists() else ""
        if key.name in {known_key.name for known_key in parse_keys(text, str(file))}:
            raise ConfigError(f"{file}: there is a key {key.name} already.")
        separator = "" if not text else "\n" if text.endswith("\n") else "\n\n"
        _write_text(file, f"{text}{separator}{_format_key(key)}")


def remove_key(file: Path, name: str) -> None:
    """Remove a key by its name. Raises ConfigError if there is none."""
    with _locked_folder(file):
        text = _read_text(file, "--file")
        names = [key.name for key in parse_keys(text, str(file))]
        if name not in names:
            raise ConfigError(f"{file}: there is no key {name}. Known: {', '.join(names) or 'none'}.")
        starts = [match.start() for match in KEY_TABLE.finditer(text)]
        if len(starts) != len(names):  # written as keys = [{…}], or with the mark inside a text
            raise ConfigError(f"{file}: the keys are not written as tables [[keys]]; remove {name} with an editor.")
        start, end = ([*starts, len(text)][names.index(name) + offset] for offset in (0, 1))
        remaining = text[:start] + text[end:]
        parse_keys(remaining, str(file))
        _write_text(file, remaining)


def _read_key(table: Mapping[str, Any], where: str) -> HashedKey:
    """Read one table. Raises ConfigError."""
    name = table.get("name")
    if not isinstance(name, str) or not KEY_NAME.fullmatch(name):
        raise ConfigError(f"{where}: name is not 1 to 64 characters of A-Z, a-z, 0-9, '.', '_', '@' and '-'.")
    where = f"{where} ({name})"
    member_names = {field.name for field in fields(HashedKey)}
    if unknown := next((member for member in table if member not in member_names), None):
        raise ConfigError(f"{where}: unknown member {unknown}. Known: {', '.join(sorted(member_names))}.")
    required = [field.name for field in fields(HashedKey) if field.default is MISSING]
    if missing := next((member for member in required if member not in table), None):
        raise ConfigError(f"{where}: {missing} is missing; `parley key add` writes it.")
    return HashedKey(**{member: _read_member(member, value, where) for member, value in table.items()})


def _read_member(member: str, value: Any, where: str) -> Any:
    """Return the value of a member. Raises ConfigError."""
    if member in COUNT_MEMBERS:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MAX_LIMIT:
            raise ConfigError(f"{where}: {member} is not a whole number from 1 to {MAX_LIMIT}.")
    elif member == "priority":
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) > MAX_PRIORITY:
            raise ConfigError(f"{where}: priority is not a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}.")
    elif member in SWITCH_MEMBERS:
        if not isinstance(value, bool):
            raise ConfigError(f"{where}: {member} is not true or false.")
    elif member in LIST_MEMBERS:
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) and item for item in value):
            raise ConfigError(f"{where}: {member} is not a list of names.")
        if member == "groups" and RESERVED_GROUPS.intersection(value):
            raise ConfigError(f"{where}: groups: no group is called {' or '.join(sorted(RESERVED_GROUPS))}.")
        return tuple(value)
    elif member == "expires":
        return _read_time(value, where)
    elif member in ("id", "salt", "hash"):
        if not isinstance(value, str) or not HEX_DIGITS.fullmatch(value) or len(value) % 2:
            raise ConfigError(f"{where}: {member} is not an even number of hexadecimal digits.")
        if member == "hash" and len(value) != 64:
            raise ConfigError(f"{where}: hash has {len(value)} digits; SHA-256 has 64.")
    return value


def _read_time(value: Any, where: str) -> datetime:
    """Return a date or time of TOML, or its text. Without an offset it is in UTC; a date means its beginning."""
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            value = None
    if isinstance(value, date) and not isinstance(value, datetime):
        value = datetime.combine(value, time())
    if not isinstance(value, datetime):
        raise ConfigError(f"{where}: expires is not a date or time, such as 2030-01-31 or 2030-01-31T12:00:00Z.")
    return value if value.tzinfo is not None else value.replace(tzinfo=UTC)


def _format_key(key: HashedKey) -> str:
    """Return a key as a table of the file, without members that have their default."""
    lines = ["[[keys]]"]
    for field in fields(HashedKey):
        value = getattr(key, field.name)
        if field.default is MISSING or value != field.default:
            lines.append(f"{field.name} = {_format_value(value)}")
    return "\n".join(lines) + "\n"


def _format_value(value: Any) -> str:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Iterable) and not isinstance(value, str):
        return f"[{', '.join(map(_format_value, value))}]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML allows no DEL


def _read_text(file: Path, option: str) -> str:
    try:
        return read_bounded_file(file, MAX_KEY_FILE).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option}: {file} cannot be read: {failure_reason(error)}.") from None


@contextlib.contextmanager
def _locked_folder(file: Path) -> Iterator[None]:
    """Keep other processes from changing the file meanwhile. The folder is locked, because the file itself is
    replaced."""
    try:
        folder = os.open(file.absolute().parent, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"--file: the folder of {file} cannot be opened: {error.strerror}.") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _write_text(file: Path, text: str) -> None:
    """Replace the file as a whole, so that no reader sees a part of it. A new one is readable by its owner only."""
    try:
        mode = file.stat().st_mode & 0o777 if file.exists() else 0o600
        descriptor, name = tempfile.mkstemp(dir=file.absolute().parent, prefix=f".{file.name}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as output:
                output.write(text)
                output.flush()
                os.fchmod(output.fileno(), mode)
                os.fsync(output.fileno())
            Path(name).replace(file)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ConfigError(f"--file: {file} cannot be written: {error.strerror}.") from None
