"""Starts, restarts and ends the API processes of a server (``--api-processes``), in its main process.

They accept connections on the same listening sockets, so any of them may accept a new one. The main process accepts
until the first of them serves, and whenever none does. It answers the requests that they pass to it, over connections
that they send.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable

import msgspec

from parley import control_groups, wire
from parley.child_process import python_command
from parley.dialects.route import Route
from parley.engine.process_exit import describe_exit
from parley.engine.remote_engine import HEALTHY_SECONDS, RESTART_DELAYS
from parley.engine.watchdog import TICK_SECONDS, Watchdog, read_processor_seconds
from parley.serving.api_processes.api_link import ApiLink
from parley.serving.api_processes.frame_link import FrameLink
from parley.serving.api_processes.messages import (
    AnnounceShutdown,
    EndProcess,
    FromApiProcess,
    MainBeat,
    ProcessReady,
    UseFacts,
    UseOptions,
    UsePlan,
)
from parley.serving.api_processes.passing import accept_passed
from parley.serving.api_processes.plan import (
    ApiProcessPlan,
    encode_server_options,
    model_facts,
    passed_limit,
    planned_model,
    shared_options,
)
from parley.serving.handlers.route_table import RouteHandler
from parley.serving.model_registry import ModelRegistry
from parley.serving.server_options import ServerOptions
from parley.web.exchange import Exchange
from parley.web.port import HttpServer
from parley.web.shared_listener import COUNT, ConnectionCounts

log = logging.getLogger("parley.server")

API_PROCESS_COMMAND = python_command("-m", "parley.boot.api_process")
END_SECONDS = 6.0  # most seconds in which a process may finish its answers
LISTEN_RETRY_SECONDS = 1.0
EXIT_SECONDS = 2.0  # from the end of its socket to the end of a process


class ApiProcessFailed(Exception):
    """An API process ended before it served. The message is one sentence."""


class ApiProcessSlot:
    """One of the API processes, which is started again whenever it ends."""

    def __init__(self, number: int, pool: ApiProcessPool):
        self.number = number
        self.link: ApiLink | None = None  # of a process that serves
        self._pool = pool
        self._starts = 0
        self._memory_kills: int | None = None  # before the process was started
        self._hang = ""  # its behaviour, if it was killed because it hung

    async def supervise(self) -> None:
        """Run the process until this task is cancelled, and start it again whenever it ends. Raises ApiProcessFailed
        if the first one does not serve."""
        ends_in_a_row = 0
        while True:
            started_at = time.monotonic()
            has_served, exit_code = await self._run_process()
            if self._pool.is_ending:
                return
            if self._hang:  # a kill of our own must not use up a memory kill, which explains the end of one process
                ending = f"hung: it {self._hang}, and was killed"
            else:
                ending = describe_exit(exit_code, self._memory_kills)
            if not has_served and self._starts == 1:
                raise ApiProcessFailed(f"API process {self.number} {ending} before it was ready.")
            ends_in_a_row = 1 if time.monotonic() - started_at >= HEALTHY_SECONDS else ends_in_a_row + 1
            first, longest = RESTART_DELAYS
            delay = min(longest, first * 2.0 ** min(ends_in_a_row - 2, 16)) if ends_in_a_row > 1 else 0.0
            log.error(
                "API process %d %s; its requests were cancelled. It is started again in %g s.",
                self.number,
                ending,
                delay,
            )
            await asyncio.sleep(delay)

    async def _run_process(self) -> tuple[bool, int | None]:
        """Start a process and serve it until it ends. Return whether it has served, and its exit code."""
        self._starts += 1
        self._memory_kills, self._hang = control_groups.count_memory_kills(), ""
        own_link, other_link = socket.socketpair()
        own_passes, other_passes = socket.socketpair()
        sockets = self._pool.listeners
        descriptors = [other_link.fileno(), other_passes.fileno()]
        try:
            process = await asyncio.to_thread(
                subprocess.Popen,
                [*API_PROCESS_COMMAND, *map(str, descriptors)],
                pass_fds=[*descriptors, self._pool.counts_file.fileno(), *(sock.fileno() for sock in sockets.values())],
                stdin=subprocess.DEVNULL,
            )
        except OSError as error:
            own_link.close()
            own_passes.close()
            log.error("API process %d could not be started: %s", self.number, error.strerror)
            return False, None
        finally:
            other_link.close()
            other_passes.close()
        try:
            return await self._serve_process(process, own_link, own_passes), await _exit_code(process)
        except Exception:  # a defect, which must not keep the process from being started again
            log.exception("The connection to API process %d failed.", self.number)
            return True, None
        finally:
            process.kill()  # it has ended, unless this task was cancelled
            process.wait()

    async def _serve_process(
        self, process: subprocess.Popen[bytes], link_socket: socket.socket, pass_socket: socket.socket
    ) -> bool:
        """Send a process its plan as soon as the models are loaded, and serve it until it ends. Return whether it has
        served."""
        accepting = asyncio.create_task(self._pool.accept_passed_connections(pass_socket))
        frames = await FrameLink.open(link_socket, msgspec.msgpack.Decoder(FromApiProcess))
        link = ApiLink(self._pool.registry, frames, process.kill)

        def handle_message(message: FromApiProcess) -> None:
            if isinstance(message, ProcessReady):
                self.link = link
                self._pool.send_state(link)
            else:
                link.handle_message(message)

        frames.change_handler(handle_message)
        tasks = [accepting]
        try:
            await self._pool.models_loaded.wait()
            tasks.append(asyncio.create_task(self._watch_process(process, frames)))
            link.send(UsePlan(self._pool.make_plan(self.number - 1, f"{self.number}.{self._starts}.")))
            with contextlib.suppress(wire.BrokenFrame, msgspec.DecodeError):  # it was killed while it wrote
                await frames.ended
            return self.link is not None
        finally:
            self.link = None
            self._pool.connection_counts.mark_ended(self.number - 1)
            frames.close()
            for task in tasks:
                task.cancel()
            link.close()
            self._pool.note_change()

    async def _watch_process(self, process: subprocess.Popen[bytes], frames: FrameLink) -> None:
        """Kill the process if it shows no sign of life, as engines are, and give it signs of life. It reports each
        second once it serves."""
        timeout = self._pool.registry.main_model.settings.engine_timeout
        watchdog = Watchdog(timeout)
        with contextlib.suppress(OSError):  # it has just ended
            while timeout:
                await asyncio.sleep(TICK_SECONDS)
                frames.send(MainBeat())
                processor_seconds = read_processor_seconds(process.pid)
                is_serving = self.link is not None
                self._hang = watchdog.explain_hang(frames.arrivals, processor_seconds, is_serving=is_serving)
                if self._hang:
                    process.kill()
                    return

    def end(self) -> None:
        """Ask the process to finish its answers and end."""
        if self.link is not None:
            self.link.send(EndProcess())


async def _exit_code(process: subprocess.Popen[bytes]) -> int:
    """Wait for the end of a process that has closed its socket; one that does not end is killed."""
    try:
        return await asyncio.to_thread(process.wait, EXIT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return await asyncio.to_thread(process.wait)


class ApiProcessPool:
    """All API processes. ``listeners``: the listening sockets, by the number of their place; ``servers``: those of the
    main process for them, by the same numbers; ``passed_server``: the one for requests that are passed to it."""

    def __init__(
        self,
        registry: ModelRegistry,
        listeners: dict[int, socket.socket],
        servers: dict[int, HttpServer],
        passed_server: HttpServer,
    ):
        self.registry = registry
        self.listeners = listeners
        self._servers, self.passed_server = servers, passed_server
        self._slots = [ApiProcessSlot(number, self) for number in range(1, registry.options.api_processes + 1)]
        count = len(self._slots)
        self.counts_file = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close
        self.counts_file.truncate(COUNT.size * count)
        self.connection_counts = ConnectionCounts(self.counts_file.fileno(), count)
        for place in range(count):
            self.connection_counts.mark_ended(place)
        self._supervisors: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._is_listening = True
        self.models_loaded = asyncio.Event()
        self.is_ending = False
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def links(self) -> list[ApiLink]:
        """The connections to the processes that serve."""
        return [slot.link for slot in self._slots if slot.link is not None]

    def start(self) -> None:
        """Start the processes, which import their libraries while the models are loaded."""
        self._supervisors = [asyncio.create_task(slot.supervise()) for slot in self._slots]
        self._supervisors.append(asyncio.create_task(self._listen_if_needed()))

    async def wait_until_ready(self) -> None:
        """Tell the processes to serve the models, which have been loaded, and wait until all do. Raises
        ApiProcessFailed."""
        for model in self.registry.models:
            model.engine.info_observers.append(lambda info: self.send_facts())
            model.adapter_observers.append(self.send_facts)
        self.models_loaded.set()
        while len(self.links) < len(self._slots):
            change = asyncio.create_task(self._changed.wait())
            await asyncio.wait([change, *self._supervisors], return_when=asyncio.FIRST_COMPLETED)
            change.cancel()
            for task in self._supervisors:
                if task.done():
                    task.result()
            await asyncio.sleep(0.01)

    def make_plan(self, number: int, id_prefix: str) -> ApiProcessPlan:
        """Return the plan of a process that starts now."""
        return ApiProcessPlan(
            number,
            encode_server_options(shared_options(self.registry.options, len(self._slots))),
            passed_limit(self.registry.options, len(self._slots)),
            tuple(planned_model(model) for model in self.registry.models),
            self.registry.reasoning_seal.key,
            {place: sock.fileno() for place, sock in self.listeners.items()},
            self.counts_file.fileno(),
            id_prefix,
        )

    def note_change(self) -> None:
        """Note that a process serves now, or has ended."""
        self._changed.set()

    async def _listen_if_needed(self) -> None:
        """Accept connections while no process does, until this task is cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            should_listen = not self.links
            if should_listen == self._is_listening:
                continue
            try:
                for number, server in self._servers.items():
                    server.stop_listening()
                    if should_listen:
                        await server.listen([self.listeners[number]])
                self._is_listening = should_listen
            except OSError as error:  # no descriptors are left
                log.error("The main process cannot accept connections: %s. It tries again.", error.strerror)
                await asyncio.sleep(LISTEN_RETRY_SECONDS)
                self._changed.set()

    async def accept_passed_connections(self, pass_socket: socket.socket) -> None:
        """Serve the connections that a process sends, until it has ended or this task is cancelled."""
        loop = asyncio.get_running_loop()
        pass_socket.setblocking(False)
        readable = asyncio.Event()
        loop.add_reader(pass_socket, readable.set)
        try:
            while True:
                try:
                    connection = accept_passed(pass_socket)
                except BlockingIOError:
                    readable.clear()
                    await readable.wait()
                    continue
                if connection is None:
                    return
                task = asyncio.create_task(self.passed_server.serve_connection(connection))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        finally:
            loop.remove_reader(pass_socket)
            pass_socket.close()

    def send_state(self, new_link: ApiLink) -> None:
        """Send a process the facts and options that may have changed while it was loading, and then tell it to
        serve."""
        new_link.send(self._facts_message())
        new_link.send(self._options_message(self.registry.options))
        self.note_change()

    def send_facts(self) -> None:
        """Send the processes the facts about the models."""
        message = self._facts_message()
        for link in self.links:
            link.send(message)

    def use_options(self, options: ServerOptions) -> None:
        """Tell the processes to use other options, and to read certificates again."""
        message = self._options_message(options)
        for link in self.links:
            link.send(message)

    def _facts_message(self) -> UseFacts:
        return UseFacts({model.name: model_facts(model) for model in self.registry.models if model.engine.info})

    def _options_message(self, options: ServerOptions) -> UseOptions:
        return UseOptions(encode_server_options(shared_options(options, len(self._slots))))

    def announce_shutdown(self) -> None:
        """Tell the processes to ask their clients to send further requests elsewhere."""
        for link in self.links:
            link.send(AnnounceShutdown())

    async def refresh_metrics(self) -> None:
        """Ask the processes for their current metrics."""
        if links := self.links:
            await asyncio.gather(*(link.refresh_metrics() for link in links))

    async def close(self) -> None:
        """Wait until the processes have finished their answers, and end them."""
        self.is_ending = True
        for slot in self._slots:
            slot.end()
        ending = [task for slot, task in zip(self._slots, self._supervisors, strict=False) if slot.link is not None]
        if ending:  # others have no client
            await asyncio.wait(ending, timeout=END_SECONDS)
        for task in self._supervisors:
            task.cancel()
        await asyncio.gather(*self._supervisors, return_exceptions=True)
        self.counts_file.close()


def with_refresh(refresh: Callable[[], Awaitable[None]], handler: RouteHandler) -> RouteHandler:
    """Return a handler that refreshes the metrics before it answers."""

    async def refresh_and_answer(registry: ModelRegistry, route: Route, exchange: Exchange) -> None:
        await refresh()
        await handler(registry, route, exchange)

    return refresh_and_answer
