"""What the server logs: one line for each request, and everybody's messages in one form, as text or as JSON.

A line holds no prompt, no answer and no key, and what a client chose (path, model, id) cannot break out of it. Lines
are written by a thread: a terminal or a pipe that nobody reads may stop that, but never the server.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import time
from logging.handlers import QueueHandler, QueueListener
from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    from parley.server.respond import Exchange
    from parley.server.tally import Note

log = logging.getLogger("parley.access")

LONGEST_PATH = 200
WAITING = 10_000  # lines; what comes while so many wait is lost
LAST_LINES = 0.5  # seconds for them at the end of the process


def set_up(form: Literal["text", "json"]) -> None:
    """Log to standard error."""
    logging.raiseExceptions = False
    outlet = Outlet()
    outlet.setFormatter(Json() if form == "json" else Line())
    lines: queue.Queue[logging.LogRecord] = queue.Queue(WAITING)
    QueueListener(lines, outlet).start()
    atexit.register(_wait, lines)
    root = logging.getLogger()
    root.handlers = [Inlet(lines)]
    root.setLevel(logging.WARNING)
    logging.getLogger("parley").setLevel(logging.INFO)
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)  # its errors are ours, and told by us


class Inlet(QueueHandler):
    """Hands records over as they are; the thread is of the same process."""

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        return record


class Outlet(logging.Handler):
    """Writes to file descriptor 2, for one thread.

    That thread may be stuck for ever, so it holds no lock, of its own or of ``sys.stderr``, for which the end of the
    process would wait.
    """

    def createLock(self) -> None:
        self.lock = None

    def emit(self, record: logging.LogRecord) -> None:
        line = f"{self.format(record)}\n".encode("utf-8", "backslashreplace")
        with contextlib.suppress(OSError):  # a closed pipe, a full disk
            while line:
                line = line[os.write(2, line) :]


def _wait(lines: queue.Queue[logging.LogRecord]) -> None:
    """Let the last lines be written, if they can be."""
    deadline = time.monotonic() + LAST_LINES
    while lines.unfinished_tasks and time.monotonic() < deadline:
        time.sleep(0.005)


class Line(logging.Formatter):
    """``12:30:01 warning message``, everything unprintable escaped."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()} "
        trace = f"\n{self.formatException(record.exc_info)}" if record.exc_info else ""
        return f"{clock} {level}{printable(record.getMessage())}{trace}"


class Json(logging.Formatter):
    """One JSON object per line; the fields of an access line are members of it."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        fields = getattr(record, "fields", None)
        entry |= fields if fields is not None else {"message": record.getMessage()}
        if record.exc_info:
            entry["trace"] = self.formatException(record.exc_info)
        return msgspec.json.encode(entry).decode()


def access(exchange: Exchange) -> None:
    """Log a request that has ended. Status 499: the client left before there was an answer."""
    if not exchange.note.probe:
        scope = exchange.scope
        served(exchange.id, scope["method"], scope["path"], exchange.status or 499, exchange.arrived, exchange.note)


def served(id: str, method: str, path: str, status: int | str, arrived: float, note: Note) -> None:
    """Log what was served to one request."""
    fields = {
        "id": id,
        "method": method,
        "path": path[:LONGEST_PATH],
        "status": status,
        "seconds": round(time.perf_counter() - arrived, 4),
        "model": note.model,
        "in": note.prompt_tokens,
        "out": note.completion_tokens,
        "ttft": None if note.first_token is None else round(note.first_token, 4),
        "finish": note.finish,
    }
    shown = " ".join(f"{name}={value}" for name, value in list(fields.items())[3:] if value not in (None, ""))
    log.info("%s %s %s %s", fields["id"], fields["method"], fields["path"], shown, extra={"fields": fields})


def printable(text: str) -> str:
    """The text with control characters and lone surrogates escaped, so that it stays one line."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
