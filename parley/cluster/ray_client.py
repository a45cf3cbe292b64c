"""The Ray client: controls clusters on Ray from any terminal that reaches the Ray cluster.

Ray finds a node for each process (``cluster.ray_process``) and restarts lost ones. The processes of a cluster are
managed by its supervisor actor (``cluster.ray_actor``), which is found by the cluster's name.
"""

from __future__ import annotations

import logging
import os
import secrets
from typing import Any

import ray

from parley.cluster.plan import Plan
from parley.cluster.ray_actor import COORDINATOR, KEEPER, NAMESPACE, Keeper, Seen


def connect(address: str = "", *, begin: bool = False) -> bool:
    """Connect to the Ray cluster at the address, or the one of this machine.

    With ``start_missing`` one is started if there is none, and lives as long as this process. Return True if one was
    started. Raises ConnectionError.
    """
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
    """Create the supervisor actor for a plan, and return it. A cluster's name can be used only once."""
    name = f"{plan.name}/{KEEPER}"
    keeper = ray.remote(Keeper).options(
        name=name, namespace=NAMESPACE, lifetime="detached", max_restarts=-1, num_cpus=0, max_concurrency=4
    )
    return keeper.remote(plan, secrets.token_urlsafe())


def find(name: str) -> Any:
    """Return the supervisor of a running cluster; of the only one if ``name`` is empty. Raises LookupError."""
    there = names()
    if not name and len(there) == 1:
        (name,) = there
    if name not in there:
        known = ", ".join(there) or "none"
        raise LookupError(f"There is no cluster {name}. Known: {known}." if name else f"Which cluster? Known: {known}.")
    return ray.get_actor(f"{name}/{KEEPER}", NAMESPACE)


def names() -> list[str]:
    """Return the names of all running clusters."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    keepers = (each["name"] for each in actors if each["namespace"] == NAMESPACE)
    return sorted(name.removesuffix(f"/{KEEPER}") for name in keepers if name.endswith(f"/{KEEPER}"))


def down(keeper: Any) -> None:
    """Shut a cluster down gracefully: its processes finish the requests they have begun."""
    ray.get(keeper.end.remote())
    ray.kill(keeper, no_restart=True)


def look(keeper: Any) -> tuple[list[Seen], dict[str, int]]:
    """Return every process of a cluster, and the wanted number of instances per group."""
    return ray.get(keeper.look.remote())


def ready(keeper: Any) -> bool:
    """Whether its coordinator accepts requests."""
    return ray.get(keeper.ready.remote())


def address(keeper: Any) -> str:
    """Return the URL of its coordinator, for clients."""
    return ray.get(keeper.address.remote())


def page(keeper: Any) -> str:
    """Return the URL of its coordinator's live page."""
    (coordinator,) = (each for each in look(keeper)[0] if each.name == COORDINATOR)
    return coordinator.url("status_port")


def scale(keeper: Any, group: str, count: int) -> str:
    """Set the wanted number of instances of a group. Return an error message, empty on success."""
    return ray.get(keeper.scale.remote({group: count}))


def has() -> str:
    """Describe the resources of all nodes together, in words."""
    named = {"CPU": "cpus", "GPU": "gpus", "memory": "memory"}
    amounts = ray.cluster_resources()
    return ", ".join(
        f"{named.get(name, name)} {amount:g}" for name, amount in sorted(amounts.items()) if ":" not in name
    )
