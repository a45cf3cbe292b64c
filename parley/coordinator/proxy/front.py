"""The inference port: matches the paths of all APIs, and has each request answered by this process, by one instance, by
all of them, or by a prefill and a decode instance.

Errors that a single server reports before it reads a body are reported here in the same words. Of a body, only the
parts needed for scheduling are read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from parley.coordinator import refusals
from parley.coordinator.ports.metrics import CONTENT_TYPE
from parley.coordinator.proxy import forward, merge_answers
from parley.coordinator.proxy.attempts import Passage
from parley.coordinator.proxy.client import Caller
from parley.coordinator.proxy.connections import Connections
from parley.coordinator.proxy.paths import Path, Paths
from parley.coordinator.routing.admission import Choice
from parley.coordinator.routing.instance import Instance
from parley.coordinator.routing.policies import Wanted
from parley.dialects.dialect import Answer, Head, Kind, Reply
from parley.dialects.mounts import BODY_FAULT, Surface
from parley.disagg.wire.prompt_hash import Look, look
from parley.errors import NotAllowed, NotFound, ParleyError, Stopping
from parley.serving.options import ServerOptions
from parley.version import __version__
from parley.web.auth import Gate, Keys
from parley.web.exchange import ClientGone
from parley.web.http_protocol import NUMBER, REFUSED
from parley.web.logs import access
from parley.web.port import crossed

log = logging.getLogger("parley.cluster")

LARGE = 1 << 18  # bytes of a body above which it is parsed in a thread
ENDING = "The server is shutting down. This answer could not be finished."
EVERYBODY: frozenset[Kind] = frozenset({"adapter", "reset"})  # commands for all instances
GUARDED: frozenset[Kind] = frozenset({"metrics", "load"})  # answered here, for clients that an instance lets in
PROBES: frozenset[Kind] = frozenset({"live", "ready", "state", "health", "metrics", "load"})


class Front:
    """The ASGI application of the inference port.

    ``metrics_page`` renders the metrics; ``options``: those of the port; ``memory_limit``: for the bodies held at a
    time, in bytes; ``strict``: report errors to all clients in the documented form.
    """

    def __init__(
        self,
        choice: Choice,
        connections: Connections,
        page: Callable[[], Awaitable[bytes]],
        surfaces: Sequence[Surface],
        options: ServerOptions,
        memory: int,
        strict: bool = False,
    ):
        self.open = 0
        self.stopping = False  # True: new requests are refused
        self.held = 0  # bytes of bodies in memory
        self._passages: set[Passage] = set()
        self._labels: set[bytes] = set()  # request ids chosen by clients, of open requests
        self._choice, self._connections, self._page = choice, connections, page
        self._options, self._memory, self._strict = options, memory, strict
        self._paths = Paths(surfaces)
        self._gate = Gate(options.host, options.hosts, options.cors, Keys(()))

    def end(self) -> None:
        """End all open requests with an error."""
        for passage in self._passages:
            passage.end(Stopping(ENDING, retry_after=5))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path: Path | None = None
        try:
            path, scope["path_params"] = self._paths.find(scope["method"], scope["path"])
            dialect, missing = path.dialect, None
        except (NotFound, NotAllowed) as error:
            dialect, missing = self._paths.wording(scope["path"]), error
        taken = 0

        async def counted() -> Message:
            """Receive the next message of the body, within the memory limit. Raises ParleyError."""
            nonlocal taken
            message = await receive()
            if size := len(message.get("body", b"")):
                taken += size
                self.held += size
                if self.held > self._memory:
                    raise refusals.refusal(429, refusals.MEMORY, 1.0)
            return message

        caller = Caller(scope, counted, send, self._options, dialect)
        self.open += 1
        try:
            if REFUSED in scope:
                raise scope[REFUSED]
            self._gate.check(caller.headers)
            most = self._choice.options.max_requests
            if self._strict and scope.get(NUMBER, 1) > most:  # a gRPC call has its own limit of streams
                await self._close(caller, 429, refusals.OVERUSED.format(most))
                return
            if path is None:
                assert missing is not None
                raise missing
            caller.note.probe = path.kind in PROBES
            await self._answer(path, caller)
        except ClientGone:
            caller.abort()
        except ParleyError as error:
            await self._refuse(caller, error)
        except asyncio.CancelledError:
            caller.abort()
            raise
        except Exception:
            log.exception("Request %s failed.", caller.id)
            await self._refuse(caller, ParleyError("The server had an error while it processed the request."))
        finally:
            self.open -= 1
            self.held -= taken
            if self._options.access_log:
                access(caller)

    # -- errors

    async def _refuse(self, caller: Caller, error: ParleyError) -> None:
        if caller.status:
            caller.abort()
            return
        try:
            strict = self._strict or caller.dialect.documented_errors
            if strict and isinstance(error, NotFound | NotAllowed):
                await self._close(caller, 400, refusals.UNKNOWN)
                return
            told = refusals.documented(error, caller.dialect, strict)
            if told is not None:
                await caller.answer(told.body, told.status, told.type)
                return
            allowed = error.allowed if isinstance(error, NotAllowed) else ""
            await caller.refuse(error, ((b"allow", allowed.encode()),) if allowed else ())
        except ClientGone:
            caller.abort()

    async def _close(self, caller: Caller, status: int, text: str) -> None:
        """Refuse with the documented text and close the connection. Raises ClientGone."""
        await caller.answer(refusals.plain(text), status, refusals.TEXT, ((b"connection", b"close"),))

    # -- routing

    async def _answer(self, path: Path, caller: Caller) -> None:
        """Answer a request. Raises ParleyError, ClientGone."""
        body, kind = None, path.kind
        if kind is None:  # the path belongs to two APIs
            body = await caller.body()
            route, caller.dialect = path.pick(body)
            kind = route.kind
        if kind == "generate":
            await self._generate(path, caller, body)
            return
        if await self._own(kind, path, caller):
            return
        body = await caller.body() if body is None else body
        usable = self._usable()
        if kind == "count" and caller.scope["method"] != "HEAD":
            work = forward.joined(self._connections, caller, usable, body, merge_answers.add)
        elif kind == "models" and caller.scope["method"] != "HEAD" and len({each.models for each in usable}) > 1:
            work = forward.joined(self._connections, caller, usable, body, merge_answers.unite)
        elif kind == "halt":
            work = forward.some(self._connections, caller, usable, body)
        elif kind in EVERYBODY or (kind == "endpoint" and caller.scope["method"] not in ("GET", "HEAD")):
            work = forward.every(self._connections, caller, usable, body)
        else:
            able = await self._holding(path, caller, body, usable)
            work = forward.one(self._connections, caller, self._by_load(able), body)
        patience = self._choice.options.tokenizer_timeout if kind == "tokenize" else None
        try:
            async with asyncio.timeout(patience):
                await caller.while_connected(work)
        except TimeoutError:
            if caller.status:
                raise ClientGone from None
            raise refusals.refusal(408, refusals.LATE_TOKENS) from None

    async def _own(self, kind: Kind, path: Path, caller: Caller) -> bool:
        """Answer a request that concerns the coordinator itself; False if it does not."""
        write, ready = path.route.write, self._ready
        if kind in GUARDED and (usable := self._choice.table.usable()):
            refused = await forward.refusal(self._connections, caller, self._by_load(usable)[0])
            if refused is not None:
                caller.whole(*refused)
                return True
        if kind in ("live", "ready") and write is not None:
            told: Answer = write(kind == "live" or ready)
            await caller.answer(told.body, told.status, told.type)
        elif kind == "live":
            await caller.answer(b'{"status":"live"}')
        elif kind == "ready" and ready:
            await caller.answer(b'{"status":"ready"}')
        elif kind == "ready":
            table = self._choice.table
            states = {str(each.id): each.state(table.clock()) for each in table}
            state = {"status": "waiting", "message": refusals.NOT_READY, "instances": states}
            if lack := table.lack():
                state["reason"] = lack
            await caller.answer(msgspec.json.encode(state), 503, extra=((b"retry-after", b"1"),))
        elif kind == "health":
            if not ready:
                raise refusals.refusal(503, refusals.NOT_READY)
            await caller.answer(b"")
        elif kind == "metrics":
            await caller.answer(await self._page(), type=CONTENT_TYPE)
        elif kind == "version" and write is not None:
            await caller.answer(write(__version__))
        elif kind == "load" and write is not None:
            await caller.answer(write(self.open - 1))
        else:
            return False
        return True

    def _usable(self) -> list[Instance]:
        """Return the usable instances. Raises ParleyError if there is none."""
        usable = self._choice.table.usable()
        if not usable:
            raise refusals.refusal(503, refusals.NOT_READY)
        return usable

    async def _holding(self, path: Path, caller: Caller, body: bytes, usable: list[Instance]) -> list[Instance]:
        """Return the instances that have the requested model, or all if none has it."""
        model = caller.path.get("model", "") or (await self._look(body)).model
        return [each for each in usable if model in each.models] or usable

    def _by_load(self, usable: list[Instance]) -> list[Instance]:
        return sorted(usable, key=lambda each: (not each.extended, each.tasks, each.id))

    @property
    def _ready(self) -> bool:
        return not self.stopping and self._choice.possible()

    # -- generation

    async def _generate(self, path: Path, caller: Caller, body: bytes | None) -> None:
        """Run a generating request. Raises ParleyError before anything was sent, and ClientGone."""
        said = caller.headers.get(b"content-length", b"")
        announced = int(said) if said.isdigit() else 0
        full = self.held + announced > self._memory and announced <= self._options.body_limit  # else 413, not 429
        many = self.open > self._choice.options.max_requests
        # "Not ready" takes precedence over other errors. If it is the only one, the scheduler reports it.
        if (full or many or self.stopping or self._strict) and not self._ready:
            raise refusals.refusal(503, refusals.NOT_READY)
        if full or many:
            raise refusals.refusal(429, refusals.TOO_MANY if many else refusals.MEMORY, 1.0)
        if body is None:
            body = await caller.body()
        if self._strict and not path.dialect.framed and (text := BODY_FAULT(path.route.path, body)):
            raise refusals.refusal(400, text)
        if caller.label in self._labels:
            raise refusals.refusal(400, refusals.TWICE)
        inflated = len(body) if b"content-encoding" in caller.headers else 0
        if self.held + inflated > self._memory:
            raise refusals.refusal(429, refusals.MEMORY, 1.0)
        self.held += inflated
        if caller.label:
            self._labels.add(caller.label)
        try:
            wanted = await self._wanted(path, caller, body)
            closing = partial(self._closing, path, caller, body)
            passage = Passage(self._choice, self._connections, caller, body, wanted, closing)
            self._passages.add(passage)
            try:
                await caller.while_connected(passage.run())
            finally:
                self._passages.discard(passage)
        except ParleyError:
            caller.dialect = path.pick(body)[1]  # needed to word the error
            raise
        finally:
            self.held -= inflated
            self._labels.discard(caller.label)

    async def _look(self, body: bytes) -> Look:
        rate = self._choice.options.string_token_rate
        return look(body, rate) if len(body) < LARGE else await asyncio.to_thread(look, body, rate)

    async def _wanted(self, path: Path, caller: Caller, body: bytes) -> Wanted:
        options, seen = self._choice.options, await self._look(body)
        model = caller.path.get("model", "") or ("" if path.shares else seen.model)
        turns = seen.turns() if options.algorithm_type == "cache_affinity" else None
        return Wanted(seen.length, seen.marks, caller.patience(), model, turns)

    def _closing(self, path: Path, caller: Caller, body: bytes, error: ParleyError) -> bytes:
        """Return the last bytes of a stream that ends with an error; none if the API has no form for it."""
        route, dialect = path.pick(body)
        if (self._strict or dialect.documented_errors) and not dialect.framed:
            return error.message.encode()
        assert route.read is not None
        head = Head(caller.unique, 0, "", path=caller.path, headers=caller.headers)
        try:
            reply = route.read(body, head)
            return reply.fail(error) if isinstance(reply, Reply) else b""
        except ParleyError:
            return b""


def application(front: Front, options: ServerOptions) -> ASGIApp:
    """Wrap the front in CORS handling, if pages of other origins may call it."""
    return crossed(front, options.cors)
