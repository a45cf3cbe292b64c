"""The scripts of every shell complete commands, flags and choices, and have every flag."""

from __future__ import annotations

import os
import pty
import shutil
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


def test_words_that_stand_for_a_value_are_not_offered(scripts, tmp_path):
    offered = complete(scripts["bash"], "parley serve --engine ", "parley serve --trusted-proxy ")
    assert offered == [["parley", "vllm"], ["unix"]]
    (tmp_path / "folder").mkdir()
    assert complete(scripts["bash"], f"parley serve --tokenizer {tmp_path}/") == [[f"{tmp_path}/folder"]]


@pytest.mark.skipif(not shutil.which("fish"), reason="needs fish")
def test_fish_completes_commands_flags_and_choices(scripts, tmp_path):
    (tmp_path / "parley.fish").write_text(scripts["fish"])
    lines = ("parley ser", "parley serve --kv-d", "parley serve --kv-dtype ", "parley bench --api t")
    calls = [f"complete -C '{line}' | string split -f 1 \\t | string join ' '" for line in lines]
    fish = ["fish", "--no-config", "-c", "; ".join(["source parley.fish", *calls])]
    done = subprocess.run(fish, capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"HOME": str(tmp_path)})
    assert done.stdout.splitlines() == ["serve", "--kv-dtype", "auto int8", "tgi triton"]


@pytest.mark.skipif(not shutil.which("zsh"), reason="needs zsh")
def test_zsh_completes_commands_flags_and_choices(scripts, tmp_path):
    (tmp_path / "_parley").write_text(scripts["zsh"])
    setup = "autoload -U compinit; compinit -u -D; source ./_parley; parley() { print done: $@ }"
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        ["zsh", "-f", "-i"], stdin=theirs, stdout=theirs, stderr=theirs, cwd=tmp_path, env=os.environ | {"TERM": "dumb"}
    ) as zsh:
        os.close(theirs)
        for line in (setup, "parley ser\t", "parley serve --kv-d\t", "parley bench --api tg\t", "exit"):
            os.write(ours, f"{line}\n".encode())
        seen = b""
        try:
            while part := os.read(ours, 4096):
                seen += part
        except OSError:  # the other end is closed
            pass
        zsh.wait(30)
    os.close(ours)
    done = [line.partition("done: ")[2].strip() for line in seen.decode().splitlines() if line.startswith("done: ")]
    assert done == ["serve", "serve --kv-dtype", "bench --api tgi"]


@pytest.mark.parametrize("shell", SCRIPTS)
def test_every_flag_of_every_command_is_in_the_script(scripts, shell):
    for name in COMMANDS:
        for flag in flag_words(command_options(name)):
            written = f"-l {flag.flag[2:]} " if shell == "fish" else flag.flag
            assert written in scripts[shell], (name, flag.flag)
