"""MindIE's TGI interface: meaning of bodies, texts of refusals, and the exact bytes of answers."""

import json
from typing import Any

import pytest
from support.mindie_errors import validation_error

from parley.dialects.mindie import STRICT
from parley.dialects.mindie.api_rules import MindieRules
from parley.dialects.mindie.interfaces import tgi
from parley.dialects.request_context import RequestContext
from parley.errors import (
    ContextLength,
    EngineDied,
    NotReady,
    Overloaded,
    ParleyError,
    ServerStopping,
    TooLarge,
    UnknownModel,
)
from parley.types import (
    ChoiceDelta,
    ChoiceDone,
    PromptAccepted,
    PromptScored,
    SamplingOptions,
    StopConditions,
    TextPrompt,
    TokenInfo,
    Usage,
)

RULES = MindieRules()
STRICTLY = [RULES, MindieRules("strict-old")]
CONTEXT = RequestContext("0f", 1700000000, "fp_1", context_length=100)
INPUTS = "My name is Olivier and I"
USAGE = Usage(prompt_tokens=3, completion_tokens=2)
ONE, TWO = TokenInfo(29915, "'", b"'", -0.5), TokenInfo(29885, "m", b"m", -0.25)
ACCEPTED = PromptAccepted(0, [1, 2, 3], 77)
DONE = ChoiceDone(0, "length", USAGE)


def read(
    route: Any = tgi.read_mindie_whole, parameters: Any = None, *, rules: MindieRules = RULES, **members: Any
) -> tgi.MindieTgiReply:
    optional = {} if parameters is None else {"parameters": parameters}
    return route(rules, json.dumps({"inputs": INPUTS} | optional | members).encode(), CONTEXT)


def refusal(route: Any = tgi.read_mindie_whole, parameters: Any = None, **members: Any) -> str:
    with pytest.raises(ParleyError) as caught:
        read(route, parameters, **members)
    return validation_error(caught.value)


def test_mindie_tgi_parameters_reach_the_request():
    request = read(parameters={}).request
    assert request.prompts == [TextPrompt(INPUTS)] and not request.stream and request.max_prompt_tokens is None
    assert request.sampling == SamplingOptions(temperature=0.0) and request.stop_conditions == StopConditions(
        max_tokens=20, reserved_tokens=1
    )

    request = read(
        parameters={
            "temperature": 0.5, "top_k": 10, "top_p": 0.95, "typical_p": 0.5, "seed": 2**64 - 1, "truncate": 5,
            "repetition_penalty": 1.03, "watermark": True, "adapter_id": "None", "max_new_tokens": 7,
            "stop": ["a", "b"], "return_full_text": False,
        }
    ).request  # fmt: skip
    assert request.sampling == SamplingOptions(
        temperature=0.5, top_k=10, top_p=0.95, seed=2**64 - 1, repetition_penalty=1.03
    )  # typical_p and watermark are validated but have no effect
    assert (
        request.stop_conditions == StopConditions(strings=["a", "b"], max_tokens=7, reserved_tokens=1)
        and request.max_prompt_tokens == 5
    )
    assert read(parameters={"stop": "a"}).request.stop_conditions.strings == ["a"]
    assert read(parameters={"stop": []}).request.stop_conditions.strings == []
    assert read(parameters=dict.fromkeys(("stop", "seed", "details", "top_k"))).request.stop_conditions.strings == []


@pytest.mark.parametrize(
    ("parameters", "temperature"),
    [
        ({}, 0.0),
        ({"do_sample": True}, 1.0),
        ({"temperature": 0.7}, 0.7),
        ({"top_k": 3}, 1.0),
        ({"top_p": 0.5}, 1.0),
        ({"temperature": 0.7, "do_sample": False}, 0.0),
    ],
)
def test_mindie_tgi_sampling_parameters_turn_sampling_on(parameters, temperature):
    assert read(parameters=parameters).request.sampling.temperature == temperature


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("temperature", 0, "Parameter temperature must be in (0.0,3.40282e+38], got 0."),
        ("temperature", 1e39, "Parameter temperature must be in (0.0,3.40282e+38], got 1e39."),
        ("temperature", "1", "temperature must be float type."),
        ("top_k", 0, "Parameter top_k must be in -1 || (0,2147483647], got 0"),
        ("top_k", 2**31, "Parameter top_k must be in -1 || (0,2147483647], got 2147483648"),
        ("top_k", 5.0, "top_k must be integer type."),
        ("top_p", 0.0, "Parameter top_p must be in (0.0,1.0], got 0.0."),
        ("top_p", 1.0, "Parameter top_p must be in (0.0,1.0], got 1.0."),
        ("typical_p", 1.5, "Parameter typical_p must be in (0.0,1.0], got 1.5."),
        ("do_sample", 1, "do_sample must be boolean type."),
        ("seed", -1, "seed must be unsigned type."),
        ("seed", 1.0, "seed must be unsigned type."),
        ("seed", 2**64, f"Parameter seed must be in [0, 9223372036854775807], got {2**64}."),
        ("repetition_penalty", 0.0, "Parameter 'repetition_penalty' must be in (0.0, 3.40282e+38], got 0.0."),
        ("watermark", "x", "watermark must be boolean type."),
        ("adapter_id", 1, "adapter_id must be string type."),
        ("adapter_id", "a b", "The format of adapter_id is invalid."),
        ("adapter_id", "", "The format of adapter_id is invalid."),
        ("max_new_tokens", 0, "Parameter max_new_tokens must be in (0,2147483647], got 0."),
        ("max_new_tokens", 2.0, "max_new_tokens must be integer type."),
        ("details", "yes", "details must be boolean type."),
        ("decoder_input_details", 0, "decoder_input_details must be boolean type."),
        ("return_full_text", [], "return_full_text must be boolean type."),
        ("truncate", 0, "truncate must be in (0,2147483647], got 0."),
        ("stop", 1, "Input validation error: param stop must be string or list[string]"),
        ("stop", "", "Input validation error: length of `stop` must be in [1, 1024], but got 0"),
        ("stop", "a" * 1025, "Input validation error: length of `stop` must be in [1, 1024], but got 1025"),
        ("stop", ["a", 1], "Input validation error: `stop` must be list[string] if list, and item length in [1, 1024] "
                           "with total <= 32768"),
        ("stop", ["a" * 1000] * 33, "Input validation error: `stop` must be list[string] if list, and item length in "
                                    "[1, 1024] with total <= 32768"),
    ],
)  # fmt: skip
def test_mindie_tgi_refuses_wrong_parameter(name, value, text):
    assert refusal(parameters={name: value}) == text


def test_mindie_tgi_reports_first_fault_in_original_order():
    both = {"truncate": 0, "max_new_tokens": 0, "temperature": 0}
    assert refusal(parameters=both).startswith("Parameter temperature")
    assert refusal(parameters={"truncate": 0, "max_new_tokens": 0}).startswith("Parameter max_new_tokens")
    assert refusal(parameters=1) == "parameters must be object type."


def test_mindie_tgi_reads_or_refuses_inputs():
    parts = [{"type": "text", "text": "a"}, {"type": None, "text": "b"}]
    assert read(inputs=parts).request.prompts == [TextPrompt("ab")]
    assert refusal(inputs=[]) == "Inputs arr is empty"
    assert refusal(inputs="") == "Inputs length must be in (0, 41943040], but got 0"
    assert refusal(inputs=5) == refusal(inputs=[5]) == "The type of inputs is abnormal"
    assert refusal(inputs=[{"type": "text", "text": 5}]) == "Request param text must be string"
    assert refusal(inputs=[{"type": "image_url"}]) == "Request param image_url null"
    assert "not available" in refusal(inputs=[{"type": "image_url", "image_url": "/x.png"}])
    text = "Request should contain 'inputs' and the type should be string."
    assert refusal(tgi.read_mindie_stream, inputs=None) == refusal(tgi.read_mindie_any, inputs=None) == text
    assert json.loads(refusal(inputs=None))["error_type"] == "validation"


def test_mindie_tgi_refuses_body_that_is_not_a_json_object():
    for route, text in (
        (tgi.read_mindie_any, "Failed to parse context to json body"),
        (tgi.read_mindie_stream, tgi.STREAM_WORDING.unreadable_body),
    ):
        for body in (b"", b"{", b"[]", b"\xff"):
            with pytest.raises(ParleyError) as caught:
                route(RULES, body, CONTEXT)
            answer = STRICT.render_error(caught.value)
            assert (answer.status, json.loads(answer.body)["error"]) == (422, text)
    assert refusal(tgi.read_mindie_any, stream="x") == "Stream must be boolean type."


@pytest.mark.parametrize("rules", STRICTLY, ids=lambda rules: rules.profile)
def test_mindie_tgi_writes_answer(rules):
    reply = read(tgi.read_mindie_any, rules=rules, parameters={"decoder_input_details": True}, stream=False)
    assert reply.render_chunk([]) == b""
    reply.add_events([ACCEPTED, ChoiceDelta(0, "'", tokens=[ONE]), ChoiceDelta(0, "m", tokens=[TWO]), DONE])
    assert reply.render_body(USAGE) == (
        b'[{"details":{"prompt_tokens":3,"finish_reason":"length","generated_tokens":2,"prefill":['
        b'{"id":1,"logprob":null,"special":null,"text":null},{"id":2,"logprob":null,"special":null,"text":null},'
        b'{"id":3,"logprob":null,"special":null,"text":null}],"seed":77,"tokens":['
        b'{"id":29915,"logprob":null,"special":null,"text":null},{"id":29885,"logprob":null,"special":null,"text":null}'
        b']},"generated_text":"\'m"}]'
    )

    reply = read(rules=rules, parameters={"return_full_text": True})
    reply.add_events([ACCEPTED, ChoiceDelta(0, "'m", tokens=[ONE, TWO]), DONE])
    assert reply.render_body(USAGE) == b'{"generated_text":"My name is Olivier and I \'m"}'
    reply = read(rules=rules, parameters={"details": True})
    reply.add_events([ACCEPTED, ChoiceDelta(0, "'m", tokens=[ONE, TWO]), DONE])
    assert json.loads(reply.render_body(USAGE))["details"]["prefill"] == []


@pytest.mark.parametrize("rules", STRICTLY, ids=lambda rules: rules.profile)
def test_mindie_tgi_writes_stream(rules):
    reply = read(tgi.read_mindie_stream, {"details": True}, rules=rules)
    assert reply.render_chunk([ACCEPTED]) == b""
    assert reply.render_chunk([ChoiceDelta(0, "'", tokens=[ONE])]) == (
        b'data: {"token":{"id":[29915],"text":"\'","logprob":null,"special":null},"generated_text":null,'
        b'"details":null}\n\n'
    )
    assert reply.render_chunk([ChoiceDelta(0, "m", tokens=[TWO]), DONE]) == (
        b'data: {"token":{"id":[29885],"text":"m","logprob":null,"special":null},"generated_text":"\'m","details":'
        b'{"prompt_tokens":3,"finish_reason":"length","generated_tokens":2,"seed":77}}\n\n'
    )
    assert reply.finish_stream(USAGE) == b""
    plain = read(tgi.read_mindie_any, stream=True, rules=rules)
    assert plain.request.stream
    assert json.loads(plain.render_chunk([ACCEPTED, ChoiceDelta(0, "m", tokens=[TWO]), DONE])[6:])["details"] is None
    text = "The decoder_input_details must not be true when stream is true."
    assert refusal(tgi.read_mindie_stream, {"decoder_input_details": True}) == text
    assert plain.fail_stream(EngineDied("It ended.")) == b"It ended."


def test_mindie_errors_have_documented_status_and_body():
    def status_and_body(error: ParleyError) -> tuple[int, Any]:
        answer = STRICT.render_error(error)
        return answer.status, json.loads(answer.body)

    too_long = ContextLength("x", field="prompt", limit=100, prompt=120, requested=20)
    assert status_and_body(too_long) == (
        424,
        {
            "error": "Failed to enqueue inferRequest. This model's maximum input ids length cannot be greater than 99,"
            "the input ids length is 120",
            "error_type": "Generation Error",
        },
    )
    far_too_long = status_and_body(ContextLength("x", field="prompt", limit=100, prompt_over=1_048_576))
    assert far_too_long[0] == 424 and far_too_long[1]["error"].endswith("than 99,the input ids length is over 1048576")
    text = "Request body too large. Maximum allowed size is {}MB."
    for limit, size in ((0, 40), (1 << 20, 1), (40 << 20, 40), (41 << 20, 40)):
        assert status_and_body(TooLarge("x", limit=limit)) == (413, {"message": text.format(size)})
    assert status_and_body(UnknownModel("x", name="m")) == (
        404,
        {"error": "Model m not found.", "error_type": "NotFoundError"},
    )
    stopped = {"error": "The service has been stopped", "error_type": "Service Unavailable"}
    assert status_and_body(ServerStopping("x")) == (503, stopped) and STRICT.render_error(NotReady("x")) == (
        503,
        b"",
        b"application/json",
    )
    assert status_and_body(Overloaded("x"))[0] == 503 and STRICT.render_error(ParleyError("x"))[:2] == (
        500,
        b"Server internal error",
    )
    assert (
        status_and_body(EngineDied("x"))[1]["error_type"] == "Incomplete Generation"
        and status_and_body(EngineDied("x"))[0] == 500
    )


def test_mindie_tgi_extended_reports_logprobs_and_token_text():
    extended, details = MindieRules("extended"), {"decoder_input_details": True}
    reply = read(tgi.read_mindie_any, details, rules=extended, stream=False)
    assert (reply.request.output_options.logprobs, reply.request.output_options.prompt_logprobs) == (0, 0)
    scored = PromptScored(0, [TokenInfo(1, "<s>", b"<s>", is_special=True), TokenInfo(2, "a", b"a", -1.5)])
    reply.add_events([ACCEPTED, scored, ChoiceDelta(0, "'m", tokens=[ONE, TWO]), DONE])
    assert reply.render_body(USAGE) == (
        b'[{"details":{"prompt_tokens":3,"finish_reason":"length","generated_tokens":2,"prefill":['
        b'{"id":1,"logprob":null,"special":true,"text":"<s>"},{"id":2,"logprob":-1.5,"special":false,"text":"a"}],'
        b'"seed":77,"tokens":[{"id":29915,"logprob":-0.5,"special":false,"text":"\'"},'
        b'{"id":29885,"logprob":-0.25,"special":false,"text":"m"}]},"generated_text":"\'m"}]'
    )
    stream = read(tgi.read_mindie_stream, details, rules=extended)
    assert stream.render_chunk([ACCEPTED, scored]) == b""
    assert stream.render_chunk([ChoiceDelta(0, "'", tokens=[ONE])]) == (
        b'data: {"token":{"id":[29915],"text":"\'","logprob":-0.5,"special":false},"generated_text":null,'
        b'"details":null}\n\n'
    )
    last = json.loads(stream.render_chunk([ChoiceDelta(0, "m", tokens=[TWO]), DONE])[6:])
    assert [token["id"] for token in last["details"]["prefill"]] == [1, 2]
    plain = read(rules=extended)
    assert plain.request.output_options.logprobs is None and plain.request.output_options.prompt_logprobs is None


def test_mindie_tgi_full_text_repeats_text_in_each_frame():
    reply = read(tgi.read_mindie_stream, rules=MindieRules(full_text=True))
    frames = [
        reply.render_chunk([ACCEPTED, ChoiceDelta(0, "'", tokens=[ONE])]),
        reply.render_chunk([ChoiceDelta(0, "m", tokens=[TWO]), DONE]),
    ]
    assert frames == [
        b'data: {"token":{"id":[29915],"text":"\'","logprob":null,"special":null},"generated_text":null,'
        b'"details":null}\n\n',
        b'data: {"token":{"id":[29885],"text":"\'m","logprob":null,"special":null},"generated_text":"\'m",'
        b'"details":null}\n\n',
    ]
