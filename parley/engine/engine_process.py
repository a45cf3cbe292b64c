"""A process that runs an engine, and the socket to it.

The process can be started before its settings are known. It then imports its libraries, which takes as long as loading
a small model, while the server reads its options and imports its own libraries. So that the start is early, this module
imports little.
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from parley.child_process import python_command
from parley.control_groups import count_memory_kills

ENGINE_COMMAND = python_command("-m", "parley.worker.process")  # the command that runs parley's own engine
EARLY = "early"  # an argument: the settings come later, so libraries are imported before


@dataclass(frozen=True)
class EngineProcess:
    """A process, and this side's end of the socket to it. ``memory_kills``: the result of ``count_memory_kills`` before
    it started."""

    process: subprocess.Popen[bytes]
    own_end: socket.socket
    memory_kills: int | None

    def discard(self) -> None:
        """End the process, unless it has ended."""
        self.own_end.close()
        self.process.kill()
        self.process.wait()


def start_engine_process(command: Sequence[str], *, owns_group: bool = False) -> EngineProcess:
    """Start a process, connected by a socket. The descriptor of its end is added to ``command`` as the last argument.

    ``owns_group``: the process leads a process group of its own. Raises OSError.
    """
    memory_kills = count_memory_kills()
    own_end, engine_end = socket.socketpair()
    try:
        process = subprocess.Popen(
            [*command, str(engine_end.fileno())],
            pass_fds=[engine_end.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=owns_group,
        )
    except OSError:
        own_end.close()
        raise
    finally:
        engine_end.close()
    return EngineProcess(process, own_end, memory_kills)


def start_early_process() -> EngineProcess | None:
    """Start parley's own engine before its settings are known; None if it cannot be started now."""
    try:
        return start_engine_process([*ENGINE_COMMAND, EARLY])
    except OSError:
        return None
