"""Notices that certificates were replaced, as certbot and Kubernetes do, and has them read again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from parley.settings.file_changes import POLL_SECONDS, file_changes
from parley.web.tls.files import TlsFileError

log = logging.getLogger("parley.server")


async def watch_certificates(
    files: tuple[Path, ...], reload: Callable[[], None], poll_seconds: float = POLL_SECONDS
) -> None:
    """Call ``reload`` whenever a file has changed, until this task is cancelled.

    ``reload`` raises TlsFileError and leaves the old certificates, as when a certificate is there and its key is not
    yet; it is called again after the next change.
    """
    async for _ in file_changes(files, poll_seconds):
        try:
            reload()
        except TlsFileError as error:
            log.error("Changed certificates were not loaded, and the old ones stay: %s", error)
        else:
            log.info("Changed certificates were loaded. New connections use them.")
