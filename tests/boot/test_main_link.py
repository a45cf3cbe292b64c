"""The messages of the main process to an API process, in every order in which they may arrive."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from parley.errors import NotReady, ParleyError
from parley.serving.api_processes.main_link import MainLink, RelayedAdmission
from parley.serving.api_processes.messages import (
    AdmissionGranted,
    AdmitRequest,
    CancelOpen,
    EndRequest,
    FailOpen,
    OpenAccount,
)
from parley.serving.api_processes.relayed_error import relay_error
from parley.types import NO_TENANT, KeyLimits


class ListedRequest:
    """An open request, which notes how it is ended."""

    def __init__(self) -> None:
        self.ends: list[Any] = []

    def cancel_by_id(self, cancel_id: str) -> None:
        self.ends.append(cancel_id)

    def fail_on_shutdown(self, error: ParleyError) -> None:
        self.ends.append(str(error))


async def test_a_request_ends_although_it_was_granted_just_before():
    link = MainLink(lambda message: None)
    listed = [ListedRequest(), ListedRequest()]

    async def begin(number: int) -> None:
        await link.ask_main(AdmitRequest(number, NO_TENANT, "", "m", "m", None, 1, "", (), "vllm", 0.0))
        link.generations[number] = listed[number]  # type: ignore[assignment]

    tasks = [asyncio.create_task(begin(number)) for number in range(2)]
    await asyncio.sleep(0)
    # All of this may be in one part of the data that the socket has received.
    link.take_answer(AdmissionGranted(0))
    link.end_early(CancelOpen(0, "cmpl-1"))
    link.take_answer(AdmissionGranted(1))
    link.end_early(FailOpen(1, relay_error(NotReady("The server shuts down.", retry_after=2))))
    link.end_early(CancelOpen(7, "unknown"))
    await asyncio.gather(*tasks)
    await asyncio.sleep(0)
    assert [request.ends for request in listed] == [["cmpl-1"], ["The server shuts down."]]


async def test_hung_main_process_gets_no_requests_until_it_continues():
    sent: list[Any] = []
    link = MainLink(sent.append)
    questions = [AdmitRequest(number, NO_TENANT, "", "m", "m", None, 1, "", (), "vllm", 0.0) for number in range(3)]
    asked = [asyncio.create_task(link.ask_main(questions[0]))]
    await asyncio.sleep(0)
    link.main_hangs = True
    link.fail_open_requests()
    link.take_answer(AdmissionGranted(0))  # too late
    asked.append(asyncio.create_task(link.ask_main(questions[1])))
    await asyncio.sleep(0)
    link.main_hangs = False
    asked.append(asyncio.create_task(link.ask_main(questions[2])))
    await asyncio.sleep(0)
    link.take_answer(AdmissionGranted(2))
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(result) for result in results] == [NotReady, NotReady, AdmissionGranted]
    assert sent == [questions[0], questions[2]]


async def test_a_request_that_is_cancelled_while_it_is_counted_gives_its_lease_back():
    """The main process may have counted it already."""
    sent: list[Any] = []
    tenant = msgspec.structs.replace(NO_TENANT, limits=KeyLimits(requests_per_minute=1))
    exchange: Any = SimpleNamespace(tenant=tenant, log_entry=SimpleNamespace(key="k"), limit_states=None)
    registry: Any = None
    opening = asyncio.create_task(RelayedAdmission(MainLink(sent.append)).open_account(registry, exchange))
    await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert [type(message) for message in sent] == [OpenAccount, EndRequest] and sent[0].id == sent[1].id
