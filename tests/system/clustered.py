"""A cluster of real processes, as tests start, kill and look at it: a coordinator and instances, perhaps on hosts."""

from __future__ import annotations

import asyncio
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hosts

SECRET = secrets.token_hex(8)
PREDICT, MANAGEMENT, METRICS, STATUS = 7700, 7701, 7702, 7703


class Process:
    """One process of parley. ``words``: how it is called; it can be killed and started again."""

    def __init__(self, words: list[str], url: str, log: Path):
        self.words, self.url, self.log = words, url, log
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            self.words,
            stdin=subprocess.DEVNULL,
            stdout=self.log.open("a"),
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "PARLEY_CLUSTER_SECRET": SECRET},
            start_new_session=True,
        )

    @property
    def group(self) -> int:
        assert self.process is not None
        return self.process.pid

    def signal(self, number: int) -> None:
        """To the process and its engine."""
        os.killpg(self.group, number)

    def end(self) -> None:
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.group, signal.SIGKILL)
        self.process.wait()
        self.process = None

    def restart(self) -> None:
        self.end()
        self.start()

    def get(self, path: str) -> tuple[int, Any]:
        """Status and body, JSON if it is that; 0 while nothing answers."""
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
    def held(self) -> dict[str, int]:
        """What an instance has under way: all 0 when it is idle."""
        status, told = self.get("/v1/status")
        assert status == 200, told
        more = told["parley"]
        return {name: more[name] for name in ("running", "waiting", "pinned", "reserved")}


class Cluster:
    """A coordinator and an instance for each of ``roles``, all on this host; with ``hosts`` each on one of its own, the
    coordinator on the first of them. ``options`` are keys of the coordinator's file. To be closed."""

    def __init__(self, folder: Path, *roles: str, on: hosts.Hosts | None = None, **options: Any):
        self.folder = folder
        base = 7710
        place = (
            [on.addresses[number + 1] for number in range(len(roles) + 1)] if on else ["127.0.0.1"] * (len(roles) + 1)
        )
        at = [on.command(number + 1) if on else [] for number in range(len(roles) + 1)]
        lines = {
            "host": place[0],
            "predict_port": PREDICT,
            "management_port": MANAGEMENT,
            "metrics_port": METRICS,
            "status_port": STATUS,
            "secret": SECRET,
            **options,
        }
        text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in lines.items())
        self.instances: list[Process] = []
        for number, role in enumerate(roles):
            host, port = place[number + 1], base + 10 * number
            url = f"http://{host}:{port}"
            text += f'\n[[instances]]\nurl = "{url}"\nrole = "{role}"\n'
            flags = ["--role", role, "--host", host, "--port", str(port), "--peer-port", str(port + 1)]
            words = [*at[number + 1], sys.executable, "-m", "parley", "serve", *flags, "--kv-memory", "24MiB"]
            self.instances.append(Process(words, url, folder / f"{role}-{number}.log"))
        file = folder / "coordinator.toml"
        file.write_text(text)
        words = [*at[0], sys.executable, "-m", "parley", "coordinator", "--config", str(file)]
        self.coordinator = Process(words, f"http://{place[0]}:{PREDICT}", folder / "coordinator.log")
        self.ready()

    def ready(self, seconds: float = 90.0) -> None:
        """Wait until every instance serves, and the coordinator has noticed."""
        deadline = time.monotonic() + seconds
        while not (
            all(each.get("/health/ready")[0] == 200 for each in self.instances)
            and self.coordinator.get("/health/ready")[0] == 200
        ):
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.1)

    def idle(self, seconds: float = 40.0) -> None:
        """Wait until nothing is held anywhere, as must be some time after the last request."""
        deadline = time.monotonic() + seconds
        while any(any(each.held.values()) for each in self.instances):
            assert time.monotonic() < deadline, [each.held for each in self.instances]
            time.sleep(0.1)

    def logs(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text()[-2000:]}" for path in sorted(self.folder.glob("*.log")))

    def close(self) -> None:
        for each in [self.coordinator, *self.instances]:
            each.end()


@dataclass
class Heard:
    """What a client heard of a stream: the events' data until it ended, and whether that was as it should."""

    events: list[Any]
    done: bool = False  # [DONE] came
    cut: bool = False  # the connection broke, or was refused
    status: int = 0

    @property
    def text(self) -> str:
        choices = [choice for event in self.events for choice in event.get("choices", ())]
        return "".join(choice.get("text") or "" for choice in choices)

    @property
    def errors(self) -> list[Any]:
        return [event for event in self.events if "error" in event]


async def stream(url: str, body: dict[str, Any], heard: Heard | None = None) -> Heard:
    """A streamed completion, read as it comes; ``heard`` can be watched meanwhile."""
    heard = heard or Heard([])
    host, port = url.removeprefix("http://").split(":")
    data = json.dumps({"model": "parley-demo", "stream": True, **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\ncontent-type: application/json\r\n"
    try:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        heard.status = int((await reader.readline()).split()[1])
        headers = (await reader.readuntil(b"\r\n\r\n")).lower()
        if b"chunked" not in headers:
            heard.events.append(json.loads(await reader.read()))
            return heard
        while size := int(await reader.readline(), 16):
            lines = (await reader.readexactly(size + 2))[:-2].decode().split("\n\n")
            for line in filter(None, lines):
                if line == "data: [DONE]":
                    heard.done = True
                elif line.startswith("data: "):
                    heard.events.append(json.loads(line.removeprefix("data: ")))
        writer.close()
    except (OSError, EOFError, ValueError, IndexError):
        heard.cut = True
    return heard
