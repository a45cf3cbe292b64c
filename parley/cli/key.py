"""``parley key``: makes, lists and removes the keys of a key file in TOML."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path

from parley.settings.key_file import (
    COUNT_MEMBERS,
    LIST_MEMBERS,
    MAX_PRIORITY,
    HashedKey,
    add_key,
    make_key,
    read_key_table,
    remove_key,
)
from parley.settings.option_kinds import integer_kind, switch_kind, text_kind
from parley.settings.options import ConfigError, Option, ResolvedOptions

USAGE = """\
usage: parley key add NAME [limits]     make a key, print it, and add its hash and its limits to the file
       parley key list                  show the keys of the file
       parley key remove NAME           remove a key

`parley serve --api-key-file keys.toml` accepts these keys, and reads the file again when it changes. A key is shown
only when it is made: the file has its hash."""

LIMITS = "limits"
OPTIONS = [
    Option("action", text_kind("add|list|remove"), "Action to take.", positional=True),
    Option("name", text_kind("NAME"), "Name of the key in logs, metrics and errors.", positional=True),
    Option("file", text_kind("FILE"), "The key file, in TOML.", "keys.toml"),
    Option("models", text_kind("NAME"), "Models and adapters that it may use.", section=LIMITS, repeatable=True),
    Option(
        "apis",
        text_kind("API"),
        "APIs that it may use, as `parley routes` names them.",
        section=LIMITS,
        repeatable=True,
    ),
    Option("groups", text_kind("NAME"), "Groups that endpoints grant permissions to.", section=LIMITS, repeatable=True),
    Option("admin", switch_kind(), "It may change the server.", False, section=LIMITS),
    Option("requests-per-minute", integer_kind(1), "Requests that it may begin per minute.", section=LIMITS),
    Option("tokens-per-minute", integer_kind(1), "Tokens of its prompts and answers per minute.", section=LIMITS),
    Option("tokens-per-day", integer_kind(1), "Tokens of its prompts and answers per day (UTC).", section=LIMITS),
    Option("concurrent-requests", integer_kind(1), "Requests that may be open at a time.", section=LIMITS),
    Option(
        "priority",
        integer_kind(-MAX_PRIORITY, MAX_PRIORITY),
        "Priority of its requests among those of all keys; lower numbers run sooner.",
        0,
        section=LIMITS,
    ),
    Option("chooses-priority", switch_kind(), "Its requests may set their own priority.", False, section=LIMITS),
    Option(
        "expires",
        text_kind("TIME"),
        "Time from which the key is refused, such as 2030-01-31 or 2030-01-31T12:00:00Z.",
        section=LIMITS,
    ),
]


def run_command(config: ResolvedOptions) -> int:
    """Run the action that the options name. Return the exit code."""
    file, name = Path(config["file"]), config["name"]
    if file.suffix != ".toml":
        raise ConfigError(
            f"--file: {file} does not end in .toml: servers recognize key files with hashes by this ending."
        )
    if config["action"] == "list" and name is None:
        return _list_keys(file)
    if config["action"] not in ("add", "remove") or name is None:
        missing = "name" if config["action"] in ("add", "remove") else "action"
        raise ConfigError(f"The {missing} is missing: add NAME, list or remove NAME.")
    if config["action"] == "remove":
        remove_key(file, name)
        print(f"parley: the key {name} is removed; servers refuse it a second or two from now.", file=sys.stderr)
        return 0
    from parley.cli.serve_config.server_options import check_api_names

    check_api_names(config["apis"], "--apis")
    members = {option.name.replace("-", "_"): config[option.name] for option in OPTIONS if option.section == LIMITS}
    key, hashed_key = make_key(name, **{member: value for member, value in members.items() if value is not None})
    if hashed_key.expires is not None and hashed_key.expires <= datetime.now(UTC):
        raise ConfigError(
            f"--expires: {hashed_key.expires.isoformat()} has passed, so the key would never be accepted."
        )
    add_key(file, hashed_key)
    print(f"parley: this is the key {name}. It is shown only now; {file} has its hash.", file=sys.stderr)
    print(key)
    return 0


def _list_keys(file: Path) -> int:
    keys = read_key_table(file, "--file")
    rows = [("name", "id", "limits"), *((key.name, key.id, _describe_limits(key)) for key in keys)]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    for name, key_id, limits in rows:
        print(f"{name:<{widths[0]}}  {key_id:<{widths[1]}}  {limits}")
    return 0


def _describe_limits(key: HashedKey) -> str:
    counts = {member: getattr(key, member) for member in COUNT_MEMBERS}
    parts = [f"{member.replace('_', ' ')} {count}" for member, count in counts.items() if count is not None]
    lists = {member: getattr(key, member) for member in LIST_MEMBERS}
    parts += [f"{member} {','.join(names)}" for member, names in lists.items() if names]
    parts += ["admin"] if key.admin else []
    parts += [f"priority {key.priority}"] if key.priority else []
    parts += ["chooses its priority"] if key.chooses_priority else []
    if key.expires is not None:
        parts += [f"{'until' if key.expires > datetime.now(UTC) else 'expired'} {key.expires.isoformat()}"]
    return "; ".join(parts) or "none"
