"""``parley migrate``: translates the command line of another inference server into one of ``parley serve``.

The command goes to standard output, and a report on each flag to standard error.
"""

from __future__ import annotations

import shlex
import sys

from parley.cli.peers.tables import peer_names, read_peer
from parley.cli.peers.translate import FlagResult, Translation, translate_command
from parley.settings.option_kinds import choice_kind, words_kind
from parley.settings.options import ConfigError, Option, ResolvedOptions

USAGE = f"""\
usage: parley migrate {"|".join(peer_names())} -- OLD COMMAND

Prints the command of parley for the command line of another server, and for each of its flags what became of it.
The old command may begin with variables (NAME=VALUE) and the name of its program."""

OPTIONS = [
    Option("server", choice_kind(*peer_names()), "The server that is replaced.", positional=True),
    Option("old-command", words_kind("WORDS"), "Its command line; everything after --.", takes_rest=True),
]
STATES = {"translated": "", "needless": "not needed: ", "missing": "no counterpart: ", "unknown": "not translated: "}


def run_command(config: ResolvedOptions) -> int:
    """Print the translated command and a report on each flag. Return 1 if parley would refuse the command."""
    if config["server"] is None or config["old-command"] is None:
        raise ConfigError("Write the server's name, then --, then its command line.")
    translation = translate_command(read_peer(config["server"]), config["old-command"])
    print(shlex.join(translation.command()), flush=True)
    print(format_report(translation), file=sys.stderr, end="")
    if problem := translation.problem():
        print(f"parley: parley serve would refuse this command: {problem}", file=sys.stderr)
        return 1
    return 0


def explain_flag(flag: str) -> str:
    """Return advice about a flag of another server that does not follow ``--``."""
    return f"Write -- before the other server's command: parley migrate SERVER -- ... {flag} ..."


def format_report(translation: Translation) -> str:
    """Return the report: a line for each flag, and the command with the other server's engine."""
    rows = [(shlex.join(result.original_words), _describe_outcome(result)) for result in translation.results]
    width = min(max((len(written) for written, _ in rows), default=0), 40)
    lines = [f"  {written:<{width}}  {outcome}" for written, outcome in rows]
    if translation.added_flags:
        added = " ".join(translation.added_flags)
        lines.append(f"Added: {added}, because {translation.peer.title} listens there by default.")
    if translation.published_flags:
        lines.append(f"Added: {' '.join(translation.published_flags)}, because the container publishes that port.")
    if translation.skipped_words:
        lines.append(f"Left out: {shlex.join(translation.skipped_words)}, which belongs to another program.")
    if "MODEL" in translation.command():
        lines.append("Put a folder, a GGUF file or a name on the Hugging Face hub in place of MODEL.")
    if engine := translation.engine_command():
        lines.append(f"With {translation.peer.title} as the engine behind parley (docs/engines.md):")
        lines.append(f"  {shlex.join(engine)}")
    return "".join(f"{line}\n" for line in lines)


def _describe_outcome(result: FlagResult) -> str:
    if result.state != "translated":
        return STATES[result.state] + result.reason
    return shlex.join(result.parley_words) + (f"  ({result.reason})" if result.reason else "")
