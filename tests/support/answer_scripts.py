"""Scripted answers of instances, and a body that asks for one."""

from __future__ import annotations

import json
from typing import Any

from support.scripted_instance import AnswerScript, ReceivedRequest

CHAT_SCRIPT = AnswerScript([b'data: {"a":0}\n\n', b'data: {"a":1}\n\n', b'data: {"a":2}\n\n', b"data: [DONE]\n\n"])
LONG_SCRIPT = AnswerScript([b'data: {"n":%d}\n\n' % number for number in range(40)])
UNSTREAMED_SCRIPT = AnswerScript(
    [b'{"whole":', b"true}"], stream=False, headers=(("content-type", "application/json"), ("x-own", "1"))
)
CHAT_BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hello"}], "stream": True}).encode()


def raw_answer(status: int, body: bytes, *headers: bytes) -> bytes:
    """Return a complete HTTP answer of an instance."""
    lines = b"".join(header + b"\r\n" for header in headers)
    return b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n%b\r\n%b" % (status, len(body), lines, body)


def prefill_answer(request: ReceivedRequest, **members: Any) -> bytes:
    """Return a prefill instance's answer; without ``headers`` it is MindIE's."""
    return raw_answer(200, json.dumps({"reqId": request.headers["req-id"]} | members).encode())
