"""The ``parley`` command: picks a command, reads its options, runs it, and turns the result into an exit code.

0 is success, 1 a failure that the command explained, 2 a usage error. Every command is a module of this package with a
table ``OPTIONS``, a text ``USAGE`` and a function ``run``. A command is imported only when it is called, so that
``parley --help`` answers at once. This module knows nothing of HTTP, engines or models.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from parley.child_process import protect_children
from parley.settings.config import KNOWN_VARIABLES
from parley.settings.options import ConfigError, did_you_mean, format_help, resolve_options
from parley.version import __version__

COMMANDS = {
    "serve": "answer requests for a model over HTTP",
    "coordinator": "serve from several instances behind one port, prefill and decode apart",
    "chat": "talk to a model in the terminal",
    "cluster": "run a coordinator and instances on the machines of a Ray cluster",
    "bench": "measure a server's latency and throughput",
    "doctor": "check this machine, the installation and a model",
    "routes": "list the routes and the API each belongs to",
    "watermark": "detect whether a text was generated with a watermark",
    "version": "print the version",
}

COMMAND_WIDTH = max(map(len, COMMANDS))

HELP_TEMPLATE = """\
parley: one LLM inference server that every client already speaks to.

usage: parley COMMAND [options]

commands:
{commands}

first steps:
  parley serve                        the built-in model on http://127.0.0.1:8000
  parley serve Qwen/Qwen2.5-0.5B-Instruct --port 9000
  parley chat                         talk to it; starts a server if none is running

Every option of serve can also be set by a variable (PARLEY_PORT=9000) or a key of a TOML file (--config FILE).
Flags override variables, and variables override the file. `parley COMMAND --help` lists a command's options.
"""


def help_text() -> str:
    """Return the text of ``parley --help``."""
    return HELP_TEMPLATE.format(
        commands="\n".join(f"  {name:<{COMMAND_WIDTH}} {line}" for name, line in COMMANDS.items())
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    if arguments is None:  # the process is this command's own
        protect_children()
    try:
        code = dispatch_command(list(sys.argv[1:] if arguments is None else arguments))
        if sys.stdout is not None:  # None if the process was started without a standard output
            sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has closed it, as in `parley routes | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def dispatch_command(words: list[str]) -> int:
    """Run the command named by the first word."""
    name = words.pop(0) if words else "--help"
    if name in ("--help", "-h", "help"):
        if not words:
            return print_text(help_text())
        name, words = words[0], ["--help"]
    if name in ("version", "--version", "-V"):
        return print_text(f"parley {__version__}\n")
    if name not in COMMANDS:
        kind = "flag" if name.startswith("-") else "command"
        return print_usage_error(f"Unknown {kind} {name}.{did_you_mean(name, list(COMMANDS))}", "parley --help")
    command = importlib.import_module(f"parley.cli.{name}")
    if any(word in ("--help", "-h") for word in words):
        return print_text(f"{command.USAGE}\n{format_help(command.OPTIONS)}\n")
    try:
        config = resolve_options(command.OPTIONS, words, os.environ, KNOWN_VARIABLES)
        for warning in config.warnings:
            print(f"parley: {warning}", file=sys.stderr)
        return int(command.run(config))
    except ConfigError as error:
        return print_usage_error(str(error), f"parley {name} --help")


def print_text(text: str) -> int:
    """Write ``text`` to standard output. Return exit code 0."""
    sys.stdout.write(text)
    return 0


def print_usage_error(message: str, help_command: str) -> int:
    """Write an error to standard error, with the command that shows help. Return exit code 2."""
    print(f"parley: {message}\nTry `{help_command}`.", file=sys.stderr)
    return 2
