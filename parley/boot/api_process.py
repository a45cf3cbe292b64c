"""An API process (``python -m parley.boot.api_process LINK PASSES``): reads requests and writes answers for a server.

LINK and PASSES are inherited descriptors: of the socket for messages to the main process, and of the one for
connections to it (``serving/api_processes/``). The process ends with the main process; all decisions are made there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from dataclasses import replace

import msgspec
import uvloop

from parley.boot.listening_places import listening_places
from parley.boot.server_parts import ServerParts
from parley.child_process import die_with_parent, ignore_group_signals
from parley.dialects.reasoning_seal import ReasoningSeal
from parley.dialects.route import Route
from parley.disagg.kv.peer import KVPeer
from parley.disagg.wire.headers import is_from_coordinator
from parley.engine.watchdog import TICK_SECONDS, Watchdog, read_processor_seconds
from parley.serving.api_processes.frame_link import FrameLink
from parley.serving.api_processes.main_link import (
    MainLink,
    RelayedAdmission,
    is_answered_by_main,
    main_hangs_error,
    withdraw_request,
)
from parley.serving.api_processes.messages import (
    AdmissionGranted,
    AdmissionRefused,
    AnnounceShutdown,
    CancelOpen,
    EndProcess,
    FailOpen,
    MainBeat,
    ProcessReady,
    RelayedOutputs,
    TakeMetricsSnapshot,
    ToApiProcess,
    UseFacts,
    UseOptions,
    UsePlan,
)
from parley.serving.api_processes.passing import MainHttpClient, ScopeKeeper, pass_request
from parley.serving.api_processes.plan import ApiProcessPlan, ModelFacts, PlannedModel, decode_server_options, use_facts
from parley.serving.api_processes.relayed_engine import RelayedEngine, RelayedModel
from parley.serving.app import App
from parley.serving.generate_handler import handle_generate
from parley.serving.model_registry import ModelRegistry
from parley.serving.server_options import ServerOptions
from parley.serving.socket_handshake import handle_socket
from parley.web import logs
from parley.web.exchange import Exchange
from parley.web.port import CorsByPath, HttpServer, freeze_objects, uvicorn_config
from parley.web.shared_listener import ConnectionCounts
from parley.web.tls.contexts import LoadedTls, reload_certificates, server_tls_context
from parley.web.tls.files import TlsFileError

log = logging.getLogger("parley.server")

REPORT_SECONDS = 1.0  # seconds between two reports of metrics
COUNTS_PER_REPORT = 10  # reports of the number of connections, for each report of metrics
LAST_WRITES_SECONDS = 3.0  # most seconds for writing the last bytes of answers


class ApiProcess:
    """The process after its plan has arrived. ``options``: of the plan; ``link``: to the main process; ``pass_socket``:
    for connections to it. ``stopping`` is set when the process has to end."""

    def __init__(
        self,
        plan: ApiProcessPlan,
        options: ServerOptions,
        link: MainLink,
        pass_socket: socket.socket,
        stopping: asyncio.Event,
    ):
        self._stopping = stopping
        self.has_current_options = asyncio.Event()  # those of the plan may be older
        self._link, self._admission = link, RelayedAdmission(link)
        self._models = [self._make_model(planned, plan.id_prefix, options) for planned in plan.models]
        self._parts = parts = ServerParts(options, self._models, KVPeer())
        self.registry = parts.registry
        self.registry.reasoning_seal = ReasoningSeal(key=plan.seal_key)
        self._facts = {planned.names[0]: planned.facts for planned in plan.models}
        places = listening_places(options)
        parts.handlers.update(dict.fromkeys(parts.handlers, self._pass_to_main))
        parts.handlers["generate"] = parts.handlers["embed"] = self._generate_answer
        parts.handlers["socket"] = handle_socket  # here, where the connection is; its requests may be passed
        self._main_client = MainHttpClient(pass_socket, plan.passed_limit)
        self._places: dict[App, int] = {}
        self._loaded_tls: list[LoadedTls] = []
        self._sockets = [socket.socket(fileno=descriptor) for descriptor in plan.listeners.values()]
        self._servers = []
        self._counts = ConnectionCounts(plan.counts_file, options.api_processes, plan.number)
        for number in plan.listeners:
            place = places[number]
            app = parts.make_port_app(
                place.mounts, place.host, certified=place.is_certified, serves_route=place.serves_route
            )
            self._places[app] = number
            context = None
            if place.tls is not None:
                context = server_tls_context(place.tls, http2=options.http2)
                self._loaded_tls.append(LoadedTls(context, place.tls))
            config = uvicorn_config(options, CorsByPath(ScopeKeeper(app), options.cors, app.web_origins), context)
            self._servers.append(HttpServer(config, self._counts))

    def _make_model(self, planned: PlannedModel, id_prefix: str, options: ServerOptions) -> RelayedModel:
        name = planned.names[0]
        engine = RelayedEngine(
            planned.facts.info, id_prefix, lambda message: self._link.send_engine_message(name, message)
        )
        model = RelayedModel(planned.names, planned.settings, engine, options)
        model.created = planned.created
        return model

    async def load_tokenizers(self) -> None:
        """Load the tokenizers, and all else that text needs. Raises BadTokenizer."""
        for model in self._models:
            await model.load_engine()
        self.use_facts(self._facts)
        freeze_objects()

    def start_serving(self) -> asyncio.Future[list[None]]:
        """Accept connections from now on. Return a future that is done when the servers have ended."""
        pairs = zip(self._servers, self._sockets, strict=True)
        return asyncio.gather(*(server.serve(sockets=[sock]) for server, sock in pairs))

    def handle_message(self, message: ToApiProcess) -> None:
        """Handle a message of the main process."""
        match message:
            case RelayedOutputs(name, is_ready, outputs, stats):
                model = next(model for model in self._models if model.name == name)
                model.relayed_engine.deliver_outputs(outputs, stats, is_ready=is_ready)
            case AdmissionGranted() | AdmissionRefused():
                self._link.take_answer(message)
            case CancelOpen() | FailOpen():
                self._link.end_early(message)
            case TakeMetricsSnapshot(question_id):
                self._link.send_snapshot(self.registry, question_id)
            case UseFacts(facts):
                self.use_facts(facts)
            case UseOptions(options):
                self._use_options(decode_server_options(options))
            case MainBeat():
                pass  # its arrival is all
            case AnnounceShutdown():
                for server in self._servers:
                    server.announce_shutdown()
            case EndProcess():
                self._stopping.set()

    def use_facts(self, facts: dict[str, ModelFacts]) -> None:
        """Use new facts about the models."""
        for model in self._models:
            if model.name in facts:
                use_facts(model, facts[model.name])

    def _use_options(self, new_options: ServerOptions) -> None:
        """Use new values of the options that may change while the server runs, and read certificates again."""
        own_options = self.registry.options
        options = replace(
            new_options, body_budget=own_options.body_budget, connection_limit=own_options.connection_limit
        )
        with contextlib.suppress(TlsFileError):  # the main process reports it
            reload_certificates(self._loaded_tls)
        self.registry.use_options(options)
        for app in self._places:
            app.use_options(options)
        for server in self._servers:
            server.use_options(options)
        self.has_current_options.set()

    async def _generate_answer(self, registry: ModelRegistry, route: Route, exchange: Exchange) -> None:
        """Answer a generating request here, unless it needs state that only the main process has."""
        if route.names_endpoint or is_from_coordinator(exchange.headers):
            await self._pass_to_main(registry, route, exchange)
            return
        body = await exchange.peek_body()
        if route.refers_to_records(body):
            await self._pass_to_main(registry, route, exchange)
            return
        exchange.keep_body(body)
        del body
        try:
            await handle_generate(registry, route, exchange, self._admission)
        except Exception as error:
            if exchange.kept_body is None or not is_answered_by_main(error):  # admitted, or an error of the request
                raise
            withdraw_request(self._link, exchange)
        else:
            return
        await self._pass_request(exchange, exchange.take_kept_body())

    async def _pass_to_main(self, registry: ModelRegistry, route: Route, exchange: Exchange) -> None:
        """Pass a request to the main process, which answers it."""
        await self._pass_request(exchange, await exchange.read_body())

    async def _pass_request(self, exchange: Exchange, body: bytes) -> None:
        if self._link.main_hangs:
            raise main_hangs_error()
        await pass_request(self._main_client, self._places[exchange.scope["app"]], exchange, body)

    async def report_metrics(self) -> None:
        """Send metrics each second, and count connections more often, until this task is cancelled."""
        while True:
            if not self._link.main_hangs:  # which would let the messages pile up in memory
                self._link.send_snapshot(self.registry)
            for _ in range(COUNTS_PER_REPORT):
                self._counts.set_own(sum(len(server.server_state.connections) for server in self._servers))
                await asyncio.sleep(REPORT_SECONDS / COUNTS_PER_REPORT)

    async def watch_main(self, frames: FrameLink) -> None:
        """Fail all requests if the main process shows no sign of life, and refuse others until it does, until this task
        is cancelled. Nothing is done if engines are not watched either."""
        timeout = self._models[0].settings.engine_timeout
        watchdog = Watchdog(timeout)
        while timeout:
            await asyncio.sleep(TICK_SECONDS)
            with contextlib.suppress(OSError):  # it has just ended, and this process ends as well
                processor_seconds = read_processor_seconds(os.getppid())
                hang = watchdog.explain_hang(frames.arrivals, processor_seconds, is_serving=True)
                self._note_hang(hang)

    def _note_hang(self, hang: str) -> None:
        """Note whether the main process hangs. Called at each tick, since requests that are being prepared reach it
        later. ``hang``: as from ``Watchdog.explain_hang``."""
        was_hanging, self._link.main_hangs = self._link.main_hangs, bool(hang)
        if hang:
            self._link.fail_open_requests()
            self._main_client.fail_all(hang)
        if hang and not was_hanging:
            log.error("The main process hangs: it %s. Requests are refused until it continues.", hang)
        elif was_hanging and not hang:
            log.warning("The main process answers again.")

    async def stop(self, serving: asyncio.Future[list[None]]) -> None:
        """Wait until open answers are written, and send the last metrics."""
        for server in self._servers:
            server.should_exit = True
        await asyncio.wait([serving], timeout=LAST_WRITES_SECONDS)
        await self.registry.close_models()
        await self._parts.close_parts()
        self._link.send_snapshot(self.registry)


async def serve_link(link_socket: socket.socket, pass_socket: socket.socket) -> None:
    """Serve until the main process ends the process. Raises anything that ends the link otherwise."""
    arrived_messages, stopping = asyncio.Queue[ToApiProcess](), asyncio.Event()
    frames = await FrameLink.open(link_socket, msgspec.msgpack.Decoder(ToApiProcess), arrived_messages.put_nowait)
    frames.ended.add_done_callback(end_at_once)
    plan_message = await arrived_messages.get()
    assert isinstance(plan_message, UsePlan)
    plan = plan_message.plan
    options = decode_server_options(plan.options)
    logs.set_up_logging(options.log_format, options.log_level)
    link = MainLink(frames.send)
    process = ApiProcess(plan, options, link, pass_socket, stopping)
    await process.load_tokenizers()
    frames.change_handler(process.handle_message)
    link.send(ProcessReady())
    await process.has_current_options.wait()
    serving = process.start_serving()
    tasks = [asyncio.create_task(process.report_metrics()), asyncio.create_task(process.watch_main(frames))]
    await stopping.wait()
    for task in tasks:
        task.cancel()
    await process.stop(serving)
    frames.close()
    await frames.ended


def end_at_once(ended: asyncio.Future[None]) -> None:
    """End the process because the link has ended: no request could be answered."""
    if (error := ended.exception()) is not None:
        log.error("The connection to the main process failed.", exc_info=error)
    sys.stderr.flush()
    os._exit(0 if error is None else 1)


def run_process(link_descriptor: int, pass_descriptor: int) -> None:
    """Run an API process over two inherited sockets."""
    if sys.platform == "linux":  # the end of the link is enough, but a process that hangs would keep the ports
        die_with_parent(signal.SIGKILL)
    ignore_group_signals()
    link_socket, pass_socket = socket.socket(fileno=link_descriptor), socket.socket(fileno=pass_descriptor)
    pass_socket.setblocking(False)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve_link(link_socket, pass_socket))


if __name__ == "__main__":
    run_process(int(sys.argv[1]), int(sys.argv[2]))
