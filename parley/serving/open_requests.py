"""Requests between admission and their last event, as a served model lists them to find, cancel and end them."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from parley.errors import ParleyError
from parley.types import Tenant


class RequestProgress(NamedTuple):
    """The progress of an open request. ``key`` is the name of its API key, ``seconds`` its age; ``output_tokens`` are
    those of all choices; ``started``: its first token has been generated."""

    id: str
    api: str
    key: str
    model: str
    seconds: float
    choices: int
    prompt_tokens: int
    output_tokens: int
    started: bool


class OpenRequest(Protocol):
    """A request between admission and its last event.

    ``adapter_state``: the name of its adapter, and whether no token has arrived yet.
    """

    @property
    def tenant(self) -> Tenant:
        """The request's owner. Only the owner may cancel it by an id."""

    @property
    def cancel_ids(self) -> tuple[str, ...]:
        """The ids by which the owner can cancel the request."""

    @property
    def adapter_state(self) -> tuple[str, bool] | None:
        """The request's adapter, if any, and whether it still waits for its first token."""

    @property
    def progress(self) -> RequestProgress:
        """The request's progress."""

    def cancel_by_id(self, cancel_id: str) -> None:
        """Cancel the request for a client or an operator, who gave one of its cancel ids."""

    def fail_on_shutdown(self, error: ParleyError) -> None:
        """Fail the request because the server shuts down."""
