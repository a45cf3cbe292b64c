"""A small client of the OpenAI API for the commands: JSON calls and event streams over ``http.client``.

It serves one conversation at a time in a terminal; the load generator has its own client.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from parley.dialects.bench import error_message
from parley.errors import failure_reason
from parley.settings.options import ConfigError, ResolvedOptions

DEFAULT_URL = "http://127.0.0.1:8000"


class ClientError(Exception):
    """The server could not be reached, or it refused. The message is one sentence; ``status`` 0 means no response."""

    def __init__(self, message: str, status: int = 0):
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class ServerAddress:
    """The address of a server, without the ``/v1`` that many users append."""

    scheme: str
    host: str
    port: int
    path: str

    @classmethod
    def parse_url(cls, url: str) -> ServerAddress:
        """Parse a URL. Raises ConfigError unless it is an http or https URL."""
        full_url = url if "://" in url else f"http://{url}"
        try:
            parts = urlsplit(full_url)
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            raise ConfigError(f"--url: {url!r} is not a URL.") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url: {url!r} is not a URL such as {DEFAULT_URL}.")
        return cls(parts.scheme, parts.hostname, port, parts.path.rstrip("/").removesuffix("/v1"))

    @property
    def authority(self) -> str:
        """The host and port, as in the Host header."""
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.path}"


class OpenAIClient:
    """Calls one server. Each call opens and closes its own connection."""

    def __init__(self, address: ServerAddress, key: str | None = None, timeout: float = 600.0):
        self.address = address
        self.headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self.timeout = timeout

    def call_json(self, method: str, path: str, body: Any = None, timeout: float | None = None) -> Any:
        """Return the JSON response of a route. Raises ClientError."""
        connection, answer = self._send_request(method, path, body, timeout)
        try:
            return json.loads(answer.read() or b"null")
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ClientError(f"{self.address}{path} gave no JSON answer: {failure_reason(error)}.") from None
        finally:
            connection.close()

    def stream_events(self, path: str, body: Any) -> Generator[dict[str, Any], None, None]:
        """Yield the events of a streaming route. Closing the generator closes the connection. Raises ClientError."""
        connection, answer = self._send_request("POST", path, body, None)
        try:
            for line in answer:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise ClientError(error_message(event) or "The server ended the answer with an error.")
                yield event
            raise ClientError("The server closed the connection before the answer was complete.")
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ClientError(f"The connection broke in the middle of the answer: {failure_reason(error)}.") from None
        finally:
            connection.close()

    def list_models(self) -> list[str]:
        """Return the names of the server's models. Raises ClientError."""
        return [str(card["id"]) for card in self.list_model_cards()]

    def list_model_cards(self) -> list[dict[str, Any]]:
        """Return the descriptions of the server's models, each with its name as ``id``. Raises ClientError."""
        try:
            return [card | {"id": str(card["id"])} for card in self.call_json("GET", "/v1/models", timeout=10)["data"]]
        except (KeyError, TypeError):
            raise ClientError(f"The server at {self.address} does not speak the OpenAI API.") from None

    def _send_request(
        self, method: str, path: str, body: Any, timeout: float | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self.address.scheme == "https" else http.client.HTTPConnection
        connection = kind(self.address.host, self.address.port, timeout=timeout or self.timeout)
        content = None if body is None else json.dumps(body).encode()
        try:
            connection.request(method, self.address.path + path, content, self.headers)
            answer = connection.getresponse()
            if answer.status < 400:
                return connection, answer
            refusal = answer.read(65536)
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise ClientError(f"No server answers at {self.address}: {failure_reason(error)}.") from None
        connection.close()
        try:
            why = error_message(json.loads(refusal))
        except ValueError:
            why = ""
        raise ClientError(why or f"{self.address}{path} answered with status {answer.status}.", answer.status)


def client_from_options(config: ResolvedOptions) -> OpenAIClient:
    """Return a client as the options ``url`` and ``api-key`` say. Raises ConfigError."""
    keys = config["api-key"]
    return OpenAIClient(ServerAddress.parse_url(config["url"] or DEFAULT_URL), keys[0] if keys else None)
