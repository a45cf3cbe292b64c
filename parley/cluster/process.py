"""One process of parley where Ray placed it: the child of an actor, which lives and dies with it.

An actor whose child has ended ends itself, and Ray starts it again, elsewhere if its node is gone; so there is neither
placement nor restarting in here. Knows nothing of what the process does.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray

from parley.cluster.plan import written

PAUSE = 5.0  # seconds before one that ended at once is started again
DRAIN = 60.0  # seconds that it gets to end by itself
PR_SET_PDEATHSIG = 1


class Process:
    """One process of parley on the node that Ray chose. ``words``: its command; ``options``: its file.

    ``hosts`` and ``ports`` are options that get the node's address and free ports of it, unless the file says which.
    """

    def __init__(self, words: list[str], options: Mapping[str, Any], hosts: list[str], ports: list[str], secret: str):
        self._host = str(options.get(hosts[0], "")) or ray.util.get_node_ip_address()
        self._ports = {name: int(options.get(name, 0)) or _free_port(self._host) for name in ports}
        self._ended = threading.Event()
        file, path = tempfile.mkstemp(suffix=".toml", prefix="parley-")
        with os.fdopen(file, "w", encoding="utf-8") as config:
            config.write(written({**dict.fromkeys(hosts, self._host), **options, **self._ports}))
        self._config = Path(path)
        self._since = time.monotonic()
        self._child = subprocess.Popen(
            [sys.executable, "-m", "parley", *words, "--config", path],
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PARLEY_CLUSTER_SECRET": secret},
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,
        )
        threading.Thread(target=self._watch, daemon=True).start()

    def where(self) -> tuple[str, dict[str, int], str, int]:
        """Address, ports by option, id of the node, process id."""
        node = ray.get_runtime_context().get_node_id()
        return self._host, self._ports, node, self._child.pid

    def stop(self) -> None:
        """Let it end, with what it has begun; then there is nothing left to watch."""
        self._ended.set()
        for number, patience in ((signal.SIGTERM, DRAIN), (signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
            self._child.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(patience)
                break

    def _watch(self) -> None:
        code = self._child.wait()
        self._config.unlink(missing_ok=True)
        if self._ended.is_set():
            return
        print(f"parley: a process of the cluster ended with {code}; it is started again", file=sys.stderr, flush=True)
        if time.monotonic() - self._since < PAUSE:
            time.sleep(PAUSE)  # what is wrong with it may be wrong for good
        os._exit(1)


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _die_with_parent() -> None:
    """Ask the kernel to end this process when the actor is gone, however it went."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
