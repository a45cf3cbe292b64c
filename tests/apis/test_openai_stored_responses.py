"""Stored responses, conversations and background over HTTP: what is kept, for whom, and how runs end."""

import asyncio
import json
import sqlite3
from typing import Any

import pytest
from support.http_client import Answer, RunningServer

from parley.dialects.json_answer import encode_json
from parley.dialects.openai.responses.stored import StoredResponse
from parley.serving.records.record_store import RECORD_OVERHEAD
from parley.types import EngineRequest

OWNER, OTHER = {"authorization": "Bearer sk-one-key-0123456789"}, {"authorization": "Bearer sk-two-key-0123456789"}
KEYS = ("sk-one-key-0123456789", "sk-two-key-0123456789")
ENDED = ("completed", "incomplete", "failed", "cancelled")


async def create(server: RunningServer, headers: dict[str, str] | None = None, **members: Any) -> dict[str, Any]:
    answer = await server.call("POST", "/v1/responses", {"input": "Hello", "max_output_tokens": 8} | members, headers)
    assert answer.status == 200, answer.body
    return answer.json


async def ended(server: RunningServer, response: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}

    async def read_response() -> bool:
        found.update((await server.get(f"/v1/responses/{response['id']}")).json)
        return found["status"] in ENDED

    while not await read_response():
        pass
    return found


def lines(answer: Answer) -> list[dict[str, Any]]:
    data = [line for line in answer.body.decode().split("\n") if line.startswith("data: ")]
    assert data.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in data]


async def leave_stream(server: RunningServer, **members: Any) -> str:
    """Begin a stream, disconnect after its third event, and return the id of the response."""
    connection = await server.connect()
    body = json.dumps({"input": "Hello there", "stream": True} | members).encode()
    head = f"POST /v1/responses HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    await connection.send(head + body)
    data = await connection.reader.readuntil(b'"sequence_number":2}')
    connection.close()
    return data.split(b'"id":"', 1)[1].split(b'"', 1)[0].decode()


async def test_a_response_continues_another_one(serve):
    server = await serve()
    first = await create(server, instructions="Be brief.", metadata={"a": "b"})
    assert first["store"] and first["output"]
    path = f"/v1/responses/{first['id']}"
    assert (await server.get(path)).json == first
    second = await create(server, input="More", previous_response_id=first["id"])
    listed = (await server.get(f"/v1/responses/{second['id']}/input_items?order=asc")).json
    assert [item["role"] for item in listed["data"]] == ["user", "assistant", "user"]
    assert listed["data"][1] == first["output"][0]
    count = await server.post("/v1/responses/input_tokens", {"input": "More", "previous_response_id": first["id"]})
    assert count.json == {"object": "response.input_tokens", "input_tokens": second["usage"]["input_tokens"]}
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    await create(server, input=[{"role": "user", "content": "a"}, reference, {"role": "user", "content": "b"}])
    assert (await server.call("DELETE", path)).json == {"id": first["id"], "object": "response", "deleted": True}
    assert (await server.get(path)).status == 404
    answer = await server.post("/v1/responses", {"input": "a", "previous_response_id": first["id"]})
    assert (answer.status, answer.error["code"]) == (400, "previous_response_not_found")
    assert (await create(server, previous_response_id=second["id"]))["output"]  # it has its own copy


async def test_what_is_not_stored_is_unknown(serve):
    server = await serve()
    response = await create(server, store=False)
    assert not response["store"] and (await server.get(f"/v1/responses/{response['id']}")).status == 404
    empty = await serve(response_store=0)
    assert not (await create(empty))["store"]
    for members in ({"background": True}, {"conversation": "conv_x"}, {"previous_response_id": "resp_x"}):
        answer = await empty.post("/v1/responses", {"input": "a"} | members)
        assert answer.status == 400 and "stores no responses" in answer.error["message"]
    assert (await empty.post("/v1/conversations", {})).status == 400


async def test_a_full_store_forgets_the_oldest_response(serve):
    server = await serve(response_store=20_000)
    first, *_, last = [await create(server, input="a" * 4000) for _ in range(6)]
    assert (await server.get(f"/v1/responses/{last['id']}")).json == last
    assert (await server.get(f"/v1/responses/{first['id']}")).status == 404
    answer = await server.post("/v1/responses", {"input": "a", "previous_response_id": first["id"]})
    assert (answer.status, answer.error["code"]) == (400, "previous_response_not_found")


async def test_a_response_that_is_larger_than_the_store_says_that_it_is_not_stored(serve):
    server = await serve(response_store=3000)
    assert (await create(server))["store"] is True
    response = await create(server, input="a" * 4000)
    assert response["store"] is False and (await server.get(f"/v1/responses/{response['id']}")).status == 404
    answer = await server.post("/v1/responses", {"input": "a" * 4000, "background": True})
    assert answer.status == 400 and "larger than the server's store" in answer.error["message"]
    assert answer.error["param"] == "background" and (await create(server))["store"] is True


async def test_ids_tell_nothing_about_other_ids(serve):
    server = await serve()
    ids = [(await create(server, max_output_tokens=1))["id"] for _ in range(20)]
    ids += [(await create_conversation(server))["id"] for _ in range(20)]
    digits = [name.partition("_")[2] for name in ids]
    assert all(len(name) >= 32 and int(name, 16) for name in digits)
    for place in range(32):  # a counter or a clock would have constant digits
        assert len({name[place] for name in digits}) > 1 or place == 12  # 12: the version in a random UUID


async def test_lists_go_on_after_an_item(serve):
    server = await serve()
    items = [{"role": "user", "content": f"a{number}"} for number in range(5)]
    path = f"/v1/responses/{(await create(server, input=items))['id']}/input_items"
    newest = (await server.get(f"{path}?limit=2")).json
    assert [item["content"][0]["text"] for item in newest["data"]] == ["a4", "a3"] and newest["has_more"]
    rest = (await server.get(f"{path}?after={newest['last_id']}&include[]=a")).json
    assert [item["content"][0]["text"] for item in rest["data"]] == ["a2", "a1", "a0"] and not rest["has_more"]
    for query in ("limit=0", "limit=x", "after=nothing", "order=up"):
        assert (await server.get(f"{path}?{query}")).status == 400


async def test_calls_and_their_outputs_are_listed_with_a_status(serve):
    server = await serve()
    items = [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
             {"type": "function_call_output", "call_id": "c", "output": "7", "status": "incomplete"}]  # fmt: skip
    conversation = (await server.post("/v1/conversations", {"items": items})).json["id"]
    call, output = (await server.get(f"/v1/conversations/{conversation}/items?order=asc")).json["data"]
    assert call == {"id": call["id"], "type": "function_call", "status": "completed", "call_id": "c", "name": "f",
                    "arguments": "{}"}  # fmt: skip
    assert output["status"] == "incomplete"


async def create_conversation(server: RunningServer) -> dict[str, Any]:
    return (await server.post("/v1/conversations", {})).json


async def test_conversations_collect_the_items_of_their_responses(serve):
    server = await serve()
    items = [{"role": "user", "content": "I live in Rome."}]
    conversation = (await server.post("/v1/conversations", {"items": items, "metadata": {"a": "b"}})).json
    path = f"/v1/conversations/{conversation['id']}"
    response = await create(server, conversation={"id": conversation["id"]})
    assert response["conversation"] == {"id": conversation["id"]}
    listed = (await server.get(f"{path}/items?order=asc")).json["data"]
    assert [item["role"] for item in listed] == ["user", "user", "assistant"]
    added = (await server.post(f"{path}/items", {"items": [{"type": "message", "role": "user", "content": "x"}]})).json
    assert (await server.get(f"{path}/items/{added['first_id']}")).json == added["data"][0]
    said = [{"role": "assistant", "content": content} for content in ("ok", [{"type": "output_text", "text": "ok"}])]
    for item in (await server.post(f"{path}/items", {"items": said})).json["data"]:
        assert item["content"] == [{"type": "output_text", "annotations": [], "logprobs": [], "text": "ok"}]
        await server.call("DELETE", f"{path}/items/{item['id']}")
    assert (await server.call("DELETE", f"{path}/items/{added['first_id']}")).json == conversation
    assert (await server.get(f"{path}/items/{added['first_id']}")).status == 404
    changed = (await server.post(path, {"metadata": {"c": "d"}})).json
    assert (await server.get(path)).json == changed and changed["metadata"] == {"c": "d"}
    assert (await server.call("DELETE", path)).json["object"] == "conversation.deleted"
    assert (await server.get(path)).status == 404
    for path in ("/v1/conversations", f"/v1/conversations/{(await create_conversation(server))['id']}/items"):
        for kind in ("nonsense", "compaction_trigger"):
            refused = await server.post(path, {"items": [{"role": "user", "content": "a"}, {"type": kind}]})
            assert (refused.status, refused.error["param"]) == (400, "items[1].type")
    both = {"input": "a", "conversation": "conv_x", "previous_response_id": "resp_x"}
    assert (await server.post("/v1/responses", both)).error["code"] == "mutually_exclusive_parameters"


@pytest.mark.parametrize("in_file", [False, True])
async def test_a_conversation_that_is_larger_than_the_store_is_refused(serve, tmp_path, in_file):
    members = {"response_store_file": str(tmp_path / "responses.db")} if in_file else {}
    server = await serve(response_store=3500, **members)
    long = [{"role": "user", "content": "a" * 3500}]
    path = f"/v1/conversations/{(await create_conversation(server))['id']}"
    for place, name, value in (
        ("/v1/conversations", "items", long),
        (f"{path}/items", "items", long),
        (path, "metadata", {f"k{number}": "v" * 500 for number in range(16)}),
    ):
        refused = await server.post(place, {name: value})
        assert (refused.status, refused.error["param"]) == (400, name), refused.body
        assert refused.error["message"] == "The conversation would be larger than the server's store."
    assert (await server.get(f"{path}/items")).json["data"] == []
    response = await create(server, input=long, conversation=path.split("/")[-1])
    assert response["output"] and response["store"] is False
    assert (await server.post(f"{path}/items", {"items": [{"role": "user", "content": "b"}]})).status == 200
    assert len((await server.get(f"{path}/items")).json["data"]) == 1


async def test_compaction_stands_for_the_conversation(serve):
    server = await serve()
    body = {"model": "tiny", "input": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    compacted = (await server.post("/v1/responses/compact", body)).json
    kept, compaction = compacted["output"]
    assert compacted["object"] == "response.compaction" and kept["content"][0]["text"] == "a"
    assert (await create(server, input=[*compacted["output"], {"role": "user", "content": "c"}]))["output"]
    foreign = [compaction | {"encrypted_content": "AAAA"}]
    assert (await server.post("/v1/responses", {"input": foreign})).error["code"] == "invalid_encrypted_content"
    assert (await server.post("/v1/responses/compact", {"input": "a"})).error["param"] == "model"


@pytest.mark.parametrize("is_stored", [False, True])
async def test_compaction_does_not_bring_back_what_a_summary_replaced(serve, is_stored):
    prompts: list[list[int]] = []

    def reply(work: EngineRequest, index: int) -> list[int]:
        prompts.append(work.token_ids)
        return [70, 71, 72]

    server = await serve(reply=reply)
    apple = {"role": "user", "content": "apple"}
    summarized = await create(server, input=[apple, {"type": "compaction_trigger"}])
    earlier = {"previous_response_id": summarized["id"]} if is_stored else {}
    banana = {"role": "user", "content": "banana"}
    items = [banana] if is_stored else [apple, *summarized["output"], banana]
    answer = await server.post("/v1/responses/compact", {"model": "tiny", "input": items} | earlier)
    prompt = (await server.post("/detokenize", {"tokens": prompts[-1]})).json["prompt"]
    assert "apple" not in prompt and "Summary of the conversation so far" in prompt
    assert "banana\n\nSummarize the conversation" in prompt
    kept, compaction = answer.json["output"]
    assert kept["content"][0]["text"] == "banana" and compaction["type"] == "compaction"


async def test_no_tenant_finds_the_responses_of_another(serve):
    server = await serve(api_keys=KEYS, tick=0.01)
    response = await create(server, OWNER, background=True, max_output_tokens=2000)
    path = f"/v1/responses/{response['id']}"
    for method, place in (("GET", path), ("GET", f"{path}?stream=true"), ("DELETE", path), ("POST", f"{path}/cancel"),
                          ("GET", f"{path}/input_items")):  # fmt: skip
        assert (await server.call(method, place, None, OTHER)).status == 404
    answer = await server.call("POST", "/v1/responses", {"input": "a", "previous_response_id": response["id"]}, OTHER)
    assert answer.error["code"] == "previous_response_not_found"
    assert (await server.call("POST", f"{path}/cancel", None, OWNER)).json["status"] == "cancelled"
    conversation = (await server.call("POST", "/v1/conversations", {}, OWNER)).json["id"]
    assert (await server.call("GET", f"/v1/conversations/{conversation}", None, OTHER)).status == 404


async def test_background_answers_at_once_and_ends_without_its_client(serve):
    server = await serve(tick=0.005)
    queued = await create(server, background=True)
    assert (queued["status"], queued["output"], queued["usage"]) == ("queued", [], None)
    done = await ended(server, queued)
    assert done["status"] in ("completed", "incomplete") and done["output"] and done["background"]
    path = f"/v1/responses/{queued['id']}"
    assert (await server.post(f"{path}/cancel")).status == 400
    assert "stream=true" in (await server.get(f"{path}?stream=true")).error["message"]
    whole = await create(server)
    assert "synchronous" in (await server.post(f"/v1/responses/{whole['id']}/cancel")).error["message"]


async def test_background_response_that_grows_larger_than_the_store_has_ended(serve):
    async def run(store_size: int) -> tuple[dict[str, Any], Answer, RunningServer]:
        server = await serve(response_store=store_size, reply=lambda work, index: [70] * 900)
        items = [{"id": "a/b", "role": "user", "content": "Hello"}]  # an id with a slash is no part of the record
        queued = await create(server, input=items, background=True, max_output_tokens=900)
        await server.wait_until_idle()
        return queued, await server.get(f"/v1/responses/{queued['id']}"), server

    queued, found, server = await run(100_000)
    assert found.json["status"] == "incomplete" and found.json["output"]
    items = (await server.get(f"/v1/responses/{queued['id']}/input_items")).json["data"]
    least_size = len(encode_json(StoredResponse(queued, items))) + RECORD_OVERHEAD
    queued, found, server = await run(least_size + 500)
    assert (found.json["status"], found.json["output"]) == ("failed", [])
    assert found.json["error"]["message"] == "The response is larger than the server's store of responses."
    assert found.json["id"] == queued["id"] and found.json["incomplete_details"] is None
    assert (await server.get(f"/v1/responses/{queued['id']}/input_items")).json["data"]
    assert (await run(least_size))[1].status == 404  # there is not even room for the failure


async def test_background_stream_goes_on_at_any_event(serve):
    server = await serve(tick=0.005)
    response_id = await leave_stream(server, background=True, max_output_tokens=8)
    path = f"/v1/responses/{response_id}?stream=true"
    events = lines(await server.get(path))
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert (await server.get(f"/v1/responses/{response_id}")).json == events[-1]["response"]
    for cursor in (0, 4, len(events) - 1):
        assert lines(await server.get(f"{path}&starting_after={cursor}")) == events[cursor + 1 :]
    assert (await server.get(f"{path}&starting_after={len(events) + 9}")).body == b""


async def test_a_stream_whose_client_leaves_stops_and_is_not_stored(serve):
    server = await serve(tick=0.01)
    response_id = await leave_stream(server, max_output_tokens=3000)
    await server.until(lambda: not server.model.used_slots)
    assert (await server.get(f"/v1/responses/{response_id}")).status == 404


async def test_a_hundred_streams_at_once_are_whole_and_stored(serve):
    server = await serve(max_queue=100)
    members = {"stream": True, "max_output_tokens": 4}
    answers = await asyncio.gather(*(server.post("/v1/responses", members | {"input": f"{n}"}) for n in range(100)))
    streams = [lines(answer) for answer in answers]
    for events in streams:
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert (await server.get(f"/v1/responses/{events[-1]['response']['id']}")).json == events[-1]["response"]
    assert len({events[0]["response"]["id"] for events in streams}) == 100


async def test_background_is_stopped_by_delete(serve):
    server = await serve(tick=0.01)
    response = await create(server, background=True, max_output_tokens=3000)
    assert server.model.used_slots == 1
    assert (await server.call("DELETE", f"/v1/responses/{response['id']}")).status == 200
    await server.until(lambda: not server.model.used_slots)
    assert (await server.get(f"/v1/responses/{response['id']}")).status == 404


async def test_background_counts_against_the_limits(serve):
    server = await serve(tick=0.01, max_batch=1, max_queue=0)
    response = await create(server, background=True, max_output_tokens=3000)
    for background in (True, False):
        assert (await server.post("/v1/responses", {"input": "a", "background": background})).status == 429
    early = await server.post("/v1/responses", {"input": "a", "previous_response_id": response["id"]})
    assert (early.status, early.error["param"]) == (400, "previous_response_id")
    cancelled = await server.post(f"/v1/responses/{response['id']}/cancel")
    assert cancelled.json["status"] == "cancelled"
    await server.until(lambda: not server.model.used_slots)
    assert (await server.post(f"/v1/responses/{response['id']}/cancel")).json == cancelled.json
    assert (await create(server))["status"]


async def test_background_that_cannot_be_stored_leaves_nothing_behind(serve, monkeypatch):
    server = await serve(tick=0.01)

    def fail(*arguments: Any) -> None:
        raise RuntimeError("no store")

    monkeypatch.setattr(server.service.record_store, "save_record", fail)
    answer = await server.post("/v1/responses", {"input": "a", "background": True, "max_output_tokens": 3000})
    assert answer.status == 500
    await server.until(lambda: not server.model.used_slots and not server.model.open_requests)


async def test_background_fails_with_the_engine(serve):
    server = await serve(tick=0.01)
    response = await create(server, background=True, max_output_tokens=3000)
    await server.until(lambda: bool(server.model.open_requests))
    await server.engine.close()
    failed = await ended(server, response)
    assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")


async def test_response_without_a_running_server_counts_as_failed(serve, tmp_path):
    file = str(tmp_path / "responses.db")
    server = await serve(tick=0.01, response_store_file=file)
    response = await create(server, background=True, max_output_tokens=3000)
    other = await serve(response_store_file=file)
    assert (await other.get(f"/v1/responses/{response['id']}")).json["status"] in ("queued", "in_progress")
    assert "another server" in (await other.post(f"/v1/responses/{response['id']}/cancel")).error["message"]
    await server.service.background_runs.close()
    database = other.service.record_store._database
    database.execute("UPDATE records SET kept_at = kept_at - 100")
    database.commit()
    lost = (await other.get(f"/v1/responses/{response['id']}")).json
    assert (lost["status"], lost["error"]["code"]) == ("failed", "server_error")


async def test_an_answer_comes_although_its_store_is_locked(serve, tmp_path, monkeypatch):
    monkeypatch.setattr("parley.serving.records.record_store.LOCK_SECONDS", 0.01)
    server = await serve(response_store_file=str(tmp_path / "responses.db"))
    other = sqlite3.connect(tmp_path / "responses.db")
    other.execute("BEGIN IMMEDIATE")
    whole = await create(server)
    assert whole["output"] and whole["store"] is False
    assert "\nparley:record_faults_total 1\n" in (await server.get("/metrics")).body.decode()
    last = lines(await server.post("/v1/responses", {"input": "Hello", "max_output_tokens": 8, "stream": True}))[-1]
    assert last["response"]["output"] and last["response"]["store"] is False
    for path, members in (("/v1/conversations", {}), ("/v1/responses", {"input": "a", "background": True})):
        answer = await server.post(path, members)
        assert answer.status == 503 and "database is locked" in answer.error["message"]
    other.rollback()
    assert (await create(server))["store"] is True


@pytest.mark.parametrize("members", [{"store": False}, {"response_format": {}}])
async def test_background_refuses_what_cannot_run(serve, members):
    server = await serve()
    answer = await server.post("/v1/responses", {"input": "a", "background": True} | members)
    assert answer.status == 400 and not server.model.used_slots


@pytest.mark.parametrize("stream", [False, True])
async def test_compaction_trigger_ends_a_stored_conversation_with_its_summary(serve, stream):
    prompts: list[list[int]] = []

    def reply(work: EngineRequest, index: int) -> list[int]:
        prompts.append(work.token_ids)
        return [70, 71, 72]

    server = await serve(reply=reply)

    async def prompt_text() -> str:
        return (await server.post("/detokenize", {"tokens": prompts[-1]})).json["prompt"]

    first = await create(server, instructions="Be kind.", input="apple " * 20)
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}]
    body = {"model": "tiny", "previous_response_id": first["id"], "input": [{"type": "compaction_trigger"}]}
    body |= {"stream": stream, "tools": tools, "tool_choice": "required"}
    answer = await server.post("/v1/responses", body | {"text": {"format": {"type": "json_object"}}})
    assert answer.status == 200, answer.body
    response = lines(answer)[-1]["response"] if stream else answer.json
    assert [item["type"] for item in response["output"]] == ["compaction"] and response["status"] == "completed"
    assert "apple" in await prompt_text() and "Summarize the conversation" in await prompt_text()
    second = await create(server, previous_response_id=response["id"], input="banana")
    assert second["status"] == "completed"
    text = await prompt_text()
    assert "apple" not in text and "banana" in text and "Summary of the conversation so far" in text


@pytest.mark.parametrize("members", [{"generate": False}, {"max_output_tokens": 1}])
async def test_a_conversation_goes_on_after_a_trigger_without_its_summary(serve, members):
    prompts: list[list[int]] = []

    def reply(work: EngineRequest, index: int) -> list[int]:
        prompts.append(work.token_ids)
        return [70, 71, 72]

    server = await serve(reply=reply)
    conversation = await create_conversation(server)
    first = await create(server, input="apple", conversation=conversation["id"])
    trigger = {"input": [{"type": "compaction_trigger"}]} | members
    assert (await create(server, **trigger, conversation=conversation["id"]))["output"] == []
    chained = await create(server, **trigger, previous_response_id=first["id"])
    for word in ("banana", "cherry"):
        chained = await create(server, input=word, previous_response_id=chained["id"])
        await create(server, input=word, conversation=conversation["id"])
    for tokens in prompts[-2:]:
        text = (await server.post("/detokenize", {"tokens": tokens})).json["prompt"]
        assert all(word in text for word in ("apple", "banana", "cherry")) and "Summar" not in text
