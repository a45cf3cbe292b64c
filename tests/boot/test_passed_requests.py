"""Connections over which API processes pass requests to the main process: none is lost, and none harms the next one."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import pytest
import uvloop

from parley.errors import Overloaded
from parley.serving.api_processes.passing import UNREAD_LIMIT, MainHttpClient, PassedAnswer, accept_passed


class ReadAnswer:
    """Takes an answer as a client's exchange does."""

    status = 0

    def release_body(self) -> None:
        """Nothing is held."""

    async def pass_head(self, status: int, headers: object) -> None:
        self.status = status

    async def pass_part(self, data: bytes, *, last: bool = False) -> None:
        """Read it."""


@pytest.fixture
def socket_ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The sockets over which connections are sent, of an API process and of the main process."""
    api_end, main_end = socket.socketpair()
    with api_end, main_end:
        yield api_end, main_end


async def test_an_answer_that_has_arrived_leaves_its_connection_to_the_next_request(socket_ends):
    client = MainHttpClient(socket_ends[0], 1)
    connection = await client.open_connection()
    accepted = accept_passed(socket_ends[1])
    assert accepted is not None
    with accepted as main_end:
        unread = PassedAnswer(connection)
        connection.send_request(client.format_request(b"GET", b"/", []), unread)
        size = UNREAD_LIMIT + 1
        connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size + bytes(size))
        assert client.take_idle() is connection
        answer, read = PassedAnswer(connection), ReadAnswer()
        connection.send_request(client.format_request(b"GET", b"/", []), answer)
        unread.abandon()  # its client has left
        await asyncio.get_running_loop().sock_sendall(main_end, b"HTTP/1.1 204 No Content\r\n\r\n")
        async with asyncio.timeout(20):
            await answer.write_to(read)  # type: ignore[arg-type]
        assert read.status == 204
        connection.transport.close()


async def test_connections_to_the_main_process_are_limited(socket_ends):
    client = MainHttpClient(socket_ends[0], 2)
    first, second = await client.open_connection(), await client.open_connection()
    with pytest.raises(Overloaded):
        await client.open_connection()
    first.transport.abort()
    await asyncio.sleep(0)  # the loss is noted in the next step of the loop
    await asyncio.sleep(0)
    third = await client.open_connection()
    with pytest.raises(Overloaded):
        await client.open_connection()
    for connection in (second, third):
        connection.transport.abort()


@pytest.mark.parametrize("new_loop", [uvloop.new_event_loop, asyncio.new_event_loop])
def test_a_connection_whose_request_is_cancelled_while_it_opens_no_longer_counts(socket_ends, new_loop):
    async def open_again() -> None:
        client = MainHttpClient(socket_ends[0], 1)
        opening = asyncio.create_task(client.open_connection())
        await asyncio.sleep(0)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        await asyncio.sleep(0.01)  # a loop may say now that the first one is lost
        connection = await client.open_connection()
        with pytest.raises(Overloaded):
            await client.open_connection()
        connection.transport.abort()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(open_again())


def test_a_connection_that_was_lost_on_its_way_is_passed_over(socket_ends):
    api_end, main_end = socket_ends
    main_end.setblocking(False)
    api_end.send(b"\0")  # so it arrives at a process with too many open files
    socket.send_fds(api_end, [b"\0"], [api_end.fileno()])
    accepted = accept_passed(main_end)
    assert accepted is not None
    accepted.close()
    with pytest.raises(BlockingIOError):
        accept_passed(main_end)
    api_end.close()
    assert accept_passed(main_end) is None
