"""Which model of a cluster a request is for, and which instances can answer it.

A request that names a model is for the instances that have it. One that names none is for the model that a single
server with all models of the cluster would choose: the first that suits its route, in the order of the instances' ids
and of the models there. It goes to the instances that would choose that model themselves. Instances that do not answer
count as well, so that their restart does not change the choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from parley.coordinator.routing.instance import ClusterInstance, InstanceModel
from parley.dialects.route import Route
from parley.types import ALL_MODEL_TASKS, ModelTask

MAX_KEPT_MODELS = 1024  # one for each kind of route and limited key


class ModelRequirement(NamedTuple):
    """What a request that names no model needs of one.

    * ``tasks``: the model must have one of these; None: any model suits.
    * ``key_models``: the models that the client's key may use; empty: all.
    * ``main_only``: the request is for the main model, whichever that is.
    """

    tasks: frozenset[ModelTask] | None
    key_models: tuple[str, ...] = ()
    main_only: bool = False


class ImpliedModel(NamedTuple):
    """The model of a request that names none; None if no instance reports its models. ``instances``: the ids of the
    instances that would choose it themselves."""

    model: InstanceModel | None
    instances: frozenset[int]


def read_offered_models(members: Mapping[str, Any]) -> tuple[InstanceModel, ...] | None:
    """Return the models of an instance from its status, the main one first; None if it does not report them. An
    older version reports names, but no tasks."""
    reports, names = members.get("model_tasks"), _read_texts(members.get("models"))
    if isinstance(reports, list):
        offered = [_read_offered_model(report) for report in reports if isinstance(report, dict)]
        return tuple(model for model in offered if model.names)
    return (InstanceModel(names[:1], None),) if names else None


def _read_offered_model(report: Mapping[str, Any]) -> InstanceModel:
    tasks = report.get("tasks")
    known_tasks = None if tasks is None else frozenset(ALL_MODEL_TASKS.intersection(_read_texts(tasks)))
    return InstanceModel(_read_texts(report.get("names")), known_tasks)


def _read_texts(value: Any) -> tuple[str, ...]:
    return tuple(text for text in value if isinstance(text, str)) if isinstance(value, list) else ()


class ImpliedModelFinder:
    """Finds the models of requests that name none, and remembers them. ``list_instances`` returns all instances."""

    def __init__(self, list_instances: Callable[[], Iterable[ClusterInstance]]):
        self._list_instances = list_instances
        self._implied_models: dict[ModelRequirement, ImpliedModel] = {}

    def forget_implied_models(self) -> None:
        """Find each model again when it is next needed: the instances or their models have changed."""
        self._implied_models.clear()

    def find_implied_model(self, requirement: ModelRequirement) -> ImpliedModel:
        """Return the model of a request that names none."""
        implied = self._implied_models.get(requirement)
        if implied is None:
            if len(self._implied_models) >= MAX_KEPT_MODELS:
                self._implied_models.clear()
            implied = self._implied_models[requirement] = _find_implied_model(requirement, self._list_instances())
        return implied

    def holds_model(self, instance: ClusterInstance, model: str, requirement: ModelRequirement | None) -> bool:
        """Whether a request is for an instance. ``model``: the one that it names; ``requirement``: set if it names
        none."""
        if requirement is None:
            return model in instance.models
        implied = self.find_implied_model(requirement)
        return implied.model is None or instance.id in implied.instances

    def lacks_task(self, model: str, route: Route) -> bool:
        """Whether all instances that have a model say that it does not suit a route."""
        is_offered = False
        for instance in self._list_instances():
            for offered in instance.offered_models:
                if model in offered.names:
                    is_offered = True
                    if offered.tasks is None or route.suits_model(offered.tasks):
                        return False
        return is_offered


def _find_implied_model(requirement: ModelRequirement, instances: Iterable[ClusterInstance]) -> ImpliedModel:
    ordered = sorted(instances, key=lambda instance: instance.id)
    own_models = [
        (instance, _own_implied_model(requirement, instance.offered_models))
        for instance in ordered
        if instance.offered_models
    ]
    if not own_models:
        return ImpliedModel(None, frozenset())
    usable = [model for _, model in own_models if _is_open_to_key(requirement, model)] or [own_models[0][1]]
    suitable = [model for model in usable if model.tasks is not None and _suits_requirement(requirement, model)]
    unreported = [model for model in usable if model.tasks is None]
    expects_text = requirement.tasks is None or "generate" in requirement.tasks
    if requirement.main_only:
        chosen = own_models[0][1]
    elif expects_text:  # a model that reports no tasks most likely writes text
        chosen = next((model for model in usable if _suits_requirement(requirement, model)), usable[0])
    else:
        chosen = (*suitable, *unreported, usable[0])[0]
    names = set(chosen.names)
    holders = {instance.id for instance, model in own_models if not names.isdisjoint(model.names)}
    # A server that reports no models may get any request for text.
    holders |= {instance.id for instance in ordered if not instance.offered_models and expects_text}
    return ImpliedModel(chosen, frozenset(holders))


def _own_implied_model(requirement: ModelRequirement, offered: Sequence[InstanceModel]) -> InstanceModel:
    """Return the model that an instance chooses itself (``ModelRegistry.implied_model``)."""
    usable = [model for model in offered if _is_open_to_key(requirement, model)] or offered
    if requirement.main_only:
        return offered[0]
    return next((model for model in usable if _suits_requirement(requirement, model)), usable[0])


def _suits_requirement(requirement: ModelRequirement, model: InstanceModel) -> bool:
    return model.tasks is None or requirement.tasks is None or not requirement.tasks.isdisjoint(model.tasks)


def _is_open_to_key(requirement: ModelRequirement, model: InstanceModel) -> bool:
    return not requirement.key_models or any(name in requirement.key_models for name in model.names)
