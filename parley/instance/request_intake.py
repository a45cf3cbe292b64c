"""Request intake: where a cluster's requests arrive, commanded by a coordinator or begun by another member.

It chooses the stage of a request and prepares it; the stages are in ``prefill_stage`` and ``decode_stage``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from parley.dialects.mounts import INSTANCE_PLANE
from parley.dialects.route import Route
from parley.disagg.kv.receiver import KVReceiver
from parley.disagg.wire import handover
from parley.disagg.wire.headers import PrefillCommand
from parley.instance import decode_stage
from parley.instance.cluster_member import ClusterMember
from parley.instance.prefill_stage import PrefillStage
from parley.serving.app import App
from parley.serving.generate_handler import handle_generate
from parley.serving.model_registry import ModelRegistry
from parley.web.exchange import Exchange


class RequestIntake:
    """Receives the requests for a prefill or decode stage on this member."""

    def __init__(self, member: ClusterMember):
        self._member = member

    async def begin_prefill(
        self, registry: ModelRegistry, route: Route, exchange: Exchange, command: PrefillCommand
    ) -> None:
        """Run the prefill stage that a coordinator commands. Raises ParleyError, ClientGone, CommandRefused."""
        exchange.set_request_uuid(command.request_uuid or exchange.request_uuid)
        exchange.created_at = int(time.time()) if command.created is None else command.created
        exchange.arrived_at -= command.elapsed
        handover.strip_cluster_headers(exchange.headers)
        body = await exchange.peek_body()
        prior_outputs, prompt = handover.split_records(exchange.preface_bytes) if command.preface_size else None, None
        if command.recompute and not command.coordinator_name:
            resumed_body = INSTANCE_PLANE.read_resumed(exchange.scope["path"], body)
            body, prior_outputs, prompt = resumed_body.body, resumed_body.prior_outputs, resumed_body.prompt_ids
            exchange.replace_body(body)
            if resumed_body.request_uuid:
                exchange.set_request_uuid(resumed_body.request_uuid)
                exchange.created_at = resumed_body.created
        exchange.stage = stage = PrefillStage(self._member, exchange, command, body, prior_outputs, prompt)
        exchange.redirect_response(stage.response_writer)
        self._member.note_prompt(body, registry.options.prefix_owner(exchange.tenant))
        del body
        await handle_generate(registry, route, exchange)

    async def take_handover(self, apps: Sequence[App], receiver: KVReceiver) -> None:
        """Take over a request that another member began, or refuse it. ``apps``: the apps of this server's ports."""
        role = self._member.instance_state.role
        if role.is_unsettled or not role.runs_decode:
            share_text = f" with {role.prefill_share} % for prompts" if role.name == "flex" else ""
            await receiver.refuse_handover(f"Its role is {role.name}{share_text}.")
        else:
            await decode_stage.accept_handover(self._member, apps, receiver)
