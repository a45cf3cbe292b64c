"""The Ray client: controls clusters on Ray from any terminal that reaches the Ray cluster.

Ray finds a node for each process (``cluster.ray_process``) and restarts lost ones. The processes of a cluster are
managed by its supervisor actor (``cluster.ray_actor``), which is found by the cluster's name.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Mapping
from typing import Any

import ray

from parley.cluster.plan import ClusterPlan
from parley.cluster.ray_actor import RAY_NAMESPACE, SUPERVISOR_NAME, ProcessInfo, RaySupervisor

# Ray's own limit of 60 s is for a control service that restarts elsewhere. The one that `up` starts never does: a
# signal to the whole process group ends it together with `up`, which would then wait for it in vain.
RECONNECT_LIMIT, RECONNECT_SECONDS = "gcs_rpc_server_reconnect_timeout_s", 5


class ClusterJob(ray.job_config.JobConfig):  # type: ignore[misc]  # ray has no types
    """A job whose workers do not import from the driver's working directory."""

    def _runtime_env_has_working_dir(self) -> bool:
        """Return True: then Ray does not put the driver's working directory first on the path of all workers."""
        return True


def connect_ray(address: str = "", *, start_missing: bool = False) -> bool:
    """Connect to the Ray cluster at the address, or the one of this machine.

    With ``start_missing`` one is started if there is none, and lives as long as this process. Return True if one was
    started. Raises ConnectionError.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet = {
        "namespace": RAY_NAMESPACE,
        "logging_level": logging.ERROR,
        "log_to_driver": start_missing,
        "job_config": ClusterJob(),
    }
    try:
        ray.init(address=address or "auto", **quiet)
        return False
    except ConnectionError:
        if address or not start_missing:
            raise
    start_ray(**quiet)
    return True


def start_ray(**options: Any) -> None:
    """Start Ray on this machine, for as long as this process lives, with options of ``ray.init``.

    Raises ConnectionError.
    """
    try:
        ray.init(include_dashboard=False, _system_config={RECONNECT_LIMIT: RECONNECT_SECONDS}, **options)
    except Exception as error:  # Ray has no class of its own for a node that does not start
        raise ConnectionError(f"Ray did not start on this machine: {error}") from error


def start_cluster(plan: ClusterPlan) -> Any:
    """Create the supervisor actor for a plan, and return it. A cluster's name can be used only once."""
    name = f"{plan.name}/{SUPERVISOR_NAME}"
    supervisor = ray.remote(RaySupervisor).options(
        name=name, namespace=RAY_NAMESPACE, lifetime="detached", max_restarts=-1, num_cpus=0, max_concurrency=4
    )
    return supervisor.remote(plan, secrets.token_urlsafe())


def find_supervisor(name: str) -> Any:
    """Return the supervisor of a running cluster; of the only one if ``name`` is empty. Raises LookupError."""
    running_names = cluster_names()
    if not name and len(running_names) == 1:
        (name,) = running_names
    if name not in running_names:
        known_names = ", ".join(running_names) or "none"
        raise LookupError(
            f"There is no cluster {name}. Known: {known_names}." if name else f"Which cluster? Known: {known_names}."
        )
    return ray.get_actor(f"{name}/{SUPERVISOR_NAME}", RAY_NAMESPACE)


def cluster_names() -> list[str]:
    """Return the names of all running clusters."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    supervisors = (actor["name"] for actor in actors if actor["namespace"] == RAY_NAMESPACE)
    return sorted(
        name.removesuffix(f"/{SUPERVISOR_NAME}") for name in supervisors if name.endswith(f"/{SUPERVISOR_NAME}")
    )


def stop_cluster(supervisor: Any) -> None:
    """Shut a cluster down gracefully: its processes finish the requests they have begun."""
    ray.get(supervisor.stop_processes.remote())
    ray.kill(supervisor, no_restart=True)


def cluster_processes(supervisor: Any) -> tuple[list[ProcessInfo], dict[str, int]]:
    """Return every process of a cluster, and the wanted number of instances per group."""
    result: tuple[list[ProcessInfo], dict[str, int]] = ray.get(supervisor.list_processes.remote())
    return result


def cluster_ready(supervisor: Any) -> bool:
    """Whether its coordinator accepts requests."""
    result: bool = ray.get(supervisor.coordinator_ready.remote())
    return result


def cluster_address(supervisor: Any) -> str:
    """Return the URL of its coordinator, for clients."""
    result: str = ray.get(supervisor.client_address.remote())
    return result


def status_page(supervisor: Any) -> tuple[str, str]:
    """Return the URL of its coordinator's live page, and the password that other machines need for it."""
    result: tuple[str, str] = ray.get(supervisor.status_page.remote())
    return result


def scale_group(supervisor: Any, group: str, count: int) -> str:
    """Set the wanted number of instances of a group. Return an error message, empty on success."""
    result: str = ray.get(supervisor.scale_groups.remote({group: count}))
    return result


def has_live_nodes() -> bool:
    """Whether any node of the Ray cluster is alive."""
    return any(node["Alive"] for node in ray.nodes())


def describe_resources() -> str:
    """Describe the resources of all nodes together, in words."""
    return format_amounts(ray.cluster_resources())


def format_amounts(amounts: Mapping[str, float]) -> str:
    """Return amounts of resources by their names in Ray as words, without those that stand for single nodes."""
    words = {"CPU": "cpus", "GPU": "gpus"}
    return ", ".join(
        f"{words.get(name, name)} " + (f"{amount / 2**30:.1f}GiB" if name.endswith("memory") else f"{amount:g}")
        for name, amount in sorted(amounts.items())
        if ":" not in name
    )
