"""The failure of an attempt to run a request on the cluster, and its consequences for the instances."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from parley.coordinator import refusals
from parley.coordinator.proxy.generation import prefill_answer
from parley.coordinator.routing.instance import ClusterInstance
from parley.coordinator.routing.instance_scheduler import Placement
from parley.disagg.wire.headers import LOST_HEADER, REFUSED_HEADER, SHORT_HEADER
from parley.web.http_client import InstanceAnswer


class AttemptFailed(Exception):
    """An attempt failed because of an instance.

    * ``answer``: the prefill instance's answer, if there is one.
    * ``final``: no other instance could answer either.
    * ``equally_unfit``: ids of instances that would fail in the same way.
    * ``refused``: the request is at fault.
    * ``status`` and ``text``: the client's error if no other attempt is made.
    """

    def __init__(
        self,
        status: int,
        text: str,
        instance: ClusterInstance | None = None,
        *,
        answer: InstanceAnswer | None = None,
        final: bool = False,
        equally_unfit: Iterable[int] = (),
        refused: bool = False,
    ):
        super().__init__(text)
        self.status, self.text, self.instance, self.equally_unfit = status, text, instance, equally_unfit
        self.answer, self.final, self.refused = answer, final, refused


def classify_refusal(placement: Placement, answer: InstanceAnswer, usable: Sequence[ClusterInstance]) -> AttemptFailed:
    """Classify P's error: one of P or D, so that other instances may do better, or one of the client."""
    header_names = {name for name, _ in answer.headers}
    if prefill_answer.reports_full_decode(answer):
        placement.report_handover_refused()
        return AttemptFailed(429, refusals.TEXTS.too_many_requests, placement.decode_instance)
    if LOST_HEADER in header_names:
        placement.prefill_instance.accepts_requests = False  # until its status reports a new engine
        return AttemptFailed(answer.status, refusals.TEXTS.prefill_failed, placement.prefill_instance)
    if prefill_answer.reports_wrong_role(answer):
        return AttemptFailed(503, refusals.TEXTS.prefill_failed, placement.prefill_instance)
    if SHORT_HEADER in header_names and any(
        instance.context_length > placement.prefill_instance.context_length for instance in usable
    ):
        equally_unfit = [
            instance.id for instance in usable if instance.context_length <= placement.prefill_instance.context_length
        ]
        return AttemptFailed(
            answer.status,
            refusals.TEXTS.prefill_failed,
            placement.prefill_instance,
            answer=answer,
            equally_unfit=equally_unfit,
        )
    text = refusals.TEXTS.inference_timeout if answer.status == 408 else refusals.TEXTS.prefill_failed
    return AttemptFailed(
        answer.status,
        text,
        placement.prefill_instance,
        answer=answer,
        final=answer.status not in (429, 503),
        refused=REFUSED_HEADER in header_names,
    )
