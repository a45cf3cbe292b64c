"""The API process: HTTP, the life of a request, limits and metrics. Never imports torch or transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parley.server.options import Offer, ServerOptions


def run(offers: Sequence[Offer], options: ServerOptions) -> int:
    """Serve these models, the main one first, until a signal ends it; the exit code."""
    from parley.server.start import run as start  # HTTP libraries are loaded only to serve

    return start(offers, options)
