"""KV peer: the endpoint of an instance for handovers of KV pages, incoming and outgoing.

It knows its arenas, the properties that must be equal on both sides of a link, and the available transports. It does
not know the content of handovers.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from parley.disagg.kv.arena import Memory
from parley.disagg.kv.frames import FIRST_FRAME, Begin, FromGiver, FromTaker, Hello, Refuse, Welcome
from parley.disagg.kv.layout import difference
from parley.disagg.kv.link import Link
from parley.disagg.kv.link_pool import NEEDLESS, Pool
from parley.disagg.kv.listener import GREET_S, Contact, Gate, knock
from parley.disagg.kv.mapped_files import Maps
from parley.disagg.kv.receiver import Taker
from parley.disagg.kv.sender import Giver
from parley.disagg.kv.shared_memory import Proof, Shared
from parley.disagg.kv.tcp import Channel, Stream
from parley.disagg.kv.transport import LinkError, Lost, Transport, Unreachable
from parley.types import Arena

log = logging.getLogger("parley.kv")

LEASE_S = 30.0
LINKS = 4096  # incoming links
ENDED = "is not needed any more: the engine has ended"


class Peer:
    """One for each instance, created and used in its event loop.

    ``secret``: of the cluster, empty for none. ``server_tls`` and ``client_tls``: TLS for listening and for connecting,
    best with certificates on both sides. ``lease``: seconds; a side that is silent for longer counts as dead.
    ``checksum``: compare pages after the transfer; it is used if either side enables it. ``shared``: read memory on the
    same host directly.
    """

    def __init__(
        self,
        *,
        secret: bytes = b"",
        lets: ssl.SSLContext | None = None,
        shows: ssl.SSLContext | None = None,
        lease: float = LEASE_S,
        checksum: bool = False,
        shared: bool = True,
    ):
        self._secret = secret
        self._shows = shows
        self._lease = lease
        self._checksum = checksum
        self._shared = shared
        self._proof = Proof()
        self._maps = Maps()
        self._gate = Gate(secret, lets, self._welcome, self._attach)
        self._accept: Callable[[Taker], Awaitable[None]] | None = None
        self._memories: dict[str, Memory] = {}
        self._links: dict[Link, str] = {}  # and the name of their arena
        self._pool = Pool()
        self._tickets: dict[bytes, Stream] = {}  # of links that wait for their page channel
        self._tasks: set[asyncio.Task[None]] = set()  # run incoming handovers
        self._endings: set[asyncio.Task[None]] = set()  # wait until links have closed
        self._closed = False

    @property
    def port(self) -> int:
        """Port that it listens on."""
        return self._gate.port

    def add(self, name: str, arena: Arena) -> None:
        """Add the arena of the model ``name``; it replaces an earlier one. Raises BadArena."""
        memory = Memory(arena)
        self.remove(name)
        self._memories[name] = memory

    def remove(self, name: str) -> None:
        """Remove the arena ``name``, because its engine has ended; its links end."""
        memory = self._memories.pop(name, None)
        if memory is None:
            return
        links = [link for link, arena in self._links.items() if arena == name]
        for link in links:
            link.fail(f"The engine of {name} has ended.")
        _start(self._endings, _release(memory, links))

    async def listen(self, host: str, port: int, accept: Callable[[Taker], Awaitable[None]]) -> None:
        """Accept links; ``accept_handover`` is called for each handover, in a task of its own. Raises OSError.

        ``port`` 0 takes any. A handover that ``accept_handover`` has neither accepted nor refused when it returns is
        refused.
        """
        self._accept = accept
        await self._gate.listen(host, port)

    async def connect(self, address: str, name: str) -> Giver:
        """Prepare a handover to the peer at ``address`` (``host:port`` or ``host;port``) of pages of the arena
        ``name``.

        Raises LinkError if the peer cannot be reached, has another secret, or has pages of another layout.
        """
        memory = self._memories.get(name)
        if memory is None:
            raise LinkError(f"There are no pages of a model {name} here.")

        def free(link: Link) -> None:
            """Return the link to the pool."""
            self._free(link, address, name)

        async def fresh() -> Link:
            """Open a new link."""
            return await self._dial(address, name)

        if (link := self._pool.take(address, name)) is not None:
            return Giver(link, memory, free, fresh)
        link = await fresh()
        return Giver(link, self._memories[name], free)  # the arena may be a new one by now; the link belongs to it

    async def close(self) -> None:
        """Stop listening and end all links; return when everything has ended. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        await self._gate.close()
        for name in list(self._memories):
            self.remove(name)
        for link in list(self._links):
            link.fail("The peer was closed.")
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while self._endings:
            await asyncio.gather(*self._endings, return_exceptions=True)
        self._proof.close()
        await asyncio.to_thread(self._maps.close)

    # --------------------------------------------------------------------------------------------- receiving

    async def _welcome(self, contact: Contact) -> None:
        """Accept an incoming link for one of the arenas, or refuse it. Raises LinkLost."""
        link = Link(contact, FromGiver, f"The sender at {contact.name}", self._lease)
        try:
            if len(self._links) >= LINKS:
                raise Lost("there are too many links")
            hello = await link.read(FIRST_FRAME)
            if not isinstance(hello, Hello):
                raise Lost("its first message was not a hello")
            memory, welcome = await self._choose(link, hello, contact.ticket)
            if self._memories.get(hello.name) is not memory:  # removed meanwhile, when this link was not listed yet
                raise Lost("its engine has ended")
        except Unreachable as no:
            link.dismiss(Refuse(str(no)))
            raise Lost(str(no)) from None
        except BaseException as error:
            link.fail(str(error) or "The connection ended too soon.")
            raise
        finally:
            if link.reason:
                _start(self._endings, link.settle())
        link.holder = _Between(link, lambda begin: self._offered(link, memory, hello.name, begin))
        self._keep(link, hello.name)
        link.send(welcome)

    async def _choose(self, link: Link, hello: Hello, ticket: bytes) -> tuple[Memory, Welcome]:
        """Return the arena that a link is for, and choose a transport. Raises OfferUnusable with the reason to
        refuse."""
        memory = self._memories.get(hello.name)
        if memory is None:
            raise Unreachable(f"The receiver has no pages of a model {hello.name}.")
        unlike = difference(hello.layout, memory.arena.layout, hello.sizes, memory.sizes)
        if unlike:
            raise Unreachable(f"Pages of {hello.name} differ at sender and receiver: {unlike}.")
        link.checksum = hello.checksum or self._checksum
        link.lease = min(hello.lease, self._lease)
        if not memory.page_bytes:
            return memory, Welcome("none", link.lease, link.checksum)
        ways: list[Transport] = [Shared(memory, self._proof, self._maps)] if self._shared else []
        ways.append(Stream(memory, link.lease))
        for way in ways:
            if way.name not in hello.offers:
                continue
            link.transport = way  # already now: the end of the link, for any reason, must close it
            try:
                await link.work(way.reach, hello.offers[way.name])
            except Unreachable as no:
                log.debug("%s cannot be reached by %s: %s", link.name, way.name, no)
                continue
            if isinstance(way, Stream):
                self._tickets[ticket] = way
                link.on_end(lambda link: self._forget(ticket))
            return memory, Welcome(way.name, link.lease, link.checksum)
        raise Unreachable("There is no way for the pages: the receiver cannot use any transport of the sender.")

    def _attach(self, ticket: bytes, channel: Channel) -> bool:
        """Attach a page channel to its link. False if no link has the ticket."""
        stream = self._tickets.pop(ticket, None)
        if stream is None:
            return False
        stream.attach(channel)
        return True

    def _forget(self, ticket: bytes) -> None:
        """Drop the ticket of a link that has ended."""
        self._tickets.pop(ticket, None)

    def _offered(self, link: Link, memory: Memory, name: str, begin: Begin) -> None:
        """Start an incoming handover; the link returns to its idle holder afterwards."""
        between = link.holder

        def free() -> None:
            """Make the link idle."""
            link.holder = between

        _start(self._tasks, self._take(Taker(link, memory, name, begin, free)))

    async def _take(self, taker: Taker) -> None:
        """Run the accept callback for a handover, and refuse the handover if the callback did not answer."""
        assert self._accept is not None
        try:
            await self._accept(taker)
        except Lost as error:
            log.info("a handover was lost: %s", error)
        except Exception:
            log.exception("a handover failed on the receiving side")
        finally:
            await taker.refuse("The other side did not accept the handover.")

    # ----------------------------------------------------------------------------------------------- sending

    async def _dial(self, address: str, name: str) -> Link:
        """Open a link to a peer. Raises LinkError."""
        host, port = split(address)
        other = f"The receiver at {address}"
        try:
            async with asyncio.timeout(GREET_S):
                contact, pages = await knock(host, port, self._secret, self._shows)
                return await self._introduce(contact, other, name, pages)
        except TimeoutError:
            raise LinkError(f"{other} did not answer in {GREET_S:g} s.") from None
        except ssl.SSLError as error:
            raise LinkError(f"{other} failed the TLS handshake: {error.reason or error}.") from None
        except OSError as error:
            raise LinkError(f"{other} cannot be reached: {error.strerror or error}.") from None
        except LinkError as error:
            raise LinkError(f"{other} {error}.") from None

    async def _introduce(self, contact: Contact, other: str, name: str, pages: Callable[[], Channel]) -> Link:
        """Send the hello message and agree on a transport. Raises LinkError."""
        link = Link(contact, FromTaker, other, self._lease)
        try:
            memory = self._memories.get(name)
            if memory is None or self._closed:
                raise LinkError(ENDED)
            ways: list[Transport] = [Stream(memory, self._lease, pages)] if memory.page_bytes else []
            if self._shared and ways:
                ways.append(Shared(memory, self._proof, self._maps))
            offers = {way.name: way.offer() for way in ways}
            link.send(Hello(name, memory.arena.layout, memory.sizes, offers, self._lease, self._checksum))
            answer = await link.read(FIRST_FRAME)
            if isinstance(answer, Refuse):
                raise LinkError(f"refuses the link: {answer.reason.rstrip('.')}")
            link.transport = next((way for way in ways if way.name == getattr(answer, "transport", "")), None)
            if not isinstance(answer, Welcome) or (ways and link.transport is None):
                raise LinkError("did not choose a transport")
            if self._memories.get(name) is not memory or self._closed:  # meanwhile
                raise LinkError(ENDED)
            link.checksum, link.lease = answer.checksum, min(answer.lease, self._lease)
        except BaseException as error:
            link.fail(str(error) or "The connection ended too soon.")
            _start(self._endings, link.settle())
            raise
        self._keep(link, name)
        return link

    def _free(self, link: Link, address: str, name: str) -> None:
        """Return a link to the pool after its handover."""
        if self._closed:
            link.fail(NEEDLESS)
        else:
            self._pool.put(link, address, name)

    def _keep(self, link: Link, name: str) -> None:
        """Register a link and start it."""
        self._links[link] = name
        link.on_end(self._ended)
        link.start()

    def _ended(self, link: Link) -> None:
        """Forget a link that has ended."""
        del self._links[link]
        self._pool.remove(link)
        _start(self._endings, link.settle())


class _Between:
    """Holds an incoming link while there is no handover."""

    def __init__(self, link: Link, begin: Callable[[Begin], None]):
        self._link = link
        self._begin = begin

    def take(self, frame: Any) -> None:
        """Start the handover that the message begins. Raises LinkLost for any other message."""
        if not isinstance(frame, Begin):
            raise Lost(f"{self._link.name} sent an unexpected message.")
        self._begin(frame)

    def lost(self, reason: str) -> None:
        """Do nothing: no handover is affected."""


def split(address: str) -> tuple[str, int]:
    """Return host and port of ``host:port``, ``[v6]:port`` or ``host;port``. Raises LinkError."""
    host, _, port = address.rpartition(";" if ";" in address else ":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise LinkError(f"{address} is not the address of a receiver (host:port).")
    return host, int(port)


async def _release(memory: Memory, links: list[Link]) -> None:
    """Unmap an arena when all its links have closed."""
    await asyncio.gather(*(link.settle() for link in links))
    memory.close()


def _start(tasks: set[asyncio.Task[None]], action: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine as a task, listed in ``tasks`` until it ends."""
    task = asyncio.get_running_loop().create_task(action)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
