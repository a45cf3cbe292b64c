"""The main process's end of the link to an API process: what one request does there harms no other."""

from __future__ import annotations

from typing import Any

from parley.engine.messages import SubmitRequest
from parley.serving.api_processes.api_link import ApiLink
from parley.serving.api_processes.messages import (
    AdmissionGranted,
    AdmissionRefused,
    AdmitRequest,
    EndRequest,
    EngineMessage,
    RelayedOutputs,
    ReserveTokens,
)
from parley.types import NO_TENANT, EngineRequest


class SentFrames:
    """Keeps what is sent to the process."""

    unsent_bytes = 0

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)


async def test_a_message_that_cannot_be_handled_ends_one_request(serve, caplog):
    server = await serve(tick=30.0)
    frames = SentFrames()
    link = ApiLink(server.parts.registry, frames, lambda: None)  # type: ignore[arg-type]
    admit = AdmitRequest(1, NO_TENANT, "", "tiny", "tiny", None, 1, "", ("one",), "vllm", 0.0)
    request = EngineRequest("1.one", [1, 2], 5)
    link.handle_message(admit)
    link.handle_message(EngineMessage("tiny", SubmitRequest(request)))
    link.handle_message(ReserveTokens(7, 1, 1))  # of a request that is not known
    link.handle_message(EngineMessage("tiny", SubmitRequest(request)))  # an id in use
    link.handle_message(EngineMessage("gone", SubmitRequest(EngineRequest("1.two", [1, 2], 5))))
    kinds = [type(message) for message in frames.sent]
    assert kinds == [AdmissionGranted, AdmissionRefused, RelayedOutputs, RelayedOutputs]
    assert frames.sent[1].id == 7 and "had an error" in frames.sent[1].error.message
    errors = [message.outputs[0].error for message in frames.sent[2:]]
    assert "had an error" in errors[0] and "no longer served" in errors[1]
    assert sum("could not" in record.message for record in caplog.records) == 2
    assert len(server.parts.registry.open_requests) == 1  # the first one goes on
    link.handle_message(EndRequest(1))
    assert not server.parts.registry.open_requests
    link.close()
