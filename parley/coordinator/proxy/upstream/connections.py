"""The coordinator's connections: one HTTP client and one result stream per instance.

They are opened and closed as instances enter and leave the table. Of client requests this module knows only the ids.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Coroutine
from typing import Any
from urllib.parse import quote, urlsplit

import msgspec

from parley.coordinator.access import coordinator_reach
from parley.coordinator.config import CoordinatorOptions
from parley.coordinator.proxy.upstream.result_stream import ResultStreamClient
from parley.coordinator.routing.health import Unanswered
from parley.coordinator.routing.instance import ClusterInstance
from parley.coordinator.routing.instance_table import InstanceEvent, InstanceTable
from parley.disagg.wire.headers import FORWARDED_HEADER, SECRET_HEADER
from parley.web.http_client import ConnectionBroken, InstanceHttpClient, InstanceUnreachable
from parley.web.random_ids import draw_id

MAX_REPORT_BYTES = 16 << 20  # bytes of an answer to the coordinator itself: a status, metrics
COMMAND_TIMEOUT = 10.0  # seconds that an instance may take to answer a command
CONNECT_RESULTS_TIMEOUT = 1.0  # seconds that a request waits for a connection for results
JSON_CONTENT_TYPE = [(b"content-type", b"application/json")]


class InstanceConnections:
    """The HTTP clients and result streams of all instances.

    ``coordinator_id``: the coordinator id, the same after a restart; instances drop the results that they kept for an
    earlier coordinator with this id. ``context``: TLS towards instances. ``secret_headers``: the header that
    authenticates the coordinator to an instance, in its own commands. ``forwarding_headers`` authenticate it when it
    forwards a client's request, and say whether strangers may be among its clients.
    """

    def __init__(
        self,
        table: InstanceTable,
        options: CoordinatorOptions,
        coordinator_id: str,
        context: ssl.SSLContext | None = None,
    ):
        self.coordinator_name = draw_id().hex()  # identifies this coordinator's results at instances
        self._coordinator_id = coordinator_id
        self._table = table
        self._context = context
        self.secret_headers = [(SECRET_HEADER, options.secret.encode())] if options.secret else []
        is_public = coordinator_reach(options, options.host) == "public"
        self.forwarding_headers = [*self.secret_headers, (FORWARDED_HEADER, b"public" if is_public else b"private")]
        self._http_clients: dict[str, InstanceHttpClient] = {}  # by scheme, host and port
        self._result_streams: dict[int, tuple[ResultStreamClient, asyncio.Task[None]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start_connections(self) -> None:
        """Connect to the table's instances, and follow its changes from now on."""
        self._table.watchers.append(self._instance_changed)
        for instance in self._table:
            self._update_stream(instance)

    async def close_connections(self) -> None:
        """Close all connections."""
        self._table.watchers.remove(self._instance_changed)
        tasks = [task for _, task in self._result_streams.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._tasks, return_exceptions=True)
        for http_client in self._http_clients.values():
            http_client.close_idle()

    def http_client(self, instance: ClusterInstance) -> InstanceHttpClient:
        """Return the HTTP client of an instance."""
        return self._http_clients.get(instance.url) or self._create_client(instance.url)

    def last_heard(self, instance: ClusterInstance) -> float:
        """Return when the instance last sent anything, by time.monotonic; 0 for never."""
        return self.http_client(instance).last_heard

    async def ask_instance(
        self, url: str, method: str = "GET", body: bytes = b"", timeout: float = 5.0
    ) -> tuple[int, bytes]:
        """Return status and body of an instance's answer; an error status is no exception. Raises Unanswered."""
        url_parts = urlsplit(url)
        root = f"{url_parts.scheme}://{url_parts.netloc}"
        http_client = self._http_clients.get(root) or self._create_client(root)
        target = url[len(root) :].encode() or b"/"
        headers = [*self.secret_headers, *JSON_CONTENT_TYPE] if body else self.secret_headers
        try:
            async with asyncio.timeout(timeout):
                answer = await http_client.request_answer(
                    method.encode(), target, headers, (body,) if body else (), limit=MAX_REPORT_BYTES
                )
        except TimeoutError:
            raise Unanswered("Nothing came in time.") from None
        except InstanceUnreachable as error:
            raise Unanswered(str(error), responded=error.refused) from None
        except ConnectionBroken as error:
            raise Unanswered(str(error), responded=True) from None
        return answer.status, answer.body

    def _create_client(self, root: str) -> InstanceHttpClient:
        http_client = self._http_clients[root] = InstanceHttpClient(root, self._context)
        return http_client

    def result_stream(self, instance: ClusterInstance) -> ResultStreamClient | None:
        """Return the result stream of an instance; None if it has none."""
        stream_entry = self._result_streams.get(instance.id)
        return stream_entry[0] if stream_entry is not None else None

    async def connect_results(self, instance: ClusterInstance) -> None:
        """Try to receive the results of an instance now, and return when that has succeeded or failed."""
        if (stream := self.result_stream(instance)) is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CONNECT_RESULTS_TIMEOUT):
                    await stream.connect_now()

    # -- commands whose completion is not awaited

    def abort_request(self, instance: ClusterInstance, request_id: str, model: str = "") -> None:
        """Abort a request on an instance, if it runs there."""
        names = [model] if model and model in instance.models else sorted(instance.models) or [model or "model"]
        for name in names:
            self._run_in_background(
                self._post_command(
                    instance, b"/v2/models/%b/stopInfer" % quote(name, safe="").encode(), {"id": request_id}
                )
            )

    async def set_results_paused(self, instance: ClusterInstance, request_id: str, pause: bool) -> None:
        """Pause or resume the results of a request on an instance."""
        await self._post_command(
            instance, b"/v1/dresult/flow", {"client": self.coordinator_name, "id": request_id, "pause": pause}
        )

    async def _post_command(self, instance: ClusterInstance, target: bytes, body: dict[str, Any]) -> None:
        with contextlib.suppress(InstanceUnreachable, ConnectionBroken, TimeoutError):
            async with asyncio.timeout(COMMAND_TIMEOUT):
                headers = [*self.secret_headers, *JSON_CONTENT_TYPE]
                await self.http_client(instance).request_answer(b"POST", target, headers, (msgspec.json.encode(body),))

    def _run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- changes of the table

    def _instance_changed(self, instance: ClusterInstance, event: InstanceEvent) -> None:
        if event == "left":
            self._drop_instance(instance)
            return
        if event in ("lost", "restarted"):
            reason = "It was restarted." if event == "restarted" else "It does not answer."
            self.http_client(instance).fail_all(reason)
            if (stream := self.result_stream(instance)) is not None:
                stream.fail_requests(reason)
        self._update_stream(instance)

    def _update_stream(self, instance: ClusterInstance) -> None:
        """Open or close the result stream of an instance, by its role."""
        needs_stream = instance.native or instance.role in ("decode", "flex")
        if needs_stream and instance.id not in self._result_streams:
            stream = ResultStreamClient(
                self.http_client(instance),
                self.coordinator_name,
                self._coordinator_id,
                lambda connected, why: self._report_attached(instance, connected, why),
                lambda request_id: self.abort_request(instance, request_id),
                self.secret_headers,
            )
            task = asyncio.get_running_loop().create_task(stream.keep_connected())
            self._result_streams[instance.id] = stream, task
            self._report_attached(instance, False)
        elif not needs_stream and instance.id in self._result_streams:
            self._result_streams.pop(instance.id)[1].cancel()
            self._report_attached(instance, True)

    def _report_attached(self, instance: ClusterInstance, connected: bool, reason: str = "") -> None:
        """Tell the table whether results of an instance can be received; one that only prefills is usable without
        them."""
        self._table.set_result_stream(instance, connected or instance.role == "prefill", reason)

    def _drop_instance(self, instance: ClusterInstance) -> None:
        stream_entry = self._result_streams.pop(instance.id, None)
        if stream_entry is not None:
            stream_entry[1].cancel()
        used_urls = {place for other in self._table for place in (other.url, other.management, other.metrics)}
        for place in {instance.url, instance.management, instance.metrics} - used_urls:
            if (http_client := self._http_clients.pop(place, None)) is not None:
                http_client.close_idle()
