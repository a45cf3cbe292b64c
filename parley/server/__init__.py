"""The API process: HTTP, the life of a request, limits and metrics. Never imports torch or transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parley.server.options import ServerOptions
    from parley.types import Settings


def run(settings: Settings, options: ServerOptions) -> int:
    """Serve until a signal ends it; the exit code. ``settings.model`` may be a name, which is looked up or fetched."""
    from parley.server.start import run as start  # HTTP libraries are loaded only to serve

    return start(settings, options)
