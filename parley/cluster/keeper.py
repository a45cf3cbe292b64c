"""What a cluster on Ray consists of: an actor that makes the other actors, takes them away, and knows where they are.

Each second the *keeper* sees that there are as many processes (``process``) as are wanted, and tells the coordinator
which instances there are (`POST /v1/instances/refresh`). Actors are found by name, ``CLUSTER/GROUP-NUMBER`` in the
namespace ``parley``; so a keeper that was itself started again finds everything. Knows nothing of requests.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any, NamedTuple

import msgspec
import ray

from parley.cluster.plan import Needs, Plan
from parley.cluster.process import DRAIN, Process

NAMESPACE = "parley"
KEEPER = "keeper"
HOST, PORT = "127.0.0.1", 8000  # of the coordinator, for clients
COORDINATOR = "coordinator"
PERIOD = 1.0  # seconds between two looks
BATCH = 16  # actors that are made in one look, so that it stays short
PATIENCE = DRAIN + 15  # seconds in which a process that is to end has ended
CODES = {"mixed": "U", "prefill": "P", "decode": "D", "flex": "F"}  # of roles, in the refresh interface
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy for the world knows no nodes

log = logging.getLogger("parley.cluster")


class Seen(NamedTuple):
    """A process of the cluster, as the keeper saw it last. ``pid`` 0: it is not placed, or not started again yet."""

    name: str
    group: str
    role: str
    needs: str
    host: str = ""
    ports: Mapping[str, int] = {}
    node: str = ""
    pid: int = 0

    def url(self, port: str) -> str:
        """Where it answers on one of its ports, by the port's option."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.ports[port]}"


class Leaving(NamedTuple):
    """An actor whose process is to end: what is there when it has ended, and when that is no longer waited for."""

    actor: Any
    stopped: Any
    until: float


class Keeper:
    """What the cluster consists of. ``wanted``: how many instances of each group."""

    def __init__(self, plan: Plan, secret: str):
        self._plan = plan
        self._secret = secret
        self._groups = {group.name: group for group in plan.groups}
        self._wanted = {group.name: group.count for group in plan.groups}
        self._seen: dict[str, Seen] = {}
        self._actors: dict[str, Any] = {}
        self._leaving: dict[str, Leaving] = {}
        self._asked: dict[str, Any] = {}  # where each is, as far as that was not answered
        self._born: set[str] = set()  # those that have had a process
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._find()
        threading.Thread(target=self._keep, daemon=True).start()

    def scale(self, wanted: dict[str, int]) -> str:
        """Have so many instances of these groups. A sentence if that is not possible."""
        if unknown := wanted.keys() - self._groups.keys():
            return f"There is no group {min(unknown)}. Known: {', '.join(self._groups)}."
        with self._lock:
            self._wanted.update(wanted)
        return ""

    def look(self) -> tuple[list[Seen], dict[str, int]]:
        """Every process, and how many of each group are wanted."""
        with self._lock:
            return sorted(self._seen.values(), key=lambda seen: _number(seen.name)), dict(self._wanted)

    def address(self) -> str:
        """Where clients find the coordinator."""
        options = {"host": HOST, "predict_port": PORT, **self._plan.coordinator}
        shown = {"0.0.0.0": self._seen[COORDINATOR].host, "::": self._seen[COORDINATOR].host}
        host = shown.get(options["host"], options["host"])
        port = self._seen[COORDINATOR].ports.get("predict_port", options["predict_port"])
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def end(self) -> None:
        """Stop every process, the coordinator first."""
        self._over.set()
        with self._lock:
            self._remove([COORDINATOR] if COORDINATOR in self._actors else [])
            self._reap(PATIENCE)
            self._remove(list(self._actors))
            self._reap(PATIENCE)

    def _find(self) -> None:
        """The actors of an earlier keeper."""
        prefix = f"{self._plan.name}/"
        for each in ray.util.list_named_actors(all_namespaces=True):
            name = each["name"].removeprefix(prefix)
            if each["namespace"] != NAMESPACE or not each["name"].startswith(prefix) or name == KEEPER:
                continue
            self._actors[name] = ray.get_actor(each["name"], NAMESPACE)
            self._born.add(name)
        for group in self._groups.values():  # of what was scaled, what there is counts
            there = sum(_group(name) == group.name for name in self._actors)
            self._wanted[group.name] = there or group.count

    def _keep(self) -> None:
        while not self._over.wait(PERIOD if self._seen else 0.0):
            try:
                with self._lock:
                    if self._over.is_set():
                        return
                    self._adjust()
                    self._reap()
                self._observe()
                self._tell()
            except Exception:
                log.exception("the keeper failed to look after the cluster")

    def _adjust(self) -> None:
        """Make actors that are missing, some at a time, and remove the newest of those that are too many."""
        if COORDINATOR not in self._actors:
            options = {"host": HOST, "predict_port": PORT, **self._plan.coordinator, "secret": self._secret}
            ports = ["predict_port", "management_port", "metrics_port", "status_port"]
            hosts = ["management_host", "metrics_host", "status_host"]
            self._add(COORDINATOR, "", ["coordinator"], options, hosts, ports, self._plan.needs)
        for group in self._groups.values():
            names = sorted((name for name in self._actors if _group(name) == group.name), key=_number)
            for _ in range(len(names), min(self._wanted[group.name], len(names) + BATCH)):
                name = f"{group.name}-{max(map(_number, [*self._actors, *self._leaving]), default=0) + 1}"
                words = ["serve", "--role", group.role]
                self._add(name, group.role, words, group.options, ["host"], ["port", "peer-port"], group.needs)
            self._remove(names[self._wanted[group.name] :])

    def _add(
        self,
        name: str,
        role: str,
        words: list[str],
        options: Mapping[str, Any],
        hosts: list[str],
        ports: list[str],
        needs: Needs,
    ) -> None:
        actor = ray.remote(Process).options(
            name=f"{self._plan.name}/{name}",
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=-1,
            max_concurrency=2,
            num_cpus=needs.cpus,
            num_gpus=needs.gpus,
            memory=needs.memory or None,
            resources=dict(needs.resources) or None,
        )
        self._actors[name] = actor.remote(words, dict(options), hosts, ports, self._secret)
        self._seen[name] = Seen(name, _group(name), role, str(needs))

    def _remove(self, names: list[str]) -> None:
        """Let these end, with what they have begun; until then they are in the list, for that is to be heard of."""
        until = time.monotonic() + PATIENCE
        for name in names:
            actor = self._actors.pop(name)
            self._leaving[name] = Leaving(actor, actor.stop.remote(), until if name in self._born else 0.0)

    def _reap(self, patience: float = 0.0) -> None:
        """Have done with those that have ended, or have had the time for it; wait for them so many seconds."""
        refs = {each.stopped: name for name, each in self._leaving.items() if each.until}
        ended = ray.wait(list(refs), num_returns=len(refs), timeout=patience)[0] if refs else []
        over = {refs[ref] for ref in ended} | {
            name for name, each in self._leaving.items() if time.monotonic() >= each.until
        }
        for name in over:
            ray.kill(self._leaving.pop(name).actor, no_restart=True)
            self._seen.pop(name, None)
            self._asked.pop(name, None)
            self._born.discard(name)

    def _observe(self) -> None:
        """Where each actor's process is; of one that Ray is starting, or starting again, nobody knows. It answers when
        it has started, and is not asked once more before."""
        with self._lock:
            for name, actor in self._actors.items():
                if name not in self._asked:
                    self._asked[name] = actor.where.remote()
            asked = {ref: name for name, ref in self._asked.items()}
        done = ray.wait(list(asked), num_returns=len(asked), timeout=PERIOD)[0] if asked else []
        found = {}
        for each in done:
            with contextlib.suppress(ray.exceptions.RayError):
                found[asked[each]] = ray.get(each)
        with self._lock:
            for each in done:
                self._asked.pop(asked[each], None)
            self._born |= found.keys() & self._actors.keys()
            for name in self._actors:
                seen = self._seen.get(name) or self._unseen(name)
                host, ports, node, pid = found.get(name, ("", {}, "", 0))
                self._seen[name] = seen._replace(host=host, ports=ports, node=node, pid=pid)

    def _unseen(self, name: str) -> Seen:
        """An actor of an earlier keeper."""
        group = self._groups.get(_group(name))
        role, needs = (group.role, group.needs) if group else ("", self._plan.needs)
        return Seen(name, _group(name), role, str(needs))

    def _tell(self) -> None:
        """Give the coordinator the list of instances that are placed, whether or not they are ready."""
        seen = dict(self._seen)
        coordinator = seen.pop(COORDINATOR, None)
        if coordinator is None or not coordinator.pid:
            return
        placed = [each for each in seen.values() if each.pid]
        body = {"ids": [_number(each.name) for each in placed], "instances": list(map(_item, placed))}
        url = coordinator.url("management_port") + "/v1/instances/refresh"
        headers = {"content-type": "application/json", "parley-secret": self._secret}
        listed = urllib.request.Request(url, msgspec.json.encode(body), headers)
        _answers(listed)  # or it is starting, or gone; the next list comes in a second

    def ready(self) -> bool:
        """Does the coordinator take requests?"""
        coordinator = self._seen.get(COORDINATOR)
        if coordinator is None or not coordinator.pid:
            return False
        return _answers(coordinator.url("status_port") + "/v1/readiness")


def _answers(asked: str | urllib.request.Request) -> bool:
    """Ask the coordinator: does it say that all is well?"""
    try:
        DIRECT.open(asked, timeout=PERIOD).close()
    except (OSError, HTTPException):
        return False
    return True


def _item(seen: Seen) -> dict[str, Any]:
    """An instance as the refresh interface has it. What it can do, the coordinator asks it itself."""
    return {
        "id": _number(seen.name),
        "ip": seen.host,
        "port": str(seen.ports["port"]),
        "inter_comm_port": str(seen.ports["peer-port"]),
        "static_info": {"role": ord(CODES[seen.role])},
    }


def _group(name: str) -> str:
    return name.rpartition("-")[0] or name


def _number(name: str) -> int:
    """Of an instance, counted over all groups; 0: it is none."""
    return int(name.rpartition("-")[2]) if name != COORDINATOR else 0
