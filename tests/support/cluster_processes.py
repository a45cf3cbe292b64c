"""A cluster of real processes that tests start, kill and inspect: a coordinator and instances, optionally on hosts."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from support import network_hosts
from support.free_ports import free_port_range

SECRET = secrets.token_hex(8)
PREDICT, MANAGEMENT, METRICS, STATUS = 0, 1, 2, 3  # offsets into a cluster's port range
INSTANCE, RANGE = 10, 100  # offset of the first instance's ports and distance between instances; size of the range


class ParleyProcess:
    """One parley process with its ``command_line``; it can be killed and started again."""

    def __init__(self, command_line: list[str], url: str, log: Path, role: str = ""):
        self.command_line, self.url, self.log, self.role = command_line, url, log, role
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        with self.log.open("a") as output:
            self.process = subprocess.Popen(
                self.command_line,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "PARLEY_CLUSTER_SECRET": SECRET},
                start_new_session=True,
            )

    @property
    def process_group(self) -> int:
        assert self.process is not None
        return self.process.pid

    def signal(self, number: int) -> None:
        """Sends a signal to the process and its engine."""
        os.killpg(self.process_group, number)

    def kill_group(self) -> None:
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process_group, signal.SIGKILL)
        self.process.wait()
        self.process = None

    def restart(self) -> None:
        self.kill_group()
        self.start()

    def fetch(self, path: str) -> tuple[int, Any]:
        """Returns status and body, decoded if it is JSON; status 0 while nothing answers."""
        request = urllib.request.Request(self.url + path, headers={"parley-secret": SECRET})
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                status, body = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            status, body = error.code, error.read()
        except OSError:
            return 0, None
        try:
            return status, json.loads(body)
        except ValueError:
            return status, body

    @property
    def held_counts(self) -> dict[str, int]:
        """The running, waiting, pinned and reserved counts of an instance: all 0 when it is idle."""
        status, body = self.fetch("/v1/status")
        assert status == 200, body
        counts = body["parley"]
        return {name: counts[name] for name in ("running", "waiting", "pinned", "reserved")}


class Cluster:
    """A coordinator and an instance for each of ``roles``, all on this host, or with ``network`` each on a host of its
    own, the coordinator on the first. ``flags`` apply to every instance, ``instance_flags`` replaces them for instances
    by number; ``peers`` overrides the handover address that the coordinator uses for an instance; ``options`` are keys
    of its config file; ``ready_seconds``: how long the start may take. Must be closed."""

    def __init__(
        self,
        folder: Path,
        *roles: str,
        network: network_hosts.NetworkHosts | None = None,
        flags: Sequence[str] = ("--kv-memory", "24MiB"),
        instance_flags: Mapping[int, Sequence[str]] = MappingProxyType({}),
        peers: Mapping[int, str] = MappingProxyType({}),
        ready_seconds: float = 90.0,
        **options: Any,
    ):
        self.folder = folder
        base = free_port_range(RANGE)
        addresses = (
            [network.addresses[number + 1] for number in range(len(roles) + 1)]
            if network
            else ["127.0.0.1"] * (len(roles) + 1)
        )
        prefixes = [network.command(number + 1) if network else [] for number in range(len(roles) + 1)]
        coordinator_keys = {
            "host": addresses[0],
            "predict_port": base + PREDICT,
            "management_port": base + MANAGEMENT,
            "metrics_port": base + METRICS,
            "status_port": base + STATUS,
            "secret": SECRET,
            **options,
        }
        config_text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in coordinator_keys.items())
        self.instances: list[ParleyProcess] = []
        for number, role in enumerate(roles):
            host, port = addresses[number + 1], base + INSTANCE * (number + 1)
            url = f"http://{host}:{port}"
            config_text += f'\n[[instances]]\nurl = "{url}"\nrole = "{role}"\n'
            config_text += f'peer = "{peers[number]}"\n' if number in peers else ""
            command_line = [
                *prefixes[number + 1],
                sys.executable,
                "-m",
                "parley",
                "serve",
                "--role",
                role,
                "--host",
                host,
            ]
            command_line += ["--port", str(port), "--peer-port", str(port + 1), *instance_flags.get(number, flags)]
            self.instances.append(ParleyProcess(command_line, url, folder / f"{role}-{number}.log", role))
        file = folder / "coordinator.toml"
        file.write_text(config_text)
        command_line = [*prefixes[0], sys.executable, "-m", "parley", "coordinator", "--config", str(file)]
        self.coordinator = ParleyProcess(
            command_line, f"http://{addresses[0]}:{base + PREDICT}", folder / "coordinator.log"
        )
        try:
            self.ready(ready_seconds)
        except BaseException:
            self.close()
            raise

    def ready(self, seconds: float = 90.0) -> None:
        """Waits until every instance serves and the coordinator has noticed."""
        deadline = time.monotonic() + seconds
        while not (
            all(instance.fetch("/health/ready")[0] == 200 for instance in self.instances)
            and self.coordinator.fetch("/health/ready")[0] == 200
        ):
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.1)

    def wait_until_idle(self, seconds: float = 40.0) -> None:
        """Waits until no instance holds anything, as must happen some time after the last request."""
        deadline = time.monotonic() + seconds
        while any(any(instance.held_counts.values()) for instance in self.instances):
            assert time.monotonic() < deadline, [instance.held_counts for instance in self.instances]
            time.sleep(0.1)

    def logs(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text()[-2000:]}" for path in sorted(self.folder.glob("*.log")))

    def close(self) -> None:
        for process in [self.coordinator, *self.instances]:
            process.kill_group()
