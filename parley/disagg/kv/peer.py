"""KV peer: the endpoint of an instance for handovers of KV pages, incoming and outgoing.

It knows its arenas, the properties that must be equal on both sides of a link, and the available transports. It does
not know the content of handovers.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

from parley.disagg.kv.arena import MappedArena
from parley.disagg.kv.file_passing import FileSender
from parley.disagg.kv.frames import (
    MAX_HELLO_BYTES,
    BeginFrame,
    HelloFrame,
    ReceiverFrame,
    RefuseFrame,
    SenderFrame,
    WelcomeFrame,
)
from parley.disagg.kv.layout import layout_difference
from parley.disagg.kv.link import KVLink
from parley.disagg.kv.link_pool import LINK_NOT_NEEDED, LinkPool
from parley.disagg.kv.listener import HANDSHAKE_TIMEOUT_S, AuthenticatedConnection, KVListener, connect_to_listener
from parley.disagg.kv.mapped_files import MappedFiles
from parley.disagg.kv.receiver import KVReceiver
from parley.disagg.kv.sender import KVSender
from parley.disagg.kv.shared_memory import SharedMemoryTransport
from parley.disagg.kv.tcp import PageChannel, TCPTransport
from parley.disagg.kv.transport import KVTransport, LinkError, LinkLost, OfferUnusable
from parley.types import Arena

log = logging.getLogger("parley.kv")

LEASE_S = 30.0
MAX_INCOMING_LINKS = 4096  # incoming links
ENGINE_ENDED = "is not needed any more: the engine has ended"


class KVPeer:
    """An instance's end of its KV links: it listens for other instances, and connects to them.

    It is created and used in the event loop of the instance.

    * ``secret``: the cluster's secret; empty: there is none.
    * ``server_tls`` and ``client_tls``: TLS for listening and for connecting, best with certificates on both sides.
    * ``lease``: seconds; a side that is silent for longer counts as dead.
    * ``checksum``: compare pages after the transfer; it is used if either side enables it.
    * ``shared``: read memory on the same host directly.
    * ``admits_host``: whether the host at an IP address may connect; None: every host may.
    """

    def __init__(
        self,
        *,
        secret: bytes = b"",
        server_tls: ssl.SSLContext | None = None,
        client_tls: ssl.SSLContext | None = None,
        lease: float = LEASE_S,
        checksum: bool = False,
        shared: bool = True,
        admits_host: Callable[[str], bool] | None = None,
    ):
        self._secret = secret
        self._client_tls = client_tls
        self._lease = lease
        self._checksum = checksum
        self._shared = shared
        self._file_sender = FileSender()
        self._mapped_files = MappedFiles()
        self._listener = KVListener(secret, server_tls, self._welcome_link, self._attach_channel, admits_host)
        self._accept_handover: Callable[[KVReceiver], Awaitable[None]] | None = None
        self._arenas: dict[str, MappedArena] = {}
        self._links: dict[KVLink, str] = {}  # and the name of their arena
        self._link_pool = LinkPool()
        self._tickets: dict[bytes, TCPTransport] = {}  # transports of links that wait for their page channel, by ticket
        self._tasks: set[asyncio.Task[None]] = set()  # run incoming handovers
        self._closing_tasks: set[asyncio.Task[None]] = set()  # each waits until a link has closed
        self._closed = False

    @property
    def port(self) -> int:
        """Port that it listens on."""
        return self._listener.port

    @property
    def links(self) -> list[KVLink]:
        """The open links of both directions, oldest first; those that idle in the pool count as open."""
        return list(self._links)

    @property
    def unauthenticated_count(self) -> int:
        """Number of incoming connections that have not proved the secret yet."""
        return self._listener.unauthenticated_count

    def add_arena(self, name: str, arena: Arena) -> None:
        """Add the arena of the model ``name``; it replaces an earlier one. Raises BadArena."""
        mapped_arena = MappedArena(arena)
        self.remove_arena(name)
        self._arenas[name] = mapped_arena

    def remove_arena(self, name: str) -> None:
        """Remove the arena ``name``, because its engine has ended; its links end."""
        mapped_arena = self._arenas.pop(name, None)
        if mapped_arena is None:
            return
        links = [link for link, arena in self._links.items() if arena == name]
        for link in links:
            link.fail_link(f"The engine of {name} has ended.")
        _start_tracked(self._closing_tasks, _close_unlinked_arena(mapped_arena, links))

    async def listen(self, host: str, port: int, accept_handover: Callable[[KVReceiver], Awaitable[None]]) -> None:
        """Accept links; ``accept_handover`` is called for each handover, in a task of its own. Raises OSError.

        ``port`` 0 takes any. A handover that ``accept_handover`` has neither accepted nor refused when it returns is
        refused.
        """
        self._accept_handover = accept_handover
        await self._listener.listen(host, port)

    async def open_handover(self, address: str, name: str) -> KVSender:
        """Prepare a handover to the peer at ``address`` (``host:port`` or ``host;port``) of pages of the arena
        ``name``.

        Raises LinkError if the peer cannot be reached, has another secret, or has pages of another layout.
        """
        mapped_arena = self._arenas.get(name)
        if mapped_arena is None:
            raise LinkError(f"This instance has no KV pages of a model {name}.")

        def return_link(link: KVLink) -> None:
            """Return the link to the pool."""
            self._pool_link(link, address, name)

        async def open_new_link() -> KVLink:
            """Open a new link."""
            return await self._open_link(address, name)

        if (link := self._link_pool.take_idle_link(address, name)) is not None:
            return KVSender(link, mapped_arena, return_link, open_new_link)
        link = await open_new_link()
        # The arena may be a new one by now; the link belongs to it.
        return KVSender(link, self._arenas[name], return_link)

    async def close_peer(self) -> None:
        """Stop listening and end all links; return when everything has ended. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        await self._listener.close_listener()
        for name in list(self._arenas):
            self.remove_arena(name)
        for link in list(self._links):
            link.fail_link("The peer was closed.")
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while self._closing_tasks:
            await asyncio.gather(*self._closing_tasks, return_exceptions=True)
        await asyncio.to_thread(self._file_sender.close_sender)
        await asyncio.to_thread(self._mapped_files.finish_unmapping)

    # --------------------------------------------------------------------------------------------- receiving

    async def _welcome_link(self, connection: AuthenticatedConnection) -> None:
        """Accept an incoming link for one of the arenas, or refuse it. Raises LinkLost."""
        link = KVLink(connection, SenderFrame, f"The sender at {connection.name}", self._lease)
        try:
            if len(self._links) >= MAX_INCOMING_LINKS:
                raise LinkLost("there are too many links")
            hello = await link.read_frame(MAX_HELLO_BYTES)
            if not isinstance(hello, HelloFrame):
                raise LinkLost("its first message was not a hello")
            mapped_arena, welcome = await self._choose_transport(link, hello, connection.ticket)
            if self._arenas.get(hello.name) is not mapped_arena:  # removed meanwhile, when this link was not listed yet
                raise LinkLost("its engine has ended")
        except OfferUnusable as refusal:
            link.refuse_link(RefuseFrame(str(refusal)))
            raise LinkLost(str(refusal)) from None
        except BaseException as error:
            link.fail_link(str(error) or "The connection ended too soon.")
            raise
        finally:
            if link.end_reason:
                _start_tracked(self._closing_tasks, link.wait_closed())
        self._register_link(link, hello.name, partial(self._start_receiver, link, mapped_arena, hello.name))
        link.send_frame(welcome)

    async def _choose_transport(
        self, link: KVLink, hello: HelloFrame, ticket: bytes
    ) -> tuple[MappedArena, WelcomeFrame]:
        """Return the arena that a link is for, and choose a transport. Raises OfferUnusable with the reason to
        refuse."""
        mapped_arena = self._arenas.get(hello.name)
        if mapped_arena is None:
            raise OfferUnusable(f"The receiver has no pages of a model {hello.name}.")
        mismatch = layout_difference(hello.layout, mapped_arena.arena.layout, hello.sizes, mapped_arena.sizes)
        if mismatch:
            raise OfferUnusable(f"Pages of {hello.name} differ at sender and receiver: {mismatch}.")
        link.checksum = hello.checksum or self._checksum
        link.lease = min(hello.lease, self._lease)
        if not mapped_arena.sizes:
            return mapped_arena, WelcomeFrame("none", link.lease, link.checksum)
        transports: list[KVTransport] = (
            [SharedMemoryTransport(mapped_arena, self._file_sender, self._mapped_files)] if self._shared else []
        )
        transports.append(TCPTransport(mapped_arena, link.lease))
        for transport in transports:
            if transport.name not in hello.offers:
                continue
            link.transport = transport  # already now: the end of the link, for any reason, must close it
            try:
                await link.run_blocking(transport.use_offer, hello.offers[transport.name])
            except OfferUnusable as refusal:
                log.debug("%s cannot be reached by %s: %s", link.name, transport.name, refusal)
                continue
            if isinstance(transport, TCPTransport):
                self._tickets[ticket] = transport
                link.add_end_callback(lambda link: self._forget_ticket(ticket))
            return mapped_arena, WelcomeFrame(transport.name, link.lease, link.checksum)
        raise OfferUnusable("The receiver cannot use any of the sender's transports.")

    def _attach_channel(self, ticket: bytes, channel: PageChannel) -> bool:
        """Attach a page channel to its link. False if no link has the ticket."""
        stream = self._tickets.pop(ticket, None)
        if stream is None:
            return False
        stream.attach_channel(channel)
        return True

    def _forget_ticket(self, ticket: bytes) -> None:
        """Drop the ticket of a link that has ended."""
        self._tickets.pop(ticket, None)

    def _start_receiver(self, link: KVLink, mapped_arena: MappedArena, name: str, frame: Any) -> None:
        """Start the handover that a message on an idle link begins. Raises LinkLost for any other message."""
        if not isinstance(frame, BeginFrame):
            link.reject_frame(frame)
        _start_tracked(self._tasks, self._run_receiver(KVReceiver(link, mapped_arena, name, frame)))

    async def _run_receiver(self, receiver: KVReceiver) -> None:
        """Run the accept callback for a handover, and refuse the handover if the callback did not answer."""
        assert self._accept_handover is not None
        try:
            await self._accept_handover(receiver)
        except LinkLost as error:
            log.info("a handover was lost: %s", error)
        except Exception:
            log.exception("a handover failed on the receiving side")
        finally:
            await receiver.refuse_handover("The other side did not accept the handover.")

    # ----------------------------------------------------------------------------------------------- sending

    async def _open_link(self, address: str, name: str) -> KVLink:
        """Open a link to a peer. Raises LinkError."""
        host, port = split_address(address)
        receiver_name = f"The receiver at {address}"
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                connection, open_channel = await connect_to_listener(host, port, self._secret, self._client_tls)
                return await self._agree_on_link(connection, receiver_name, name, open_channel)
        except TimeoutError:
            raise LinkError(f"{receiver_name} did not answer in {HANDSHAKE_TIMEOUT_S:g} s.") from None
        except ssl.SSLError as error:
            raise LinkError(f"{receiver_name} failed the TLS handshake: {error.reason or error}.") from None
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
            raise LinkError(f"{receiver_name} cannot be reached: {reason}.") from None
        except LinkError as error:
            raise LinkError(f"{receiver_name} {error}.") from None

    async def _agree_on_link(
        self,
        connection: AuthenticatedConnection,
        receiver_name: str,
        name: str,
        open_channel: Callable[[], PageChannel],
    ) -> KVLink:
        """Send the hello message and agree on a transport. Raises LinkError."""
        link = KVLink(connection, ReceiverFrame, receiver_name, self._lease)
        transports: list[KVTransport] = []
        try:
            mapped_arena = self._arenas.get(name)
            if mapped_arena is None or self._closed:
                raise LinkError(ENGINE_ENDED)
            if mapped_arena.sizes:
                transports.append(TCPTransport(mapped_arena, self._lease, open_channel))
            if self._shared and transports:
                transports.append(SharedMemoryTransport(mapped_arena, self._file_sender, self._mapped_files))
            offers = _make_offers(transports)
            link.send_frame(
                HelloFrame(name, mapped_arena.arena.layout, mapped_arena.sizes, offers, self._lease, self._checksum)
            )
            answer = await link.read_frame(MAX_HELLO_BYTES)
            if isinstance(answer, RefuseFrame):
                raise LinkError(f"refuses the link: {answer.reason.rstrip('.')}")
            link.transport = next(
                (transport for transport in transports if transport.name == getattr(answer, "transport", "")), None
            )
            if not isinstance(answer, WelcomeFrame) or (transports and link.transport is None):
                raise LinkError("did not choose a transport")
            if self._arenas.get(name) is not mapped_arena or self._closed:  # meanwhile
                raise LinkError(ENGINE_ENDED)
            link.checksum, link.lease = answer.checksum, min(answer.lease, self._lease)
        except BaseException as error:
            link.fail_link(str(error) or "The connection ended too soon.")
            _start_tracked(self._closing_tasks, link.wait_closed())
            raise
        finally:
            for transport in transports:
                if transport is not link.transport:
                    transport.close_transport()
        self._register_link(link, name)
        return link

    def _pool_link(self, link: KVLink, address: str, name: str) -> None:
        """Return a link to the pool after its handover."""
        if self._closed:
            link.fail_link(LINK_NOT_NEEDED)
        else:
            self._link_pool.put_idle_link(link, address, name)

    def _register_link(self, link: KVLink, name: str, handle_idle_frame: Callable[[Any], None] | None = None) -> None:
        """Register a link and start it."""
        self._links[link] = name
        link.add_end_callback(self._on_link_end)
        link.start_tasks(handle_idle_frame)

    def _on_link_end(self, link: KVLink) -> None:
        """Forget a link that has ended."""
        del self._links[link]
        self._link_pool.remove_link(link)
        _start_tracked(self._closing_tasks, link.wait_closed())


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of ``host:port``, ``[v6]:port`` or ``host;port``. Raises LinkError."""
    host, _, port = address.rpartition(";" if ";" in address else ":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise LinkError(f"{address} is not the address of a receiver (host:port).")
    return host, int(port)


async def _close_unlinked_arena(mapped_arena: MappedArena, links: list[KVLink]) -> None:
    """Unmap an arena when all its links have closed."""
    await asyncio.gather(*(link.wait_closed() for link in links))
    mapped_arena.close_arena()


def _make_offers(transports: list[KVTransport]) -> dict[str, bytes]:
    """Return the offers of those transports that work on this machine, by name."""
    offers = {}
    for transport in transports:
        try:
            offers[transport.name] = transport.make_offer()
        except OSError as error:
            log.debug("%s cannot be offered: %s", transport.name, error)
    return offers


def _start_tracked(tasks: set[asyncio.Task[None]], coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine as a task, listed in ``tasks`` until it ends."""
    task = asyncio.get_running_loop().create_task(coroutine)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
