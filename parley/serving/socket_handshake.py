"""The request that opens a WebSocket: checked like any other request, then answered by making its connection one."""

from __future__ import annotations

from urllib.parse import parse_qsl

from parley.dialects.route import Route
from parley.dialects.socket_session import SocketOpening, SocketSession
from parley.errors import UpgradeRequired
from parley.serving.model_registry import ModelRegistry
from parley.serving.records.connection_records import ConnectionStore, RecordsOfConnection
from parley.web.exchange import Exchange
from parley.web.websocket import HAS_WEBSOCKETS
from parley.web.websocket.handshake import (
    UPGRADE_HEADERS,
    UPGRADE_KEY,
    accepting_head,
    agreed_protocol,
    check_handshake,
)


async def handle_socket(registry: ModelRegistry, route: Route, exchange: Exchange) -> None:
    """Serve a WebSocket until it ends. Raises ParleyError if it is refused."""
    await serve_websocket(registry.connection_records, route, exchange)


async def serve_websocket(store: ConnectionStore, route: Route, exchange: Exchange) -> None:
    """Serve a WebSocket until it ends; ``store`` keeps its records. Raises ParleyError if it is refused."""
    assert route.reader is not None
    switch_connection = exchange.scope.pop(UPGRADE_KEY, None)
    try:
        if switch_connection is None:
            path = exchange.scope["path"]
            raise UpgradeRequired(
                f"GET {path} only opens a WebSocket: send the headers of its handshake, over HTTP/1.1."
            )
        if not HAS_WEBSOCKETS:
            raise UpgradeRequired(
                "This server cannot open WebSockets, because the library wsproto is not installed "
                "(pip install 'parley-llm[websocket]')."
            )
        key = check_handshake(exchange.headers)
    except UpgradeRequired as error:
        await exchange.send_error(error, UPGRADE_HEADERS)
        return
    from parley.serving.socket_requests import SocketConversation  # imports wsproto, an extra

    records = RecordsOfConnection(store)
    session: SocketSession = route.reader(SocketOpening(records, _read_query(exchange)))
    try:
        with store.count_connection(exchange.tenant.id, session.max_per_client):
            head = accepting_head(key, exchange.id_headers(), agreed_protocol(exchange.headers, session.subprotocol))
            websocket = switch_connection(head)
            exchange.status, exchange.response_sent = 101, True
            await SocketConversation(websocket, session, exchange).run()
    finally:
        records.close()


def _read_query(exchange: Exchange) -> dict[str, str]:
    """Return the query's parameters; of several with a name the last."""
    return dict(parse_qsl(exchange.scope.get("query_string", b"").decode("latin-1")))
