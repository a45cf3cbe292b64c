"""What the server logs: one line for each request, and everybody's messages in one form, as text or as JSON.

A line holds no prompt, no answer and no key, and what a client chose (path, model, id) cannot break out of it. Lines
are written by a thread: a terminal or a pipe that nobody reads may stop that, but never the server.
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

LONGEST_PATH = 200
WAITING = 10_000  # lines; what comes while so many wait is lost
GATHER = 0.05  # seconds for which lines are gathered before they are written
LAST_LINES = 0.5  # seconds for them at the end of the process


def set_up(form: Literal["text", "json"]) -> None:
    """Log to standard error."""
    logging.raiseExceptions = False
    inlet = Inlet(Json() if form == "json" else Plain())
    threading.Thread(target=inlet.write, name="parley-log", daemon=True).start()
    atexit.register(inlet.wait)
    # Nobody is shown where a line comes from.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None  # type: ignore[attr-defined]
    root = logging.getLogger()
    root.handlers = [inlet]
    root.setLevel(logging.WARNING)
    logging.getLogger("parley").setLevel(logging.INFO)
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)  # its errors are ours, and told by us


class Inlet(logging.Handler):
    """Takes records; ``write``, for one thread, formats them and writes them to file descriptor 2, many at a time.

    That thread may be stuck for ever, so it holds no lock, of its own or of ``sys.stderr``, for which a record or the
    end of the process would wait.
    """

    def __init__(self, form: logging.Formatter):
        super().__init__()
        self._form = form
        self._records: deque[logging.LogRecord] = deque()
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()  # rung by the first of some records
        self._written = True

    def emit(self, record: logging.LogRecord) -> None:
        if len(self._records) >= WAITING:
            return
        self._records.append(record)
        if len(self._records) == 1:
            self._written = False
            self._bell.put(None)

    def write(self) -> None:
        while True:
            self._bell.get()
            time.sleep(GATHER)  # waking for each line would cost the event loop more than the line does
            lines = b""
            while self._records:
                lines += f"{self._line(self._records.popleft())}\n".encode("utf-8", "backslashreplace")
            with contextlib.suppress(OSError):  # a closed pipe, a full disk
                while lines:
                    lines = lines[os.write(2, lines) :]
            self._written = not self._records

    def _line(self, record: logging.LogRecord) -> str:
        """One that cannot be formatted says where it is from: those behind it are to be written."""
        try:
            return self._form.format(record)
        except Exception as error:
            record.exc_info = None
            record.msg, record.args = f"a line of {record.name} cannot be written: {type(error).__name__}", ()
            return self._form.format(record)

    def wait(self) -> None:
        """Let the last lines be written, if they can be."""
        deadline = time.monotonic() + LAST_LINES
        while not self._written and time.monotonic() < deadline:
            time.sleep(0.005)


class Plain(logging.Formatter):
    """``12:30:01 warning message``, everything unprintable escaped."""

    def format(self, record: logging.LogRecord) -> str:
        clock = _clock(int(record.created))
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()} "
        trace = f"\n{self.formatException(record.exc_info)}" if record.exc_info else ""
        return f"{clock} {level}{printable(record.getMessage())}{trace}"


@functools.lru_cache(4)
def _clock(second: int) -> str:
    return time.strftime("%H:%M:%S", time.localtime(second))


class Json(logging.Formatter):
    """One JSON object per line; the fields of an access line are members of it."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        entry |= record.msg.fields if isinstance(record.msg, Served) else {"message": record.getMessage()}
        if record.exc_info:
            entry["trace"] = self.formatException(record.exc_info)
        try:
            return msgspec.json.encode(entry).decode()
        except UnicodeEncodeError:  # half of a surrogate pair: a file's name that is no UTF-8
            return json.dumps(entry)


@dataclass
class Note:
    """What the access log says of a request beside method, path, status and time."""

    model: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    first_token: float | None = None  # seconds
    finish: str = ""
    probe: bool = False  # asked every few seconds; not worth a line


class Ended(Protocol):
    """A request that has ended, as far as its access line shows it. Status 0: nothing was sent."""

    id: str
    scope: Scope
    status: int
    arrived: float
    note: Note


def access(exchange: Ended) -> None:
    """Log a request that has ended. Status 499: the client left before there was an answer."""
    if not exchange.note.probe:
        scope = exchange.scope
        served(exchange.id, scope["method"], scope["path"], exchange.status or 499, exchange.arrived, exchange.note)


class Served:
    """An access line. It is written where it is formatted, and that is not where requests are served."""

    __slots__ = ("_id", "_method", "_note", "_path", "_seconds", "_status")

    def __init__(self, id: str, method: str, path: str, status: int | str, seconds: float, note: Note):
        self._id, self._method, self._path = id, method, path[:LONGEST_PATH]
        self._status, self._seconds, self._note = status, seconds, note

    @property
    def fields(self) -> dict[str, Any]:
        note = self._note
        return {
            "id": self._id,
            "method": self._method,
            "path": self._path,
            "status": self._status,
            "seconds": round(self._seconds, 4),
            "model": note.model,
            "in": note.prompt_tokens,
            "out": note.completion_tokens,
            "ttft": None if note.first_token is None else round(note.first_token, 4),
            "finish": note.finish,
        }

    def __str__(self) -> str:
        shown = [f"{name}={value}" for name, value in list(self.fields.items())[3:] if value not in (None, "")]
        return f"{self._id} {self._method} {self._path} {' '.join(shown)}"


def served(id: str, method: str, path: str, status: int | str, arrived: float, note: Note) -> None:
    """Log what was served to one request."""
    log.info(Served(id, method, path, status, time.perf_counter() - arrived, note))


def printable(text: str) -> str:
    """The text with control characters and lone surrogates escaped, so that it stays one line."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
