"""vLLM's API through a running server: its routes, the paths it shares, and the members that other APIs share."""

import asyncio
import json
import math

import pytest
from openai import APIError, AsyncOpenAI, BadRequestError, NotFoundError
from support.http_client import HELLO_CHAT, build_request
from support.tiny_models import model_folder

from parley.dialects.mounts import dedicated_mounts
from parley.errors import EngineError
from parley.types import CacheEventSettings, ParleySettings

EOS = 2
HELLO_MESSAGE = {"model": "tiny", "max_tokens": 12, "messages": [{"role": "user", "content": "Hello"}]}
HELLO_RESPONSE = {"model": "tiny", "max_output_tokens": 12, "input": "Hello"}
PROMPT = "Hello there, my friend"


def echo_and_end(work, index):
    """Repeat the prompt's tokens, then end the text."""
    return [*work.token_ids, EOS][: work.max_tokens]


@pytest.fixture
async def server(serve):
    return await serve(reply=echo_and_end)


# -- the routes of vLLM's demo server


async def test_generate_path_serves_vllm_tgi_and_strict_vllm(server):
    whole = {"text": [PROMPT + PROMPT]}
    for body in ({"prompt": PROMPT}, {"prompt": PROMPT, "inputs": "b"}, {"prompt": PROMPT, "inputs": None}):
        assert (await server.post("/generate", body)).json == whole
    parameters = {"return_full_text": False}
    assert (await server.post("/generate", {"inputs": "a", "parameters": parameters})).json == {"generated_text": "a"}
    assert (await server.post("/generate", {"inputs": "a", "prompt": None})).status == 200
    for body in ({}, b"{", b"[]"):
        assert (await server.post("/generate", body)).body.startswith(b"Failed to ")
    answer = await server.post("/generate", {"prompt": 5})
    assert (answer.status, answer.error["type"]) == (400, "Bad Request")
    for prefix in ("/vllm", "/vllm-0.6.3"):
        assert (await server.post(prefix + "/generate", {"prompt": PROMPT})).json == whole
        answer = await server.post(prefix + "/generate", {"inputs": "a"})
        assert (answer.status, answer.body) == (500, b"Internal Server Error")
    too_long = {"prompt": "a" * 5000, "max_tokens": 1}
    assert (await server.post("/vllm/generate", too_long)).status == 500
    answer = await server.post("/generate", too_long)
    assert (answer.status, answer.error["param"]) == (400, "input_tokens")


@pytest.mark.parametrize(("prefix", "end"), [("", b"\n"), ("/vllm", b"\n"), ("/vllm-0.6.3", b"\0")])
async def test_vllm_demo_stream_separates_records_by_version(server, prefix, end):
    answer = await server.post(prefix + "/generate", {"prompt": "Zwölf", "stream": True, "n": 2})
    assert answer.status == 200 and "content-type" not in answer.headers
    *records, rest = answer.body.split(end)
    assert rest == b"" and len(records) > 1
    assert records[-1] == b'{"text": ["Zw\\u00f6lfZw\\u00f6lf", "Zw\\u00f6lfZw\\u00f6lf"]}'
    assert all(record.startswith(b'{"text": ["Zw\\u00f6lf') for record in records)


async def test_vllm_demo_stream_breaks_off_on_an_engine_error(serve):
    server = await serve()
    server.engine.step_gate.clear()
    connection = await server.connect()
    await connection.send(build_request("POST", "/generate", {"prompt": "a", "stream": True}))
    await server.until(lambda: server.engine.open_stream_count == 1)
    server.engine.step_gate.set()
    await connection.head()
    for generation in list(server.service.open_requests):
        generation.fail_request(EngineError("gone"))
    assert not (await connection.ended()).endswith(b"0\r\n\r\n")
    connection.close()


# -- control


async def test_reset_prefix_cache_answers_success_and_checks_its_flag(serve):
    server = await serve()
    for prefix in ("", "/vllm"):
        assert (await server.post(prefix + "/reset_prefix_cache")).json == {"success": True}
    server.engine.step_gate.clear()
    waiting = asyncio.create_task(server.post("/v1/chat/completions", HELLO_CHAT))
    await server.until(lambda: server.engine.open_stream_count == 1)
    server.engine.step_gate.set()
    await waiting
    answer = await server.post("/reset_prefix_cache?reset_running_requests=perhaps")
    assert (answer.status, answer.error["param"]) == (400, "body.reset_running_requests")
    assert (await server.post("/reset_prefix_cache?reset_running_requests=true&x=1")).json == {"success": True}


async def test_reset_mm_cache_answers_empty_and_other_caches_are_refused_by_name(serve):
    server = await serve()
    for prefix in ("", "/vllm"):
        answer = await server.post(prefix + "/reset_mm_cache")
        assert (answer.status, answer.body) == (200, b"")
    assert "cache of the encoders" in (await server.post("/vllm/reset_encoder_cache")).error["message"]


async def test_unanswered_prefix_cache_reset_fails_when_the_engine_crashes(serve):
    server = await serve()
    server.engine.hang_engine()
    pending = asyncio.create_task(server.post("/reset_prefix_cache"))
    await server.until(lambda: server.engine.pending_answer_count)
    server.engine.crash_engine()
    assert (await pending).json == {"success": False}
    assert (await server.post("/reset_prefix_cache")).status == 503


# -- the routes of vLLM's OpenAI server

JSON_HEADERS = {"content-type": "application/json"}
STREAM_WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True}}


async def test_vllm_chats_and_completions_match_their_streams(server):
    whole = await server.post("/vllm/v1/chat/completions", HELLO_CHAT | {"max_tokens": 4096}, **JSON_HEADERS)
    (choice,) = whole.json["choices"]
    assert (whole.status, choice["finish_reason"]) == (200, "stop")
    streamed = (
        await server.post(
            "/vllm/v1/chat/completions", HELLO_CHAT | STREAM_WITH_USAGE | {"max_tokens": 4096}, **JSON_HEADERS
        )
    ).events
    assert streamed[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in streamed[:-1])
    assert text == choice["message"]["content"]
    assert streamed[-1]["usage"]["total_tokens"] == whole.json["usage"]["total_tokens"]
    body = {"prompt": PROMPT, "max_tokens": 4096}
    text = (await server.post("/vllm/v1/completions", body, **JSON_HEADERS)).json["choices"][0]["text"]
    assert text == PROMPT
    events = (await server.post("/vllm/v1/completions", body | {"stream": True}, **JSON_HEADERS)).events
    assert "".join(chunk["choices"][0]["text"] for chunk in events) == PROMPT
    assert (await server.post("/vllm/invocations", body, **JSON_HEADERS)).json["object"] == "text_completion"
    assert (await server.post("/vllm/invocations", HELLO_CHAT, **JSON_HEADERS)).json["object"] == "chat.completion"


async def test_rendered_messages_and_responses_have_the_tokens_of_their_chats(server):
    chat = (await server.post("/vllm/v1/chat/completions/render", HELLO_CHAT)).json
    messages = {"messages": HELLO_CHAT["messages"], "model": "tiny", "max_tokens": 8}
    responses = {"input": HELLO_CHAT["messages"], "model": "tiny", "max_output_tokens": 8}
    for path, body in (("messages", messages), ("responses", responses)):
        rendered = (await server.post(f"/vllm/v1/{path}/render", body)).json
        assert rendered["token_ids"] == chat["token_ids"]
        assert rendered["sampling_params"] == chat["sampling_params"]
        answer = (await server.post("/vllm/inference/v1/generate", rendered)).json
        assert answer["choices"][0]["token_ids"] and answer["usage"]["prompt_tokens"] == len(chat["token_ids"])
        refused = await server.post(f"/vllm/v1/{path}/render", body | {"model": "other"})
        assert (refused.status, refused.error["type"]) == (404, "NotFoundError")
        assert (await server.post(f"/v1/{path}/render", body)).status in (404, 405)


@pytest.mark.parametrize("prefix", ["", "/vllm"])
async def test_generated_tokens_become_the_answer_of_their_request(server, prefix):
    for members in ({}, {"n": 2, "temperature": 1, "logprobs": True, "top_logprobs": 2}, {"stop": ["lo"]}):
        request = HELLO_CHAT | {"temperature": 0, "return_token_ids": True} | members
        whole = (await server.post(prefix + "/v1/chat/completions", request)).json
        rendered = (await server.post(prefix + "/v1/chat/completions/render", request)).json
        generated = (await server.post(prefix + "/inference/v1/generate", rendered)).json
        body = {"model": "tiny", "generate_response": generated, "chat_request": request}
        body |= {"prompt_tokens": len(rendered["token_ids"])}
        answer = (await server.post(prefix + "/v1/chat/completions/derender", body)).json
        assert (answer["id"], answer["object"]) == (generated["request_id"], "chat.completion")
        for choice, wanted in zip(answer["choices"], whole["choices"], strict=True):
            assert choice["message"]["content"] == wanted["message"]["content"]
            assert (choice["index"], choice["finish_reason"]) == (wanted["index"], wanted["finish_reason"])
            scored = choice["logprobs"] and choice["logprobs"]["content"]
            assert bool(scored) == ("logprobs" in members)
            assert [logprob["token"] for logprob in scored or ()] == [
                logprob["token"] for logprob in (wanted["logprobs"] or {}).get("content", ())
            ]
        assert answer["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in generated["choices"])
        assert answer["usage"]["prompt_tokens"] == len(rendered["token_ids"])
    bare = {"model": "tiny", "generate_response": generated}
    plain = (await server.post(prefix + "/v1/chat/completions/derender", bare)).json
    assert plain["choices"][0]["message"]["content"] and plain["usage"]["prompt_tokens"] == 0
    texts = {"prompt": [PROMPT, "b"], "max_tokens": 8}
    whole = (await server.post(prefix + "/v1/completions", texts)).json
    prompts = (await server.post(prefix + "/v1/completions/render", texts)).json
    answers = [(await server.post(prefix + "/inference/v1/generate", prompt)).json for prompt in prompts]
    body = {"model": "tiny", "generate_responses": answers, "completion_request": texts, "prompt_tokens": [5, 1]}
    answer = (await server.post(prefix + "/v1/completions/derender", body)).json
    assert [choice["text"] for choice in answer["choices"]] == [choice["text"] for choice in whole["choices"]]
    assert (answer["id"], answer["usage"]["prompt_tokens"]) == (answers[0]["request_id"], 6)
    for token_id, status in ((639, 200), (640, 400)):  # the model has 640 tokens, and the tokenizer knows fewer
        listed = {"token_id": 5, "logprob": -1, "top_logprobs": [{"token_id": token_id, "logprob": -1}]}
        for choice in ({"token_ids": [5, token_id]}, {"token_ids": [5], "logprobs": {"content": [listed]}}):
            body = {"model": "tiny", "generate_response": {"choices": [choice]}}
            answer = await server.post(prefix + "/v1/chat/completions/derender", body)
            assert answer.status == status
            assert status == 200 or "is not in the vocabulary of 640" in answer.error["message"]


async def test_stop_tokens_of_generated_answers_are_named_and_hidden(server):
    generated = {"choices": [{"token_ids": [70, 71], "finish_reason": "stop", "stop_reason": 71}]}
    last = {"choices": [{"token_ids": [70], "finish_reason": "stop"}]}
    for name, path, plural in (("chat", "chat/completions", False), ("completion", "completions", True)):
        path, stop = f"/vllm/v1/{path}/derender", {"stop_token_ids": [71]}
        request = (HELLO_CHAT if name == "chat" else {"prompt": "a"}) | stop
        choices = []
        for response, options in ((generated, {}), (last, {}), (generated, {"include_stop_str_in_output": True})):
            given = {"generate_responses": [response]} if plural else {"generate_response": response}
            answer = await server.post(path, {"model": "tiny", f"{name}_request": request | options} | given)
            choices.append(answer.json["choices"][0])
        texts = [choice["text"] if plural else choice["message"]["content"] for choice in choices]
        assert texts[0] == texts[1] and texts[2].startswith(texts[0]) and texts[2] != texts[0]
        assert [choice["stop_reason"] for choice in choices] == [71, None, 71]


async def test_rendered_prompts_tell_which_characters_their_tokens_have(server):
    path = "/vllm/v1/completions/render"
    body = {"prompt": PROMPT, "return_token_offsets": True}
    (text,) = (await server.post(path, body)).json
    (ids,) = (await server.post(path, body | {"prompt": [5, 6]})).json
    assert ids["token_offsets"] is None and len(text["token_offsets"]) == len(text["token_ids"])
    assert "".join(PROMPT[start:end] for start, end in text["token_offsets"]) == PROMPT
    for side, kept in (("left", text["token_offsets"][-3:]), ("right", text["token_offsets"][:3])):
        cut = body | {"truncate_prompt_tokens": 3, "truncation_side": side}
        (rendered,) = (await server.post(path, cut)).json
        assert rendered["token_offsets"] == kept
    chat = (await server.post("/vllm/v1/chat/completions/render", HELLO_CHAT | {"return_token_offsets": True})).json
    assert len(chat["token_offsets"]) == len(chat["token_ids"])


async def test_rendered_prompts_continue_as_tokens_like_the_requests_themselves(server):
    for prefix in ("", "/vllm"):
        options = {"max_tokens": 40, "return_token_ids": True, "temperature": 0}
        chat = (await server.post(prefix + "/v1/chat/completions", HELLO_CHAT | options)).json
        body = (await server.post(prefix + "/v1/chat/completions/render", HELLO_CHAT | options)).json
        assert body["token_ids"] == chat["prompt_token_ids"] and body["sampling_params"]["max_tokens"] == 40
        answer = (await server.post(prefix + "/inference/v1/generate", body)).json
        (choice,) = answer["choices"]
        assert choice["token_ids"] == chat["choices"][0]["token_ids"]
        assert answer["prompt_token_ids"] == chat["prompt_token_ids"]
        assert (choice["finish_reason"], answer["request_id"]) == ("stop", f"generate-tokens-{body['request_id']}")
        streamed = (await server.post(prefix + "/inference/v1/generate", body | STREAM_WITH_USAGE)).events
        *chunks, last = streamed
        pieces = [chunk["choices"][0]["token_ids"] for chunk in chunks]
        assert [token_id for piece in pieces for token_id in piece] == choice["token_ids"] and len(pieces) > 1
        assert last["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"]
        first, _ = (await server.post(prefix + "/v1/completions/render", {"prompt": [PROMPT, "b"]})).json
        text = (await server.post(prefix + "/inference/v1/generate", first | {"output_mode": "text"})).json
        whole = (await server.post(prefix + "/v1/completions", {"prompt": PROMPT})).json
        assert text["choices"][0]["text"] == whole["choices"][0]["text"]
    long = await server.post("/v1/completions/render", {"prompt": "a " * 9000})
    assert long.status == 400 and "maximum context length" in long.error["message"]
    unknown = await server.post("/inference/v1/generate", {"token_ids": [10**6], "sampling_params": {}})
    assert (unknown.status, unknown.error["message"]) == (400, "Token id 1000000 is out of vocabulary")
    await server.wait_until_idle()


async def test_generative_scores_are_the_probabilities_of_the_next_token(serve):
    folder = str(model_folder("llama"))
    server = await serve(
        settings=ParleySettings(model=folder, dtype="float32", kv_memory=8 << 20, max_batch=8, threads=1)
    )
    labels, query, items = [7, 9, 300], "Is it a number? ", ["one", ""]
    body = {"query": query, "items": items, "label_token_ids": labels}
    for prefix, members in (("", {}), ("/vllm", {}), ("", {"item_first": True}), ("", {"add_special_tokens": False})):
        item_first, special = members.get("item_first", False), members.get("add_special_tokens", True)
        first = (await server.post("/tokenize", {"prompt": query, "add_special_tokens": special})).json["tokens"]
        expected = []
        for item in items:
            second = item and (await server.post("/tokenize", {"prompt": item, "add_special_tokens": False})).json
            second = second["tokens"] if item else []
            prompt = {"prompt": [*second, *first] if item_first else [*first, *second], "max_tokens": 1}
            named = prompt | {"logprobs": 3, "logprob_token_ids": labels, "return_tokens_as_token_ids": True}
            choice = (await server.post("/vllm/v1/completions", named)).json["choices"][0]
            tops = choice["logprobs"]["top_logprobs"][0]
            expected.append([math.exp(tops[f"token_id:{label}"]) for label in labels])
        scored = (await server.post(prefix + "/generative_scoring", body | members)).json
        shares = [row[0] / sum(row) for row in expected]
        assert [item["score"] for item in scored["data"]] == pytest.approx(shares, rel=1e-4)
        plain = (await server.post(prefix + "/generative_scoring", body | members | {"apply_softmax": False})).json
        assert [item["score"] for item in plain["data"]] == pytest.approx([row[0] for row in expected], rel=1e-4)
    assert scored["usage"]["completion_tokens"] == 2
    cut = (await server.post("/generative_scoring", {"query": [5] * 9000, "items": [[5]], "label_token_ids": [7]})).json
    assert cut["usage"]["total_tokens"] == cut["usage"]["prompt_tokens"] + 1 < 9000 and cut["data"][0]["score"] == 1.0
    await server.wait_until_idle()


async def test_items_do_not_multiply_a_query_beyond_the_limit_of_a_body(serve):
    server = await serve(body_limit=20_000)
    for query in ("a " * 1000, [5] * 2000):
        body = {"query": query, "items": [[5]] * 9, "label_token_ids": [7]}
        assert (await server.post("/generative_scoring", body)).status == 200
        answer = await server.post("/generative_scoring", body | {"items": [[5]] * 10})
        assert answer.status == 413 and "20010 characters; 20000 are allowed" in answer.error["message"]
    await server.wait_until_idle()


async def test_tokens_are_not_held_back_for_the_rest_of_a_character_or_stop_string(server):
    (body,) = (await server.post("/v1/completions/render", {"prompt": "Zwölf", "stop": "fx", "stream": True})).json
    events = (await server.post("/inference/v1/generate", body)).events
    assert [event["choices"][0]["token_ids"] for event in events] == [
        [token_id] for token_id in [*body["token_ids"], EOS]
    ]
    texts = (await server.post("/inference/v1/generate", body | {"output_mode": "text"})).events
    assert "".join(event["choices"][0]["text"] for event in texts) == "Zwölf"


async def test_abort_requests_ends_only_the_listed_requests(serve):
    server = await serve(tick=0.001)
    body = {"token_ids": [5], "sampling_params": {"max_tokens": 3000, "ignore_eos": True}}
    requests = [
        asyncio.create_task(server.post("/inference/v1/generate", body | {"request_id": name})) for name in "abc"
    ]
    await server.until(lambda: server.engine.stats.running == 3)
    ids = {"request_ids": ["generate-tokens-a", "b", "unknown"]}
    for path in ("/inference/v1/abort_requests", "/abort_requests"):
        answer = await server.post(path, ids)
        assert (answer.status, answer.body) == (200, b"")
    for request in requests[:2]:
        assert (await request).json["choices"][0]["finish_reason"] == "abort"
    await server.until(lambda: server.engine.stats.running == 1)
    await server.post("/abort_requests", {"request_ids": "c"})
    assert (await requests[2]).json["choices"][0]["finish_reason"] == "abort"
    refused = await server.post("/inference/v1/abort_requests", {})
    assert (refused.status, refused.error["message"]) == (400, "Missing 'request_ids' in request body")
    await server.wait_until_idle()


async def test_limits_full_vocabulary_logprobs_over_a_whole_request(server):
    """All lists of a request are built in one go, and no other request gets a token during that time."""
    body = {"model": "tiny", "prompt": "ab", "max_tokens": 204}
    assert (await server.post("/v1/completions", body | {"logprobs": -1, "n": 2})).status == 200
    for members in ({"logprobs": -1, "n": 2, "max_tokens": 205}, {"prompt": "a" * 410, "prompt_logprobs": -1}):
        answer = await server.post("/v1/completions", body | members)
        assert answer.status == 400 and "at most 409 tokens" in answer.error["message"], answer.body[:300]
        assert answer.error["param"] in members


@pytest.mark.parametrize("prefix", ["", "/vllm"])
async def test_truncation_side_drops_either_end_of_the_prompt(server, prefix):
    options = {"max_tokens": 1, "return_token_ids": True}
    whole = (await server.post(prefix + "/v1/chat/completions", HELLO_CHAT | options)).json["prompt_token_ids"]
    for side, kept_slice in (("left", slice(-4, None)), ("right", slice(4))):
        cut = options | {"truncate_prompt_tokens": 4, "truncation_side": side}
        answer = await server.post(prefix + "/v1/chat/completions", HELLO_CHAT | cut)
        assert answer.json["prompt_token_ids"] == whole[kept_slice]
        answer = await server.post(prefix + "/v1/completions", {"prompt": whole} | cut)
        assert answer.json["choices"][0]["prompt_token_ids"] == whole[kept_slice]


@pytest.mark.parametrize("prefix", ["", "/vllm"])
async def test_chat_batch_answers_each_conversation_like_a_single_request(server, prefix):
    several = [HELLO_CHAT["messages"], [{"role": "user", "content": "Bye"}]]
    alone = [(await server.post(prefix + "/v1/chat/completions", {"messages": messages})).json for messages in several]
    batch = (await server.post(prefix + "/v1/chat/completions/batch", {"messages": several})).json
    contents = [choice["message"]["content"] for choice in batch["choices"]]
    assert contents == [single_answer["choices"][0]["message"]["content"] for single_answer in alone]
    assert batch["usage"]["total_tokens"] == sum(single_answer["usage"]["total_tokens"] for single_answer in alone)
    long = {"messages": [several[0], [{"role": "user", "content": "b " * 9000}]]}
    refused = await server.post(prefix + "/v1/chat/completions/batch", long)
    assert refused.status == 400 and "maximum context length" in refused.error["message"]
    await server.wait_until_idle()


async def test_vllm_errors_have_its_statuses_and_members(server):
    async def post_error(body, path="/vllm/v1/completions", **headers):
        answer = await server.post(path, body, **(JSON_HEADERS | headers))
        return answer.status, answer.json

    status, body = await post_error({"prompt": "a", "model": "nope"})
    assert (status, body["error"]["message"]) == (404, "The model `nope` does not exist. Valid aliases: tiny.")
    status, body = await post_error({"prompt": [5] * 5000})
    assert status == 400 and "prompt contains at least 5000 input tokens" in body["error"]["message"]
    assert (await post_error({"prompt": [5] * 5000, "stream": True}))[0] == 400
    assert (await post_error({"prompt": [5] * 4095, "max_tokens": 100}))[0] == 200
    for name, value in ("stop_token_ids", [1, 9999]), ("logit_bias", {"9999": 1}), ("allowed_token_ids", [9999]):
        status, body = await post_error({"prompt": "a", name: value})
        ids = [9999]
        text = f"token_id(s) {ids} in {name} contain out-of-vocab token ids. Vocabulary size: 640"
        text = "allowed_token_ids contains out-of-vocab token id!" if name == "allowed_token_ids" else text
        assert (status, body["error"]["message"]) == (400, f"{text} (parameter={name}, value={ids})")
        assert body["error"]["param"] == name
    status, body = await post_error({"prompt": [9999]})
    assert (status, body["error"]["message"]) == (400, "Token id 9999 is out of vocabulary")
    assert (await post_error({}, **{"content-type": "text/plain"}))[0] == 400
    assert await post_error({}, "/vllm/v1/classify") == (404, {"detail": "Not Found"})
    assert (await server.get("/vllm/v1/completions")).json == {"detail": "Method Not Allowed"}
    for path in ("/vllm/v1/decisions", "/vllm/v1/systemone"):
        status, body = await post_error({}, path)
        assert (status, body["error"]["type"], body["error"]["code"]) == (501, "NotImplementedError", 501)


async def test_vllm_answers_unauthorized_without_a_key(serve):
    server = await serve(api_keys=("sk-0123456789abcdef",))
    for answer in (await server.get("/vllm/v1/models"), await server.post("/vllm/v1/messages", HELLO_MESSAGE)):
        assert (answer.status, answer.body) == (401, b'{"error":"Unauthorized"}')


@pytest.mark.parametrize("options", [{}, {"surfaces": dedicated_mounts("vllm")}], ids=["below", "alone"])
async def test_vllm_serves_responses_and_messages_in_its_own_form(serve, options):
    server, prefix = await serve(reply=echo_and_end, **options), "" if options else "/vllm"
    response = (await server.post(f"{prefix}/v1/responses", HELLO_RESPONSE)).json
    assert list(response)[:3] == ["id", "created_at", "incomplete_details"] and response["output"][0]["phase"] is None
    path = f"{prefix}/v1/responses/{response['id']}"
    assert (await server.get(path)).json == response
    for refused, status, message, kind in (
        (await server.post(f"{path}/cancel"), 400, "Cannot cancel a synchronous response.", "invalid_request_error"),
        (await server.get(f"{prefix}/v1/responses/resp_x"), 404, "Response with id 'resp_x' not found.",
         "invalid_request_error"),
        (await server.post(f"{prefix}/v1/responses", HELLO_RESPONSE | {"model": "nope"}), 404,
         "The model `nope` does not exist. Valid aliases: tiny.", "NotFoundError"),
    ):  # fmt: skip
        assert (refused.status, refused.error["message"], refused.error["type"]) == (status, message, kind)
    assert (await server.call("DELETE", path)).json == {"detail": "Method Not Allowed"}
    streamed = await server.post(f"{prefix}/v1/responses", HELLO_RESPONSE | {"stream": True})
    assert b"[DONE]" not in streamed.body and b"event: response.completed\ndata: " in streamed.body
    behind = await server.post(f"{prefix}/v1/responses", HELLO_RESPONSE | {"stream": True, "background": True})
    assert b"event: response.completed\ndata: " in behind.body and b"queued" not in behind.body

    message = (await server.post(f"{prefix}/v1/messages", HELLO_MESSAGE)).json
    assert message["id"].startswith("chatcmpl-") and message["content"][0]["text"]
    counted = (await server.post(f"{prefix}/v1/messages/count_tokens", HELLO_MESSAGE)).json
    usage = message["usage"]
    assert counted["input_tokens"] == sum(count for name, count in usage.items() if name != "output_tokens")
    assert counted["context_management"] == {"original_input_tokens": counted["input_tokens"]}
    for path in ("messages", "messages/count_tokens"):
        unknown = await server.post(f"{prefix}/v1/{path}", HELLO_MESSAGE | {"model": "nope"})
        sentence = "The model `nope` does not exist. Valid aliases: tiny."
        assert (unknown.status, unknown.json) == (
            404, {"type": "error", "error": {"type": "not_found_error", "message": sentence}}
        )  # fmt: skip
        shapeless = await server.post(f"{prefix}/v1/{path}", {"model": "tiny"})
        assert (shapeless.status, shapeless.error["type"]) == (400, "Bad Request")
        assert (await server.get(f"{prefix}/v1/{path}")).json == {"detail": "Method Not Allowed"}
    long = {"messages": [{"role": "user", "content": "b " * 9000}]}
    refused = await server.post(f"{prefix}/v1/messages", HELLO_MESSAGE | long)
    assert refused.error["type"] == "invalid_request_error" and "maximum context length" in refused.error["message"]
    await server.wait_until_idle()


async def test_vllm_responses_are_stored_only_where_the_server_stores_them(serve):
    server = await serve(response_store=0)
    response = (await server.post("/vllm/v1/responses", HELLO_RESPONSE | {"request_id": "mine"})).json
    assert response["id"] == "mine"
    refused = await server.post("/vllm/v1/responses", HELLO_RESPONSE | {"background": True})
    assert (refused.status, refused.error["type"]) == (400, "invalid_request_error")


async def test_openai_client_reads_vllm_responses(serve):
    server = await serve(reply=echo_and_end)
    async with AsyncOpenAI(base_url=f"{server.url}/vllm/v1", api_key="none", max_retries=0) as client:
        whole = await client.responses.create(model="tiny", input="Hello", temperature=0, extra_body={"top_k": 5})
        async with client.responses.stream(model="tiny", input="Hello", temperature=0) as stream:
            final = await stream.get_final_response()
        assert final.output_text == whole.output_text != "" and final.usage.total_tokens == whole.usage.total_tokens
        following = await client.responses.create(model="tiny", input="More", previous_response_id=whole.id)
        assert following.usage.input_tokens > whole.usage.input_tokens
        with pytest.raises(NotFoundError, match="Response with id 'resp_x' not found"):
            await client.responses.retrieve("resp_x")


async def test_vllm_version_models_and_tokenizer_routes_answer(server):
    assert (await server.get("/vllm/version")).json == {"version": "0.33.0"}
    assert (await server.get("/vllm/load")).json == {"server_load": 0}
    assert (await server.get("/vllm/kv_event_sources")).json == {}
    server.model.settings.cache_events = CacheEventSettings("tcp://*:5557", topic="kv@a@tiny")
    source = (await server.get("/vllm/kv_event_sources")).json["0"]
    assert (source["publisher"], source["endpoint"], source["replay_endpoint"]) == ("zmq", "tcp://*:5557", None)
    assert (source["topic"], source["buffer_steps"], source["hwm"]) == ("kv@a@tiny", 10_000, 100_000)
    for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
        answer = await server.call(method, "/vllm" + path)
        assert (answer.status, answer.body) == (200, b"")
    (card,) = (await server.get("/vllm/v1/models")).json["data"]
    assert (card["id"], card["max_model_len"], card["permission"][0]["organization"]) == ("tiny", 4096, "*")
    assert (await server.get("/vllm/v1/models/tiny")).json == {"detail": "Not Found"}
    assert b"vllm:num_requests_running" in (await server.get("/vllm/metrics")).body
    tokenized = (await server.post("/vllm/tokenize", {"prompt": "Zwölf", "return_token_strs": True})).json
    assert list(tokenized) == ["count", "max_model_len", "tokens", "token_strs"]
    assert (await server.post("/vllm/detokenize", {"tokens": [*tokenized["tokens"], 9999]})).json == {"prompt": "Zwölf"}
    chat = (await server.post("/vllm/tokenize", {"messages": HELLO_CHAT["messages"]})).json
    assert chat["count"] > 1 and chat["token_strs"] is None
    answer = await server.post("/vllm/tokenize", {})
    assert (answer.status, answer.error["param"]) == (400, "body.prompt")
    assert (await server.get("/vllm/tokenizer_info")).json == {"detail": "Not Found"}


@pytest.mark.parametrize("prefix", ["", "/vllm"])
async def test_tokenized_conversations_have_the_tokens_of_their_chats(server, prefix):
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
    for members in (
        {"tools": [tool]},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"tools": [tool], "chat_template_kwargs": {"enable_thinking": True}, "add_generation_prompt": False},
    ):
        body = {"messages": HELLO_CHAT["messages"]} | members
        tokenized = (await server.post(prefix + "/tokenize", body)).json
        rendered = (await server.post(prefix + "/v1/chat/completions/render", body | {"max_tokens": 1})).json
        assert tokenized["tokens"] == rendered["token_ids"] and tokenized["count"] == len(tokenized["tokens"])
    for members in ({"chat_template": "x"}, {"chat_template_kwargs": {"chat_template": "x"}}):
        refused = await server.post(prefix + "/tokenize", {"messages": HELLO_CHAT["messages"]} | members)
        assert refused.status == 400
        assert ("--trust-request-chat-template" in refused.error["message"]) == (prefix == "/vllm")


async def test_openai_client_passes_all_vllm_extra_parameters(serve):
    server = await serve(reply=echo_and_end)
    extras = {
        "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": False, "min_tokens": 1, "priority": 3,
        "stop_token_ids": [7], "include_stop_str_in_output": True, "return_token_ids": True,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True, "truncate_prompt_tokens": -1, "cache_salt": "tenant", "echo": True,
        "chat_template_kwargs": {"enable_thinking": False}, "documents": [{"text": "a"}], "prompt_logprobs": 1,
        "request_id": "mine", "vllm_xargs": {"a": 1}, "add_special_tokens": False, "use_beam_search": False,
        "return_prompt_text": True,
    }  # fmt: skip
    base = {
        "model": "tiny",
        "messages": HELLO_CHAT["messages"],
        "extra_body": extras,
        "logprobs": True,
        "top_logprobs": 2,
    }
    async with AsyncOpenAI(base_url=f"{server.url}/vllm/v1", api_key="none", max_retries=0) as client:
        answer = await client.chat.completions.create(**base)
        assert answer.id == "chatcmpl-mine"
        assert answer.prompt_token_ids and answer.choices[0].token_ids and answer.prompt_logprobs[0] is None
        assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
        assert HELLO_CHAT["messages"][-1]["content"] in answer.prompt_text
        stream = await client.chat.completions.create(
            **base | {"extra_body": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}},
            stream=True,
        )
        chunks = [chunk async for chunk in stream]
        counts = [chunk.usage.completion_tokens for chunk in chunks]
        assert counts[0] == 0 and counts == sorted(counts) and counts[-2] == counts[-1] > 5
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == answer.choices[0].message.content
        assert (await client.models.list()).data[0].owned_by == "vllm"
        for invalid in ({"guided_json": "{"}, {"structured_outputs": {"regex": "(?=a)"}}, {"logits_processors": ["x"]}):
            with pytest.raises(BadRequestError, match=next(iter(invalid))):
                await client.chat.completions.create(**base | {"extra_body": invalid})
        with pytest.raises(BadRequestError, match="temperature must be in"):
            await client.completions.create(model="tiny", prompt="a", temperature=3)
        with pytest.raises(APIError, match="max allowed: 20"):
            async for _ in await client.completions.create(model="tiny", prompt="a", logprobs=30, stream=True):
                raise AssertionError("nothing may come")
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        shared = await client.chat.completions.create(**base)
        assert (shared.id, shared.choices[0].token_ids) == ("chatcmpl-mine", answer.choices[0].token_ids)
        assert shared.prompt_logprobs == answer.prompt_logprobs


@pytest.mark.parametrize("prefix", ["", "/vllm"])
async def test_tokens_of_the_prefilling_server_are_reused(server, prefix):
    """They take the place of the messages, which still decide how the answer is read."""
    ids = (await server.post(prefix + "/tokenize", {"prompt": PROMPT})).json["tokens"]
    transfer = {"kv_transfer_params": {"prompt_token_ids": ids}}
    chat = HELLO_CHAT | {"max_tokens": 40}
    path = prefix + "/v1/chat/completions"
    answer = (await server.post(path, chat | transfer)).json
    assert (answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens"]) == (PROMPT, len(ids))
    if prefix:
        message = (await server.post(prefix + "/v1/messages", HELLO_MESSAGE | {"max_tokens": 40} | transfer)).json
        assert message["content"][0]["text"] == PROMPT
        response = HELLO_RESPONSE | {"max_output_tokens": 40} | transfer
        assert (await server.post(prefix + "/v1/responses", response)).json["output"][0]["content"][0]["text"] == PROMPT
    plain = (await server.post(path, chat | {"echo": True})).json["usage"]["prompt_tokens"]
    echoed = (await server.post(path, chat | transfer | {"echo": True})).json
    assert echoed["usage"]["prompt_tokens"] == plain != len(ids)  # as in the original
    for wrong in ([], [-1], [True], ["a"], "abc", [70, 10**6]):
        refused = await server.post(path, chat | {"kv_transfer_params": {"prompt_token_ids": wrong}})
        assert refused.status == 400 and "prompt_token_ids" in refused.body.decode(), refused.body
    batch = {"messages": [chat["messages"]], **transfer}
    refused = await server.post(prefix + "/v1/chat/completions/batch", batch)
    assert (refused.status, refused.error["param"]) == (400, "kv_transfer_params.prompt_token_ids")


async def test_derender_names_its_own_member_for_unknown_tokens_of_the_prompt(server):
    body = {"model": "tiny", "stream": True, "generate_chunk": {"choices": [{"token_ids": [70]}]},
            "chat_request": HELLO_CHAT, "prompt_token_ids": [10**6]}  # fmt: skip
    refused = await server.post("/vllm/v1/chat/completions/derender", body)
    assert (refused.status, refused.error["param"]) == (400, "prompt_token_ids")
    assert "kv_transfer_params" not in refused.error["message"]


def sse_chunks(answer):
    lines = [line.removeprefix("data: ") for line in answer.body.decode().split("\n") if line.startswith("data: {")]
    return list(map(json.loads, lines))


async def derender_stream(server, path, generated, **members):
    """Return the chunks that a stream of generated tokens means, with the state passed from chunk to chunk."""
    state, chunks = None, []
    for chunk in generated:
        body = {"model": "tiny", "stream": True, "generate_chunk": chunk, "stream_state": state, **members}
        answer = await server.post(path, body)
        assert answer.status == 200, answer.body
        state = answer.json["stream_state"]
        chunks.append(answer.json["chunk"])
    return chunks


def joined_logprobs(choices):
    return [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]


@pytest.mark.parametrize("prefix", ["", "/vllm"])
@pytest.mark.parametrize("options", [{}, {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}])
async def test_chunks_of_generated_tokens_become_the_chunks_of_their_request(server, prefix, options):
    """Characters of several tokens are whole, as in one stream."""
    members = {"temperature": 0, "max_tokens": 60, "stream": True, "stream_options": {"include_usage": True}} | options
    request = HELLO_CHAT | members | {"messages": [{"role": "user", "content": "Zwölf größere Bäume"}]}
    streamed = sse_chunks(await server.post("/vllm/v1/chat/completions", request))
    rendered = (await server.post(prefix + "/v1/chat/completions/render", request)).json
    generated = sse_chunks(await server.post(prefix + "/inference/v1/generate", rendered | {"stream": True}))
    assert len(generated) > 3
    ids = {"prompt_token_ids": rendered["token_ids"]}
    path = prefix + "/v1/chat/completions/derender"
    chunks = await derender_stream(server, path, generated, chat_request=request, **ids)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    wanted = [choice for chunk in streamed for choice in chunk["choices"]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    assert "größere" in text and text == "".join(choice["delta"].get("content") or "" for choice in wanted)
    assert [choice["delta"].get("role") for choice in choices] == ["assistant"] + [None] * (len(choices) - 1)
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == (wanted[-1]["finish_reason"], None)
    assert joined_logprobs(choices) == joined_logprobs(wanted) and bool(joined_logprobs(choices)) == bool(options)
    sent = [choice["token_ids"] for choice in choices]
    assert sent == ([chunk["choices"][0]["token_ids"] for chunk in generated if chunk["choices"]] if options else
                    [None] * len(sent))  # fmt: skip
    assert {chunk["id"] for chunk in chunks} == {generated[0]["request_id"]}
    totals = [chunk["usage"]["total_tokens"] for chunk in chunks if chunk["usage"]]
    assert totals == [chunk["usage"]["total_tokens"] for chunk in generated if chunk["usage"]]
    plain = await derender_stream(server, path, generated, **ids)
    assert "größere" in "".join(choice["delta"].get("content") or "" for chunk in plain for choice in chunk["choices"])


@pytest.mark.parametrize("prefix", ["", "/vllm"])
async def test_chunks_of_generated_tokens_become_completion_chunks(server, prefix):
    request = {"model": "tiny", "prompt": "Zwölf größere", "max_tokens": 40, "temperature": 0, "logprobs": 1}
    whole = (await server.post("/vllm/v1/completions", request)).json["choices"][0]
    (rendered,) = (await server.post(prefix + "/v1/completions/render", request)).json
    generated = sse_chunks(await server.post(prefix + "/inference/v1/generate", rendered | {"stream": True}))
    ids = {"prompt_token_ids": rendered["token_ids"]}
    path = prefix + "/v1/completions/derender"
    chunks = await derender_stream(server, path, generated, completion_request=request, **ids)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["text"] for choice in choices) == whole["text"] and "größere" in whole["text"]
    offsets = [offset for choice in choices if choice["logprobs"] for offset in choice["logprobs"]["text_offset"]]
    assert offsets == whole["logprobs"]["text_offset"]
    assert choices[-1]["finish_reason"] == whole["finish_reason"]
    too_high = {"choices": [{"index": 0, "token_ids": [10**6]}]}
    refused = await server.post(path, {"model": "tiny", "stream": True, "generate_chunk": too_high})
    assert refused.status == 400 and "is not in the vocabulary" in refused.error["message"]
