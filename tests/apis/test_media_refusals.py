"""Media that cannot be used, through a running server: each API's own bytes, and no image in an answer or a log."""

import json
import logging
from typing import Any

import msgspec
import pytest
from support.server_fixtures import MODEL_INFO

SEES = msgspec.structs.replace(MODEL_INFO, media_kinds=frozenset({"image"}))
SECRET = "c2VjcmV0" * 8  # an image's data
NO_BASE64 = f"data:image/png;base32,{SECRET}"
TEXT = {"type": "text", "text": "What?"}
OPENAI_SENTENCE = "Invalid 'messages[0].content[1].image_url': a data: URL must have the form data:TYPE;base64,DATA."


def chat(url: str) -> dict[str, Any]:
    parts = [TEXT, {"type": "image_url", "image_url": {"url": url}}]
    return {"model": "tiny", "messages": [{"role": "user", "content": parts}]}


REFUSALS: list[tuple[str, dict[str, Any], int, bytes]] = [
    ("/v1/chat/completions", chat(NO_BASE64), 400,
     b'{"error":{"message":"%b","type":"invalid_request_error","param":"messages[0].content[1].image_url",'
     b'"code":"invalid_image_url"}}' % OPENAI_SENTENCE.encode()),
    ("/vllm/v1/chat/completions", chat(NO_BASE64), 400,
     b'{"error":{"message":"Only base64 data URLs are supported for now.","type":"BadRequestError",'
     b'"param":"messages[0].content[1].image_url","code":400}}'),
    ("/vllm/v1/chat/completions", chat("https://" + "a" * 5000), 422,
     b'{"error":{"message":"Failed to fetch media from URL: Invalid URL","type":"UnprocessableEntityError",'
     b'"param":"messages[0].content[1].image_url","code":422}}'),
    ("/mindie/generate", {"inputs": [TEXT, {"type": "image_url", "image_url": NO_BASE64}]}, 422,
     b'{"error":"[InferTokenizer::DownloadUrl] Download fail: ValueError: Expected format: '
     b'data:<mime_type>/<subtype>;base64,<base64_data>","error_type":"Input Validation Error"}'),
    ("/tgi/generate", {"inputs": f"![]({NO_BASE64})What?"}, 422,
     b'{"error":"Input validation error: invalid image content: data:image/png;base32,\xe2\x80\xa6",'
     b'"error_type":"validation"}'),
    ("/v2/models/tiny/generate", {"text_input": "What?", "image_url": NO_BASE64}, 400,
     b'{"error":"Invalid \'image_url[0]\': a data: URL must have the form data:TYPE;base64,DATA."}'),
    ("/databricks/serving-endpoints/chat/completions", chat(NO_BASE64), 400,
     b'{"error_code":"BAD_REQUEST","message":"Bad request: %b"}' % OPENAI_SENTENCE.encode()),
]  # fmt: skip


async def test_media_that_cannot_be_read_are_refused_in_each_apis_form(serve, caplog):
    caplog.set_level(logging.DEBUG)
    server = await serve(info=SEES, access_log=True)
    for path, body, status, answer_body in REFUSALS:
        answer = await server.post(path, json.dumps(body).encode())
        assert (answer.status, answer.body) == (status, answer_body), path
    assert SECRET not in caplog.text


async def test_texts_to_tokenize_have_media_from_allowed_hosts_only(serve):
    server = await serve(info=SEES)
    for path, body in (
        ("/tokenize", chat("https://a.b/c")),
        ("/vllm/tokenize", chat("https://a.b/c")),
        ("/tgi/chat_tokenize", chat("https://a.b/c")),
        ("/tgi/tokenize", {"inputs": "![](https://a.b/c)"}),
    ):
        answer = await server.post(path, json.dumps(body).encode(), **{"content-type": "application/json"})
        assert answer.status in (400, 422), path
        assert b"error" in answer.body, answer.body


@pytest.mark.parametrize("stream", [False, True])
async def test_media_to_a_model_that_reads_text_are_refused_by_name(serve, stream):
    server = await serve()
    answer = await server.post("/v1/chat/completions", json.dumps(chat(NO_BASE64) | {"stream": stream}).encode())
    assert answer.status == 400
    assert answer.error["message"] == (
        "'messages[0].content[1].type' is 'image_url', but this model reads text only."
    )  # fmt: skip
