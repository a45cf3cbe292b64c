"""Folders of caches are written as a whole, and nothing of killed processes stays."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from parley import cache_folders
from parley.cache_folders import remove_scratch_folders, write_whole_folder

# Writes one file of a folder, and waits.
WRITER = """
import sys
from pathlib import Path
from parley.cache_folders import write_whole_folder

with write_whole_folder(Path(sys.argv[1])) as scratch:
    (scratch / "one.json").write_text("1")
    print(flush=True)
    input()
"""


def start_writer(folder: Path) -> subprocess.Popen:
    """Return a process that is in the middle of writing the folder."""
    command = [sys.executable, "-c", WRITER, str(folder)]
    writer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    writer.stdout.readline()
    return writer


def test_folder_of_a_killed_process_is_removed_and_that_of_a_running_one_stays(tmp_path):
    with start_writer(tmp_path / "killed") as killed, start_writer(tmp_path / "running") as running:
        killed.kill()
        assert killed.wait() == -signal.SIGKILL
        assert len([*tmp_path.iterdir()]) == 2
        remove_scratch_folders(tmp_path)
        assert len([*tmp_path.iterdir()]) == 1
        running.communicate(b"\n")
    assert [*tmp_path.iterdir()] == [tmp_path / "running"]
    assert (tmp_path / "running" / "one.json").read_text() == "1"


def test_other_files_of_the_folder_and_targets_of_links_are_not_removed(tmp_path):
    cache, other = tmp_path / "cache", tmp_path / "other"
    (cache / "kept").mkdir(parents=True)
    other.mkdir()
    (cache / "unfinished-file").write_text("")
    (cache / "unfinished-link").symlink_to(other)
    remove_scratch_folders(cache)
    remove_scratch_folders(tmp_path / "missing")
    assert other.is_dir()
    assert {path.name for path in cache.iterdir()} == {"kept", "unfinished-file", "unfinished-link"}


@pytest.mark.parametrize("moment", ["open", "flock"])
def test_folder_that_another_process_removes_before_the_lock_is_made_again(moment, tmp_path, monkeypatch):
    module = {"open": cache_folders.os, "flock": cache_folders.fcntl}[moment]
    original = getattr(module, moment)
    removed = []

    def remove_first(target, *arguments):
        monkeypatch.setattr(module, moment, original)
        removed.extend(tmp_path.iterdir())
        shutil.rmtree(removed[0])
        return original(target, *arguments)

    monkeypatch.setattr(module, moment, remove_first)
    with write_whole_folder(tmp_path / "whole") as scratch:
        (scratch / "one.json").write_text("1")
    assert removed and [*tmp_path.rglob("*.json")] == [tmp_path / "whole" / "one.json"]


def write_and_remove(folder: Path) -> None:
    for number in range(30):
        remove_scratch_folders(folder)
        with write_whole_folder(folder / str(number)) as scratch:
            (scratch / "one.json").write_text("1")


def test_processes_that_write_and_remove_at_once_do_not_disturb_each_other(tmp_path):
    processes = [multiprocessing.Process(target=write_and_remove, args=(tmp_path,)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert sorted(os.listdir(tmp_path)) == sorted(map(str, range(30)))
    assert len([*tmp_path.rglob("one.json")]) == 30


def test_failed_writer_leaves_nothing(tmp_path):
    with pytest.raises(ValueError, match="x"), write_whole_folder(tmp_path / "new" / "whole"):
        raise ValueError("x")
    assert [*(tmp_path / "new").iterdir()] == []
