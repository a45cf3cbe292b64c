"""The headers that a request passes on to other requests that are made on its client's behalf."""

from __future__ import annotations

from collections.abc import Iterable

from parley.disagg.wire.headers import COMMAND_HEADERS, NATIVE_PREFIX

# Headers of one connection, or of one body.
OWN_HEADERS = COMMAND_HEADERS | {b"connection", b"expect", b"te", b"trailer", b"transfer-encoding", b"upgrade"}
OWN_PREFIXES = (b"sec-websocket-", b"content-", NATIVE_PREFIX)


def inherited_headers(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the headers that a request passes on to a request with a JSON body on its client's behalf."""
    passed_headers = [
        header for header in headers if header[0] not in OWN_HEADERS and not header[0].startswith(OWN_PREFIXES)
    ]
    return [*passed_headers, (b"content-type", b"application/json")]
