"""The Ray supervisor actor: starts and stops the other actors of a cluster, and knows where they run.

Once per second it compares the running processes (``cluster.ray_process``) with the wanted number, and sends the
coordinator the list of instances (`POST /v1/instances/refresh`). Actors are found by name, ``CLUSTER/GROUP-NUMBER`` in
the namespace ``parley``, so a restarted supervisor finds all of them. Knows nothing of requests.
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
from parley.cluster.ray_process import DRAIN, Process

NAMESPACE = "parley"
KEEPER = "keeper"
HOST, PORT = "127.0.0.1", 8000  # default address of the coordinator, for clients
COORDINATOR = "coordinator"
PERIOD = 1.0  # seconds between two rounds of supervision
BATCH = 16  # actors of a group started in one round, to keep the round short
PATIENCE = DRAIN + 15  # seconds until a stopped process must have ended
CODES = {"mixed": "U", "prefill": "P", "decode": "D", "flex": "F"}  # codes of the roles in the refresh interface
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # proxies do not reach the cluster's nodes

log = logging.getLogger("parley.cluster")


class Seen(NamedTuple):
    """A process of the cluster at the last observation. ``pid`` 0: it is not placed, or not restarted yet."""

    name: str
    group: str
    role: str
    needs: str
    host: str = ""
    ports: Mapping[str, int] = {}
    node: str = ""
    pid: int = 0

    def url(self, port: str) -> str:
        """Return the base URL of one of its ports, by the port's option name."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.ports[port]}"


class Leaving(NamedTuple):
    """An actor whose process is stopping: the result that arrives when it has ended, and the time limit for that."""

    actor: Any
    stopped: Any
    until: float


class Keeper:
    """The supervisor actor. ``scale``, ``look``, ``address``, ``ready`` and ``end`` are called through Ray."""

    def __init__(self, plan: Plan, secret: str):
        self._plan = plan
        self._secret = secret
        self._groups = {group.name: group for group in plan.groups}
        self._wanted = {group.name: group.count for group in plan.groups}
        self._seen: dict[str, Seen] = {}
        self._actors: dict[str, Any] = {}
        self._leaving: dict[str, Leaving] = {}
        self._asked: dict[str, Any] = {}  # pending calls for the location of a process
        self._born: set[str] = set()  # names of actors whose process has been started
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._find()
        threading.Thread(target=self._keep, daemon=True).start()

    def scale(self, wanted: dict[str, int]) -> str:
        """Set the wanted number of instances per group. Return an error message, empty on success."""
        if unknown := wanted.keys() - self._groups.keys():
            return f"There is no group {min(unknown)}. Known: {', '.join(self._groups)}."
        with self._lock:
            self._wanted.update(wanted)
        return ""

    def look(self) -> tuple[list[Seen], dict[str, int]]:
        """Return every process, and the wanted number of instances per group."""
        with self._lock:
            return sorted(self._seen.values(), key=lambda seen: _number(seen.name)), dict(self._wanted)

    def address(self) -> str:
        """Return the URL of the coordinator, for clients."""
        options = {"host": HOST, "predict_port": PORT, **self._plan.coordinator}
        shown = {"0.0.0.0": self._seen[COORDINATOR].host, "::": self._seen[COORDINATOR].host}
        host = shown.get(options["host"], options["host"])
        port = self._seen[COORDINATOR].ports.get("predict_port", options["predict_port"])
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def end(self) -> None:
        """Stop every process, the coordinator first, and wait until all have ended."""
        self._over.set()
        with self._lock:
            self._remove([COORDINATOR] if COORDINATOR in self._actors else [])
            self._reap(PATIENCE)
            self._remove(list(self._actors))
            self._reap(PATIENCE)

    def _find(self) -> None:
        """Take over the actors of an earlier supervisor."""
        prefix = f"{self._plan.name}/"
        for each in ray.util.list_named_actors(all_namespaces=True):
            name = each["name"].removeprefix(prefix)
            if each["namespace"] != NAMESPACE or not each["name"].startswith(prefix) or name == KEEPER:
                continue
            self._actors[name] = ray.get_actor(each["name"], NAMESPACE)
            self._born.add(name)
        for group in self._groups.values():  # after scaling, the existing number counts
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
                log.exception("The supervision of the cluster failed.")

    def _adjust(self) -> None:
        """Start missing actors, START_BATCH at a time, and remove the newest of surplus ones."""
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
        """Stop actors gracefully. They stay in the list of processes until they have ended."""
        until = time.monotonic() + PATIENCE
        for name in names:
            actor = self._actors.pop(name)
            self._leaving[name] = Leaving(actor, actor.stop.remote(), until if name in self._born else 0.0)

    def _reap(self, patience: float = 0.0) -> None:
        """Remove actors that have ended or exceeded their time limit, after waiting up to ``patience`` seconds."""
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
        """Update the location of each actor's process. An actor that Ray is (re)starting answers once it runs; until
        then its location is empty, and it is not asked again."""
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
        """Describe an actor of an earlier supervisor, before it is observed."""
        group = self._groups.get(_group(name))
        role, needs = (group.role, group.needs) if group else ("", self._plan.needs)
        return Seen(name, _group(name), role, str(needs))

    def _tell(self) -> None:
        """Send the coordinator the list of all placed instances, ready or not."""
        seen = dict(self._seen)
        coordinator = seen.pop(COORDINATOR, None)
        if coordinator is None or not coordinator.pid:
            return
        placed = [each for each in seen.values() if each.pid]
        body = {"ids": [_number(each.name) for each in placed], "instances": list(map(_item, placed))}
        url = coordinator.url("management_port") + "/v1/instances/refresh"
        headers = {"content-type": "application/json", "parley-secret": self._secret}
        listed = urllib.request.Request(url, msgspec.json.encode(body), headers)
        _answers(listed)  # if the coordinator is starting or gone, the next list follows in a second

    def ready(self) -> bool:
        """Whether the coordinator accepts requests."""
        coordinator = self._seen.get(COORDINATOR)
        if coordinator is None or not coordinator.pid:
            return False
        return _answers(coordinator.url("status_port") + "/v1/readiness")


def _answers(asked: str | urllib.request.Request) -> bool:
    """Send a request to the coordinator; True if it succeeds."""
    try:
        DIRECT.open(asked, timeout=PERIOD).close()
    except (OSError, HTTPException):
        return False
    return True


def _item(seen: Seen) -> dict[str, Any]:
    """Describe an instance for the refresh interface. Its capabilities are polled by the coordinator itself."""
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
    """Return an instance's number, unique over all groups; 0 for the coordinator."""
    return int(name.rpartition("-")[2]) if name != COORDINATOR else 0
