"""Files of a server on a disk that is full, and on one that cannot be written."""

import os
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from parley.cli.serve_config.server_options import check_writable_folder, check_written_files, server_options
from parley.serving.file_faults import fault_reason
from parley.serving.keys.usage_store import BadUsageFile, UsageStore
from parley.serving.records.record_store import BadRecordFile, RecordStore
from parley.settings.config import SERVE_OPTIONS
from parley.settings.options import ConfigError, resolve_options


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], check=False).returncode:
        pytest.skip("only root can mount a small disk")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


def fill_disk(disk: Path, spare: int) -> None:
    """Leave about ``spare`` bytes."""
    free = os.statvfs(disk)
    (disk / "others").write_bytes(bytes(free.f_bavail * free.f_frsize - spare))


STORES: list[tuple[Callable[[str], object], type[Exception]]] = [
    (lambda file: RecordStore(1 << 20, 60.0, file), BadRecordFile),
    (UsageStore, BadUsageFile),
]


# With some room, SQLite fails where it makes the log or the log's index, and calls that "disk I/O error".
@pytest.mark.parametrize("spare", [0, 8 << 10, 16 << 10, 24 << 10])
@pytest.mark.parametrize(("open_store", "refused"), STORES)
def test_a_start_on_a_full_disk_says_so_and_what_helps(small_disk, open_store, refused, spare):
    fill_disk(small_disk, spare)
    text = f"{small_disk}/file.db cannot be used: the disk is full. Make room there, or name a file on another disk."
    with pytest.raises(refused, match=text):
        open_store(str(small_disk / "file.db"))


@pytest.mark.parametrize(("open_store", "refused"), STORES)
def test_a_start_on_a_read_only_disk_says_so_and_what_helps(small_disk, open_store, refused):
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(refused, match=r"file\.db cannot be used: Read-only file system\. Name a file in a folder that"):
        open_store(str(small_disk / "file.db"))


def test_a_disk_that_does_not_tell_its_space_is_not_called_full(tmp_path):
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorname = "SQLITE_IOERR_WRITE"
    assert fault_reason(tmp_path / "gone" / "file.db", error) == "disk I/O error"


def test_a_folder_for_tables_on_a_full_or_read_only_disk_is_refused(small_disk):
    fill_disk(small_disk, 0)
    with pytest.raises(ConfigError, match=f"--tables: {small_disk} cannot be written: the disk is full"):
        check_writable_folder(str(small_disk), "tables")
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(ConfigError, match=f"--tables: {small_disk} cannot be written: Read-only file system"):
        check_writable_folder(str(small_disk), "tables")


def test_options_are_read_again_although_a_disk_is_full(small_disk):
    """A key that was removed must not stay valid because tables or the audit log cannot be written."""
    files = ["--inference-tables", str(small_disk / "tables"), "--audit-log", str(small_disk / "audit.jsonl")]
    fill_disk(small_disk, 0)
    options = server_options(resolve_options(SERVE_OPTIONS, files, {}))
    with pytest.raises(ConfigError, match=r"--inference-tables: .* the disk is full"):
        check_written_files(options)
