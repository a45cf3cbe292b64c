"""Options that change while a server runs: at SIGHUP, and when a file with API keys changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from parley.boot.listening_places import find_unprotected_port
from parley.boot.server_ports import ServerPorts
from parley.serving.model_registry import ModelRegistry
from parley.serving.server_options import ServerOptions
from parley.settings.file_changes import file_changes
from parley.settings.options import ConfigError
from parley.settings.reload import ReloadedNames, take_over_fields

log = logging.getLogger("parley.server")

# The settings that SIGHUP and a changed key file change while the server runs.
KEY_OPTIONS = frozenset({"api_keys", "admin_keys", "priority_keys", "key_owners", "hashed_keys"})
# All settings that SIGHUP changes: keys, limits and times.
RELOADED_OPTIONS = frozenset(
    {
        "header_limit", "header_count", "header_timeout", "body_limit", "media_body_limit", "body_rate", "body_timeout",
        "write_timeout", "keep_alive", "ping_interval", "max_queue", "max_prompt", "max_output", "timeout",
        "token_timeout", "drain", "access_log", "log_bodies", *KEY_OPTIONS,
    }
)  # fmt: skip


class OptionReloader:
    """Reads a server's options again, and applies those that may change to its ports and models.

    ``options``: as they are now. ``read_options`` reads them; raises ConfigError.
    """

    def __init__(
        self,
        options: ServerOptions,
        read_options: Callable[[], ServerOptions],
        registry: ModelRegistry,
        ports: ServerPorts,
    ):
        self.options = options
        self.read_options, self._registry, self._ports = read_options, registry, ports

    def reload_options(self, new_options: ServerOptions) -> ReloadedNames:
        """Use options that were read again, and read all certificates again; keys and limits apply at once.

        Raises ConfigError, TlsFileError before anything has changed.
        """
        options, names = take_over_fields(self.options, new_options, RELOADED_OPTIONS)
        self._refuse_unprotected_port(options)
        self._ports.reload_certificates()
        self._use_options(options)
        return names

    async def watch_keys(self, files: tuple[Path, ...]) -> None:
        """Accept the keys of changed files, until this task is cancelled. Keys that cannot be read change nothing."""
        async for _ in file_changes(files):
            try:
                new_options = await asyncio.to_thread(self.read_options)
                options, names = take_over_fields(self.options, new_options, KEY_OPTIONS)
                self._refuse_unprotected_port(options)
            except ConfigError as error:
                log.error("Changed API keys were not loaded, and the old ones stay: %s", error)
                continue
            self._use_options(options)
            if names.changed:
                log.info("Changed API keys were loaded.")

    def _refuse_unprotected_port(self, options: ServerOptions) -> None:
        """Raise ConfigError if these options would leave a port of the cluster open to strangers."""
        if unprotected_port := find_unprotected_port(options, self._ports.places):
            raise ConfigError(unprotected_port)

    def _use_options(self, options: ServerOptions) -> None:
        self.options = options
        self._registry.use_options(options)
        self._ports.use_options(options)
