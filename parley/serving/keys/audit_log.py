"""The audit log: one JSON line for each call that may change the server, whether it was allowed or not.

The file is opened for each line and only appended to, so that it may be rotated. Such calls are rare, but anyone may
try them: if there are many without an admin key, only some are recorded, and a line says how many were left out.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any

from parley.serving.file_faults import fault_reason
from parley.web.exchange import Exchange
from parley.web.refusal_limit import RefusalLimit

log = logging.getLogger("parley.server")

MAX_PATH = 1000  # characters of path and query


class AuditLog:
    """The audit log in a file; "" for none."""

    def __init__(self, file: str):
        self._file = file
        self._refusal_limit = RefusalLimit(self._record_omission)

    def record_call(self, exchange: Exchange) -> None:
        """Append a line about a call that has ended. A line that cannot be written is logged instead."""
        if not self._file:
            return
        is_refused = exchange.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
        if is_refused and not self._refusal_limit.allows_line(exchange.client_host, str(exchange.status)):
            return
        entry, scope = exchange.log_entry, exchange.scope
        query = scope.get("query_string", b"").decode("latin-1")
        self._append_record(
            {
                "key": entry.key,
                "key_id": exchange.tenant.id[:12],
                "client": exchange.client_host,
                "method": scope["method"],
                "path": (scope["path"] + ("?" + query if query else ""))[:MAX_PATH],
                "api": exchange.dialect.name,
                "body": exchange.audited_body.decode("utf-8", "replace"),
                "status": exchange.status or 499,
                "error": entry.error,
                "id": exchange.request_id,
            }
        )

    def _record_omission(self, text: str) -> None:
        """Append a line about lines that were left out."""
        self._append_record({"error": text})

    def _append_record(self, record: dict[str, Any]) -> None:
        line = json.dumps({"time": datetime.now(UTC).isoformat(timespec="milliseconds")} | record)
        try:
            append_line(self._file, line)
        except OSError as error:
            log.error("The audit log %s cannot be written (%s): %s", self._file, fault_reason(self._file, error), line)


def append_line(file: str, line: str = "") -> None:
    """Append a line to a file, which is made readable by its owner only; "" makes the file. Raises OSError."""
    # Without O_NONBLOCK, a pipe that nobody reads would stop the server.
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o600)
    try:
        data = line.encode() + b"\n" if line else b""
        written = os.write(descriptor, data) if data else 0  # one call, so that lines of several servers do not mix
        if written < len(data):  # the disk has become full
            with contextlib.suppress(OSError):  # such as a file that may only be appended to
                os.ftruncate(descriptor, os.lseek(descriptor, 0, os.SEEK_CUR) - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(descriptor)
