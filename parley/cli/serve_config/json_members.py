"""Checks of a JSON file's objects, member by member, with error messages. It knows no member by name."""

from __future__ import annotations

import codecs
import ipaddress
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from parley.errors import failure_reason
from parley.settings.bounded_files import read_bounded_file
from parley.settings.options import ConfigError

MAX_FILE = 10 << 20  # bytes

MemberCheck = Callable[[Any], Any]  # returns the value, or raises ValueError with a description of valid values


def integer_between(low: int, high: int | None = None) -> MemberCheck:
    """Return a check for integers from ``low`` to ``high``."""
    expected = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"

    def check_integer(value: Any) -> int:
        if type(value) is not int or value < low or (high is not None and value > high):
            raise ValueError(expected)
        return value

    return check_integer


def check_memory_size(value: Any) -> float:
    """Check a memory size in GB, or -1."""
    if type(value) not in (int, float) or (value != -1 and not value > 0):
        raise ValueError("-1 or a number of GB above 0")
    result: float = value
    return result


def check_flag(value: Any) -> bool:
    """Check a boolean."""
    if type(value) is not bool:
        raise ValueError("true or false")
    return value


def check_string(value: Any) -> str:
    """Check a string."""
    if not isinstance(value, str):
        raise ValueError("a string")
    return value


def one_of(*allowed: Any) -> MemberCheck:
    """Return a check for a value equal to one of ``allowed``, and of the same type."""

    def check_choice(value: Any) -> Any:
        if not any(value is choice or (type(value) is type(choice) and value == choice) for choice in allowed):
            raise ValueError(f"one of {', '.join(str(msgspec.json.encode(choice), 'utf-8') for choice in allowed)}")
        return value

    return check_choice


def check_ip_address(value: Any) -> str:
    """Check an IP address. Return its canonical form."""
    try:
        return str(ipaddress.ip_address(check_string(value)))
    except ValueError:
        raise ValueError("an IPv4 or IPv6 address") from None


def check_name(value: Any) -> str:
    """Check a model or adapter name."""
    marks = set("-._")
    good = isinstance(value, str) and 0 < len(value) <= 256 and value.isascii()
    if (
        not good
        or not set(value[0] + value[-1]).isdisjoint(marks)
        or not "".join(c for c in value if c not in marks).isalnum()
    ):
        raise ValueError("1 to 256 letters, digits, - . and _, none of these marks at the ends")
    result: str = value
    return result


def check_file_names(value: Any) -> list[str]:
    """Check a list of file names."""
    if (
        not isinstance(value, list)
        or not 1 <= len(value) <= 3
        or not all(isinstance(item, str) and item for item in value)
    ):
        raise ValueError("a list of 1 to 3 file names")
    return value


def check_adapters(value: Any) -> list[tuple[str, str]]:
    """Check a list of LoRA adapters. Return names and folders. Their model is ignored, because there is only one."""
    if not isinstance(value, list):
        raise ValueError("a list of objects")
    names_and_folders = []
    for item in value:
        if not isinstance(item, dict) or not isinstance(path := item.get("path"), str) or not path:
            raise ValueError("a list of objects with name and path")
        names_and_folders.append((check_name(item.get("name")), path))
    return names_and_folders


@dataclass
class ConfigSection:
    """An object of the file. It remembers the members read, so that the others can be listed."""

    path: str
    members: Mapping[str, Any]
    read_members: set[str] = field(default_factory=set)

    def get_member(self, member: str, check: MemberCheck, default: Any) -> Any:
        """Return a member's value, or ``default`` if it is absent. Raises ConfigError."""
        self.read_members.add(member)
        value = self.members.get(member)
        if value is None:
            return default
        try:
            return check(value)
        except ValueError as expectation:
            raise self.member_error(member, f"{show_value(value)} is not {expectation}") from None

    def check_unused(self, member: str, check: MemberCheck) -> None:
        """Check a member that has no effect. It counts as unread. Raises ConfigError."""
        self.get_member(member, check, None)
        self.read_members.discard(member)

    def get_section(self, member: str) -> ConfigSection:
        """Return a member that is an object, empty if absent. Raises ConfigError."""
        self.read_members.add(member)
        value = self.members.get(member)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.member_error(member, f"{show_value(value)} is not an object")
        return ConfigSection(f"{self.path}{member}.", value)

    def member_error(self, member: str, reason: str) -> ConfigError:
        """Return the error for a member's value."""
        return ConfigError(f"{self.path}{member}: {reason}.")

    def unread_members(self) -> list[str]:
        """Return the members that were not read."""
        return [self.path + member for member in self.members if member not in self.read_members]


def show_value(value: Any) -> str:
    """Return a value as JSON, cut to 60 characters."""
    encoded = msgspec.json.encode(value).decode()
    return encoded if len(encoded) <= 60 else encoded[:59] + "…"


def load_json_object(file: str) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ConfigError."""
    try:
        data = read_bounded_file(file, MAX_FILE)
        content = msgspec.json.decode(data.removeprefix(codecs.BOM_UTF8))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {failure_reason(error)}.") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid JSON: {error}.") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{file} holds no JSON object.")
    return content
