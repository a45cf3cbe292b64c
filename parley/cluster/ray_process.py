"""One parley process on a node that Ray chose: the child of an actor, and tied to its lifetime.

An actor whose child has ended exits itself, and Ray restarts it, on another node if its node is gone. This module
therefore has no placement or restart logic. Knows nothing of the process's work.
"""

from __future__ import annotations

import contextlib
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

from parley.child_process import die_with_parent, python_command
from parley.cluster.plan import format_toml, starts_ray_workers

RESTART_PAUSE = 5.0  # seconds before a process that ended immediately is restarted
GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
STOP_SECONDS = 60.0  # seconds that a process has to end by itself


class RayProcess:
    """One parley process on the node of this actor. ``command``: its command; ``options``: the content of its file.

    ``hosts`` and ``ports`` name options that default to the node's address and to free ports of the node.
    """

    def __init__(self, command: list[str], options: Mapping[str, Any], hosts: list[str], ports: list[str], secret: str):
        self._host = str(options.get(hosts[0], "")) or ray.util.get_node_ip_address()
        self._ports = {name: int(options.get(name, 0)) or _free_port(self._host) for name in ports}
        self._stop_requested = threading.Event()
        file, path = tempfile.mkstemp(suffix=".toml", prefix="parley-")
        with os.fdopen(file, "w", encoding="utf-8") as config:
            config.write(format_toml({**dict.fromkeys(hosts, self._host), **options, **self._ports}))
        self._config = Path(path)
        self._since = time.monotonic()
        self._child = subprocess.Popen(
            python_command("-m", "parley", *command, "--config", path),
            stdin=subprocess.DEVNULL,
            env=child_environment(os.environ, options, ray.get_runtime_context().gcs_address)
            | {"PARLEY_CLUSTER_SECRET": secret},
            preexec_fn=die_with_parent if sys.platform == "linux" else None,
        )
        threading.Thread(target=self._watch_child, daemon=True).start()

    def report_location(self) -> tuple[str, dict[str, int], str, int]:
        """Return the address, ports by option name, node id, and process id."""
        node = ray.get_runtime_context().get_node_id()
        return self._host, self._ports, node, self._child.pid

    def stop_process(self) -> None:
        """Ask the process to finish its requests and end; kill it if it does not."""
        self._stop_requested.set()
        for number, wait_seconds in ((signal.SIGTERM, STOP_SECONDS), (signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
            self._child.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(wait_seconds)
                break

    def _watch_child(self) -> None:
        code = self._child.wait()
        self._config.unlink(missing_ok=True)
        if self._stop_requested.is_set():
            return
        print(f"parley: a process of the cluster ended with {code}; restarting it", file=sys.stderr, flush=True)
        if time.monotonic() - self._since < RESTART_PAUSE:
            time.sleep(RESTART_PAUSE)  # the cause may be permanent
        os._exit(1)


def child_environment(environment: Mapping[str, str], options: Mapping[str, Any], ray_address: str) -> dict[str, str]:
    """Return the environment of a process that an actor starts: without Ray's variables of the actor's own process.

    If Ray places vLLM's workers for it, the process connects to ``ray_address``, and sees all GPUs: of an actor that
    reserves none, Ray hides them.
    """
    kept_variables = {name: value for name, value in environment.items() if not name.startswith("RAY_")}
    if starts_ray_workers(options):
        kept_variables["RAY_ADDRESS"] = ray_address
        for name in GPU_VARIABLES:
            kept_variables.pop(name, None)
    return kept_variables


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
