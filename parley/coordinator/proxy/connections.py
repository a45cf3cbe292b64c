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

from parley.coordinator.config import Options
from parley.coordinator.proxy.http_client import Broken, Unreachable, Upstream
from parley.coordinator.proxy.result_stream import Feed
from parley.coordinator.routing.health import Unanswered
from parley.coordinator.routing.instance import Instance
from parley.coordinator.routing.instance_table import News, Table
from parley.web.random_ids import draw

SOON = 10.0  # seconds that an instance may take to answer a command
JSON = [(b"content-type", b"application/json")]


class Connections:
    """The HTTP clients and result streams of all instances.

    ``coordinator_id``: the coordinator id, the same after a restart; instances drop the results that they kept for an
    earlier coordinator with this id. ``context``: TLS towards instances. ``secret_headers``: the header that
    authenticates the coordinator to an instance; it is sent with the coordinator's own commands, never with client
    requests forwarded unchanged.
    """

    def __init__(self, table: Table, options: Options, seat: str, context: ssl.SSLContext | None = None):
        self.name = draw().hex()  # identifies this coordinator's results at instances
        self._seat = seat
        self._table = table
        self._context = context
        self.secret = [(b"parley-secret", options.secret.encode())] if options.secret else []
        self._upstreams: dict[str, Upstream] = {}  # by scheme, host and port
        self._feeds: dict[int, tuple[Feed, asyncio.Task[None]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Connect to the table's instances, and follow its changes from now on."""
        self._table.watchers.append(self._changed)
        for instance in self._table:
            self._settle(instance)

    async def stop(self) -> None:
        """Close all connections."""
        self._table.watchers.remove(self._changed)
        tasks = [task for _, task in self._feeds.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._tasks, return_exceptions=True)
        for upstream in self._upstreams.values():
            upstream.close()

    def upstream(self, instance: Instance) -> Upstream:
        """Return the HTTP client of an instance."""
        return self._upstreams.get(instance.url) or self._made(instance.url)

    def heard(self, instance: Instance) -> float:
        """Return when the instance last sent anything, by time.monotonic; 0 for never."""
        return self.upstream(instance).heard

    async def ask(self, url: str, method: str = "GET", body: bytes = b"", timeout: float = 5.0) -> tuple[int, bytes]:
        """Return status and body of an instance's answer; an error status is no exception. Raises Unanswered."""
        split = urlsplit(url)
        root = f"{split.scheme}://{split.netloc}"
        upstream = self._upstreams.get(root) or self._made(root)
        target = url[len(root) :].encode() or b"/"
        headers = [*self.secret, *JSON] if body else self.secret
        try:
            async with asyncio.timeout(timeout):
                answer = await upstream.ask(method.encode(), target, headers, (body,) if body else ())
        except (Unreachable, Broken, TimeoutError) as error:
            raise Unanswered(str(error) or "Nothing came in time.") from None
        return answer.status, answer.body

    def _made(self, root: str) -> Upstream:
        made = self._upstreams[root] = Upstream(root, self._context)
        return made

    def feed(self, instance: Instance) -> Feed | None:
        """Return the result stream of an instance; None if it has none."""
        found = self._feeds.get(instance.id)
        return found[0] if found is not None else None

    # -- commands whose completion is not awaited

    def halt(self, instance: Instance, id: str, model: str = "") -> None:
        """Abort a request on an instance, if it runs there."""
        names = [model] if model and model in instance.models else sorted(instance.models) or [model or "model"]
        for name in names:
            self._later(self._post(instance, b"/v2/models/%b/stopInfer" % quote(name, safe="").encode(), {"id": id}))

    async def flow(self, instance: Instance, id: str, pause: bool) -> None:
        """Pause or resume the results of a request on an instance."""
        await self._post(instance, b"/v1/dresult/flow", {"client": self.name, "id": id, "pause": pause})

    async def _post(self, instance: Instance, target: bytes, body: dict[str, Any]) -> None:
        with contextlib.suppress(Unreachable, Broken, TimeoutError):
            async with asyncio.timeout(SOON):
                headers = [*self.secret, *JSON]
                await self.upstream(instance).ask(b"POST", target, headers, (msgspec.json.encode(body),))

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- changes of the table

    def _changed(self, instance: Instance, news: News) -> None:
        if news == "left":
            self._drop(instance)
            return
        if news in ("lost", "restarted"):
            reason = "It was restarted." if news == "restarted" else "It does not answer."
            self.upstream(instance).fail(reason)
            if (feed := self.feed(instance)) is not None:
                feed.fail(reason)
        self._settle(instance)

    def _settle(self, instance: Instance) -> None:
        """Open or close the result stream of an instance, by its role."""
        wanted = instance.extended or instance.role in ("decode", "flex")
        if wanted and instance.id not in self._feeds:
            feed = Feed(
                self.upstream(instance),
                self.name,
                self._seat,
                lambda connected, why: self._attached(instance, connected, why),
                lambda id: self.halt(instance, id),
                self.secret,
            )
            task = asyncio.get_running_loop().create_task(feed.run())
            self._feeds[instance.id] = feed, task
            self._attached(instance, False)
        elif not wanted and instance.id in self._feeds:
            self._feeds.pop(instance.id)[1].cancel()
            self._attached(instance, True)

    def _attached(self, instance: Instance, connected: bool, why: str = "") -> None:
        """Tell the table whether results can be received; an instance that only prefills is usable without."""
        self._table.attach(instance, connected or instance.role == "prefill", why)

    def _drop(self, instance: Instance) -> None:
        found = self._feeds.pop(instance.id, None)
        if found is not None:
            found[1].cancel()
        used = {place for each in self._table for place in (each.url, each.management, each.metrics)}
        for place in {instance.url, instance.management, instance.metrics} - used:
            if (upstream := self._upstreams.pop(place, None)) is not None:
                upstream.close()
