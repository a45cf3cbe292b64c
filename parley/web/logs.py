"""Logging: one line per request, and all other messages in the same format, as text or JSON.

A line contains no prompt, no answer and no key, and values chosen by a client (path, model, id) are escaped. A thread
writes the lines: a terminal or pipe that is not read may block that thread, but never the server.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import logging
import os
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec
from starlette.types import Scope

log = logging.getLogger("parley.access")

MAX_LOGGED_PATH = 200  # characters of a path that are logged
MAX_QUEUED_LINES = 10_000  # lines in the queue; above this, new lines are dropped
WRITE_INTERVAL = 0.05  # seconds between writes, so that several lines are written together
FLUSH_SECONDS = 0.5  # seconds to write the last lines at the end of the process


def set_up_logging(log_format: Literal["text", "json"]) -> None:
    """Set up logging to standard error."""
    logging.raiseExceptions = False
    handler = QueueingHandler(JsonFormatter() if log_format == "json" else TextFormatter())
    threading.Thread(target=handler.run_writer, name="parley-log", daemon=True).start()
    atexit.register(handler.wait_written)
    # No format shows where a line comes from, so logging need not find out.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("parley").setLevel(logging.INFO)
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

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record; drop it if the queue is full."""
        if len(self._records) >= MAX_QUEUED_LINES:
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
                lines += f"{self._format_record(self._records.popleft())}\n".encode("utf-8", "backslashreplace")
            with contextlib.suppress(OSError):  # a closed pipe, a full disk
                while lines:
                    lines = lines[os.write(2, lines) :]
            self._all_written = not self._records

    def _format_record(self, record: logging.LogRecord) -> str:
        """Format a record. If that fails, the line names its logger instead, and the records after it are kept."""
        try:
            return self._formatter.format(record)
        except Exception as error:
            record.exc_info = None
            record.msg, record.args = f"a line of {record.name} cannot be written: {type(error).__name__}", ()
            return self._formatter.format(record)

    def wait_written(self) -> None:
        """Wait for the last lines to be written, LAST_LINES seconds at most."""
        deadline = time.monotonic() + FLUSH_SECONDS
        while not self._all_written and time.monotonic() < deadline:
            time.sleep(0.005)


class TextFormatter(logging.Formatter):
    """Formats records as ``12:30:01 warning message``, with unprintable characters escaped."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line for a record."""
        clock = _format_clock(int(record.created))
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()} "
        trace = f"\n{self.formatException(record.exc_info)}" if record.exc_info else ""
        return f"{clock} {level}{escape_unprintable(record.getMessage())}{trace}"


@functools.lru_cache(4)
def _format_clock(second: int) -> str:
    return time.strftime("%H:%M:%S", time.localtime(second))


class JsonFormatter(logging.Formatter):
    """Formats records as JSON objects, one per line; the fields of an access log line become members."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line for a record."""
        entry: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        entry |= record.msg.log_fields if isinstance(record.msg, AccessLogMessage) else {"message": record.getMessage()}
        if record.exc_info:
            entry["trace"] = self.formatException(record.exc_info)
        try:
            return msgspec.json.encode(entry).decode()
        except UnicodeEncodeError:  # a lone surrogate, from a file name that is not UTF-8
            return json.dumps(entry)


@dataclass
class AccessLogEntry:
    """The fields of an access log line besides method, path, status and time."""

    model: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    ttft_seconds: float | None = None  # seconds from the request's arrival
    finish_reason: str = ""
    is_probe: bool = False  # a health probe or scrape, sent every few seconds: not logged


class FinishedRequest(Protocol):
    """A finished request, as the access log needs it. Status 0: no response was sent."""

    request_id: str
    scope: Scope
    status: int
    arrived_at: float
    log_entry: AccessLogEntry


def log_access(exchange: FinishedRequest) -> None:
    """Log a finished request, unless it was a probe. Status 499: the client left before the response."""
    if not exchange.log_entry.is_probe:
        scope = exchange.scope
        log_request(
            exchange.request_id,
            scope["method"],
            scope["path"],
            exchange.status or 499,
            exchange.arrived_at,
            exchange.log_entry,
        )


class AccessLogMessage:
    """The message of an access log line. It is formatted in the log thread, not where requests are served."""

    __slots__ = ("_id", "_method", "_note", "_path", "_seconds", "_status")

    def __init__(
        self, request_id: str, method: str, path: str, status: int | str, seconds: float, log_entry: AccessLogEntry
    ):
        self._id, self._method, self._path = request_id, method, path[:MAX_LOGGED_PATH]
        self._status, self._seconds, self._note = status, seconds, log_entry

    @property
    def log_fields(self) -> dict[str, Any]:
        """The line's fields by their names in JSON."""
        log_entry = self._note
        return {
            "id": self._id,
            "method": self._method,
            "path": self._path,
            "status": self._status,
            "seconds": round(self._seconds, 4),
            "model": log_entry.model,
            "in": log_entry.prompt_tokens,
            "out": log_entry.completion_tokens,
            "ttft": None if log_entry.ttft_seconds is None else round(log_entry.ttft_seconds, 4),
            "finish": log_entry.finish_reason,
        }

    def __str__(self) -> str:
        pairs = [f"{name}={value}" for name, value in list(self.log_fields.items())[3:] if value not in (None, "")]
        return f"{self._id} {self._method} {self._path} {' '.join(pairs)}"


def log_request(
    request_id: str, method: str, path: str, status: int | str, arrived_at: float, log_entry: AccessLogEntry
) -> None:
    """Log a request that has been answered. ``arrived_at``: by `time.perf_counter`."""
    log.info(AccessLogMessage(request_id, method, path, status, time.perf_counter() - arrived_at, log_entry))


def escape_unprintable(text: str) -> str:
    """Escape control characters and lone surrogates in a text, so that it stays on one line."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
