"""``parley completion``: prints a script that completes the command line in a shell.

The script is made from the tables of options, so it knows every command, flag and choice. Models, after ``parley rm``
and the like, are those of the cache.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from parley.settings.option_kinds import choice_kind
from parley.settings.options import ConfigError, Option, ResolvedOptions

USAGE = """\
usage: parley completion bash|zsh|fish

Prints a script for a shell:
  bash   parley completion bash > ~/.local/share/bash-completion/completions/parley
  zsh    parley completion zsh > "${fpath[1]}/_parley"
  fish   parley completion fish > ~/.config/fish/completions/parley.fish"""

SHELLS = ("bash", "zsh", "fish")
OPTIONS = [Option("shell", choice_kind(*SHELLS), "The shell.", positional=True)]
CHOICE = re.compile(r"[\w.-]+(\|[\w.-]+)+")
PATHS = re.compile(r"FILE|FOLDER|PATH|PATHS")


@dataclass(frozen=True)
class FlagWords:
    """A flag as shells complete it. ``values``: the choices for its value, if they are known."""

    flag: str
    text: str
    takes_value: bool
    values: tuple[str, ...] = ()
    is_path: bool = False


def run_command(config: ResolvedOptions) -> int:
    """Print the script. Return the exit code."""
    from parley.cli.main import COMMANDS, command_options

    if config["shell"] is None:
        raise ConfigError(f"Name a shell: {', '.join(SHELLS)}.")
    commands = {name: (text, flag_words(command_options(name))) for name, text in COMMANDS.items()}
    print(SCRIPTS[config["shell"]](commands), end="")
    return 0


def flag_words(options: list[Option]) -> list[FlagWords]:
    """Return the flags of a command."""
    words = [FlagWords("--help", "Show the options.", False)]
    for option in options:
        if option.hidden or option.positional:
            continue
        metavar = option.kind.metavar
        words_of_value = metavar.split("|") if CHOICE.fullmatch(metavar) else []
        values = tuple(word for word in words_of_value if not word.isupper())  # FOLDER and URL stand for something
        words.append(
            FlagWords(option.flag, option.help_text, not option.is_switch, values, bool(PATHS.search(metavar)))
        )
        if option.is_switch and option.default:
            words.append(FlagWords(f"--no-{option.name}", f"Not: {option.help_text}", False))
    return words


Commands = dict[str, tuple[str, list[FlagWords]]]
MODEL_COMMANDS = ("serve", "chat", "doctor", "show", "rm", "watermark")  # commands whose argument is a model


def bash_script(commands: Commands) -> str:
    """Return the script for bash."""
    lines = [
        "# bash completion of parley; made by `parley completion bash`",
        "_parley() {",
        '    local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" command="${COMP_WORDS[1]}"',
        "    COMPREPLY=()",
        "    if (( COMP_CWORD == 1 )); then",
        f'        COMPREPLY=($(compgen -W "{" ".join(commands)}" -- "$word"))',
        "        return",
        "    fi",
        '    case "$command $before" in',
    ]
    for name, (_, flags) in commands.items():
        for flag in (flag for flag in flags if flag.takes_value):
            words = f'-W "{" ".join(flag.values)}"' if flag.values else "-f"
            action = f'COMPREPLY=($(compgen {words} -- "$word")); ' if flag.values or flag.is_path else ""
            lines.append(f'        "{name} {flag.flag}") {action}return;;')
    lines += ["    esac", '    case "$command" in']
    for name, (_, flags) in commands.items():
        words = " ".join(flag.flag for flag in flags)
        models = " $(parley list --names 2>/dev/null)" if name in MODEL_COMMANDS else ""
        lines += [
            f"        {name})",
            '            if [[ "$word" == -* ]]; then',
            f'                COMPREPLY=($(compgen -W "{words}" -- "$word"))',
            "            else",
            f'                COMPREPLY=($(compgen -f -W "{models.strip()}" -- "$word"))',
            "            fi;;",
        ]
    lines += ["    esac", "}", "complete -o filenames -F _parley parley"]
    return "\n".join(lines) + "\n"


def zsh_script(commands: Commands) -> str:
    """Return the script for zsh."""
    lines = [
        "#compdef parley",
        "# made by `parley completion zsh`",
        "_parley() {",
        "    local -a commands",
        "    commands=(",
    ]
    lines += [f"        {_quote_word(f'{name}:{text}')}" for name, (text, _) in commands.items()]
    lines += [
        "    )",
        "    if (( CURRENT == 2 )); then",
        "        _describe command commands",
        "        return",
        "    fi",
    ]
    lines += ["    local command=$words[2]", "    shift words; (( CURRENT-- ))", "    case $command in"]
    for name, (_, flags) in commands.items():
        lines.append(f"        {name}) _arguments \\")
        for flag in flags:
            text = re.sub(r"[\[\]:`]", " ", flag.text)
            action = (
                f":value:({' '.join(flag.values)})" if flag.values else ":file:_files" if flag.is_path else ":value:"
            )
            lines.append(
                f"            {_quote_word(f'*{flag.flag}[{text}]' + (action if flag.takes_value else ''))} \\"
            )
        models = "_parley_models" if name in MODEL_COMMANDS else "_files"
        lines.append(f"            {_quote_word(f'*:argument:{models}')};;")
    lines += [
        "    esac",
        "}",
        "_parley_models() {",
        "    _alternative 'models:model:($(parley list --names 2>/dev/null))' 'files:file:_files'",
        "}",
    ]
    lines.append("compdef _parley parley")
    return "\n".join(lines) + "\n"


def fish_script(commands: Commands) -> str:
    """Return the script for fish."""
    lines = ["# made by `parley completion fish`"]
    for name, (text, flags) in commands.items():
        lines.append(f"complete -c parley -n __fish_use_subcommand -f -a {name} -d {_quote_word(text)}")
        of_command = f"complete -c parley -n '__fish_seen_subcommand_from {name}'"
        if name in MODEL_COMMANDS:
            lines.append(f"{of_command} -a '(parley list --names 2>/dev/null)'")
        for flag in flags:
            value = (
                f" -x -a {_quote_word(' '.join(flag.values))}" if flag.values else " -r -F" if flag.is_path else " -x"
            )
            lines.append(
                f"{of_command} -l {flag.flag[2:]} -d {_quote_word(flag.text)}{value if flag.takes_value else ''}"
            )
    return "\n".join(lines) + "\n"


def _quote_word(text: str) -> str:
    return "'" + text.replace("'", "`") + "'"


SCRIPTS: dict[str, Callable[[Commands], str]] = {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}
