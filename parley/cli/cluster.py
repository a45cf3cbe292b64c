"""``parley cluster``: a coordinator and its instances on the machines of a Ray cluster.

``parley.cluster.ray_client`` and Ray decide where processes run and restart them. This module is the terminal side.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from parley.child_process import python_command
from parley.errors import excerpt
from parley.settings.option_kinds import duration_kind, integer_kind, switch_kind, text_kind
from parley.settings.options import ConfigError, Option, ResolvedOptions, read_options_table
from parley.web.auth import is_loopback

if TYPE_CHECKING:
    from parley.cluster.plan import ClusterPlan
    from parley.cluster.ray_actor import ProcessInfo

USAGE = """\
usage: parley cluster up FILE [--detach]     start the cluster that FILE describes, and wait until it is ready
       parley cluster status [NAME]          show the processes and their nodes
       parley cluster scale [NAME] GROUP=N   change a group to N instances
       parley cluster down [NAME]            stop the cluster

Runs a coordinator and instances on the machines of a Ray cluster: the one at --address, or the one that this machine
belongs to. Without one, `up` starts one for this machine and keeps it until Ctrl-C or `down`."""

OPTIONS = [
    Option("action", text_kind("up|status|scale|down"), "Action to take.", positional=True),
    Option("first", text_kind("FILE or NAME"), "A plan (up), or the name of a cluster.", positional=True),
    Option("second", text_kind("GROUP=N"), "scale: the group and its number of instances.", positional=True),
    Option("address", text_kind("ADDRESS"), "Address of the Ray cluster.", unset_text="the file's, or this machine's"),
    Option("detach", switch_kind(), "Exit when the cluster is ready, and leave it running.", False),
    Option("timeout", duration_kind(), "Give up if it is not ready by then.", 120.0),
]


def run_command(config: ResolvedOptions) -> int:
    """Run the action that the options name. Return the exit code."""
    actions = {"up": _start_cluster, "status": _print_status, "scale": _scale_group, "down": _stop_cluster}
    action = actions.get(config["action"] or "")
    if action is None:
        raise ConfigError("The action is missing: up FILE, status, scale GROUP=N or down.")
    if find_spec("ray") is None:
        raise ConfigError("Ray is missing; install it with: pip install 'parley-llm[ray]'.")
    try:
        return action(config)
    except (LookupError, ConnectionError) as error:
        print(f"parley: {_first_line(error)}", file=sys.stderr)
        return 1


def _start_cluster(config: ResolvedOptions) -> int:
    from parley.cluster import plan

    if not config["first"]:
        raise ConfigError("up needs a file: parley cluster up FILE.")
    cluster_plan = plan.read_plan(config["first"])
    _check_program_options(cluster_plan, config["first"])
    address = config["address"] or cluster_plan.address
    from parley.cluster import ray_client

    if config["detach"] and not _ray_exists(address):
        return _start_detached(config)
    began = time.monotonic()
    own_ray = ray_client.connect_ray(address, start_missing=True)
    if cluster_plan.name in ray_client.cluster_names():
        raise LookupError(
            f"The cluster {cluster_plan.name} is running already; stop it: parley cluster down {cluster_plan.name}"
        )
    print(f"cluster {cluster_plan.name} on {'a Ray of this machine' if own_ray else 'Ray'}", flush=True)
    supervisor = ray_client.start_cluster(cluster_plan)
    try:
        url = _wait_for_cluster(supervisor, config["timeout"])
        if url is None:
            ray_client.stop_cluster(supervisor)
            return 1
        print(f"ready in {time.monotonic() - began:.1f} s: {url}", flush=True)
        page, password = ray_client.status_page(supervisor)
        login = "" if is_loopback(urlsplit(page).hostname or "") else f" (user token, password {password})"
        print(f"status page: {page}{login}", flush=True)
        if not own_ray:
            print(f"stop it with `parley cluster down {cluster_plan.name}`", flush=True)
            return 0
        _until_stopped(cluster_plan.name)
    except KeyboardInterrupt:
        print("stopping", flush=True)
    if cluster_plan.name in ray_client.cluster_names():
        ray_client.stop_cluster(supervisor)
    return 0


def _check_program_options(cluster_plan: ClusterPlan, path: str) -> None:
    """Check the options of all programs: one that cannot start would be restarted forever. Raises ConfigError."""
    from parley.coordinator.config import parse_coordinator_config
    from parley.settings.config import SERVE_OPTIONS

    parse_coordinator_config(cluster_plan.coordinator, f"{path}: coordinator")
    options_by_name = {option.name: option for option in SERVE_OPTIONS}
    for group in cluster_plan.groups:
        for name, (raw, source) in read_options_table(SERVE_OPTIONS, group.options, f"{path}: {group.name}").items():
            options_by_name[name].parse_raw(raw, f"{source}: {name}")


def _print_status(config: ResolvedOptions) -> int:
    from parley.cluster import ray_client

    ray_client.connect_ray(config["address"] or "")
    names = [config["first"]] if config["first"] else ray_client.cluster_names()
    if not names:
        print("no cluster is running")
    for name in names:
        supervisor = ray_client.find_supervisor(name)
        processes, target_counts = ray_client.cluster_processes(supervisor)
        rows = [_process_row(process, supervisor) for process in processes]
        print(f"{name}: " + ", ".join(f"{group} {count}" for group, count in target_counts.items()))
        print(_align_columns([("", "role", "where", "node", "pid", "needs"), *rows]))
    return 0


def _scale_group(config: ResolvedOptions) -> int:
    words = [config["first"] or "", config["second"] or ""]
    name, change = words if words[1] else ("", words[0])
    group, equals, count = change.rpartition("=")
    if not equals:
        raise ConfigError("scale needs a group and a number: parley cluster scale [NAME] GROUP=N.")
    from parley.cluster import plan

    try:
        number = integer_kind(0, plan.MAX_COUNT).parse_raw(count)
    except ValueError as expectation:
        raise ConfigError(f"scale: {excerpt(count)} is not {expectation}.") from None
    from parley.cluster import ray_client

    ray_client.connect_ray(config["address"] or "")
    if refused := ray_client.scale_group(ray_client.find_supervisor(name), group, number):
        raise LookupError(refused)
    print(f"{group}: {number} wanted; `parley cluster status` shows them come and go")
    return 0


def _stop_cluster(config: ResolvedOptions) -> int:
    from parley.cluster import ray_client

    ray_client.connect_ray(config["address"] or "")
    ray_client.stop_cluster(ray_client.find_supervisor(config["first"] or ""))
    return 0


def _ray_exists(address: str) -> bool:
    """Whether there is a Ray cluster at ``address`` (empty: the default one). Raises ConnectionError."""
    from parley.cluster import ray_client

    try:
        ray_client.connect_ray(address)
    except ConnectionError:
        if address:
            raise
        return False
    return True


def _start_detached(config: ResolvedOptions) -> int:
    """Run the same command in a process that keeps running. Return when it reports that the cluster is ready."""
    with tempfile.NamedTemporaryFile(prefix="parley-cluster-", suffix=".log", delete=False) as log:
        command = python_command("-m", "parley", "cluster", "up", config["first"], "--timeout", f"{config['timeout']}s")
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    with open(log.name, encoding="utf-8", errors="replace") as lines:
        while True:
            has_ended = child.poll() is not None
            for line in lines:
                print(line, end="", flush=True)
                if line.startswith("status page:"):
                    print(f"it runs in the background; its log is {log.name}")
                    return 0
            if has_ended:
                return child.returncode or 1
            time.sleep(0.1)


def _wait_for_cluster(supervisor: Any, timeout: float) -> str | None:
    """Wait until the coordinator takes requests. Return its address for clients, or None after ``timeout`` seconds."""
    from parley.cluster import ray_client

    deadline = time.monotonic() + timeout
    printed_names: set[str] = set()
    while True:
        processes, _ = ray_client.cluster_processes(supervisor)
        for process in processes:
            if process.pid and process.name not in printed_names:
                printed_names.add(process.name)
                print("  " + "  ".join(part for part in _process_row(process, supervisor)[:4] if part), flush=True)
        if ray_client.cluster_ready(supervisor):
            return ray_client.cluster_address(supervisor)
        if time.monotonic() > deadline:
            missing_processes = ", ".join(
                f"{process.name} ({process.needs})" for process in processes if not process.pid
            )
            why = (
                f"no node has the resources for {missing_processes}; the cluster has {ray_client.describe_resources()}."
                if missing_processes
                else "instances still load, or fail as their lines above say. --timeout gives them longer."
            )
            print(f"parley: not ready after {timeout:g} s: {why}", file=sys.stderr)
            return None
        time.sleep(0.1)


def _until_stopped(name: str) -> None:
    """Wait for a signal, or until the cluster has been stopped by another process.

    Raises ConnectionError if Ray on this machine has ended.
    """
    from parley.cluster import ray_client

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    while name in ray_client.cluster_names():
        if not ray_client.has_live_nodes():
            raise ConnectionError("Ray on this machine has ended, and the cluster with it.")
        time.sleep(1.0)


def _process_row(process: ProcessInfo, supervisor: Any) -> tuple[str, ...]:
    from parley.cluster import ray_client

    if not process.pid:
        return process.name, process.role, "not placed", "", "", process.needs
    # The coordinator has no port of that name: the address for clients is shown.
    address = process.port_url("port") if "port" in process.ports else ray_client.cluster_address(supervisor)
    return process.name, process.role, address, f"node {process.node[:8]}", f"{process.pid}", process.needs


def _align_columns(rows: list[tuple[str, ...]]) -> str:
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, wide, strict=True)).rstrip() for row in rows
    )


def _first_line(error: Exception) -> str:
    lines = str(error).strip("'\"").splitlines()
    return lines[0] if lines else type(error).__name__
