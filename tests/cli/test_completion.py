"""The script for bash completes commands, flags and choices, and every shell's script has every flag."""

from __future__ import annotations

import subprocess

import pytest

from parley.cli.machine.completion import SCRIPTS, flag_words
from parley.cli.main import COMMANDS, command_options


@pytest.fixture(scope="module")
def scripts() -> dict[str, str]:
    commands = {name: (text, flag_words(command_options(name))) for name, text in COMMANDS.items()}
    return {shell: write(commands) for shell, write in SCRIPTS.items()}


def complete(script: str, *lines: str) -> list[list[str]]:
    """Returns what bash offers for the last word of each line."""
    calls = [
        f"COMP_WORDS=({' '.join(repr(word) for word in line.split(' '))}); COMP_CWORD={len(line.split(' ')) - 1}; "
        'COMPREPLY=(); _parley; echo "${COMPREPLY[@]}"'
        for line in lines
    ]
    bash = ["bash", "--norc", "-c", "\n".join([script, *calls])]
    return [
        line.split() for line in subprocess.run(bash, capture_output=True, text=True, check=True).stdout.splitlines()
    ]


def test_bash_completes_commands_flags_and_choices(scripts):
    lines = (
        "parley ser",
        "parley serve --kv-d",
        "parley serve --kv-dtype ",
        "parley serve --prefix",
        "parley bench --api t",
    )
    assert complete(scripts["bash"], *lines, "parley serve --port ", "parley serve --no-pre") == [
        ["serve"],
        ["--kv-dtype"],
        ["auto", "int8"],
        ["--prefix-cache"],
        ["tgi", "triton"],
        [],
        ["--no-prefix-cache"],
    ]


@pytest.mark.parametrize("shell", SCRIPTS)
def test_every_flag_of_every_command_is_in_the_script(scripts, shell):
    for name in COMMANDS:
        for flag in flag_words(command_options(name)):
            written = f"-l {flag.flag[2:]} " if shell == "fish" else flag.flag
            assert written in scripts[shell], (name, flag.flag)
