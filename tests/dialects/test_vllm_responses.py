"""OpenAI's Responses as vLLM serves them. Bytes are those of vLLM 0.33 for the same answers, but for ids and times."""

import json
from dataclasses import replace
from typing import Any

import pytest

from parley.dialects.openai.responses.inlined_request import inline_response
from parley.dialects.records import NO_RECORDS
from parley.dialects.request_context import ApiOptions, RequestContext
from parley.dialects.vllm import responses
from parley.dialects.vllm.error_answers import vllm_error_answer
from parley.errors import EngineError, ParleyError
from parley.types import ChoiceDelta, ChoiceDone, Grammar, PromptAccepted, TokenInfo, ToolCallDelta, Usage

CONTEXT = RequestContext(
    "0123456789abcdef0123456789abcdef",
    1700000000,
    "fp_1",
    context_length=512,
    headers={b"content-type": b"application/json"},
    vocabulary_size=100,
    abilities=frozenset({"chat", "tools", "thinking"}),
)
UID = b"0123456789abcdef0123456789abcdef"
USAGE = Usage(prompt_tokens=18, completion_tokens=6, cached_tokens=4)
PROMPT = PromptAccepted(0, list(range(18)))
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"type": "function", "name": "get_weather", "description": "weather", "parameters": SCHEMA, "strict": True}


def read(context: RequestContext = CONTEXT, **members: Any) -> responses.VllmResponsesReply:
    body = {"model": "m", "input": "Hi", "temperature": 0, "max_output_tokens": 12} | members
    return responses.read_vllm_response(json.dumps({k: v for k, v in body.items() if v is not None}).encode(), context)


def refusal(context: RequestContext = CONTEXT, **members: Any) -> tuple[int, dict[str, Any]]:
    with pytest.raises(ParleyError) as caught:
        read(context, **members)
    answer = vllm_error_answer(caught.value)
    return answer.status, json.loads(answer.body)["error"]


def text(value: str, *tokens: TokenInfo) -> ChoiceDelta:
    return ChoiceDelta(0, value, "content", tokens=list(tokens))


def reasoning_delta(value: str) -> ChoiceDelta:
    return ChoiceDelta(0, value, "reasoning")


def call(arguments: str, name: str | None = None) -> ChoiceDelta:
    call_id = None if name is None else "call_ace84626253899dc"
    return ChoiceDelta(0, "", "tool", tool_call=ToolCallDelta(0, call_id, name, arguments))


def done(reason: Any = "stop") -> ChoiceDone:
    return ChoiceDone(0, reason, USAGE)


def answer_body(*events: Any, context: RequestContext = CONTEXT, **members: Any) -> bytes:
    reply = read(context, **members)
    reply.add_events([PROMPT, *events])
    return reply.render_body(USAGE)


def stream_events(*events: Any, **members: Any) -> list[bytes]:
    """Return the events of a stream."""
    reply = read(stream=True, **members)
    data = reply.render_chunk([PROMPT, *events]) + reply.finish_stream(USAGE)
    assert data.endswith(b"\n\n") and b"[DONE]" not in data
    return data.split(b"\n\n")[:-1]


# -- answers

MESSAGE = (
    b'{"id":"msg_' + UID + b'0000","content":[{"annotations":[],"text":"The sky is blue.","type":"output_text",'
    b'"logprobs":null}],"role":"assistant","status":"completed","type":"message","phase":null}'
)
CUT_MESSAGE = MESSAGE.replace(b'"status":"completed"', b'"status":"incomplete"')
RESPONSE = (
    b'{"id":"resp_' + UID + b'","created_at":1700000000,"incomplete_details":%b,"instructions":null,"metadata":null,'
    b'"model":"m","object":"response","output":[%b],"parallel_tool_calls":true,"temperature":0.0,'
    b'"tool_choice":"none","tools":[],"top_p":1.0,"background":false,"max_output_tokens":12,"max_tool_calls":null,'
    b'"previous_response_id":null,"prompt":null,"prompt_cache_options":null,"prompt_cache_key":null,'
    b'"prompt_cache_retention":null,"reasoning":null,"safety_identifier":null,"service_tier":"auto","status":"%b",'
    b'"text":null,"top_logprobs":null,"truncation":"disabled","usage":%b,"user":null,"presence_penalty":0.0,'
    b'"frequency_penalty":0.0,"kv_transfer_params":null,"ec_transfer_params":null,"input_messages":null,'
    b'"output_messages":null}'
)
COUNTS = (
    b'{"input_tokens":18,"input_tokens_details":{"cached_tokens":4,"cache_write_tokens":0,"input_tokens_per_turn":[],'
    b'"cached_tokens_per_turn":[]},"output_tokens":6,"output_tokens_details":{"reasoning_tokens":0,'
    b'"tool_output_tokens":0,"output_tokens_per_turn":[],"tool_output_tokens_per_turn":[]},"total_tokens":24}'
)


def test_vllm_response_has_its_own_bytes():
    events = text("The sky is"), text(" blue.")
    assert answer_body(*events, done()) == RESPONSE % (b"null", MESSAGE, b"completed", COUNTS)
    cut = b'{"reason":"max_output_tokens"}', CUT_MESSAGE, b"incomplete", COUNTS
    assert answer_body(*events, done("length")) == RESPONSE % cut
    assert json.loads(answer_body(done()))["output"] == []


def test_vllm_response_counts_whole_new_pages_of_the_cache():
    usage = json.loads(answer_body(text("a"), done(), context=replace(CONTEXT, page_tokens=16)))["usage"]
    assert usage["input_tokens_details"]["cache_write_tokens"] == 12


def test_vllm_response_shows_its_settings_as_they_came():
    settings = {
        "instructions": "Be kind.", "metadata": {"a": "b"}, "parallel_tool_calls": False, "max_tool_calls": 3,
        "service_tier": "flex", "truncation": "auto", "user": "u", "presence_penalty": 0.5, "frequency_penalty": 0.25,
        "prompt_cache_key": "k", "prompt_cache_retention": "24h", "safety_identifier": "s",
        "prompt_cache_options": {"mode": "explicit", "ttl": "30m", "comparison_response_id": None},
    }  # fmt: skip
    answer = json.loads(answer_body(text("a"), done(), **settings, max_output_tokens=None, model=None))
    assert {name: answer[name] for name in settings} == settings
    assert answer["max_output_tokens"] == 512 - 18 and answer["model"] == ""
    warmed = settings["prompt_cache_options"] | {"prewarm": True}  # read, not shown
    answer = json.loads(answer_body(done(), prompt_cache_options=warmed))
    assert answer["prompt_cache_options"] == settings["prompt_cache_options"]
    form = {"type": "json_schema", "name": "c", "schema": SCHEMA, "strict": True}
    answer = json.loads(answer_body(done(), text={"format": form}, reasoning={"effort": "low"}, tools=[FUNCTION]))
    shown = {"name": "c", "schema": SCHEMA, "type": "json_schema", "description": None, "strict": True}
    assert json.dumps(answer["text"]) == json.dumps({"format": shown, "verbosity": None})
    assert answer["reasoning"] == dict.fromkeys(("context", "generate_summary", "mode", "summary")) | {"effort": "low"}
    assert json.dumps(answer["tools"]) == json.dumps([{
        "name": "get_weather", "parameters": SCHEMA, "strict": True, "type": "function", "allowed_callers": None,
        "async": None, "defer_loading": None, "description": "weather", "output_schema": None}])  # fmt: skip
    assert answer["tool_choice"] == "auto"


def test_vllm_response_shows_reasoning_and_calls():
    answer = answer_body(
        reasoning_delta("Hm."), call('{"city": ', "get_weather"), call('"Paris"}'), done("tool"), tools=[FUNCTION]
    )
    items = (
        b'"output":[{"id":"rs_' + UID + b'0000","summary":[],"type":"reasoning","content":[{"text":"Hm.",'
        b'"type":"reasoning_text"}],"encrypted_content":null,"status":null},{"arguments":"{\\"city\\": \\"Paris\\"}",'
        b'"call_id":"chatcmpl-tool-ace84626253899dc","name":"get_weather","type":"function_call","id":"fc_'
        + UID + b'0001","async":null,"caller":null,"namespace":null,"status":"completed"}],'
    )  # fmt: skip
    assert items in answer
    included = {"include": ["reasoning.encrypted_content"], "reasoning": {"summary": "auto"}}
    assert items.partition(b",{")[0] in answer_body(reasoning_delta("Hm."), done(), **included)
    assert (
        json.loads(answer_body(reasoning_delta("Hm."), text("a"), done(), include_reasoning=False))["output"][0]["type"]
        == "message"
    )


def test_vllm_response_is_streamed_in_its_own_bytes():
    in_progress = RESPONSE % (b"null", b"", b"in_progress", b"null")
    place = b'"item_id":"msg_' + UID + b'0000"'
    opened = b'{"id":"msg_' + UID + b'0000","content":[],"role":"assistant","status":"in_progress","type":"message",'
    part = b'"part":{"annotations":[],"text":"%b","type":"output_text","logprobs":%b},"sequence_number":%d'
    expected = [
        (b"created", b'{"response":' + in_progress + b',"sequence_number":0'),
        (b"in_progress", b'{"response":' + in_progress + b',"sequence_number":1'),
        (b"output_item.added", b'{"item":' + opened + b'"phase":null},"output_index":0,"sequence_number":2'),
        (b"content_part.added", b'{"content_index":0,' + place + b',"output_index":0,' + part % (b"", b"[]", 3)),
        (b"output_text.delta", b'{"content_index":0,"delta":"The sky is",' + place
         + b',"logprobs":[],"output_index":0,"sequence_number":4'),
        (b"output_text.delta", b'{"content_index":0,"delta":" blue.",' + place
         + b',"logprobs":[],"output_index":0,"sequence_number":5'),
        (b"output_text.done", b'{"content_index":0,' + place
         + b',"logprobs":[],"output_index":0,"sequence_number":6,"text":"The sky is blue."'),
        (b"content_part.done", b'{"content_index":0,' + place + b',"output_index":0,'
         + part % (b"The sky is blue.", b"null", 7)),
    ]  # fmt: skip
    for reason, details, message, status in (
        ("stop", b"null", MESSAGE, b"completed"),
        ("length", b'{"reason":"max_output_tokens"}', CUT_MESSAGE, b"incomplete"),
    ):
        item = b'{"item":' + message + b',"output_index":0,"sequence_number":8'
        last = b'{"response":' + RESPONSE % (details, message, status, COUNTS) + b',"sequence_number":9'
        frames = [b'event: response.%b\ndata: %b,"type":"response.%b"}' % (name, data, name)
                  for name, data in (*expected, (b"output_item.done", item), (status, last))]  # fmt: skip
        assert stream_events(text("The sky is"), text(" blue."), done(reason)) == frames
    assert [frame.split(b"\n")[0] for frame in stream_events(done())] == [
        b"event: response.created", b"event: response.in_progress", b"event: response.completed",
    ]  # fmt: skip


def test_vllm_reasoning_and_calls_are_streamed_in_its_own_bytes():
    frames = stream_events(reasoning_delta("Hm."), call("{}", "get_weather"), done("tool"), tools=[FUNCTION])
    reasoning = b'{"item":{"id":"rs_' + UID + b'0000","summary":[],"type":"reasoning","content":%b,'
    assert reasoning % b"null" + b'"encrypted_content":null,"status":"in_progress"},"output_index":0' in frames[2]
    assert b'"part":{"text":"","type":"reasoning_text"},"sequence_number":3' in frames[3]
    assert frames[4].endswith(b'"sequence_number":4,"type":"response.reasoning_text.delta"}')
    content = b'[{"text":"Hm.","type":"reasoning_text"}]'
    assert reasoning % content + b'"encrypted_content":null,"status":"completed"},"output_index":0' in frames[7]
    assert b'{"item":{"arguments":"","call_id":"chatcmpl-tool-ace84626253899dc","name":"get_weather"' in frames[8]
    call_id = b'"item_id":"fc_' + UID + b'0001","output_index":1'
    assert frames[9:11] == [
        b'event: response.function_call_arguments.delta\ndata: {"delta":"{}",' + call_id
        + b',"sequence_number":9,"type":"response.function_call_arguments.delta"}',
        b'event: response.function_call_arguments.done\ndata: {"arguments":"{}",' + call_id
        + b',"sequence_number":10,"type":"response.function_call_arguments.done","name":"get_weather"}',
    ]  # fmt: skip
    assert b'"status":"completed"},{"arguments":"{}"' in frames[-1]  # reasoning, where the answer is a stream


def test_vllm_items_that_are_cut_off_are_incomplete():
    reasoned = stream_events(reasoning_delta("Hm."), done("length"))
    end = b'"encrypted_content":null,"status":"incomplete"}'
    assert end in reasoned[-2] and end in reasoned[-1]
    assert json.loads(answer_body(reasoning_delta("Hm."), done("length")))["output"][0]["status"] is None
    both = text("Hm."), call("{", "get_weather"), done("length")
    for answer in (answer_body(*both), stream_events(*both)[-1].partition(b'"response":')[2]):
        statuses = b'"role":"assistant","status":"completed"', b'"namespace":null,"status":"incomplete"}]'
        assert all(status in answer for status in statuses)


def test_vllm_custom_calls_have_its_members():
    written = call('{"input": "ls', "shell"), call(' -la"}'), done("tool")
    tools = [{"type": "custom", "name": "shell"}]
    item = (
        b'{"call_id":"chatcmpl-tool-ace84626253899dc","input":"%b","name":"shell","type":"custom_tool_call",'
        b'"id":"ctc_' + UID + b'0000","async":null,"caller":null,"namespace":null}'
    )  # fmt: skip
    assert b'"output":[' + item % b"ls -la" + b"]" in answer_body(*written, tools=tools)
    frames = stream_events(*written, tools=tools)
    assert b'data: {"item":' + item % b"" + b"," in frames[2] and b'data: {"item":' + item % b"ls -la" in frames[-2]


def test_vllm_response_finds_the_chosen_tool_in_its_namespace():
    spaces = [{"type": "namespace", "name": name, "description": "d", "tools": [FUNCTION]} for name in ("a", "b")]
    chosen = {"type": "function", "name": "get_weather"}
    for name in ("get_weather", "a__get_weather"):
        members = {"tools": spaces[:1], "tool_choice": chosen | {"name": name}}
        assert read(**members).request.prompts[0].forced_tool == "a__get_weather"  # type: ignore[union-attr]
        shown = {"type": "function", "name": "a__get_weather"}
        assert json.loads(answer_body(done(), **members))["tool_choice"] == shown
    assert read(tools=[*spaces, FUNCTION], tool_choice=chosen).request.prompts[0].forced_tool == "get_weather"  # type: ignore[union-attr]
    status, error = refusal(tools=spaces, tool_choice=chosen)
    assert (status, error["message"]) == (400, (
        "Tool choice 'get_weather' is ambiguous: it is defined in more than one namespace (a__get_weather, "
        "b__get_weather). Select it by its full '<namespace>__<name>' name. (parameter=tool_choice)"))  # fmt: skip


def test_vllm_response_has_its_raw_messages_if_they_are_wanted():
    tokens = [TokenInfo(5, "The", b"The"), TokenInfo(6, " \xc3", b" \xc3"), TokenInfo(7, "\xa9", b"\xa9.")]
    mark = TokenInfo(9, "<|end|>", b"<|end|>", is_special=True)
    prompt, answer = PromptAccepted(0, [1, 2], text="<user>Hi"), ChoiceDelta(0, "The é.", tokens=[*tokens, mark])
    messages = (
        b'"input_messages":[{"message":"<user>Hi","tokens":[1,2],"type":"raw_message_tokens"}],'
        b'"output_messages":[{"message":"The \xc3\xa9.","tokens":[5,6,7,9],"type":"raw_message_tokens"}]'
    )
    for stream in (False, True):
        reply = read(enable_response_messages=True, stream=stream)
        assert reply.request.output_options.ids and reply.request.output_options.prompt_text
        begun = reply.render_chunk([prompt, answer, done()]) if stream else reply.add_events([prompt, answer, done()])
        assert begun is None or begun.count(b'"input_messages":null,"output_messages":null') == 2
        assert messages in (reply.finish_stream(USAGE) if stream else reply.render_body(USAGE))
    stopped = ChoiceDone(0, "stop", USAGE, stop="\xe9")
    for keeps, text in ((False, "The "), (True, "The é.")):
        reply = read(enable_response_messages=True, stop=["\xe9"], include_stop_str_in_output=keeps)
        reply.add_events([prompt, answer, stopped])
        assert json.loads(reply.render_body(USAGE))["output_messages"][0]["message"] == text
    reply = read(enable_response_messages=True, stop=[".<|end|>"])
    reply.add_events([prompt, answer, ChoiceDone(0, "stop", USAGE, stop=".<|end|>")])
    assert json.loads(reply.render_body(USAGE))["output_messages"][0]["message"] == "The é."
    assert not read().request.output_options.ids


def test_vllm_response_lists_logprobs_only_if_they_are_included():
    top_tokens = [TokenInfo(5, "The", b"The", -0.5), TokenInfo(6, "A", b"A", -16.0)]
    token = TokenInfo(5, "The", b"The", -0.5, top_tokens=top_tokens)
    included = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    answer = answer_body(text("The", token), done(), **included)
    assert (
        b'"logprobs":[{"token":"The","bytes":[84,104,101],"logprob":-0.5,"top_logprobs":[{"token":"The",'
        b'"bytes":[84,104,101],"logprob":-0.5},{"token":"A","bytes":[65],"logprob":-16.0}]}]' in answer
    )
    assert json.loads(answer)["top_logprobs"] == 2 and read(**included).request.output_options.logprobs == 2
    (delta,) = [frame for frame in stream_events(text("The", token), done(), **included) if b"text.delta\n" in frame]
    assert b'"logprobs":[{"token":"The","logprob":-0.5,"top_logprobs":[{"token":"The","logprob":-0.5},' in delta
    assert read(top_logprobs=2).request.output_options.logprobs is None
    limited = replace(CONTEXT, api_options=ApiOptions(max_logprobs=100))
    assert read(limited, include=included["include"], top_logprobs=-1).request.output_options.logprobs == -1


def test_vllm_response_stream_ends_with_its_error():
    reply = read(stream=True)
    reply.render_chunk([PROMPT, text("The")])
    *_, error, failed = reply.fail_stream(EngineError("broken")).split(b"\n\n")[:-1]
    assert json.loads(error.partition(b"data: ")[2])["message"] == "broken" and b"[DONE]" not in failed
    assert b'"type":"InternalServerError"' in error and failed.startswith(b"event: response.failed\n")
    assert reply.render_ping() == b": ping\n\n"


# -- requests


def test_vllm_response_takes_its_extra_members():
    request = read(
        top_k=5, min_p=0.5, repetition_penalty=1.5, seed=7, stop=["a"], stop_token_ids=[9], ignore_eos=True,
        include_stop_str_in_output=True, logit_bias={"5": 1.5}, cache_salt="s", priority=3, session_id="x",
        structured_outputs={"choice": ["a", "b"]}, chat_template_kwargs={"y": 1}, vllm_xargs={"a": 1},
    ).request  # fmt: skip
    sampling, stop = request.sampling, request.stop_conditions
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty, sampling.seed) == (5, 0.5, 1.5, 7)
    assert (stop.strings, stop.ids, stop.ignore_eos, stop.reserved_tokens) == (["a"], [9], True, 1)
    assert (sampling.logit_bias, request.cache_salt, request.priority) == ({5: 1.5}, "s", 3)
    assert request.grammar == Grammar("choice", ["a", "b"], field="structured_outputs.choice")
    assert request.prompts[0].options == {"y": 1}  # type: ignore[union-attr]
    assert json.loads(answer_body(done(), request_id="mine"))["id"] == "mine"
    elsewhere = {"n": 3, "use_beam_search": True, "logprob_token_ids": [], "prompt_logprobs": 1}
    assert read(stream=True, **elsewhere).request.n == 1  # members of other routes
    assert read(replace(CONTEXT, generation_defaults={"top_k": 3.0})).request.sampling.top_k == 3


def test_vllm_response_takes_inputs_that_the_service_refuses():
    (message,) = read(input="").request.prompts[0].messages  # type: ignore[union-attr]
    assert (message.role, message.content) == ("user", "")
    output = {"type": "function_call_output", "call_id": "c", "output": "5"}
    (message,) = read(input=[output]).request.prompts[0].messages  # type: ignore[union-attr]
    assert (message.role, message.content) == ("tool", "5")
    loose = {"type": "json_schema", "name": "c", "schema": SCHEMA, "strict": True}
    assert read(text={"format": loose}, tools=[FUNCTION]).request.grammar == Grammar(
        "json", SCHEMA, field="text.format"
    )


@pytest.mark.parametrize(
    ("members", "status", "message", "kind", "param"),
    [
        ({"input": None}, 400, "1 validation error:\n  {'type': 'missing', 'loc': 'body.input', 'msg': 'Field "
         "required', 'input': '<dict of 3 items>'}", "Bad Request", "body.input"),
        ({"input": 3}, 400, "2 validation errors:\n  {'type': 'string_type', 'loc': 'body.input', 'msg': 'Input should "
         "be a valid string', 'input': '3'}\n  {'type': 'list_type', 'loc': 'body.input', 'msg': 'Input should be a "
         "valid list', 'input': '3'}", "Bad Request", "body.input"),
        ({"input": []}, 400, "Cannot apply chat template to an empty conversation. Provide at least one message.",
         "BadRequestError", None),
        ({"max_output_tokens": 0}, 400, "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)",
         "BadRequestError", "max_tokens"),
        ({"max_output_tokens": "x"}, 400, "1 validation error:\n  {'type': 'int_parsing', 'loc': "
         "'body.max_output_tokens', 'msg': 'Input should be a valid integer, unable to parse string as an integer', "
         "'input': 'x'}", "Bad Request", "body.max_output_tokens"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, 400, "Unsupported input item type: item_reference "
         "(parameter=input)", "BadRequestError", "input"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, 400, "Unsupported input item type: compaction "
         "(parameter=input)", "BadRequestError", "input"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, 400, "Encrypted content is not "
         "supported. (parameter=input)", "BadRequestError", "input"),
        ({"max_output_tokens": 100000}, 400, "max_output_tokens=100000 cannot be greater than max_model_len=512. "
         "Please request fewer output tokens. (parameter=max_output_tokens, value=100000)", "BadRequestError",
         "max_output_tokens"),
        ({"prompt": {"id": "x"}}, 400, "prompt template is not supported (parameter=prompt)", "BadRequestError",
         "prompt"),
        ({"background": True, "store": False}, 400, "background can only be used when `store` is true "
         "(parameter=background)", "BadRequestError", "background"),
        ({"background": True}, 400, responses.NO_BACKGROUND, "invalid_request_error", "background"),
        ({"previous_response_id": "resp_nope"}, 404, "Response with id 'resp_nope' not found.",
         "invalid_request_error", "response_id"),
        ({"structured_outputs": {"choice": ["a"]}, "text": {"format": {"type": "json_object"}}}, 400,
         "Cannot specify both structured_outputs and text.format (parameter=structured_outputs)", "BadRequestError",
         "structured_outputs"),
        ({"tool_choice": "required"}, 400, "Tool choice 'required' must be specified with 'tools' parameter. "
         "(parameter=tool_choice)", "BadRequestError", "tool_choice"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "x"}}, 400, "Tool choice 'function' not "
         "found in 'tools' parameter. (parameter=tool_choice)", "BadRequestError", "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "x"}}, 400, "Tool choice 'function' not found in 'tools' "
         "parameter. (parameter=tool_choice)", "BadRequestError", "tool_choice"),
        ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, 400, "Requested sample logprobs of 21, "
         "which is greater than max allowed: 20 (parameter=logprobs, value=21)", "BadRequestError", "logprobs"),
        ({"previous_input_messages": [{}], "previous_response_id": "resp_nope"}, 400, "Only one of "
         "`previous_input_messages` and `previous_response_id` can be set.", "invalid_request_error",
         "previous_response_id"),
    ],
    ids=str,
)  # fmt: skip
def test_vllm_response_refusals_use_original_wording(members, status, message, kind, param):
    assert refusal(**members) == (status, {"message": message, "type": kind, "param": param, "code": status})


def test_vllm_response_takes_messages_of_harmony_without_effect():
    assert read(previous_input_messages=[{"role": "user"}]).request == read().request


def test_vllm_response_bounds_the_id_that_it_repeats():
    assert json.loads(answer_body(done(), request_id="a" * 256))["id"] == "a" * 256
    for wrong in ("a" * 257, "", "a\n"):
        status, error = refusal(request_id=wrong)
        assert status == 400 and "request_id" in error["param"]


def test_coordinator_keeps_vllm_responses_in_its_form():
    def inline(**members: Any) -> Any:
        body = json.dumps({"model": "m", "input": "Hi"} | members).encode()
        return inline_response(
            body, CONTEXT, decode=responses.decode_response_body, event_stream=responses.VllmEventStream
        )

    with pytest.raises(ParleyError) as caught:
        inline(prompt={"id": "x"})
    assert json.loads(vllm_error_answer(caught.value).body)["error"]["type"] == "BadRequestError"
    assert CONTEXT.records is NO_RECORDS
    ended = inline(stream=True).fail_stream(EngineError("broken"))
    assert b"[DONE]" not in ended and b'"type":"InternalServerError"' in ended
