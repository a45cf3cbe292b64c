"""A server that runs only as long as a command: started on a free port, awaited, and stopped with the command.

The server is a separate ``parley serve`` in its own process group, so that Ctrl-C in the terminal does not reach it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import IO

from parley.child_process import die_with_parent, python_command
from parley.cli.client import ClientError, OpenAIClient, ServerAddress


@contextlib.contextmanager
def spawn_server(model: str | None, *flags: str) -> Iterator[OpenAIClient]:
    """Run a server for ``model`` (None: the built-in one), and yield a client once it is ready. Raises ClientError.

    Only this client can use the server, because its API key is random and secret.
    """
    (host, port), key = free_address(), secrets.token_urlsafe()
    client = OpenAIClient(ServerAddress("http", host, port, ""), key)
    command = python_command("-m", "parley", "serve", *([model] if model else []), "--host", host)
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [*command, "--port", str(port), *flags],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | {"PARLEY_API_KEY": key},  # not a flag: every user of the machine can read flags
            start_new_session=True,
            preexec_fn=die_with_parent if sys.platform == "linux" else None,
        )
        try:
            wait_for_server(process, client, log)
            yield client
        finally:
            _stop_process(process)


def wait_for_server(process: subprocess.Popen[bytes], client: OpenAIClient, log: IO[bytes]) -> None:
    """Wait until the server is ready. Shows its progress in a terminal. Raises ClientError if it exits."""
    progress_text = ""
    try:
        while True:
            if process.poll() is not None:
                log.seek(0)
                lines = log.read().decode(errors="replace").strip().splitlines()
                reason = lines[-1].removeprefix("parley: ") if lines else "it printed nothing."
                raise ClientError(f"The server did not start: {reason}")
            try:
                client.call_json("GET", "/health/ready", timeout=5)
                return
            except ClientError as error:
                if error.status not in (0, 503):
                    raise
                if sys.stderr.isatty() and error.status and (text := str(error)) != progress_text:
                    sys.stderr.write(f"\r\x1b[K{text}")
                    progress_text = text
            time.sleep(0.05)
    finally:
        if progress_text:
            sys.stderr.write("\r\x1b[K")


def _stop_process(process: subprocess.Popen[bytes]) -> None:
    """Stop the server: two requests to terminate, then a kill."""
    for act in (process.terminate, process.terminate, process.kill):
        if process.poll() is not None:
            return
        act()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)


def free_address() -> tuple[str, int]:
    """Return an address of this machine alone, and a free port there. Raises ClientError."""
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with contextlib.suppress(OSError), socket.socket(family) as probe:
            probe.bind((host, 0))
            return host, int(probe.getsockname()[1])
    raise ClientError("No server can be started: nothing can listen on 127.0.0.1 or ::1.")
