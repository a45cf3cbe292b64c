"""The ``parley`` command: picks a command, reads its options, runs it, and turns its end into an exit code.

0 is success, 1 a failure that the command explained, 2 a wrong way to call it. Every command is a module under
``commands`` with a table ``OPTIONS``, a line ``USAGE`` and a function ``run``; it is imported when it is called and
not before, so that ``parley --help`` answers at once. Knows nothing of HTTP, engines or models.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from parley.config import VARIABLES
from parley.options import ConfigError, explain, nearest, resolve
from parley.version import __version__

COMMANDS = {
    "serve": "answer requests for a model over HTTP",
    "coordinator": "let several servers answer as one, prefill and decode apart",
    "chat": "talk to a model in the terminal",
    "cluster": "run a coordinator and instances over the machines of a Ray cluster",
    "bench": "measure a server's latency and throughput",
    "doctor": "check this machine, the installation and a model",
    "routes": "list the routes and the API each belongs to",
    "watermark": "tell whether a text was generated with a watermark",
    "version": "print the version",
}

WIDE = max(map(len, COMMANDS))

ABOUT = """\
parley: one LLM inference server that every client already speaks to.

usage: parley COMMAND [options]

commands:
{commands}

first steps:
  parley serve                        the built-in model on http://127.0.0.1:8000
  parley serve Qwen/Qwen2.5-0.5B-Instruct --port 9000
  parley chat                         talk to it, or to a server started for the purpose

Every option of serve can also be a variable (PARLEY_PORT=9000) or a key of a TOML file (--config FILE);
a flag wins over a variable, a variable over the file. `parley COMMAND --help` lists a command's options.
"""


def about() -> str:
    """The text of ``parley --help``."""
    return ABOUT.format(commands="\n".join(f"  {name:<{WIDE}} {line}" for name, line in COMMANDS.items()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    try:
        code = dispatch(list(sys.argv[1:] if arguments is None else arguments))
        if sys.stdout is not None:  # it is None when the process was started without one
            sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output went away, as in `parley routes | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def dispatch(words: list[str]) -> int:
    """Run the command that the words name."""
    name = words.pop(0) if words else "--help"
    if name in ("--help", "-h", "help"):
        if not words:
            return say(about())
        name, words = words[0], ["--help"]
    if name in ("version", "--version", "-V"):
        return say(f"parley {__version__}\n")
    if name not in COMMANDS:
        kind = "flag" if name.startswith("-") else "command"
        return refuse(f"Unknown {kind} {name}.{nearest(name, list(COMMANDS))}", "parley --help")
    command = importlib.import_module(f"parley.commands.{name}")
    if any(word in ("--help", "-h") for word in words):
        return say(f"{command.USAGE}\n{explain(command.OPTIONS)}\n")
    try:
        config = resolve(command.OPTIONS, words, os.environ, VARIABLES)
        for warning in config.warnings:
            print(f"parley: {warning}", file=sys.stderr)
        return int(command.run(config))
    except ConfigError as error:
        return refuse(str(error), f"parley {name} --help")


def say(text: str) -> int:
    sys.stdout.write(text)
    return 0


def refuse(message: str, help: str) -> int:
    print(f"parley: {message}\nTry `{help}`.", file=sys.stderr)
    return 2
