"""A client of files and batches in OpenAI's form."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from support.sound_forms import BOUNDARY, encode_form

FORM_HEADERS = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
KEYS = ("sk-one-key-0123456789", "sk-two-key-0123456789")
OWNER, OTHER = ({"authorization": f"Bearer {key}"} for key in KEYS)
CHAT_URL = "/v1/chat/completions"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "temperature": 0}
ENDED = ("completed", "failed", "expired", "cancelled")


def request_line(custom_id: str, body: Any = CHAT, url: str = CHAT_URL, **members: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body} | members)


async def upload_file(server: Any, content: str, headers: dict[str, str] | None = None, **members: Any) -> Any:
    parts = []
    for name, value in ({"purpose": "batch"} | members).items():
        values = value if isinstance(value, dict) else {"": value}
        parts += [(f"{name}[{key}]" if key else name, text, None) for key, text in values.items()]
    form = encode_form([*parts, ("file", content, "in.jsonl")])
    return await server.call("POST", "/v1/files", form, FORM_HEADERS | (headers or {}))


async def create_batch(
    server: Any, lines: list[str], endpoint: str = CHAT_URL, headers: Any = None, **members: Any
) -> Any:
    file_id = (await upload_file(server, "\n".join(lines), headers)).json["id"]
    body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h"} | members
    answer = await server.call("POST", "/v1/batches", body, headers)
    assert answer.status == 200, answer.body
    return answer.json


async def wait_for_batch(server: Any, batch: Any, headers: Any = None, wanted: tuple[str, ...] = ENDED) -> Any:
    async with asyncio.timeout(20):
        while (batch := (await server.call("GET", f"/v1/batches/{batch['id']}", None, headers)).json)[
            "status"
        ] not in wanted:
            await asyncio.sleep(0.01)
    return batch


async def read_results(server: Any, file_id: str, headers: Any = None) -> dict[str, Any]:
    answer = await server.call("GET", f"/v1/files/{file_id}/content", None, headers)
    lines = [json.loads(line) for line in answer.body.splitlines()]
    return {line["custom_id"]: line for line in lines}
