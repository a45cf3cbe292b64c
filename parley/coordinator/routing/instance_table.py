"""The table of a cluster's instances and their state.

Instances come from the configuration or from a controller's list; decisions about them are made elsewhere. Watchers are
notified when an instance joins, leaves, is lost, is restarted, or changes otherwise. Opens no connection.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from parley.coordinator.config import CoordinatorOptions, InstanceConfig
from parley.coordinator.routing.implied_model import ImpliedModelFinder, ModelRequirement
from parley.coordinator.routing.instance import ClusterInstance
from parley.coordinator.routing.status_report import apply_status
from parley.dialects.mounts import known_spelling
from parley.disagg.kv.layout import layout_difference

InstanceEvent = Literal["joined", "ready", "changed", "lost", "faulty", "restarted", "left"]
RECOVERY_CHECKS = 3  # answers in a row until a faulty instance counts as healthy


TableWatcher = Callable[[ClusterInstance, InstanceEvent], None]


class InstanceTable:
    """All instances, by id. ``clock`` returns monotonic seconds. ``options``: replaced when they are reloaded."""

    def __init__(self, options: CoordinatorOptions, clock: Callable[[], float] = time.monotonic):
        self.options = options
        self.clock = clock
        self.instances: dict[int, ClusterInstance] = {}
        self.watchers: list[TableWatcher] = []
        self.implied_models = ImpliedModelFinder(lambda: self.instances.values())
        self.list_received = False  # a controller's list has been received
        for static in options.instances:
            self.add_instance(configured_instance(static))

    def __iter__(self) -> Iterator[ClusterInstance]:
        return iter(list(self.instances.values()))

    def __len__(self) -> int:
        return len(self.instances)

    def get_instance(self, instance_id: int) -> ClusterInstance | None:
        """Return the instance with an id, or None."""
        return self.instances.get(instance_id)

    def usable_instances(self) -> list[ClusterInstance]:
        """Return the instances that new requests may be sent to."""
        now = self.clock()
        return [instance for instance in self.instances.values() if instance.is_usable(now)]

    def possibly_usable_instances(self) -> list[ClusterInstance]:
        """Return the instances that could not be used when they were last checked, but may have become usable since.
        Machines that did not respond are left out: to ask them takes long."""
        now = self.clock()
        return [
            instance
            for instance in self.instances.values()
            if instance.polled and instance.responds and not instance.offline and not instance.is_usable(now)
        ]

    def running_instances(self) -> list[ClusterInstance]:
        """Return the instances that may be running requests, whether or not they take new ones."""
        return [instance for instance in self.instances.values() if instance.has_answered and not instance.lost]

    @property
    def checks_keys(self) -> bool:
        """Whether instances have API keys, as all of a cluster do or none does."""
        return any(instance.checks_keys for instance in self.instances.values())

    @property
    def has_private_prefixes(self) -> bool:
        """Whether requests of different API keys share no cached prefixes."""
        return any(instance.has_private_prefixes for instance in self.instances.values())

    def add_instance(self, instance: ClusterInstance) -> ClusterInstance:
        """Add an instance. It replaces one with the same id, whose requests are lost."""
        self.remove_instance(instance.id)
        self.instances[instance.id] = instance
        self.implied_models.forget_implied_models()
        self.notify_watchers(instance, "joined")
        return instance

    def remove_instance(self, instance_id: int) -> None:
        """Remove an instance, if it is present."""
        instance = self.instances.pop(instance_id, None)
        if instance is not None:
            self.implied_models.forget_implied_models()
            self.notify_watchers(instance, "left")

    def notify_watchers(self, instance: ClusterInstance, event: InstanceEvent) -> None:
        """Notify all watchers."""
        for watcher in tuple(self.watchers):
            watcher(instance, event)

    def mark_faulty(self, instance: ClusterInstance, reason: str = "") -> None:
        """Mark an instance as faulty for a while: its link broke, or it could not be reached.

        An instance whose status is polled recovers as soon as it answers RECOVERY_CHECKS times in a row, or was
        restarted.
        """
        instance.faulty_until = self.clock() + self.options.fault_seconds
        instance.good_checks, instance.fault_reason = 0, reason
        self.notify_watchers(instance, "faulty")

    def end_fault(self, instance: ClusterInstance) -> None:
        """End the fault of an instance that can be reached again, because no other can serve."""
        was_usable, instance.faulty_until = instance.is_usable(self.clock()), 0.0
        if not was_usable and instance.is_usable(self.clock()):
            self.notify_watchers(instance, "ready")

    def set_instance_offline(self, instance: ClusterInstance, offline: bool) -> None:
        """Take an instance out of service, or back into it."""
        was_offline, instance.offline = instance.offline, offline
        if was_offline and not offline:
            self.notify_watchers(instance, "ready")

    def mark_role_change(self, instance: ClusterInstance, begins: bool) -> None:
        """Mark the start or end of a role change; meanwhile the instance receives no new requests."""
        instance.changing = begins
        if not begins:
            self.notify_watchers(instance, "ready")

    def set_result_stream(self, instance: ClusterInstance, is_received: bool, reason: str = "") -> None:
        """Set whether an instance's results can be received. ``reason``: why they cannot, once the failure lasts.

        An instance that is loading or stopping sends no results. Of any other, watchers get each reason once.
        """
        was_received, instance.has_result_stream = instance.has_result_stream, is_received
        if is_received and not was_received:
            instance.fault_reason = ""
            self.notify_watchers(instance, "ready")
        elif reason and not is_received and instance.phase_at(self.clock()) != "joining":
            fault_reason = f"Its results cannot be received. {reason}"
            if instance.fault_reason != fault_reason:
                instance.fault_reason = fault_reason
                self.notify_watchers(instance, "faulty")

    def record_miss(self, instance: ClusterInstance) -> None:
        """Record a status check without an answer; after too many in a row the instance is lost."""
        instance.missed_checks += 1
        instance.good_checks = 0
        if instance.missed_checks >= self.options.misses and not instance.lost and instance.has_answered:
            instance.lost = True
            instance.waiting = instance.running = instance.pinned = instance.reserved = 0  # no longer known
            self.notify_watchers(instance, "lost")

    def record_answer(
        self, instance: ClusterInstance, epoch: str = "", was_usable: bool | None = None, *, is_regular: bool = True
    ) -> None:
        """Record an answer of an instance.

        A new ``epoch`` means that the instance was restarted and has lost its requests. ``was_usable``: whether it was
        usable before the answer was applied. ``is_regular``: the answer counts for the end of a fault.
        """
        now = self.clock()
        was_usable = instance.is_usable(now) if was_usable is None else was_usable
        instance.missed_checks, instance.last_answer, instance.has_answered = 0, now, True
        restarted = bool(instance.epoch and epoch and epoch != instance.epoch)
        instance.epoch = epoch or instance.epoch
        instance.lost = False
        instance.good_checks += is_regular
        if instance.polled and instance.good_checks >= RECOVERY_CHECKS:
            instance.faulty_until = 0.0
        if restarted:
            instance.faulty_until = 0.0
            instance.breaker.close_breaker()
            instance.cached_hashes, instance.sent_hashes = frozenset(), {}
            self.notify_watchers(instance, "restarted")
        if not was_usable and instance.is_usable(now):
            self.notify_watchers(instance, "ready")

    def record_status(
        self, instance: ClusterInstance, status_body: Mapping[str, Any], *, is_regular: bool = True
    ) -> None:
        """Apply the body of a /v1/status answer. ``is_regular``: see ``record_answer``."""
        role, offered, was_usable = instance.role, instance.offered_models, instance.is_usable(self.clock())
        epoch = apply_status(instance, status_body)
        if instance.offered_models != offered:
            self.implied_models.forget_implied_models()
        self.record_answer(instance, epoch, was_usable, is_regular=is_regular)
        if instance.role != role:
            self.notify_watchers(instance, "changed")

    def record_stopping(self, instance: ClusterInstance, *, is_regular: bool = True) -> None:
        """Record that an instance finishes its requests and takes no more."""
        was_usable, instance.accepts_requests = instance.is_usable(self.clock()), False
        self.record_answer(instance, was_usable=was_usable, is_regular=is_regular)

    def model_names(self) -> set[str]:
        """Return the names of models that instances report."""
        return set().union(*(instance.models for instance in self.instances.values()))

    def served_name(self, model: str) -> str:
        """Return a model's name as instances report it, which may have or lack a default tag; itself if none does."""
        return known_spelling(model, self.model_names()) or model

    def model_holders(
        self, model: str, requirement: ModelRequirement | None, instances: Sequence[ClusterInstance]
    ) -> list[ClusterInstance]:
        """Return those of some instances that have the model of a request; all if no instance of the cluster has the
        model that it names, as any of them may report that. ``requirement``: set if it names none."""
        if not model and requirement is None:
            return list(instances)
        holders = [instance for instance in instances if self.implied_models.holds_model(instance, model, requirement)]
        is_known = holders or any(self.implied_models.holds_model(instance, model, requirement) for instance in self)
        return holders if is_known else list(instances)

    def is_cluster_ready(self, model: str = "") -> bool:
        """Whether the usable instances form a complete cluster, optionally counting only those with ``model``."""
        return self.is_complete(
            [
                instance
                for instance in self.usable_instances()
                if not model or model in instance.models or not instance.models
            ]
        )

    def is_complete(self, usable: Sequence[ClusterInstance]) -> bool:
        """Whether these include a P with a linked D, or an instance that does both."""
        mode = self.options.deploy_mode
        if mode in ("auto", "single_node") and any(instance.role == "mixed" for instance in usable):
            return True
        if mode == "single_node":
            return False
        ps = [instance for instance in usable if instance.role != "mixed" and instance.prefill.instance_share > 0]
        ds = [instance for instance in usable if instance.role != "mixed" and instance.decode.instance_share > 0]
        return any(p.is_linked(d) for p in ps for d in ds)

    def explain_lack(self) -> str:
        """Explain why ready instances cannot serve requests; empty if they can, or if another reason applies."""
        usable, now = self.usable_instances(), self.clock()
        if self.is_cluster_ready():
            return ""
        if unreceived := [
            instance
            for instance in self.instances.values()
            if not instance.has_result_stream and instance.phase_at(now) == "ready"
        ]:
            return f"The results of instance {unreceived[0].id} cannot be received."
        if not usable:
            return ""
        if self.options.deploy_mode == "single_node":
            return "With deploy_mode = single_node only instances of role mixed are used."
        ps = [instance for instance in usable if instance.prefill.instance_share > 0]
        ds = [instance for instance in usable if instance.decode.instance_share > 0]
        if not ps or not ds:
            return f"No instance {'decodes' if ps else 'prefills'}; set fallback = true to let one role do both."
        for p, d in ((p, d) for p in ps for d in ds if p.group == d.group and p.layout and d.layout):
            if unlike := layout_difference(p.layout, d.layout):
                return f"Instances {p.id} and {d.id} cannot work together because they differ: {unlike}."
        return "No prefill instance is linked with a decode instance of its group."


def configured_instance(instance_config: InstanceConfig) -> ClusterInstance:
    """Create an instance from its configuration."""
    instance = ClusterInstance(
        instance_config.id or 0,
        instance_config.url,
        instance_config.role,
        instance_config.group,
        instance_config.management or "",
        instance_config.metrics or "",
        instance_config.peer or "",
        grpc=instance_config.grpc or "",
        p_percentage=instance_config.p_percentage,
        peer_configured=bool(instance_config.peer),
    )
    instance.slots, instance.blocks = instance_config.slots or instance.slots, instance_config.blocks or instance.blocks
    return instance
