"""Anthropic's files: uploads, lists, and messages whose images and documents name a file."""

from __future__ import annotations

from typing import Any

import pytest
from support.media_answers import image_base64, image_bytes
from support.openai_batches import FORM_HEADERS, KEYS
from support.sound_forms import encode_form
from test_media_requests import media_settings
from test_openai_uploaded_files import repeat_prompt

VERSION = {"anthropic-version": "2023-06-01"}
OWNER, OTHER = ({"x-api-key": key} | VERSION for key in KEYS)


async def upload(
    server: Any, content: str | bytes, name: str, headers: Any = VERSION, file_type: str = "", **members: str
) -> Any:
    parts = [*((key, value, None) for key, value in members.items()), ("file", content, name)]
    form = encode_form(parts, file_type=file_type)
    return await server.call("POST", "/v1/files", form, FORM_HEADERS | headers)


def body_of(*blocks: Any, **members: Any) -> dict[str, Any]:
    return {"model": "tiny", "max_tokens": 400, "messages": [{"role": "user", "content": list(blocks)}]} | members


def document(file_id: str) -> dict[str, Any]:
    return {"type": "document", "source": {"type": "file", "file_id": file_id}}


@pytest.mark.parametrize(
    ("name", "file_type", "mime_type"),
    [
        ("notes", "text/plain; charset=utf-8", "text/plain"),
        ("notes.txt", "", "text/plain"),
        ("notes.txt", "application/octet-stream", "text/plain"),
        ("notes.txt", "Text", "text/plain"),
        ("PHOTO.WEBP", "", "image/webp"),
        ("notes", "", "application/octet-stream"),
    ],
)
async def test_the_clients_media_type_of_a_file_precedes_that_of_its_name(serve, name, file_type, mime_type):
    server = await serve()
    assert (await upload(server, "x", name, file_type=file_type)).json["mime_type"] == mime_type


async def test_files_have_the_originals_members_and_lists(serve):
    server = await serve()
    file = (await upload(server, "abc", "dir/a.txt", expires_in_seconds="3600")).json
    assert list(file) == [
        "type", "id", "size_bytes", "created_at", "filename", "mime_type", "downloadable", "expires_at",
    ]  # fmt: skip
    assert file["id"].startswith("file_") and file["created_at"].endswith("Z") and file["expires_at"].endswith("Z")
    known = {"type": "file", "size_bytes": 3, "filename": "a.txt", "mime_type": "text/plain", "downloadable": False}
    assert file.items() >= known.items()
    others = [(await upload(server, "x", name)).json for name in ("b.png", "c")]
    assert [other["mime_type"] for other in others] == ["image/png", "application/octet-stream"]
    path = f"/v1/files/{file['id']}"
    assert (await server.get(path, **VERSION)).json == file
    first = (await server.get("/v1/files?limit=2", **VERSION)).json
    assert first["has_more"] and (first["first_id"], first["last_id"]) == tuple(each["id"] for each in first["data"])
    rest = (await server.get(f"/v1/files?limit=2&page={first['next_page']}", **VERSION)).json
    after = (await server.get(f"/v1/files?after_id={first['last_id']}", **VERSION)).json
    assert rest == after and not rest["has_more"] and rest["next_page"] is None
    assert {each["id"] for each in first["data"] + rest["data"]} == {each["id"] for each in (file, *others)}
    before = (await server.get(f"/v1/files?before_id={rest['first_id']}", **VERSION)).json
    assert before["data"] == first["data"]
    named = (await server.get(f"/v1/files?ids[]={file['id']}&ids[]=file_x", **VERSION)).json
    assert named["data"] == [file]
    content = await server.get(path + "/content", **VERSION)
    assert content.status == 400 and "not downloadable" in content.json["error"]["message"]
    assert (await server.call("DELETE", path, None, VERSION)).json == {"id": file["id"], "type": "file_deleted"}
    gone = await server.get(path, **VERSION)
    assert gone.status == 404 and gone.json["error"]["type"] == "not_found_error"


async def test_clients_of_openai_keep_their_own_files(serve):
    server = await serve()
    file = (await upload(server, "abc", "a.txt")).json
    form = encode_form([("purpose", "batch", None), ("file", "{}", "in.jsonl")])
    other = (await server.call("POST", "/v1/files", form, FORM_HEADERS)).json
    assert other["object"] == "file"
    assert [each["id"] for each in (await server.get("/v1/files")).json["data"]] == [other["id"]]
    assert [each["id"] for each in (await server.get("/v1/files", **VERSION)).json["data"]] == [file["id"]]
    assert (await server.get(f"/v1/files/{file['id']}")).status == 404
    assert (await server.get(f"/anthropic/v1/files/{file['id']}")).json == file


async def test_bad_uploads_and_lists_are_refused(serve):
    server = await serve()
    empty = await server.call("POST", "/v1/files", encode_form([("purpose", "x", None)]), FORM_HEADERS | VERSION)
    assert (empty.status, empty.json["error"]["type"]) == (400, "invalid_request_error")
    assert "expires_in_seconds" in (await upload(server, "x", "a", expires_in_seconds="60")).json["error"]["message"]
    for query, name in (("limit=0", "limit"), ("page=x", "page"), ("after_id=file_x", "after_id")):
        answer = await server.get(f"/v1/files?{query}", **VERSION)
        assert answer.status == 400 and name in answer.json["error"]["message"], answer.body
    small = await serve(response_store=40_000)
    assert (await upload(small, "x" * 20_000, "a")).status == 413
    nothing = await serve(response_store=0)
    assert "stores no files" in (await upload(nothing, "x", "a")).json["error"]["message"]
    answer = await nothing.post("/v1/messages", body_of(document("file_x")), **VERSION)
    assert answer.status == 400 and "stores no files" in answer.json["error"]["message"]


async def test_message_reads_an_uploaded_image_as_one_in_the_body(serve):
    server = await serve(settings=media_settings("qwen3_vl"))
    file = (await upload(server, image_bytes(1), "a.png")).json
    asked = {"type": "text", "text": "What is this?"}
    sources = (
        {"type": "base64", "media_type": "image/png", "data": image_base64(1)},
        {"type": "file", "file_id": file["id"]},
    )
    for prefix in ("", "/anthropic"):
        answers = [
            (
                await server.post(
                    f"{prefix}/v1/messages",
                    body_of({"type": "image", "source": source}, asked, max_tokens=8, temperature=0),
                    **VERSION,
                )
            ).json
            for source in sources
        ]
        assert answers[0]["content"] == answers[1]["content"]
        assert answers[0]["usage"]["output_tokens"] == 8
    unnamed = (await upload(server, image_bytes(1), "a")).json
    block = {"type": "image", "source": {"type": "file", "file_id": unnamed["id"]}}
    answer = await server.post("/v1/messages", body_of(block), **VERSION)
    assert answer.status == 400 and "messages.0.content.0.source." in answer.json["error"]["message"]


@pytest.mark.parametrize("roles", [(), ("flex",), ("prefill", "decode")], ids=["server", "coordinator", "separated"])
async def test_message_reads_an_uploaded_text_of_its_own_client_alone(serve, live_cluster, roles):
    keys: dict[str, Any] = {"reply": repeat_prompt, "api_keys": KEYS}
    if roles:
        server = (await live_cluster(*roles, cluster_secret="s" * 20, **keys)).front
    else:
        server = await serve(**keys)
    file = (await upload(server, "Zebras sleep.", "zebra.md", OWNER)).json
    result = {"type": "tool_result", "tool_use_id": "t", "content": [document(file["id"])]}
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]}
    user = {"role": "user", "content": "Read it."}
    for body in (
        body_of(document(file["id"])),
        body_of(messages=[user, call, {"role": "user", "content": [result]}], max_tokens=800),
    ):
        for path in ("/v1/messages", "/vllm/v1/messages"):
            answer = await server.call("POST", path, body, OWNER)
            assert answer.status == 200 and "Zebras sleep." in answer.json["content"][0]["text"], answer.body
            counted = {"model": "tiny", "messages": body["messages"]}
            count = await server.call("POST", f"{path}/count_tokens", counted, OWNER)
            used = [tokens for name, tokens in answer.json["usage"].items() if name.endswith("input_tokens")]
            assert count.json["input_tokens"] == sum(used)
            foreign = await server.call("POST", path, body_of(document(file["id"])), OTHER)
            assert foreign.status == 404 and file["id"] in foreign.json["error"]["message"]


async def test_documents_must_be_texts(serve):
    server = await serve(reply=repeat_prompt)
    for content, name, part in ((b"%PDF", "a.pdf", "'application/pdf'"), (b"\xff", "a.txt", "not UTF-8")):
        file = (await upload(server, content, name)).json
        answer = await server.post("/v1/messages", body_of(document(file["id"])), **VERSION)
        assert answer.status == 400 and part in answer.json["error"]["message"], answer.body
    missing = {"type": "document", "source": {"type": "file"}}
    answer = await server.post("/v1/messages", body_of(missing), **VERSION)
    assert answer.status == 400 and "messages.0.content.0.source.file_id" in answer.json["error"]["message"]


async def test_files_of_a_request_are_limited_together(serve):
    server = await serve(reply=repeat_prompt)
    file = (await upload(server, b"a" * (9 << 20), "a.txt")).json
    answer = await server.post("/v1/messages", body_of(*[document(file["id"])] * 8), **VERSION)
    assert answer.status == 413 and "67108864 bytes together" in answer.json["error"]["message"], answer.body


async def test_image_in_a_document_of_blocks_may_be_an_uploaded_file(live_cluster):
    server = (await live_cluster("flex", settings=lambda: media_settings("qwen3_vl"))).front
    file = (await upload(server, image_bytes(1), "a.png")).json
    source = {"type": "content", "content": [{"type": "image", "source": {"type": "file", "file_id": file["id"]}}]}
    body = body_of({"type": "document", "source": source}, {"type": "text", "text": "What is this?"}, max_tokens=8)
    answer = await server.post("/v1/messages", body, **VERSION)
    assert answer.status == 200, answer.body
