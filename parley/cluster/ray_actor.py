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

from parley.cluster.plan import ClusterPlan, ResourceNeeds
from parley.cluster.ray_process import STOP_SECONDS, RayProcess

RAY_NAMESPACE = "parley"
SUPERVISOR_NAME = "supervisor"
DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8000  # default address of the coordinator, for clients
COORDINATOR_NAME = "coordinator"
SUPERVISION_PERIOD = 1.0  # seconds between two rounds of supervision
START_BATCH = 16  # actors of a group started in one round, to keep the round short
STOP_TIMEOUT = STOP_SECONDS + 15  # seconds until a stopped process must have ended
ROLE_CODES = {"mixed": "U", "prefill": "P", "decode": "D", "flex": "F"}  # codes of the roles in the refresh interface
DIRECT_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # proxies do not reach the cluster's nodes

log = logging.getLogger("parley.cluster")


class ProcessInfo(NamedTuple):
    """A process of the cluster at the last observation. ``pid`` 0: it is not placed, or not restarted yet."""

    name: str
    group: str
    role: str
    needs: str
    host: str = ""
    ports: Mapping[str, int] = {}
    node: str = ""
    pid: int = 0

    def port_url(self, port: str) -> str:
        """Return the base URL of one of its ports, by the port's option name."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.ports[port]}"


class StoppingActor(NamedTuple):
    """An actor whose process is stopping: the result that arrives when it has ended, and the time limit for that."""

    actor: Any
    stopped: Any
    deadline: float


class RaySupervisor:
    """The supervisor actor. Its public methods are called through Ray."""

    def __init__(self, plan: ClusterPlan, secret: str):
        self._plan = plan
        self._secret = secret
        self._groups = {group.name: group for group in plan.groups}
        self._wanted_counts = {group.name: group.count for group in plan.groups}
        self._processes: dict[str, ProcessInfo] = {}
        self._actors: dict[str, Any] = {}
        self._stopping_actors: dict[str, StoppingActor] = {}
        self._pending_locations: dict[str, Any] = {}  # pending calls for the location of a process
        self._started_names: set[str] = set()  # names of actors whose process has been started
        self._lock = threading.Lock()
        self._closing_event = threading.Event()
        self._adopt_actors()
        threading.Thread(target=self._supervise_loop, daemon=True).start()

    def scale_groups(self, target_counts: dict[str, int]) -> str:
        """Set the wanted number of instances per group. Return an error message, empty on success."""
        if unknown := target_counts.keys() - self._groups.keys():
            return f"There is no group {min(unknown)}. Known: {', '.join(self._groups)}."
        with self._lock:
            self._wanted_counts.update(target_counts)
        return ""

    def list_processes(self) -> tuple[list[ProcessInfo], dict[str, int]]:
        """Return every process, and the wanted number of instances per group."""
        with self._lock:
            return sorted(self._processes.values(), key=lambda process: _instance_number(process.name)), dict(
                self._wanted_counts
            )

    def client_address(self) -> str:
        """Return the URL of the coordinator, for clients."""
        return self._coordinator_url("host", "predict_port")

    def status_page(self) -> tuple[str, str]:
        """Return the URL of the coordinator's live page, and the password that other machines need for it."""
        return self._coordinator_url("status_host", "status_port"), self._secret

    def _coordinator_url(self, host_key: str, port_key: str) -> str:
        """Return the URL of a port of the coordinator, from the keys of its file for host and port."""
        options = {"host": DEFAULT_HOST, **self._plan.coordinator}
        process = self._processes[COORDINATOR_NAME]
        host = options.get(host_key) or options["host"]
        if host in ("0.0.0.0", "::"):
            host = process.host
        return (
            f"http://[{host}]:{process.ports[port_key]}" if ":" in host else f"http://{host}:{process.ports[port_key]}"
        )

    def stop_processes(self) -> None:
        """Stop every process, the coordinator first, and wait until all have ended."""
        self._closing_event.set()
        with self._lock:
            self._stop_actors([COORDINATOR_NAME] if COORDINATOR_NAME in self._actors else [])
            self._reap_stopped(STOP_TIMEOUT)
            self._stop_actors(list(self._actors))
            self._reap_stopped(STOP_TIMEOUT)

    def _adopt_actors(self) -> None:
        """Take over the actors of an earlier supervisor."""
        prefix = f"{self._plan.name}/"
        for listed_actor in ray.util.list_named_actors(all_namespaces=True):
            name = listed_actor["name"].removeprefix(prefix)
            if (
                listed_actor["namespace"] != RAY_NAMESPACE
                or not listed_actor["name"].startswith(prefix)
                or name == SUPERVISOR_NAME
            ):
                continue
            self._actors[name] = ray.get_actor(listed_actor["name"], RAY_NAMESPACE)
            self._started_names.add(name)
        for group in self._groups.values():  # after scaling, the existing number counts
            existing_count = sum(_group_name(name) == group.name for name in self._actors)
            self._wanted_counts[group.name] = existing_count or group.count

    def _supervise_loop(self) -> None:
        while not self._closing_event.wait(SUPERVISION_PERIOD if self._processes else 0.0):
            try:
                with self._lock:
                    if self._closing_event.is_set():
                        return
                    self._adjust_actors()
                    self._reap_stopped()
                self._observe_processes()
                self._refresh_coordinator()
            except Exception:
                log.exception("The supervision of the cluster failed.")

    def _adjust_actors(self) -> None:
        """Start missing actors, START_BATCH at a time, and remove the newest of surplus ones."""
        if COORDINATOR_NAME not in self._actors:
            options = {
                "host": DEFAULT_HOST,
                "predict_port": DEFAULT_PORT,
                **self._plan.coordinator,
                "secret": self._secret,
            }
            ports = ["predict_port", "management_port", "metrics_port", "status_port"]
            hosts = ["management_host"]  # the supervisor may run elsewhere; the other ports are where clients are
            self._start_actor(COORDINATOR_NAME, "", ["coordinator"], options, hosts, ports, self._plan.needs)
        for group in self._groups.values():
            names = sorted((name for name in self._actors if _group_name(name) == group.name), key=_instance_number)
            for _ in range(len(names), min(self._wanted_counts[group.name], len(names) + START_BATCH)):
                name = (
                    f"{group.name}-{max(map(_instance_number, [*self._actors, *self._stopping_actors]), default=0) + 1}"
                )
                command = ["serve", "--role", group.role]
                self._start_actor(
                    name, group.role, command, group.options, ["host"], ["port", "peer-port"], group.needs
                )
            self._stop_actors(names[self._wanted_counts[group.name] :])

    def _start_actor(
        self,
        name: str,
        role: str,
        command: list[str],
        options: Mapping[str, Any],
        hosts: list[str],
        ports: list[str],
        needs: ResourceNeeds,
    ) -> None:
        actor = ray.remote(RayProcess).options(
            name=f"{self._plan.name}/{name}",
            namespace=RAY_NAMESPACE,
            lifetime="detached",
            max_restarts=-1,
            max_concurrency=2,
            num_cpus=needs.cpus,
            num_gpus=needs.gpus,
            memory=needs.memory or None,
            resources=dict(needs.resources) or None,
        )
        self._actors[name] = actor.remote(command, dict(options), hosts, ports, self._secret)
        self._processes[name] = ProcessInfo(name, _group_name(name), role, str(needs))

    def _stop_actors(self, names: list[str]) -> None:
        """Stop actors gracefully. They stay in the list of processes until they have ended."""
        deadline = time.monotonic() + STOP_TIMEOUT
        for name in names:
            actor = self._actors.pop(name)
            self._stopping_actors[name] = StoppingActor(
                actor, actor.stop_process.remote(), deadline if name in self._started_names else 0.0
            )

    def _reap_stopped(self, patience: float = 0.0) -> None:
        """Remove actors that have ended or exceeded their time limit, after waiting up to ``patience`` seconds."""
        refs = {actor.stopped: name for name, actor in self._stopping_actors.items() if actor.deadline}
        ended_refs = ray.wait(list(refs), num_returns=len(refs), timeout=patience)[0] if refs else []
        finished = {refs[ref] for ref in ended_refs} | {
            name for name, actor in self._stopping_actors.items() if time.monotonic() >= actor.deadline
        }
        for name in finished:
            ray.kill(self._stopping_actors.pop(name).actor, no_restart=True)
            self._processes.pop(name, None)
            self._pending_locations.pop(name, None)
            self._started_names.discard(name)

    def _observe_processes(self) -> None:
        """Update the location of each actor's process. An actor that Ray is (re)starting answers once it runs; until
        then its location is empty, and it is not asked again."""
        with self._lock:
            for name, actor in self._actors.items():
                if name not in self._pending_locations:
                    self._pending_locations[name] = actor.report_location.remote()
            names_by_ref = {ref: name for name, ref in self._pending_locations.items()}
        answered_refs = (
            ray.wait(list(names_by_ref), num_returns=len(names_by_ref), timeout=SUPERVISION_PERIOD)[0]
            if names_by_ref
            else []
        )
        locations = {}
        for location_ref in answered_refs:
            with contextlib.suppress(ray.exceptions.RayError):
                locations[names_by_ref[location_ref]] = ray.get(location_ref)
        with self._lock:
            for location_ref in answered_refs:
                self._pending_locations.pop(names_by_ref[location_ref], None)
            self._started_names |= locations.keys() & self._actors.keys()
            for name in self._actors:
                process = self._processes.get(name) or self._unobserved_process(name)
                host, ports, node, pid = locations.get(name, ("", {}, "", 0))
                self._processes[name] = process._replace(host=host, ports=ports, node=node, pid=pid)

    def _unobserved_process(self, name: str) -> ProcessInfo:
        """Describe an actor of an earlier supervisor, before it is observed."""
        group = self._groups.get(_group_name(name))
        role, needs = (group.role, group.needs) if group else ("", self._plan.needs)
        return ProcessInfo(name, _group_name(name), role, str(needs))

    def _refresh_coordinator(self) -> None:
        """Send the coordinator the list of all placed instances, ready or not."""
        processes = dict(self._processes)
        coordinator = processes.pop(COORDINATOR_NAME, None)
        if coordinator is None or not coordinator.pid:
            return
        placed_processes = [process for process in processes.values() if process.pid]
        body = {
            "ids": [_instance_number(process.name) for process in placed_processes],
            "instances": list(map(_refresh_item, placed_processes)),
        }
        url = coordinator.port_url("management_port") + "/v1/instances/refresh"
        headers = {"content-type": "application/json", "parley-secret": self._secret}
        request = urllib.request.Request(url, msgspec.json.encode(body), headers)
        request_succeeds(request)  # if the coordinator is starting or gone, the next list follows in a second

    def coordinator_ready(self) -> bool:
        """Whether the coordinator accepts requests."""
        coordinator = self._processes.get(COORDINATOR_NAME)
        if coordinator is None or not coordinator.pid:
            return False
        return request_succeeds(coordinator.port_url("management_port") + "/v1/readiness")


def request_succeeds(request: str | urllib.request.Request) -> bool:
    """Send a request to the coordinator; True if it succeeds."""
    try:
        DIRECT_OPENER.open(request, timeout=SUPERVISION_PERIOD).close()
    except (OSError, HTTPException):
        return False
    return True


def _refresh_item(process: ProcessInfo) -> dict[str, Any]:
    """Describe an instance for the refresh interface. Its capabilities are polled by the coordinator itself."""
    return {
        "id": _instance_number(process.name),
        "ip": process.host,
        "port": str(process.ports["port"]),
        "inter_comm_port": str(process.ports["peer-port"]),
        "static_info": {"role": ord(ROLE_CODES[process.role])},
    }


def _group_name(name: str) -> str:
    return name.rpartition("-")[0] or name


def _instance_number(name: str) -> int:
    """Return an instance's number, unique over all groups; 0 for the coordinator."""
    return int(name.rpartition("-")[2]) if name != COORDINATOR_NAME else 0
