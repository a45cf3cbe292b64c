"""Files that a server reads again: regular ones, pipes and devices."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from parley.settings import bounded_files
from parley.settings.bounded_files import read_bounded_file

SELECT_LIMIT = 1024  # select() takes no descriptor from here on


@pytest.fixture
def many_open_files() -> Iterator[None]:
    """A process whose next open file gets a number that select() does not take."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 2 * SELECT_LIMIT), hard), hard))
    with ExitStack() as opened:
        while opened.enter_context(Path(os.devnull).open("rb")).fileno() < SELECT_LIMIT:
            pass
        yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_pipe_that_does_not_end_is_an_error_however_many_files_are_open(
    tmp_path: Path, many_open_files: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_files, "PIPE_SECONDS", 0.01)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = os.open(pipe, os.O_RDWR)
    os.write(writer, b"beginning")
    with pytest.raises(OSError, match=r"its writer did not end within 0\.01 s"):
        read_bounded_file(pipe, 100)
    os.close(writer)


def test_only_a_pipe_must_have_content(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    assert read_bounded_file(tmp_path / "file", 100) == read_bounded_file(os.devnull, 100) == b""
    with pytest.raises(OSError, match="it is a pipe, and nothing can be read from it"):
        read_bounded_file(tmp_path / "pipe", 100)
