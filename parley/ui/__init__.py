"""The files of the web page: HTML, CSS and JavaScript modules, which the server sends as they are.

The pages need no build step and load nothing from other hosts. ``static/apis/`` has a module for each API that the
playground speaks; ``static/`` has the pages themselves and the modules that they share.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import NamedTuple

CONTENT_TYPES = {
    "html": b"text/html; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "svg": b"image/svg+xml",
}
# A browser loads nothing but these files for a page. Images are data or blobs, because conversations hold those that
# their user pasted.
CONTENT_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data: blob:; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
PAGE_HEADERS = (
    (b"content-security-policy", CONTENT_POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=()"),
    (b"cache-control", b"no-cache"),
    (b"vary", b"accept"),
)
PAGE_NAMES = {"/": "index.html", "/ui": "index.html", "/ui/status": "status.html", "/docs": "docs.html"}


class PageFile(NamedTuple):
    """A file of the web page, with its media type and its entity tag."""

    body: bytes
    content_type: bytes
    etag: bytes


@cache
def page_files() -> dict[str, PageFile]:
    """Return all files by their paths below ``static/``, such as ``apis/index.js``."""
    return dict(_read_folder(resources.files(__name__) / "static", ""))


def _read_folder(folder: Traversable, prefix: str) -> list[tuple[str, PageFile]]:
    files: list[tuple[str, PageFile]] = []
    for entry in folder.iterdir():
        if entry.is_dir():
            files += _read_folder(entry, f"{prefix}{entry.name}/")
        elif (content_type := CONTENT_TYPES.get(entry.name.rpartition(".")[2])) is not None:
            body = entry.read_bytes()
            etag = b'"%b"' % hashlib.sha256(body).hexdigest()[:24].encode()
            files.append((prefix + entry.name, PageFile(body, content_type, etag)))
    return files
