"""The request that opens a WebSocket: checked like any other request, then answered by making its connection one."""

from __future__ import annotations

from parley.dialects.dialect import Route
from parley.errors import UpgradeRequired
from parley.serving.records.connection_records import RecordsOfConnection
from parley.serving.records.memory_records import MemoryRecordStore
from parley.serving.registry import ModelRegistry
from parley.web.exchange import Exchange
from parley.web.websocket import HAS_WEBSOCKETS
from parley.web.websocket.handshake import UPGRADE_HEADERS, UPGRADE_KEY, accepting_head, check_handshake


async def handle_socket(registry: ModelRegistry, route: Route, exchange: Exchange) -> None:
    """Serve a WebSocket until it ends. Raises ParleyError if it is refused."""
    await serve_websocket(registry.connection_records, route, exchange)


async def serve_websocket(store: MemoryRecordStore, route: Route, exchange: Exchange) -> None:
    """Serve a WebSocket until it ends; ``store`` keeps its records. Raises ParleyError if it is refused."""
    assert route.reader is not None
    switch_connection = exchange.scope.pop(UPGRADE_KEY, None)
    try:
        if switch_connection is None:
            path = exchange.scope["path"]
            raise UpgradeRequired(f"GET {path} opens a WebSocket over HTTP/1.1; send other requests with POST.")
        if not HAS_WEBSOCKETS:
            raise UpgradeRequired(
                "This server cannot open WebSockets, because the wsproto library is not installed "
                "(pip install 'parley-llm[websocket]'); send requests with POST."
            )
        key = check_handshake(exchange.headers)
    except UpgradeRequired as error:
        await exchange.send_error(error, UPGRADE_HEADERS)
        return
    from parley.serving.socket_requests import SocketConversation  # imports wsproto, an extra

    websocket = switch_connection(accepting_head(key, exchange.id_headers()))
    exchange.status, exchange.response_sent = 101, True
    records = RecordsOfConnection(store)
    try:
        await SocketConversation(websocket, route.reader(records), exchange).run()
    finally:
        records.close()
