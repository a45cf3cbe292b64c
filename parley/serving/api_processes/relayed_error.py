"""Errors of requests that the main process reports to an API process, which answers with them."""

from __future__ import annotations

from typing import Any

import msgspec

from parley import errors
from parley.errors import ParleyError


class RelayedError(msgspec.Struct, array_like=True):
    """An error of ``parley.errors``: the name of its class, its message, and its members."""

    kind: str
    message: str
    members: dict[str, Any]


def relay_error(error: ParleyError) -> RelayedError:
    """Return an error in the form of a message."""
    return RelayedError(type(error).__name__, str(error), vars(error))


def restore_error(relayed: RelayedError) -> ParleyError:
    """Return the error in a message, with all its members."""
    kind = getattr(errors, relayed.kind, ParleyError)
    if not (isinstance(kind, type) and issubclass(kind, ParleyError)):
        kind = ParleyError
    error = kind.__new__(kind, relayed.message)
    for name, value in relayed.members.items():
        setattr(error, name, value)
    return error
