"""Messages typed or pasted at a terminal: editing, history, completion, and texts of several lines."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

BLOCK = '"""'  # begins and ends a message of several lines


def read_message(prompt: str = ">>> ", more: str = "... ", read_line: Callable[[str], str] = input) -> str:
    """Return a message. Raises EOFError and KeyboardInterrupt.

    Pasted text of any number of lines is one message, if the terminal marks pasted text. A line that ends
    with a backslash continues on the next one, and three quotation marks begin and end a message of several lines.
    """
    line = read_line(prompt)
    if line.lstrip().startswith(BLOCK):
        return _read_block(line.lstrip()[len(BLOCK) :], more, read_line)
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(read_line(more))
    return "\n".join(lines).strip()


def _read_block(line: str, more: str, read_line: Callable[[str], str]) -> str:
    lines = [line]
    while not lines[-1].rstrip().endswith(BLOCK):
        lines.append(read_line(more))
    lines[-1] = lines[-1].rstrip()[: -len(BLOCK)]
    return "\n".join(lines).strip()


@contextlib.contextmanager
def edited_lines(name: str, words: Callable[[str], list[str]]) -> Iterator[None]:
    """Edit the lines that are read, with the history of earlier ones, and complete them with the Tab key.

    ``words`` returns the words that may stand in place of the last one of a line.
    """
    try:
        import readline
    except ImportError:  # Python was built without it
        yield
        return
    file = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "parley" / name
    with contextlib.suppress(OSError):
        readline.read_history_file(file)
    readline.set_history_length(1000)

    def complete(text: str, number: int) -> str | None:
        matching_words = [word for word in words(readline.get_line_buffer()) if word.startswith(text)]
        return matching_words[number] if number < len(matching_words) else None

    readline.set_completer_delims(" ")
    readline.set_completer(complete)
    readline.parse_and_bind("tab: complete")
    readline.parse_and_bind("set enable-bracketed-paste on")
    try:
        yield
    finally:
        readline.set_completer(None)
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch(mode=0o600)
            readline.write_history_file(file)
