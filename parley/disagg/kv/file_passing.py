"""Passes open files to other processes of this host and user, over a Unix socket (SCM_RIGHTS).

The sender keeps a file ready under a random token. A receiver that sends the token gets the file, once. Each side asks
the kernel for the user of the other (SO_PEERCRED). No number of a process or descriptor is exchanged, so a receiver can
only get a file that the other process has opened itself. Socket names are random and belong to the network namespace,
so a receiver on another host or in another container finds no socket. This module knows nothing of the files' content.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import threading
from contextlib import suppress

from parley.disagg.kv.transport import OfferUnusable

NAME_BYTES, TOKEN_BYTES = 16, 32
PASSING_TIMEOUT_S = 2.0  # most seconds for passing one file: both sides are on the same host
WAITING_CONNECTIONS = 128
CREDENTIALS = struct.Struct("3i")  # struct ucred: process, user, group
FILE_READY = b"f"


class FileSender:
    """Hands files to processes that know their tokens. A thread answers them, from the first file on."""

    def __init__(self) -> None:
        self.name = secrets.token_bytes(NAME_BYTES)
        self._files: dict[bytes, int] = {}  # descriptors by token
        self._lock = threading.Lock()  # protects the files
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None

    def offer_file(self, fd: int) -> bytes:
        """Keep a file ready for one receiver, for reading only, until it is withdrawn. Return its token. Raises
        OSError."""
        read_only = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._start_thread()
        except OSError:
            os.close(read_only)
            raise
        token = secrets.token_bytes(TOKEN_BYTES)
        with self._lock:
            self._files[token] = read_only
        return token

    def withdraw_file(self, token: bytes) -> None:
        """Close a file that was not fetched. Does nothing if it was."""
        with self._lock:
            fd = self._files.pop(token, None)
        if fd is not None:
            os.close(fd)

    def close_sender(self) -> None:
        """Close the socket and all files; return when the thread has ended. Blocks."""
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        if self._thread is not None:
            self._thread.join()
        if self._socket is not None:
            self._socket.close()
        for token in list(self._files):
            self.withdraw_file(token)

    def _start_thread(self) -> None:
        """Listen and start the thread, the first time. Raises OSError."""
        if self._thread is not None:
            return
        listening_socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            listening_socket.bind(_socket_address(self.name))
            listening_socket.listen(WAITING_CONNECTIONS)
        except OSError:
            listening_socket.close()
            raise
        self._socket = listening_socket
        self._thread = threading.Thread(
            target=self._answer_receivers, args=(listening_socket,), name="parley-kv-files", daemon=True
        )
        self._thread.start()

    def _answer_receivers(self, listening_socket: socket.socket) -> None:
        """Answer receivers, one after the other, until the socket is shut down."""
        while True:
            try:
                connection, _ = listening_socket.accept()
            except OSError:
                return
            with connection, suppress(OSError):
                connection.settimeout(PASSING_TIMEOUT_S)
                if _is_same_user(connection):
                    self._pass_file(connection)

    def _pass_file(self, connection: socket.socket) -> None:
        """Read a token and send its file. Raises OSError."""
        token = connection.recv(TOKEN_BYTES)
        with self._lock:
            fd = self._files.pop(token, None)
        if fd is not None:
            try:
                socket.send_fds(connection, [FILE_READY], [fd])
            finally:
                os.close(fd)


def receive_file(name: bytes, token: bytes) -> int:
    """Return the descriptor of the file that the sender ``name`` keeps ready under a token. Blocks.

    Raises OfferUnusable if the sender has another user or passes no file, and OSError if there is no such sender here.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
        connection.settimeout(PASSING_TIMEOUT_S)
        connection.connect(_socket_address(name))
        if not _is_same_user(connection):
            raise OfferUnusable("the sender's process belongs to another user")
        connection.sendall(token)
        _, fds, _, _ = socket.recv_fds(connection, len(FILE_READY), 1, socket.MSG_CMSG_CLOEXEC)
    if not fds:
        raise OfferUnusable("the sender passed no file")
    return fds[0]


def _socket_address(name: bytes) -> bytes:
    """Return the address of a sender in the abstract namespace. The prefix keeps a receiver from any other socket."""
    return b"\0parley-kv-" + name.hex().encode()


def _is_same_user(connection: socket.socket) -> bool:
    """Whether the process on the other side of a Unix socket has this process's user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    _, user, _ = CREDENTIALS.unpack(credentials)
    return bool(user == os.geteuid())
