"""What the server logs: one line for each request, and everybody's messages in one form, as text or as JSON.

A line holds no prompt, no answer and no key, and what a client chose (path, model, id) cannot break out of it.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    from parley.server.respond import Exchange

log = logging.getLogger("parley.access")

LONGEST_PATH = 200


def set_up(form: Literal["text", "json"]) -> None:
    """Log to standard error. A closed pipe there must not stop the server."""
    logging.raiseExceptions = False
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Json() if form == "json" else Line())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("parley").setLevel(logging.INFO)
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)  # its errors are ours, and told by us


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
    note = exchange.note
    if note.probe:
        return
    fields = {
        "id": exchange.id,
        "method": exchange.scope["method"],
        "path": exchange.scope["path"][:LONGEST_PATH],
        "status": exchange.status or 499,
        "seconds": round(time.perf_counter() - exchange.arrived, 4),
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
