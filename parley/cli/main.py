"""The ``parley`` command: picks a command, reads its options, runs it, and turns the result into an exit code.

0 is success, 1 a failure that the command explained, 2 a usage error. Every command is a module of this package, or of
``machine``, with a table ``OPTIONS``, a text ``USAGE`` and a function ``run_command``. A command is imported only when
it is called, so that ``parley --help`` answers at once. This module knows nothing of HTTP, engines or models.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from parley.child_process import protect_children
from parley.settings.config import KNOWN_VARIABLES
from parley.settings.options import (
    ConfigError,
    Option,
    ResolvedOptions,
    UnknownFlag,
    did_you_mean,
    format_help,
    resolve_options,
)
from parley.version import __version__

COMMANDS = {
    "serve": "answer requests for a model over HTTP",
    "coordinator": "put several instances behind one port, prefill and decode together or apart",
    "chat": "talk to a model in the terminal",
    "cluster": "run a coordinator and instances on the machines of a Ray cluster",
    "bench": "measure a server's latency and throughput",
    "key": "make, list and remove API keys with limits",
    "doctor": "check this machine, the installation and a model",
    "routes": "list the routes and the API each belongs to",
    "migrate": "translate the command line of another server into one of parley",
    "watermark": "detect whether a text was generated with a watermark",
    "pull": "download a model from the Hugging Face hub",
    "list": "list the models in the Hugging Face cache",
    "show": "describe a model on this machine",
    "rm": "remove a model from the cache",
    "ps": "list the models that a running server serves",
    "completion": "print a script that completes commands and options in a shell",
    "version": "print the version; --all: also those of Python, the libraries and the machine",
}
MACHINE_COMMANDS = ("pull", "list", "show", "rm", "ps", "completion", "version")  # modules of the folder machine

FAILED_WRITES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # errors of a file or device that gets the output

# Commands that share a line of the help, so that it fits a screen.
TOGETHER = {
    "pull": (("pull", "list", "show", "rm"), "models in the Hugging Face cache: download, list, describe, remove"),
    "completion": (("completion", "version"), "a script for your shell; the version (--all: also of libraries)"),
}
GROUPED = {name for names, _ in TOGETHER.values() for name in names}
COMMAND_WIDTH = max(len("  ".join(TOGETHER.get(name, ((name,), ""))[0])) for name in COMMANDS)

HELP_TEMPLATE = """\
parley: one LLM inference server that every client already speaks to.

usage: parley COMMAND [options]

commands:
{commands}

`parley serve` serves the built-in model on http://127.0.0.1:8000; `parley chat` talks to it.

Every option of serve can also be set by a variable (PARLEY_PORT=9000) or a key of a TOML file (--config FILE).
Flags override variables, and variables override the file. `parley COMMAND --help` lists a command's options.
"""


def help_text() -> str:
    """Return the text of ``parley --help``."""
    rows = [
        TOGETHER.get(name, ((name,), line))
        for name, line in COMMANDS.items()
        if name in TOGETHER or name not in GROUPED
    ]
    return HELP_TEMPLATE.format(
        commands="\n".join(f"  {'  '.join(names):<{COMMAND_WIDTH}} {line}" for names, line in rows)
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
    except OSError as error:
        if error.filename is not None or error.errno not in FAILED_WRITES:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for output that is still buffered at the exit
        print(f"parley: The output cannot be written: {error.strerror}.", file=sys.stderr)
        return 1


def dispatch_command(words: list[str]) -> int:
    """Run the command named by the first word."""
    name = words.pop(0) if words else "--help"
    if name in ("--help", "-h", "help"):
        if not words:
            return print_text(help_text())
        name, words = words[0], ["--help"]
    if name in ("--version", "-V") or (name == "version" and not words):
        return print_text(f"parley {__version__}\n")
    if name not in COMMANDS:
        kind = "flag" if name.startswith("-") else "command"
        return print_usage_error(f"Unknown {kind} {name}.{did_you_mean(name, list(COMMANDS))}", "parley --help")
    command = import_command(name)
    if any(word in ("--help", "-h") for word in own_words(command, words)):
        return print_text(f"{command.USAGE}\n{format_help(command.OPTIONS)}\n")
    try:
        config = resolve_options(command.OPTIONS, words, os.environ, KNOWN_VARIABLES)
        print_warnings(config)
        return int(command.run_command(config))
    except UnknownFlag as error:
        explain = getattr(command, "explain_flag", None)  # a command may know the flags of other programs
        hint = explain(error.flag) if explain else ""
        return print_usage_error(f"Unknown flag {error.flag}. {hint}" if hint else str(error), f"parley {name} --help")
    except ConfigError as error:
        return print_usage_error(str(error), f"parley {name} --help")


def own_words(command: ModuleType, words: list[str]) -> list[str]:
    """Return the words that are the command's own; those after ``--`` may be for another program."""
    has_rest = "--" in words and any(option.takes_rest for option in command.OPTIONS)
    return words[: words.index("--")] if has_rest else words


def print_warnings(config: ResolvedOptions) -> None:
    """Write warnings about the sources of options to standard error: log lines if the command writes them as JSON."""
    if config.warnings and config.get("log-format") == "json":
        from parley.log_lines import format_json_line  # its packages would slow down `parley --help`

        for warning in config.warnings:
            print(format_json_line("warning", warning), file=sys.stderr)
        return
    for warning in config.warnings:
        print(f"parley: {warning}", file=sys.stderr)


def import_command(name: str) -> ModuleType:
    """Return the module of a command."""
    folder = "machine." if name in MACHINE_COMMANDS else ""
    return importlib.import_module(f"parley.cli.{folder}{name}")


def command_options(name: str) -> list[Option]:
    """Return the table of a command's options."""
    options: list[Option] = import_command(name).OPTIONS
    return options


def print_text(text: str) -> int:
    """Write ``text`` to standard output. Return exit code 0."""
    sys.stdout.write(text)
    return 0


def print_usage_error(message: str, help_command: str) -> int:
    """Write an error to standard error, with the command that shows help. Return exit code 2."""
    print(f"parley: {message}\nTry `{help_command}`.", file=sys.stderr)
    return 2
