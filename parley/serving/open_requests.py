"""Requests between admission and their last event, as a served model lists them to find, cancel and end them."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from parley.errors import ParleyError
from parley.types import Tenant


class RequestProgress(NamedTuple):
    """How far an open request is. ``key`` is the name of its API key, ``seconds`` its age; ``output_tokens`` are those
    of all choices; ``started``: its first token has been generated."""

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
        """Its owner, who alone may cancel it by an id."""

    @property
    def cancel_ids(self) -> tuple[str, ...]:
        """The ids that its owner can cancel it by."""

    @property
    def adapter_state(self) -> tuple[str, bool] | None:
        """Its adapter, if any, and whether it still waits for its first token."""

    @property
    def progress(self) -> RequestProgress:
        """How far it is."""

    def cancel_by_id(self, cancel_id: str) -> None:
        """Cancel it at the request of a client or an operator, by one of its cancel ids."""

    def fail_on_shutdown(self, error: ParleyError) -> None:
        """Fail it because the server shuts down."""
