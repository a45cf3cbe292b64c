"""The commands that README.md shows, and the answers that it shows for them."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"
ADDRESS = "http://127.0.0.1:8000"


def read_blocks(language: str) -> list[str]:
    """Return the code blocks of a language, in their order."""
    return re.findall(rf"```{language}\n(.*?)```", README.read_text("utf-8"), re.DOTALL)


def read_requests() -> list[tuple[str, re.Pattern[str]]]:
    """Return a script for each request by curl, and the pattern of the answer that the line after it shows."""
    section = README.read_text("utf-8").partition("## One request for each API")[2].partition("\n## ")[0]
    lines = [line for block in re.findall(r"```sh\n(.*?)```", section, re.DOTALL) for line in block.splitlines()]
    variables = [line for line in lines if re.match("[A-Z]+=", line)]
    return [
        (
            "\n".join([*variables, command]),
            re.compile(".*".join(map(re.escape, shown.removeprefix("# ").split("…"))), re.DOTALL),
        )
        for command, shown in pairwise(lines)
        if command.startswith("curl ")
    ]


def read_command_lines() -> list[str]:
    """Return the lines of all shell blocks that call a program, without curl's and without comments."""
    lines = [line.partition("  #")[0].strip() for block in read_blocks("sh") for line in block.splitlines()]
    return [line for line in lines if re.match(r"(make|pip|parley) ", line)]
