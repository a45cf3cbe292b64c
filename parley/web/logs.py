"""Logging: one line per request, and all other messages in the same format, as text or JSON.

Lines contain no prompts, answers or keys; only an error may quote an excerpt of an invalid value. Values chosen by a
client (path, model, id) are escaped. A thread writes the lines: a terminal or pipe that is not read may block that
thread, but never the server.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.types import Scope

from parley.dialects.dialect import Dialect
from parley.errors import ParleyError, hide_data
from parley.log_lines import LogFormat, LogLevel, announce_to_children, make_formatter, set_level
from parley.web.refusal_limit import RefusalLimit

log = logging.getLogger("parley.access")
_refusal_limit = RefusalLimit()  # for all ports of the process

MAX_LOGGED_PATH = 200  # characters of a path that are logged
MAX_LOGGED_MODEL = 200  # characters of a model's name that are logged
LOGGED_BODY = 2000  # characters of a body that are logged
LOGGED_BODY_BYTES = 4 * LOGGED_BODY
MAX_LOGGED_ERROR = 500  # characters of an error that are logged
MAX_QUEUED_LINES = 10_000  # lines in the queue; above this, new lines are dropped
WRITE_INTERVAL = 0.05  # seconds between writes, so that several lines are written together
FLUSH_SECONDS = 0.5  # seconds to write the last lines at the end of the process


def set_up_logging(log_format: LogFormat, level: LogLevel = "info") -> None:
    """Set up logging to standard error, also for the processes that this one starts."""
    announce_to_children(log_format, level)
    logging.raiseExceptions = False
    handler = QueueingHandler(make_formatter(log_format))
    threading.Thread(target=handler.run_writer, name="parley-log", daemon=True).start()
    atexit.register(handler.wait_written)
    # No format shows the source of a line, so logging need not look it up.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None
    logging.getLogger().handlers = [handler]
    set_level(level)
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)  # its errors are handled and logged by us


class QueueingHandler(logging.Handler):
    """A logging handler that queues records; the log thread formats and writes them to file descriptor 2, in batches.

    That thread may block for ever. So it holds no lock that a log call or the end of the process waits for: neither its
    own nor that of ``sys.stderr``.
    """

    def __init__(self, formatter: logging.Formatter):
        super().__init__()
        self._formatter = formatter
        self._records: deque[logging.LogRecord] = deque()
        self._wakeups: queue.SimpleQueue[None] = queue.SimpleQueue()  # wakes the thread for the first record of a batch
        self._all_written = True
        self._dropped_lines = 0
        self._lost_lines, self._write_error = 0, ""  # lines that could not be written, and why
        self._is_within_line = False  # the last write was cut short

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record; drop and count it if the queue is full."""
        if len(self._records) >= MAX_QUEUED_LINES:
            self._dropped_lines += 1
            return
        self._records.append(record)
        if len(self._records) == 1:
            self._all_written = False
            self._wakeups.put(None)

    def run_writer(self) -> None:
        """Write batches of records for ever; runs in a thread."""
        while True:
            self._wakeups.get()
            time.sleep(WRITE_INTERVAL)  # waking for every line would cost the event loop more than the line itself
            lines = b""
            while self._records:
                lines += self._encode_record(self._records.popleft())
            if self._dropped_lines:
                dropped, self._dropped_lines = self._dropped_lines, 0
                text = "%d log lines were dropped: they came faster than they could be written."
                lines += self._encode_warning(text, dropped)
            self._write_lines(lines)
            self._all_written = not self._records

    def _write_lines(self, lines: bytes) -> None:
        """Write lines. Those that cannot be written are lost; the next line that can be written says how many."""
        if self._lost_lines:
            text = "%d log lines are lost: they could not be written (%s)."
            if self._write_bytes(self._encode_warning(text, self._lost_lines, self._write_error)):
                self._lost_lines += lines.count(b"\n")
                return
        self._lost_lines = self._write_bytes(lines).count(b"\n")

    def _write_bytes(self, data: bytes) -> bytes:
        """Write whole lines. Return the bytes that could not be written because the pipe is closed or the disk is
        full.
        """
        try:
            if self._is_within_line:
                os.write(2, b"\n")
                self._is_within_line = False
            while data:
                count = os.write(2, data)
                self._is_within_line = data[count - 1 : count] != b"\n"
                data = data[count:]
        except OSError as error:
            self._write_error = error.strerror or str(error)
        return data

    def _encode_warning(self, text: str, *args: object) -> bytes:
        return self._encode_record(logging.LogRecord("parley.log", logging.WARNING, "", 0, text, args, None))

    def _encode_record(self, record: logging.LogRecord) -> bytes:
        return f"{self._format_record(record)}\n".encode("utf-8", "backslashreplace")

    def _format_record(self, record: logging.LogRecord) -> str:
        """Format a record. If that fails, the line names its logger instead, and the records after it are kept."""
        try:
            return self._formatter.format(record)
        except Exception as error:
            record.exc_info = None
            record.msg, record.args = f"a line of {record.name} cannot be written: {type(error).__name__}", ()
            return self._formatter.format(record)

    def wait_written(self) -> None:
        """Wait for the last lines to be written, FLUSH_SECONDS at most."""
        deadline = time.monotonic() + FLUSH_SECONDS
        while not self._all_written and time.monotonic() < deadline:
            time.sleep(0.005)


@dataclass(slots=True)
class AccessLogEntry:
    """The fields of an access log line, except method, path, status and time."""

    api: str = ""
    client: str = ""  # its IP address
    key: str = ""  # the name of its API key, never the key itself
    model: str = ""
    error: str = ""  # the message that the client got
    field: str = ""  # the member of the request that the error is about
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    ttft_seconds: float | None = None  # seconds from the request's arrival
    finish_reason: str = ""
    request_body: bytes = b""  # the beginning, if bodies are logged
    answer_body: bytes = b""
    is_probe: bool = False  # a health probe or scrape, sent every few seconds: not logged

    def note_model(self, name: str) -> None:
        """Note the model that the client named, which may not exist."""
        self.model = name[:MAX_LOGGED_MODEL]

    def record_error(self, error: ParleyError) -> None:
        """Record the error that ends the request."""
        self.error, self.field = error.message, error.field or ""

    def record_answer(self, data: bytes) -> None:
        """Record a part of the answer's body, as far as it is logged."""
        self.answer_body += data[: LOGGED_BODY_BYTES - len(self.answer_body)]


class FinishedRequest(Protocol):
    """A finished request, as the access log needs it. Status 0: no response was sent."""

    request_id: str
    scope: Scope
    dialect: Dialect
    status: int
    arrived_at: float
    log_entry: AccessLogEntry

    @property
    def client_host(self) -> str:
        """The client's IP address, "" if it is not known."""


def log_access(exchange: FinishedRequest) -> None:
    """Log a finished request, unless it was a probe. Status 499: the client left before the response."""
    if not exchange.log_entry.is_probe:
        scope, entry = exchange.scope, exchange.log_entry
        entry.api, entry.client = exchange.dialect.name, exchange.client_host
        log_request(
            exchange.request_id,
            scope["method"],
            scope["path"],
            exchange.status or 499,
            exchange.arrived_at,
            entry,
        )


class AccessLogMessage:
    """The message of an access log line. It is formatted in the log thread, not where requests are served."""

    __slots__ = ("_id", "_log_entry", "_method", "_path", "_seconds", "_status")

    def __init__(
        self, request_id: str, method: str, path: str, status: int | str, seconds: float, log_entry: AccessLogEntry
    ):
        self._id, self._method, self._path = request_id, method, path[:MAX_LOGGED_PATH]
        self._status, self._seconds, self._log_entry = status, seconds, log_entry

    @property
    def log_fields(self) -> dict[str, Any]:
        """The line's fields by their names in JSON."""
        log_entry = self._log_entry
        fields = {
            "id": self._id,
            "method": self._method,
            "path": self._path,
            "status": self._status,
            "seconds": round(self._seconds, 4),
            "api": log_entry.api,
            "client": log_entry.client,
            "key": log_entry.key,
            "model": log_entry.model,
            "in": log_entry.prompt_tokens,
            "out": log_entry.completion_tokens,
            "ttft": None if log_entry.ttft_seconds is None else round(log_entry.ttft_seconds, 4),
            "finish": log_entry.finish_reason,
            "field": log_entry.field,
            "error": log_entry.error[:MAX_LOGGED_ERROR],
        }
        for name, body in (("request", log_entry.request_body), ("answer", log_entry.answer_body)):
            if body:
                fields[name] = hide_data(body.decode("utf-8", "replace"))[:LOGGED_BODY]
        return fields

    def __str__(self) -> str:
        pairs = [f"{name}={value}" for name, value in list(self.log_fields.items())[3:] if value not in (None, "")]
        return f"{self._id} {self._method} {self._path} {' '.join(pairs)}"


def log_request(
    request_id: str, method: str, path: str, status: int | str, arrived_at: float, log_entry: AccessLogEntry
) -> None:
    """Log a request that has been answered. ``arrived_at``: by `time.perf_counter`.

    ``status``: a number, or the name of a gRPC status. Lines of refused requests are limited.
    """
    refused = status >= 400 if isinstance(status, int) else status != "OK"
    if refused and not _refusal_limit.allows_line(log_entry.client, str(status)):
        return
    log.info(AccessLogMessage(request_id, method, path, status, time.perf_counter() - arrived_at, log_entry))


def log_refused_connection(client: str, status: int, message: str) -> None:
    """Log that a connection was refused, whose request could not be read. ``client``: its IP address."""
    log_request("-", "-", "-", status, time.perf_counter(), AccessLogEntry(client=client, error=message))
