"""Stored chat completions: kept whole and streamed, found, listed, changed and deleted, also by a coordinator."""

from typing import Any

import pytest

PATH = "/v1/chat/completions"
CHAT = {"messages": [{"role": "user", "content": "Hello there"}], "max_tokens": 6, "temperature": 0}
KEYS = ("sk-one-key-0123456789", "sk-two-key-0123456789")
OWNER, OTHER = ({"authorization": f"Bearer {key}"} for key in KEYS)


async def create(server: Any, **members: Any) -> dict[str, Any]:
    answer = await server.post(PATH, CHAT | {"store": True} | members)
    assert answer.status == 200, answer.body
    return answer.json


async def test_stored_completions_are_found_changed_and_deleted(serve):
    server = await serve()
    made = await create(server, metadata={"run": "1"}, seed=5)
    path = f"{PATH}/{made['id']}"
    stored = (await server.get(path)).json
    assert stored.items() >= made.items()
    assert (stored["metadata"], stored["seed"], stored["tools"]) == ({"run": "1"}, 5, None)
    changed = await server.post(path, {"metadata": {"run": "2"}})
    assert changed.json == stored | {"metadata": {"run": "2"}} == (await server.get(path)).json
    listed = (await server.get(f"{path}/messages")).json
    assert listed["data"] == [{"id": f"{made['id']}-0", **CHAT["messages"][0], "content_parts": None}]
    assert (await server.call("DELETE", path)).json == {
        "object": "chat.completion.deleted",
        "id": made["id"],
        "deleted": True,
    }
    for method, body in (("GET", None), ("POST", {"metadata": {}}), ("DELETE", None)):
        answer = await server.call(method, path, body)
        assert (answer.status, answer.error["type"]) == (404, "invalid_request_error")
    not_stored = (await server.post(PATH, CHAT)).json["id"]
    assert (await server.get(f"{PATH}/{not_stored}")).status == 404


async def test_lists_are_paged_in_the_order_of_time_and_filtered(serve):
    server = await serve()
    ids = [(await create(server, metadata={"parity": str(number % 2)}))["id"] for number in range(5)]
    everything = (await server.get(PATH)).json
    order = [completion["id"] for completion in everything["data"]]
    assert sorted(order) == sorted(ids) and not everything["has_more"]
    newest = [completion["id"] for completion in (await server.get(f"{PATH}?order=desc")).json["data"]]
    assert newest == order[::-1]
    first = (await server.get(f"{PATH}?limit=2")).json
    assert (first["first_id"], first["last_id"], first["has_more"]) == (order[0], order[1], True)
    after = (await server.get(f"{PATH}?limit=3&after={first['last_id']}")).json
    assert [completion["id"] for completion in after["data"]] == order[2:] and not after["has_more"]
    odd = (await server.get(f"{PATH}?metadata[parity]=1&limit=2")).json
    assert {completion["id"] for completion in odd["data"]} == {ids[1], ids[3]} and not odd["has_more"]
    assert (await server.get(f"{PATH}?model=other")).json["data"] == []
    for query, field in (("limit=0", "limit"), ("order=up", "order"), ("after=chatcmpl-x", "after")):
        answer = await server.get(f"{PATH}?{query}")
        assert (answer.status, answer.error["param"]) == (400, field)


@pytest.mark.parametrize("placed", ["one server", "coordinator"])
async def test_streams_are_stored_as_the_completion_in_one_piece(serve, live_cluster, placed):
    server = await serve() if placed == "one server" else (await live_cluster("prefill", "decode")).front
    members = {"n": 2, "logprobs": True, "top_logprobs": 1, "max_tokens": 12, "seed": 1, "temperature": 1}
    whole = await create(server, **members)
    path = f"{PATH}/{whole['id']}"
    expected = (await server.get(path)).json
    await server.call("DELETE", path)
    body = CHAT | members | {"store": True, "stream": True, "stream_options": {"include_usage": True}}
    assert (await server.post(PATH, body)).body.endswith(b"data: [DONE]\n\n")
    (streamed,) = (await server.get(PATH)).json["data"]
    for name in ("usage", "model", "object", "seed", "metadata"):
        assert streamed[name] == expected[name], name
    assert list(map(without_empty, streamed["choices"])) == list(map(without_empty, expected["choices"]))
    failed = await server.post(PATH, CHAT | {"store": "yes"})
    assert (failed.status, failed.error["param"]) == (400, "store")


async def test_stored_completions_have_ids_independent_of_the_clients_request_id(serve):
    server = await serve()
    ids = [(await create(server, request_id="a/b"))["id"] for _ in range(2)]
    assert len({*ids, "chatcmpl-a/b"}) == 3
    for completion_id in ids:
        assert (await server.get(f"{PATH}/{completion_id}")).json["id"] == completion_id
    assert (await server.post(PATH, CHAT | {"request_id": "a/b"})).json["id"] == "chatcmpl-a/b"
    storeless = await serve(response_store=0)
    assert (await create(storeless, request_id="a/b"))["id"] == "chatcmpl-a/b"


def without_empty(choice: dict[str, Any]) -> dict[str, Any]:
    message = {name: value for name, value in choice["message"].items() if value not in (None, [])}
    return choice | {"message": message}


async def test_completions_belong_to_their_tenant_and_need_a_store(serve):
    server = await serve(api_keys=KEYS)
    made = (await server.post(PATH, CHAT | {"store": True}, **OWNER)).json
    assert (await server.get(f"{PATH}/{made['id']}", **OWNER)).status == 200
    assert (await server.get(f"{PATH}/{made['id']}", **OTHER)).status == 404
    assert (await server.get(PATH, **OTHER)).json["data"] == []
    without = await serve(response_store=0)
    made = await create(without)
    assert (await without.get(f"{PATH}/{made['id']}")).status == 404


async def test_strict_surface_takes_metadata_with_store_only(serve):
    server = await serve()
    refused = await server.post("/openai" + PATH, CHAT | {"metadata": {"a": "b"}})
    assert (refused.status, refused.error["param"]) == (400, "metadata")
    made = (await server.post("/openai" + PATH, CHAT | {"metadata": {"a": "b"}, "store": True})).json
    assert (await server.get(f"/openai{PATH}/{made['id']}")).json["metadata"] == {"a": "b"}
    other = await server.post(f"/vllm{PATH}", {"model": "tiny"} | CHAT | {"store": True})
    assert (await server.get(f"{PATH}/{other.json['id']}")).status == 404  # vLLM's own form stores nothing
