"""Where the processes of a cluster run: Ray finds a node for each, and starts those again that are lost.

Every process of parley (an instance, the coordinator) is the child of an actor, which lives and dies with it: an actor
whose child has ended ends itself, and Ray starts it again, elsewhere if its node is gone. So there is neither placement
nor restarting in here. One further actor, the *keeper*, holds what the cluster is to consist of, makes actors and takes
them away, and tells the coordinator each second which instances there are (`POST /v1/instances/refresh`).

Actors are found by name, ``CLUSTER/GROUP-NUMBER`` in the namespace ``parley``; so a keeper that was itself started
again finds everything, and so does another terminal. The file knows nothing of requests.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import ray

from parley.cluster.plan import Needs, Plan, written

NAMESPACE = "parley"
KEEPER = "keeper"
HOST, PORT = "127.0.0.1", 8000  # of the coordinator, for clients
COORDINATOR = "coordinator"
PERIOD = 1.0  # seconds between two looks of the keeper
PAUSE = 5.0  # before a process that ended at once is started again
DRAIN = 60.0  # seconds that a process gets to end by itself
PR_SET_PDEATHSIG = 1
CODES = {"mixed": "U", "prefill": "P", "decode": "D", "flex": "F"}  # of roles, in the refresh interface

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


class Keeper:
    """What the cluster consists of. ``wanted``: how many instances of each group."""

    def __init__(self, plan: Plan, secret: str):
        self._plan = plan
        self._secret = secret
        self._groups = {group.name: group for group in plan.groups}
        self._wanted = {group.name: group.count for group in plan.groups}
        self._seen: dict[str, Seen] = {}
        self._actors: dict[str, Any] = {}
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
        return f"http://{shown.get(options['host'], options['host'])}:{options['predict_port']}"

    def end(self) -> None:
        """Stop every process, the coordinator first."""
        self._over.set()
        with self._lock:
            self._remove([COORDINATOR] if COORDINATOR in self._actors else [])
            self._remove(list(self._actors))

    def _find(self) -> None:
        """The actors of an earlier keeper."""
        prefix = f"{self._plan.name}/"
        for each in ray.util.list_named_actors(all_namespaces=True):
            name = each["name"].removeprefix(prefix)
            if each["namespace"] != NAMESPACE or not each["name"].startswith(prefix) or name == KEEPER:
                continue
            self._actors[name] = ray.get_actor(each["name"], NAMESPACE)
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
                self._observe()
                self._tell()
            except Exception:
                log.exception("the keeper failed to look after the cluster")

    def _adjust(self) -> None:
        """Make actors that are missing, and remove the newest of those that are too many."""
        if COORDINATOR not in self._actors:
            options = {"host": HOST, "predict_port": PORT, **self._plan.coordinator, "secret": self._secret}
            ports = ["management_port", "metrics_port", "status_port"]
            hosts = ["management_host", "metrics_host", "status_host"]
            self._add(COORDINATOR, "", ["coordinator"], options, hosts, ports, self._plan.needs)
        for group in self._groups.values():
            names = sorted((name for name in self._actors if _group(name) == group.name), key=_number)
            for _ in range(len(names), self._wanted[group.name]):
                name = f"{group.name}-{max(map(_number, self._actors), default=0) + 1}"
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
        """Let these end, all at once."""
        leaving = {name: self._actors.pop(name) for name in names}
        for name in leaving:
            self._seen.pop(name, None)
        stopped = [actor.stop.remote() for actor in leaving.values()]
        ray.wait(stopped, num_returns=len(stopped), timeout=DRAIN + 15) if stopped else None
        for actor in leaving.values():
            ray.kill(actor, no_restart=True)

    def _observe(self) -> None:
        """Where each actor's process is; of one that Ray is starting again nobody knows."""
        with self._lock:
            asked = {actor.where.remote(): name for name, actor in self._actors.items()}
        done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=PERIOD)
        found = {}
        for each in done:
            with contextlib.suppress(ray.exceptions.RayError):
                found[asked[each]] = ray.get(each)
        with self._lock:
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
        head = {"content-type": "application/json", "parley-secret": self._secret}
        url = coordinator.url("management_port") + "/v1/instances/refresh"
        with contextlib.suppress(OSError):  # it is starting, or gone; the next list comes in a second
            urllib.request.urlopen(urllib.request.Request(url, msgspec.json.encode(body), head), timeout=PERIOD).close()

    def ready(self) -> bool:
        """Does the coordinator take requests?"""
        coordinator = self._seen.get(COORDINATOR)
        if coordinator is None or not coordinator.pid:
            return False
        try:
            urllib.request.urlopen(coordinator.url("status_port") + "/v1/readiness", timeout=PERIOD).close()
        except OSError:
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


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _die_with_parent() -> None:
    """Ask the kernel to end this process when the actor is gone, however it went."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


# -- from outside, by any terminal that reaches the Ray cluster


def connect(address: str = "", *, begin: bool = False) -> bool:
    """Connect to the Ray cluster at the address, or the one of this machine. With ``begin`` one is started if there is
    none, and lives as long as this process: then True. Raises ConnectionError."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet = {"namespace": NAMESPACE, "logging_level": logging.ERROR, "log_to_driver": begin}
    try:
        ray.init(address=address or "auto", **quiet)
        return False
    except ConnectionError:
        if address or not begin:
            raise
    ray.init(include_dashboard=False, **quiet)
    return True


def up(plan: Plan) -> Any:
    """A keeper for the plan, which begins with it. Of a cluster's name there can only be one."""
    name = f"{plan.name}/{KEEPER}"
    keeper = ray.remote(Keeper).options(
        name=name, namespace=NAMESPACE, lifetime="detached", max_restarts=-1, num_cpus=0, max_concurrency=4
    )
    return keeper.remote(plan, secrets.token_urlsafe())


def find(name: str) -> Any:
    """The keeper of a cluster that is there; of the only one if ``name`` is empty. Raises LookupError."""
    there = names()
    if not name and len(there) == 1:
        (name,) = there
    if name not in there:
        known = ", ".join(there) or "none"
        raise LookupError(f"There is no cluster {name}. Known: {known}." if name else f"Which cluster? Known: {known}.")
    return ray.get_actor(f"{name}/{KEEPER}", NAMESPACE)


def names() -> list[str]:
    """The clusters that there are."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    keepers = (each["name"] for each in actors if each["namespace"] == NAMESPACE)
    return sorted(name.removesuffix(f"/{KEEPER}") for name in keepers if name.endswith(f"/{KEEPER}"))


def down(keeper: Any) -> None:
    """End a cluster: its processes may finish what they have begun."""
    ray.get(keeper.end.remote())
    ray.kill(keeper, no_restart=True)


def look(keeper: Any) -> tuple[list[Seen], dict[str, int]]:
    """Every process of a cluster, and how many of each group are wanted."""
    return ray.get(keeper.look.remote())


def ready(keeper: Any) -> bool:
    """Does its coordinator take requests?"""
    return ray.get(keeper.ready.remote())


def address(keeper: Any) -> str:
    """Where clients find it."""
    return ray.get(keeper.address.remote())


def page(keeper: Any) -> str:
    """Where its coordinator's live page is."""
    (coordinator,) = (each for each in look(keeper)[0] if each.name == COORDINATOR)
    return coordinator.url("status_port")


def scale(keeper: Any, group: str, count: int) -> str:
    """Have so many instances of a group. A sentence if that is not possible."""
    return ray.get(keeper.scale.remote({group: count}))


def has() -> str:
    """What all nodes together have, in words."""
    named = {"CPU": "cpus", "GPU": "gpus", "memory": "memory"}
    amounts = ray.cluster_resources()
    return ", ".join(
        f"{named.get(name, name)} {amount:g}" for name, amount in sorted(amounts.items()) if ":" not in name
    )
