"""Log lines as text or JSON, the same in every process of a server.

The server's process writes its lines in a thread (``web/logs.py``). The processes that it starts write few lines, and
find their format in the environment (``set_up_child_logging``).
"""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
import time
from typing import Any, Literal

import msgspec

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

# The variables of the options --log-format and --log-level; a server sets them for the processes that it starts.
FORMAT_VARIABLE, LEVEL_VARIABLE = "PARLEY_LOG_FORMAT", "PARLEY_LOG_LEVEL"


class TextFormatter(logging.Formatter):
    """Formats records as ``2026-01-31 12:30:01 warning message``, with unprintable characters escaped."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line for a record."""
        clock = _format_clock(int(record.created))
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()} "
        trace = f"\n{self.formatException(record.exc_info)}" if record.exc_info else ""
        return f"{clock} {level}{escape_unprintable(record.getMessage())}{trace}"


@functools.lru_cache(4)
def _format_clock(second: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(second))


class JsonFormatter(logging.Formatter):
    """Formats records as JSON objects, one per line. A message with ``log_fields`` has them as members."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line for a record."""
        entry: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        fields = getattr(record.msg, "log_fields", None)
        entry |= {"message": record.getMessage()} if fields is None else fields
        if record.exc_info:
            entry["trace"] = self.formatException(record.exc_info)
        try:
            return msgspec.json.encode(entry).decode()
        except UnicodeEncodeError:  # a lone surrogate, from a file name that is not UTF-8
            return json.dumps(entry)


def format_json_line(level: LogLevel, message: str) -> str:
    """Return the line of a message that is printed before logging is set up."""
    number = logging.getLevelNamesMapping()[level.upper()]
    return JsonFormatter().format(logging.LogRecord("parley", number, "", 0, message, (), None))


def make_formatter(log_format: LogFormat) -> logging.Formatter:
    """Return the formatter of a format."""
    return JsonFormatter() if log_format == "json" else TextFormatter()


def set_level(level: LogLevel) -> None:
    """Log parley's own messages from this level on, and those of libraries from warnings on."""
    number = logging.getLevelNamesMapping()[level.upper()]
    logging.getLogger().setLevel(max(number, logging.WARNING))
    logging.getLogger("parley").setLevel(number)


def announce_to_children(log_format: LogFormat, level: LogLevel) -> None:
    """Make the processes that this one starts log in the same way."""
    os.environ |= {FORMAT_VARIABLE: log_format, LEVEL_VARIABLE: level}


def logs_json() -> bool:
    """Whether this process, or the one that started it, logs JSON."""
    return os.environ.get(FORMAT_VARIABLE) == "json"


def make_child_handler(stream: Any) -> logging.Handler:
    """Return a handler that writes to a stream in the format of the process that started this one."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(make_formatter("json" if logs_json() else "text"))
    return handler


def set_up_child_logging() -> None:
    """Log to standard error as the process that started this one does. Warnings of Python become lines as well."""
    logging.getLogger().addHandler(make_child_handler(sys.stderr))
    logging.captureWarnings(True)
    match os.environ.get(LEVEL_VARIABLE):
        case ("debug" | "warning" | "error") as level:
            set_level(level)
        case _:
            set_level("info")


def escape_unprintable(text: str) -> str:
    """Escape control characters and lone surrogates in a text, so that it stays on one line."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
