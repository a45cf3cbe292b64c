"""MindIE's native and vLLM interfaces: meaning of bodies, texts of refusals, and the exact bytes of answers."""

import json
from typing import Any

import pytest
from support.mindie_errors import validation_error

from parley.dialects.admin_requests import TokenizeResult
from parley.dialects.mindie import STRICT, control
from parley.dialects.mindie.api_rules import MindieRules
from parley.dialects.mindie.interfaces import native, vllm
from parley.dialects.request_context import RequestContext
from parley.errors import EngineDied, InUse, NoTokens, ParleyError, TimeLimitPassed, UnknownToken
from parley.types import (
    ChoiceDelta,
    ChoiceDone,
    PromptAccepted,
    StopConditions,
    TextPrompt,
    TokenCost,
    TokenInfo,
    TokensPrompt,
    Usage,
)

RULES = MindieRules("strict")
PROFILES = [MindieRules("strict-old"), RULES, MindieRules("extended")]
CONTEXT = RequestContext("0f" * 16, 1700000000, "fp_1", context_length=100)
USAGE = Usage(prompt_tokens=3, completion_tokens=3)
ONE = TokenInfo(306, " I", b" I", cost=TokenCost(2, 0.005, 0.04))
TWO = TokenInfo(4966, " am", b" am", cost=TokenCost(3, 0.001, 0.127))
THREE = TokenInfo(263, " a", b" a", cost=TokenCost(1, 0.0, 0.0284))
ACCEPTED = PromptAccepted(0, [1, 2, 3], 77)
DONE = ChoiceDone(0, "length", USAGE)


def read_native(rules: MindieRules = RULES, **body: Any) -> native.NativeReply:
    return native.read_mindie_native(rules, json.dumps(body).encode(), CONTEXT)


def read_vllm(rules: MindieRules = RULES, **body: Any) -> vllm.RecordReply:
    return vllm.read_mindie_vllm(rules, json.dumps({"prompt": "a b"} | body).encode(), CONTEXT)


def refusal(read: Any = read_native, **body: Any) -> str:
    with pytest.raises(ParleyError) as caught:
        read(**body)
    return validation_error(caught.value)


def test_mindie_native_reads_text_or_token_ids():
    assert read_native(inputs="a").request.prompts == [TextPrompt("a")]
    assert read_native(inputs=[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]).request.prompts == [
        TextPrompt("ab")
    ]
    request = read_native(input_id=[1, 0, 1048576]).request
    assert request.prompts == [TokensPrompt([1, 0, 1048576])] and request.stop_conditions == StopConditions(
        max_tokens=20, reserved_tokens=1
    )


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"inputs": "a", "input_id": [1]}, "Input conflict."),
        ({"inputs": None, "input_id": None}, "Input conflict."),
        ({}, "Not found inputs."),
        ({"inputs": None}, "Inputs must not be null"),
        ({"input_id": None}, "Input_id should not be empty"),
        ({"input_id": "1"}, "Parameter input_id must be an array"),
        ({"input_id": [1, "2"]}, "Parameter input_id must be integer"),
        ({"input_id": [1.0]}, "Parameter input_id must be integer"),
        ({"input_id": [True]}, "Parameter input_id must be integer"),
        ({"input_id": [-1]}, "Data element in param input_id is invalid"),
        ({"input_id": [1048577]}, "Data element in param input_id is invalid"),
        ({"input_id": []}, "Inputs token length must be in (0, 1048576], but got 0"),
        ({"inputs": 5}, "The type of inputs is abnormal"),
        ({"inputs": [5]}, "The type of inputs is abnormal"),
        ({"inputs": [{"type": "text", "text": 5}]}, "Request param text must be string"),
        ({"inputs": [{"text": 5}]}, "Request param text must be string"),
        ({"inputs": [{"type": "image_url"}]}, "Request param image_url null"),
        ({"inputs": [{"image_url": None}]}, "Request param image_url null"),
        ({"inputs": [{"image_url": {"url": None}}]}, "Request param image_url null"),
        ({"inputs": [{"video_url": "x"}] * 21}, "The number of multimodal url should be no more than 20"),
        ({"inputs": [{"type": "other", "text": "a"}]}, "The type of inputs is abnormal"),
        ({"inputs": [{}]}, "The type of inputs is abnormal"),
        ({"inputs": [{"type": "video_url", "video_url": {"a": 1}}]}, "Request param video_url null"),
        ({"inputs": [{"type": "audio_url", "audio_url": "x"}] * 21},
         "The number of multimodal url should be no more than 20"),
        ({"inputs": []}, "Inputs arr is empty"),
        ({"inputs": ""}, "Inputs must be necessary and data type must be string and length in (0, 41943040], but the "
                         "length of inputs is 0"),
        ({"inputs": "a", "parameters": []}, "parameters must be object type."),
        ({"inputs": "a", "stream": 1}, "stream must be boolean type."),
    ],
)  # fmt: skip
def test_mindie_native_refuses_wrong_input(body, text):
    assert refusal(**body) == text


def test_mindie_generate_without_prompt_prints_blanks_in_the_inner_text():
    assert vllm.NO_PROMPT_MESSAGE == (
        '{"Error": "`inputs` or `prompt` must be necessary and data type must be string. Additionally, the request '
        'body must be valid json", "error_type": "validation"}'
    )


def test_mindie_native_refuses_body_that_is_not_a_json_object():
    for body in (b"", b"{", b"[]", b"\xff", b"[" * 100_000):
        for read, text in (
            (native.read_mindie_native, "Failed to parse request context to json"),
            (vllm.read_mindie_vllm, vllm.NO_PROMPT_MESSAGE),
        ):
            with pytest.raises(ParleyError) as caught:
                read(RULES, body, CONTEXT)
            answer = STRICT.render_error(caught.value)
            assert (answer.status, json.loads(answer.body)["error"]) == (422, text)


@pytest.mark.parametrize("rules", PROFILES, ids=lambda rules: rules.profile)
def test_mindie_native_writes_answer(rules):
    plain = read_native(rules, inputs="a")
    plain.add_events([ACCEPTED, ChoiceDelta(0, " I", tokens=[ONE]), ChoiceDelta(0, " am", tokens=[TWO]), DONE])
    assert plain.render_body(USAGE) == b'{"generated_text":" I am"}' and not plain.request.output_options.token_costs
    detailed = read_native(rules, inputs="a", parameters={"details": True})
    detailed.add_events([ACCEPTED, ChoiceDelta(0, " I am", tokens=[ONE, TWO]), ChoiceDone(0, "stop", USAGE)])
    assert detailed.render_body(USAGE) == (
        b'{"generated_text":" I am","details":{"finish_reason":"eos_token","generated_tokens":3,'
        b'"generated_token_ids":[306,4966],"seed":77}}'
    )


@pytest.mark.parametrize("rules", PROFILES, ids=lambda rules: rules.profile)
def test_mindie_native_stream_reports_prefill_and_decode_time(rules):
    reply = read_native(rules, inputs="a", stream=True, parameters={"details": True})
    assert reply.request.output_options.token_costs and reply.render_chunk([ACCEPTED]) == b""
    assert reply.render_chunk([ChoiceDelta(0, " I", tokens=[ONE])]) == (
        b'data: {"prefill_time":45,"decode_time":null,"token":{"id":[306],"text":" I"}}\n\n'
    )
    # tokens that arrive together are written as separate events
    assert reply.render_chunk([ChoiceDelta(0, " am", tokens=[TWO]), ChoiceDelta(0, " a", tokens=[THREE]), DONE]) == (
        b'data: {"prefill_time":null,"decode_time":128,"token":{"id":[4966],"text":" am"}}\n\n'
        b'data: {"prefill_time":null,"decode_time":28,"generated_text":" I am a","details":{"finish_reason":"length",'
        b'"generated_tokens":3,"seed":77},"token":{"id":[263],"text":null}}\n\n'
    )
    assert reply.finish_stream(USAGE) == b""
    short = read_native(rules, inputs="a", stream=True)
    assert short.render_chunk([ACCEPTED, ChoiceDelta(0, " I", tokens=[ONE]), DONE]) == (
        b'data: {"prefill_time":45,"decode_time":null,"generated_text":" I","details":null,"token":{"id":[306],'
        b'"text":null}}\n\n'
    )
    alone = read_native(rules, inputs="a", stream=True)
    alone.render_chunk([ACCEPTED, ChoiceDelta(0, " I", tokens=[ONE])])
    assert alone.render_chunk([ChoiceDone(0, "cancel", USAGE)]) == (
        b'data: {"prefill_time":null,"decode_time":null,"generated_text":" I","details":null,"token":{"id":[],'
        b'"text":null}}\n\n'
    )


def test_mindie_native_gives_split_text_to_its_last_token():
    reply = read_native(inputs="a", stream=True)
    first_byte, second_byte = TokenInfo(1, "\ufffd", b"\xc3"), TokenInfo(2, "\ufffd", b"\xa9")
    mark = TokenInfo(3, "<x>", b"<x>", is_special=True)
    frames = reply.render_chunk(
        [ACCEPTED, ChoiceDelta(0, "é", tokens=[first_byte, second_byte]), ChoiceDelta(0, " b", tokens=[mark, ONE])]
    )
    written_tokens = [json.loads(frame[6:])["token"] for frame in frames.decode().strip().split("\n\n")]
    assert written_tokens == [
        {"id": [1], "text": ""},
        {"id": [2], "text": "é"},
        {"id": [3], "text": ""},
        {"id": [306], "text": " b"},
    ]


def test_mindie_native_stream_ends_with_error():
    reply = read_native(inputs="a", stream=True)
    assert reply.fail_stream(EngineDied("It ended.")) == b"It ended."
    timeout = TimeLimitPassed("x", limit="client")
    assert reply.fail_stream(timeout) == b"Engine callback timeout: client timeout"
    assert read_native(MindieRules("extended"), inputs="a", stream=True).fail_stream(timeout) == (
        b'data: {"error":"Engine callback timeout: client timeout","error_type":"Incomplete Generation"}\n\n'
    )


def test_mindie_native_reports_engine_errors():
    def status_and_error(error: ParleyError) -> tuple[int, Any, Any]:
        answer = STRICT.render_error(error)
        body = json.loads(answer.body)
        return answer.status, body["error"], body["error_type"]

    incomplete, timeout = "Incomplete Generation", "Engine callback timeout: "
    assert status_and_error(TimeLimitPassed("x", limit="client")) == (500, timeout + "client timeout", incomplete)
    assert status_and_error(TimeLimitPassed("x", limit="server")) == (500, timeout + "server e2eTimeout", incomplete)
    assert status_and_error(TimeLimitPassed("x", limit="token")) == (500, timeout + "server tokenTimeout", incomplete)
    used = "Failed to enqueue inferRequest. Runtime request has been used before."
    assert status_and_error(InUse("x")) == (500, used, incomplete)
    ids = "Failed to enqueue inferRequest. Invalid Input Ids"
    assert status_and_error(UnknownToken("x", field="prompt")) == (424, ids, "Generation Error")
    empty_prompt = read_native(inputs="a").render_refusal(NoTokens("x", field="prompt"))
    assert empty_prompt is not None and empty_prompt.status == 422
    assert json.loads(empty_prompt.body)["error"] == "Inputs token length must be in (0, 1048576], but got 0"
    assert read_native(inputs="a").render_refusal(InUse("x")) is None


# -- vLLM interface


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        (None, "Contains not prompt or prompt null"),
        (5, "The type of prompt is abnormal"),
        ([], "Prompt arr is empty"),
        ("", "Prompt must be necessary and data type must be string and length in (0, 41943040], but the length of "
             "inputs is 0"),
    ],
)  # fmt: skip
def test_mindie_vllm_refuses_wrong_prompt(prompt, text):
    assert refusal(read_vllm, prompt=prompt) == text


@pytest.mark.parametrize("rules", PROFILES, ids=lambda rules: rules.profile)
def test_mindie_vllm_record_starts_with_prompt(rules):
    reply = read_vllm(rules)
    reply.add_events([ACCEPTED, ChoiceDelta(0, "I am"), DONE])
    assert reply.render_body(USAGE) == b'{"text":["a b I am"]}'
    parts = read_vllm(rules, prompt=[{"type": "text", "text": "a"}, {"text": "b"}])
    parts.add_events([ChoiceDelta(0, "x"), DONE])
    assert parts.request.prompts == [TextPrompt("ab")] and parts.render_body(USAGE) == b'{"text":["a x"]}'


def test_mindie_vllm_ranks_choices_unless_streamed():
    reply = read_vllm(n=2, best_of=3, temperature=1)
    reply.add_events(
        [ChoiceDelta(0, "1"), ChoiceDelta(1, "2"), ChoiceDone(0, "stop", USAGE), ChoiceDone(1, "stop", USAGE)]
    )
    assert (reply.request.n, reply.request.best_of) == (2, 3)
    assert reply.render_body(USAGE) == b'{"text":["a b 1","a b 2"]}'
    assert read_vllm(n=2, temperature=1).request.best_of == 2  # returns all choices, likeliest first
    assert read_vllm(n=2, temperature=1, stream=True).request.best_of is None


@pytest.mark.parametrize("rules", PROFILES, ids=lambda rules: rules.profile)
def test_mindie_vllm_stream_records_end_with_nul(rules):
    reply = read_vllm(rules, n=2, temperature=1, stream=True)
    assert reply.render_chunk([ACCEPTED]) == b""
    assert reply.render_chunk([ChoiceDelta(0, "I"), ChoiceDelta(1, "You")]) == b'{"text":["I","You"]}\0'
    assert reply.render_chunk([ChoiceDelta(1, " are"), ChoiceDone(1, "stop", USAGE)]) == b'{"text":[""," are"]}\0'
    assert reply.render_chunk([ChoiceDelta(0, " am"), DONE]) == b'{"text":[" am",""]}\0'
    assert reply.finish_stream(USAGE) == b""
    full = read_vllm(MindieRules(full_text=True), n=2, temperature=1, stream=True)
    assert (
        full.render_chunk([ChoiceDelta(0, "I"), ChoiceDelta(1, "You"), ChoiceDone(1, "stop", USAGE)])
        == b'{"text":["I","You"]}\0'
    )
    assert full.render_chunk([ChoiceDelta(0, " am"), DONE]) == b'{"text":["I am","You"]}\0'


# -- tokenizer


def test_mindie_tokenizer_reads_and_writes():
    def tokenize(**body: Any) -> Any:
        return control.read_mindie_tokenize(RULES, json.dumps(body).encode())

    request = tokenize(inputs="a b")
    assert request.prompt == TextPrompt("a b") and request.with_texts
    assert not tokenize(inputs="a b", do_decode=False).with_texts and tokenize(inputs="a", do_decode="x").with_texts
    assert (
        control.write_mindie_tokens(TokenizeResult([5, 6], ["a", " b"], 100))
        == b'{"token_number":2,"tokens":["a"," b"]}'
    )
    assert control.write_mindie_tokens(TokenizeResult([5, 6], None, 100)) == b'{"token_number":2,"tokens":[]}'
    for inputs in (None, 5, ["a"]):
        assert refusal(tokenize, inputs=inputs) == "Inputs in request body is invalid."
    text = "Inputs data length in [0, 41943040], but the length of inputs is 0"
    assert refusal(tokenize, inputs="") == text
    with pytest.raises(ParleyError) as caught:
        control.read_mindie_tokenize(RULES, b"{")
    assert caught.value.message == "Req body converts to json fail."


def test_mindie_native_frames_tokens_of_one_step_together():
    """Tokens held back because a stop string may have begun get a frame of their own."""
    cost = TokenCost(1, 0.001, 0.012, tokens=3)
    three = [
        TokenInfo(token_id, text, text.encode(), cost=cost) for token_id, text in ((7, " b"), (8, " c"), (9, " d"))
    ]
    reply = read_native(inputs="a", stream=True)
    frames = reply.render_chunk([ACCEPTED, ChoiceDelta(0, " I b c", tokens=[ONE, *three[:2]])])
    frames += reply.render_chunk([ChoiceDelta(0, " d am", tokens=[three[2], TWO]), DONE])
    events = [json.loads(line.removeprefix(b"data: ")) for line in frames.split(b"\n\n")[:-1]]
    assert [event["token"] for event in events] == [
        {"id": [306], "text": " I"}, {"id": [7, 8], "text": " b c"}, {"id": [9], "text": " d"},
        {"id": [4966], "text": None},
    ]  # fmt: skip
    assert [event["decode_time"] for event in events] == [None, 26, 13, 128]
    assert events[-1]["generated_text"] == " I b c d am"
