"""Options of ``parley serve`` about clients: their keys, and the files that keep their usage and requests."""

from __future__ import annotations

from parley.settings.option_kinds import (
    duration_kind,
    size_kind,
    switch_kind,
    text_kind,
)
from parley.settings.options import Option

ACCESS_OPTIONS: list[Option] = [
    Option(
        "endpoints",
        text_kind("FILE"),
        "File that stores the endpoints created over Databricks' API.",
        section="server",
        unset_text="kept until the server stops",
        configurable=True,
    ),
    Option(
        "inference-tables",
        text_kind("FOLDER"),
        "Folder for inference tables: the requests and answers of endpoints whose recording is switched on over "
        "Databricks' API.",
        section="server",
        unset_text="endpoints record nothing",
        configurable=True,
    ),
    Option(
        "response-store",
        size_kind(),
        "Space for objects that clients refer to later: responses, conversations, chat completions, files and "
        "batches. 0: nothing is stored.",
        64 << 20,
        section="server",
        configurable=True,
    ),
    Option(
        "response-store-file",
        text_kind("FILE"),
        "SQLite file that keeps these objects across restarts. Servers that use the same file share them.",
        section="server",
        unset_text="kept in memory until the server stops",
        configurable=True,
    ),
    Option(
        "response-lifetime",
        duration_kind(1.0),
        "The longest time that these objects are kept.",
        7 * 24 * 3600.0,
        section="server",
        configurable=True,
    ),
    Option(
        "api-key",
        text_kind("KEY"),
        "Key that clients must send.",
        section="server",
        repeatable=True,
        configurable=True,
        secret=True,
    ),
    Option(
        "api-key-file",
        text_kind("FILE"),
        "File with one key per line, or, if its name ends in .toml, with hashes of keys that `parley key` makes and "
        "their limits; it is read again when it changes. In the plain form, a key with the word `priority` after it, "
        "and every admin key, may overtake the requests of other keys by `priority`; those of any other key reorder "
        "only its own requests. "
        "`name=NAME` and `groups=NAME,NAME` say who has the key: endpoints have permissions for them.",
        section="server",
        configurable=True,
    ),
    Option(
        "admin-key-file",
        text_kind("FILE"),
        "File with keys, one per line. Only these, and keys with `admin` in a TOML file, may change the server: "
        "adapters, endpoints, caches, pauses, roles, shutdown.",
        section="server",
        unset_text="no client; without API keys, the clients on this machine",
        configurable=True,
    ),
    Option(
        "audit-log",
        text_kind("FILE"),
        "File that a JSON line is appended to for each call that may change the server.",
        section="server",
        unset_text="such calls are only in the access log",
        configurable=True,
    ),
    Option(
        "usage-db",
        text_kind("FILE"),
        "Database of the requests and tokens of each key, day and model, which admins read at /v1/usage.",
        section="server",
        unset_text="usage is not kept",
        configurable=True,
    ),
    Option(
        "share-prefixes",
        switch_kind(),
        "Let requests with different API keys share cached prefixes. A key then learns from `cached_tokens` and from "
        "response times which prompts other keys have sent.",
        False,
        section="server",
        configurable=True,
    ),
]
