"""Sends the files of the web page, with headers that let a browser load nothing but these files."""

from __future__ import annotations

from parley.dialects.route import Route
from parley.errors import NotFound, excerpt
from parley.serving.model_registry import ModelRegistry
from parley.ui import PAGE_HEADERS, PAGE_NAMES, page_files
from parley.web.exchange import Exchange


async def handle_page(registry: ModelRegistry, route: Route, exchange: Exchange) -> None:
    """Send a file of the web page. Raises NotFound."""
    await send_page_file(route, exchange)


async def send_page_file(route: Route, exchange: Exchange) -> None:
    """Send the file of the web page that a route stands for, or 304 if the client has it. Raises NotFound."""
    name = exchange.path_params.get("file") or PAGE_NAMES.get(route.path, "")
    if not name:  # /ui/, where the relative links of the page would be wrong
        return await exchange.send_response(b"", 308, b"", [*PAGE_HEADERS, (b"location", b"../ui")])
    file = page_files().get(name)
    if file is None:
        raise NotFound(f"The web page has no file {excerpt(name)}.")
    headers = [*PAGE_HEADERS, (b"etag", file.etag)]
    client_etags = {tag.strip().removeprefix(b"W/") for tag in exchange.headers.get(b"if-none-match", b"").split(b",")}
    if file.etag in client_etags:
        await exchange.send_response(b"", 304, b"", headers)
    else:
        await exchange.send_response(file.body, 200, file.content_type, headers)
