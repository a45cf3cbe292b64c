"""Handlers for the routes of an instance: requests, results, roles, status. One function for each kind of route."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple
from urllib.parse import parse_qs

import msgspec

from parley.dialects.mounts import INSTANCE_PLANE
from parley.dialects.route import Route, RouteKind
from parley.disagg.wire import headers, role_request
from parley.errors import CommandRefused, Forbidden, InvalidValue, MalformedBody
from parley.instance.instance_state import InstanceState
from parley.instance.instance_status import instance_status
from parley.instance.request_intake import RequestIntake
from parley.serving.generate_handler import handle_generate
from parley.serving.handlers.abort import handle_abort
from parley.serving.handlers.route_table import RouteHandler
from parley.serving.model_registry import ModelRegistry
from parley.web.exchange import Exchange
from parley.web.http_cycle import CYCLE_KEY, HttpCycle

EVENT_STREAM_TYPE = "text/event-stream"
MIXED_WITHOUT_RESULTS = "Non DMI does not support dresult request"
NOT_A_DECODE_INSTANCE = "Only the Decode node supports dresult but you send to {}"
UNACKNOWLEDGED_MILLISECONDS = 30_000  # unacknowledged data of this age, in milliseconds, ends a connection for results


class PauseCommand(msgspec.Struct):
    """A command to pause the results of one request, or to resume them."""

    client: str
    id: str
    pause: bool


class ResultsQuery(NamedTuple):
    """The query of a coordinator that opens a connection for results; see ``ResultStreams.serve_results``.

    ``first_frame``: the number of the first frame that it has not received; None: it begins.
    """

    coordinator_name: str
    coordinator_id: str
    epoch: str
    first_frame: int | None


class ExchangeSink:
    """An HTTP exchange as a connection for results."""

    def __init__(self, exchange: Exchange):
        self._exchange = exchange

    def write_part(self, data: bytes) -> bool:
        """Send data, and return whether more can be sent at once."""
        return self._exchange.write_part(data)

    async def write_stream(self, data: bytes) -> None:
        """Send data once the connection accepts it."""
        await self._exchange.write_stream(data, EVENT_STREAM_TYPE)

    def abort_connection(self) -> None:
        """Break the connection."""
        self._exchange.abort_connection()


async def handle_instance_generate(
    instance_state: InstanceState, intake: RequestIntake, registry: ModelRegistry, route: Route, exchange: Exchange
) -> None:
    """Answer a request of a client, or run the prefill stage that a coordinator commands.

    Raises CommandRefused.
    """
    is_command = exchange.stage is None and not exchange.counts_tokens
    command = instance_state.read_command(exchange) if is_command else None
    if command is None:
        await handle_generate(registry, route, exchange)
    else:
        await intake.begin_prefill(registry, route, exchange, command)


async def handle_results(
    instance_state: InstanceState, registry: ModelRegistry, route: Route, exchange: Exchange
) -> None:
    """Stream results to a coordinator until it leaves or connects again. Raises CommandRefused, InvalidValue."""
    instance_state.access.require_member(exchange)
    parameters, role = _query_parameters(exchange), instance_state.role
    if not parameters.get("client") and (role.name == "mixed" or not role.runs_decode):
        text = MIXED_WITHOUT_RESULTS if role.name == "mixed" else NOT_A_DECODE_INSTANCE.format(role.name)
        raise CommandRefused(400, text)
    query = _read_results_query(parameters)
    _set_user_timeout(exchange)
    serving = instance_state.results.serve_results(
        query.coordinator_name, ExchangeSink(exchange), query.epoch, query.first_frame, query.coordinator_id
    )
    await exchange.while_connected(serving)
    await exchange.write_stream(b"", EVENT_STREAM_TYPE, last=True)


async def handle_results_flow(
    instance_state: InstanceState, registry: ModelRegistry, route: Route, exchange: Exchange
) -> None:
    """Pause or resume the results of one request. An unknown request may have just ended."""
    instance_state.access.require_member(exchange)
    try:
        pause_command = msgspec.json.decode(await exchange.read_body(), type=PauseCommand)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise MalformedBody(f"The body must be {{client, id, pause}}: {error}.") from None
    except RecursionError:
        raise MalformedBody("The body is nested too deeply.") from None
    is_known_client = instance_state.results.set_results_paused(
        pause_command.client, pause_command.id, pause_command.pause
    )
    await exchange.send_response(msgspec.json.encode({"known": is_known_client}))


async def handle_role(instance_state: InstanceState, registry: ModelRegistry, route: Route, exchange: Exchange) -> None:
    """Assign a role; the answer does not wait until the change is complete. Raises CommandRefused."""
    version, _, name = route.path[1:].split("/")
    if not registry.options.admin_keys:  # else the caller has shown an admin key or the secret
        instance_state.access.require_member(exchange)
    assignment = role_request.parse_role_request(
        name, version, await exchange.read_body(), instance_state.role.name == "none"
    )
    if registry.options.peer_port is None:  # started as mixed: no instance could hand anything over
        raise CommandRefused(503, role_request.NO_PEERS)
    instance_state.role.assign_role(assignment)
    await exchange.send_response(role_request.ROLE_ACCEPTED.body)


async def handle_instance_status(
    instance_state: InstanceState, registry: ModelRegistry, route: Route, exchange: Exchange
) -> None:
    """Answer with the instance's status. Raises Unauthorized; Forbidden to a client whose key is limited to some
    models."""
    instance_state.access.require_member(exchange)
    if exchange.tenant.models:
        raise Forbidden("A key that is limited to some models may not read the status of an instance.")
    if registry.shutting_down:
        stopping = INSTANCE_PLANE.stopping_answer
        await exchange.send_answer(stopping)
        return
    version = 2 if route.path.startswith("/v2") else 1
    await exchange.send_response(
        msgspec.json.encode(instance_status(registry, instance_state, instance_state.address_for(exchange), version))
    )


async def handle_instance_abort(
    instance_state: InstanceState, registry: ModelRegistry, route: Route, exchange: Exchange
) -> None:
    """Abort a request. If it has ended, drop results of it that are still held back for a coordinator."""
    await handle_abort(registry, route, exchange, instance_state.results.drop_held_results)


def build_instance_handlers(instance_state: InstanceState, intake: RequestIntake) -> dict[RouteKind, RouteHandler]:
    """Return the handlers of an instance's routes, including the server's routes that an instance answers itself."""
    return {
        "generate": partial(handle_instance_generate, instance_state, intake),
        "abort": partial(handle_instance_abort, instance_state),
        "results": partial(handle_results, instance_state),
        "results_flow": partial(handle_results_flow, instance_state),
        "role": partial(handle_role, instance_state),
        "instance_status": partial(handle_instance_status, instance_state),
    }


def _read_results_query(parameters: Mapping[str, str]) -> ResultsQuery:
    """Read the query of a connection for results. Raises InvalidValue."""
    coordinator_name, coordinator_id = parameters.get("client", ""), parameters.get("seat", "")
    if coordinator_name and not headers.COORDINATOR_NAME.fullmatch(coordinator_name):
        raise InvalidValue("'client' must be 1 to 64 letters, digits, _ or -.", field="client")
    first_frame = parameters.get("from")
    if first_frame is not None and not re.fullmatch("[0-9]{1,15}", first_frame):
        raise InvalidValue("'from' must be the number of a frame.", field="from")
    if coordinator_id and not (coordinator_name and headers.COORDINATOR_NAME.fullmatch(coordinator_id)):
        raise InvalidValue("'seat' must be 1 to 64 letters, digits, _ or -, and comes with 'client'.", field="seat")
    return ResultsQuery(
        coordinator_name, coordinator_id, parameters.get("epoch", ""), None if first_frame is None else int(first_frame)
    )


def _query_parameters(exchange: Exchange) -> dict[str, str]:
    text = exchange.scope.get("query_string", b"").decode("latin-1")
    return {name: values[-1] for name, values in parse_qs(text, keep_blank_values=True, max_num_fields=16).items()}


def _set_user_timeout(exchange: Exchange) -> None:
    """Make the kernel end a connection whose other side is gone; the heartbeats detect that."""
    cycle: HttpCycle = exchange.scope[CYCLE_KEY]
    sock = cycle.transport.get_extra_info("socket")
    if sock is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MILLISECONDS)
