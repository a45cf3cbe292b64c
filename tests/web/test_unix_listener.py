"""Unix sockets: of several servers that start on one path in the same moment, exactly one listens there.

No other program can keep a server from starting.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import threading
from pathlib import Path

from parley.web import unix_listener
from parley.web.port import open_listener


def test_a_socket_that_is_bound_and_does_not_listen_yet_is_not_taken_for_a_stale_one(tmp_path: Path, monkeypatch):
    path, errors = str(tmp_path / "s"), []
    find_file_id = unix_listener._file_id

    def start_second_server() -> None:
        try:
            open_listener(f"unix:{path}", 0).close()
        except OSError as error:
            errors.append(error.errno)

    second = threading.Thread(target=start_second_server)

    def find_while_second_starts(file: str) -> tuple[int, int, int]:
        monkeypatch.undo()
        second.start()
        second.join(0.2)  # without the lock it ends, and has the path; with the lock it waits
        return find_file_id(file)

    monkeypatch.setattr(unix_listener, "_file_id", find_while_second_starts)
    listener = open_listener(f"unix:{path}", 0)
    second.join()
    assert errors == [errno.EADDRINUSE]
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
    listener.close()


def test_a_folder_that_another_program_keeps_locked_delays_a_server_only(tmp_path: Path, monkeypatch):
    """Such as flock(1), which starts a command with the folder locked."""
    monkeypatch.setattr(unix_listener, "LOCK_SECONDS", 0.05)
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    open_listener(f"unix:{tmp_path}/s", 0).close()
    os.close(descriptor)
