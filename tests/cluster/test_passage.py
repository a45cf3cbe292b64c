"""One answer made of P's and D's: order, framing, failures, retries, cancels. Instances are scripted."""

from __future__ import annotations

import json

from scripted import Script, Scripted

CHAT = Script([b'data: {"a":0}\n\n', b'data: {"a":1}\n\n', b'data: {"a":2}\n\n', b"data: [DONE]\n\n"])
WHOLE = Script([b'{"whole":true}'], stream=False, headers=(("content-type", "application/json"), ("x-own", "1")))
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hello"}], "stream": True}).encode()


async def test_a_stream_is_ps_part_and_then_ds(cluster):
    p, d = Scripted("prefill", script=CHAT), Scripted("decode")
    running = await cluster(p, d)
    answer = await running.post(body=BODY)
    assert (answer.status, answer.body) == (200, b"".join(CHAT.parts))
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["x-own"] == "1"
    assert answer.headers["transfer-encoding"] == "chunked"
    (asked,) = p.asked
    assert asked.body == BODY and asked.target == "/v1/chat/completions"
    assert asked.headers["req-type"] == "prefill" and asked.headers["d-target"] == d.target


async def test_an_answer_in_one_piece_is_ds(cluster):
    running = await cluster(Scripted("prefill", script=Script([b"a", b"b"], stream=False)), Scripted("decode"))
    answer = await running.post(body=BODY)
    assert (answer.status, answer.body) == (200, b"ab")
    assert answer.headers["content-length"] == "2"
