"""Uploaded files in the Responses API: a part that names one by id is read as if the file were in the body."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from support.media_answers import image_bytes, image_data_url
from support.openai_batches import FORM_HEADERS, KEYS, OTHER, OWNER
from support.sound_forms import encode_form
from test_media_requests import media_settings

END_TOKENS = (0, 1, 2)  # of the scripted model


def repeat_prompt(request, choice):
    """Answer with the whole prompt, all turns of it."""
    return [token_id for token_id in request.token_ids if token_id not in END_TOKENS][: request.max_tokens]


async def upload(server: Any, content: str | bytes, name: str, purpose: str, headers: Any = None) -> str:
    form = encode_form([("purpose", purpose, None), ("file", content, name)])
    answer = await server.call("POST", "/v1/files", form, FORM_HEADERS | (headers or {}))
    assert answer.status == 200 and answer.json["purpose"] == purpose, answer.body
    return answer.json["id"]


def body_of(*parts: Any, **members: Any) -> dict[str, Any]:
    return {"model": "tiny", "input": [{"role": "user", "content": list(parts)}], "max_output_tokens": 400} | members


def text_of(answer: Any) -> str:
    assert answer.status == 200, answer.body
    return answer.json["output"][0]["content"][0]["text"]


async def test_uploaded_image_is_read_as_one_in_the_body(serve):
    server = await serve(settings=media_settings("qwen3_vl"))
    file_id = await upload(server, image_bytes(1), "a.png", "vision")
    asked = {"type": "input_text", "text": "What is this?"}
    members = {"temperature": 0, "ignore_eos": True, "max_output_tokens": 8}
    for url in ("/v1/responses", "/openai/v1/responses"):
        if url.startswith("/openai"):
            members = {"temperature": 0, "max_output_tokens": 16}
        answers = [
            await server.post(url, body_of(part, asked, **members))
            for part in (
                {"type": "input_image", "image_url": image_data_url(1)},
                {"type": "input_image", "file_id": file_id, "detail": "auto"},
                {"type": "input_file", "file_id": file_id},
            )
        ]
        assert len({text_of(answer) for answer in answers}) == 1
        assert len({answer.json["usage"]["input_tokens"] for answer in answers}) == 1
    item = (await server.get(f"/v1/responses/{answers[1].json['id']}/input_items")).json["data"][0]
    assert item["content"][0]["file_id"] == file_id and "image_url" not in item["content"][0]


@pytest.mark.parametrize("roles", [(), ("flex",), ("prefill", "decode")], ids=["server", "coordinator", "separated"])
async def test_uploaded_text_is_in_the_prompt_of_its_owner_alone(serve, live_cluster, roles):
    keys: dict[str, Any] = {"reply": repeat_prompt, "api_keys": KEYS}
    if roles:
        server = (await live_cluster(*roles, cluster_secret="s" * 20, **keys)).front
    else:
        server = await serve(**keys)
    file_id = await upload(server, "Zebras sleep.", "zebra.txt", "user_data", OWNER)
    part = {"type": "input_file", "file_id": file_id}
    first = await server.call("POST", "/v1/responses", body_of(part), OWNER)
    assert "Zebras sleep." in text_of(first)
    later = {"previous_response_id": first.json["id"], "max_output_tokens": 800}
    second = await server.call("POST", "/v1/responses", body_of({"type": "input_text", "text": "So?"}, **later), OWNER)
    assert "Zebras sleep." in text_of(second) and "So?" in text_of(second)
    count = await server.call("POST", "/v1/responses/input_tokens", {"input": body_of(part)["input"]}, OWNER)
    assert count.json["input_tokens"] == first.json["usage"]["input_tokens"]
    foreign = await server.call("POST", "/v1/responses", body_of(part), OTHER)
    assert foreign.status == 404 and foreign.error["message"] == f"No such File object: '{file_id}'."
    assert foreign.error["param"] == "input[0].content[0].file_id"
    assert (await server.call("DELETE", f"/v1/files/{file_id}", None, OWNER)).status == 200
    assert (await server.call("POST", "/v1/responses", body_of(part), OWNER)).status == 404


@pytest.mark.parametrize("is_cluster", [False, True], ids=["server", "coordinator"])
async def test_chat_reads_an_uploaded_image(serve, live_cluster, is_cluster):
    def settings() -> Any:
        return media_settings("qwen3_vl")

    server = (await live_cluster("flex", settings=settings)).front if is_cluster else await serve(settings=settings())
    file_id = await upload(server, image_bytes(1), "a.png", "user_data")
    texts = []
    for file in ({"file_data": image_data_url(1)}, {"file_id": file_id}):
        content = [{"type": "file", "file": file}, {"type": "text", "text": "What is this?"}]
        body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0}
        answer = await server.post("/v1/chat/completions", body | {"ignore_eos": True})
        assert answer.status == 200, answer.body
        texts.append(answer.json["choices"][0]["message"]["content"])
    assert texts[0] == texts[1] != ""
    content = [{"type": "file", "file": {"file_id": "file-x"}}]
    answer = await server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}]})
    assert answer.status == 404 and answer.error["param"] == "messages[0].content[0].file.file_id", answer.body


async def test_uploaded_files_that_cannot_be_read_are_refused(serve):
    server = await serve(reply=repeat_prompt)
    unknown = await upload(server, b"\0", "a", "user_data")
    broken = await upload(server, b"\xff", "a.txt", "assistants")
    image = await upload(server, image_bytes(1), "a.png", "vision")
    for part, status, sentence in (
        ({"type": "input_file", "file_id": unknown}, 400, "is a file of type 'unknown'"),
        ({"type": "input_file", "file_id": broken}, 400, "the text must be UTF-8"),
        ({"type": "input_image", "file_id": image}, 400, "this model reads text only"),
        ({"type": "input_file", "file_id": "file-x"}, 404, "No such File object: 'file-x'."),
        ({"type": "input_file", "file_id": 5}, 400, "file_id"),
        ({"type": "input_file", "file_id": unknown, "file_data": "aGk="}, 400, "together with 'file_data'"),
        ({"type": "input_audio", "file_id": unknown}, 400, "Uploaded files are not available"),
    ):
        answer = await server.post("/v1/responses", body_of(part))
        assert answer.status == status and sentence in answer.error["message"], (part, answer.body)
    nothing = await serve(response_store=0)
    answer = await nothing.post("/v1/responses", body_of({"type": "input_file", "file_id": "file-x"}, store=False))
    assert answer.status == 400 and "Uploaded files are not available" in answer.error["message"]


async def test_files_of_a_request_are_limited_together(serve):
    server = await serve(reply=repeat_prompt)
    file_id = await upload(server, b"a" * (9 << 20), "a.txt", "user_data")
    answer = await server.post("/v1/responses", body_of(*[{"type": "input_file", "file_id": file_id}] * 8))
    assert answer.status == 413 and "67108864 bytes together" in answer.error["message"], answer.body


async def test_batch_needs_a_file_of_its_purpose(serve):
    server = await serve()
    file_id = await upload(server, "{}", "in.jsonl", "user_data")
    body = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    answer = await server.post("/v1/batches", body)
    assert answer.status == 400 and answer.error["param"] == "input_file_id"
    assert "must be 'batch', but is 'user_data'" in answer.error["message"]


async def test_openai_client_asks_about_a_file_that_it_uploaded(serve):
    server = await serve(reply=repeat_prompt)
    client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)
    file = await client.files.create(file=("notes.md", b"Zebras sleep."), purpose="user_data")
    content: Any = [{"type": "input_file", "file_id": file.id}, {"type": "input_text", "text": "When?"}]
    response = await client.responses.create(
        model="tiny", input=[{"role": "user", "content": content}], max_output_tokens=400
    )
    assert "Zebras sleep." in response.output_text and "When?" in response.output_text
    await client.close()


@pytest.mark.parametrize("roles", [(), ("flex",)], ids=["server", "coordinator"])
async def test_screenshot_of_a_computer_may_be_an_uploaded_file(serve, live_cluster, roles):
    if roles:
        server = (await live_cluster(*roles, settings=lambda: media_settings("qwen3_vl"))).front
    else:
        server = await serve(settings=media_settings("qwen3_vl"))
    file_id = await upload(server, image_bytes(1), "a.png", "vision")
    call = {"type": "computer_call", "call_id": "c", "actions": [{"type": "screenshot"}], "pending_safety_checks": []}
    members = {"model": "tiny", "temperature": 0, "max_output_tokens": 8, "tools": [{"type": "computer"}]}
    answers = []
    for source in ({"image_url": image_data_url(1)}, {"file_id": file_id}):
        output = {"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot"} | source}
        asked = [{"role": "user", "content": "Look."}, call, output]
        answers.append(await server.post("/v1/responses", {"input": asked} | members))
    assert [answer.status for answer in answers] == [200, 200], answers[0].body
    assert answers[0].json["usage"]["input_tokens"] == answers[1].json["usage"]["input_tokens"]
    listed = (await server.get(f"/v1/responses/{answers[1].json['id']}/input_items")).json["data"]
    assert listed[0]["output"]["file_id"] == file_id and listed[0]["status"] == listed[1]["status"] == "completed"
