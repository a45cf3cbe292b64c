"""Triton's generate extension: meaning of bodies, refusals, and the exact bytes of answers and streams."""

import json
import struct
from functools import partial
from typing import Any

import pytest

from parley.dialects.reply import RequestTimings
from parley.dialects.request_context import RequestContext
from parley.dialects.triton import error_answers, generate
from parley.errors import NotAllowed, NotFound, NotReady, Overloaded, ParleyError, TooLarge, UnknownModel, Unsupported
from parley.types import (
    BeamOptions,
    ChoiceDelta,
    ChoiceDone,
    Grammar,
    OutputOptions,
    PoolingOptions,
    PromptAccepted,
    PromptVector,
    SamplingOptions,
    StopConditions,
    TextPrompt,
    TokenInfo,
    TokensPrompt,
    Usage,
)

PATH = {"model": "mymodel"}
stop_with_reserve = partial(StopConditions, reserved_tokens=1)  # more tokens than fit are cut, not refused


def read_bytes(
    body: bytes, *, stream: bool = False, path: dict[str, str] = PATH, strict: bool = False
) -> generate.TritonReply:
    return generate.read_triton_generate(
        body, RequestContext("0f", 1700000000, "fp_1", path_parts=path), stream=stream, strict=strict
    )


def read(*, stream_route: bool = False, strict: bool = False, **members: Any) -> generate.TritonReply:
    return read_bytes(json.dumps({"text_input": "Hi"} | members).encode(), stream=stream_route, strict=strict)


def refusal(
    body: bytes | None = None, path: dict[str, str] = PATH, strict: bool = False, **members: Any
) -> tuple[int, str]:
    body = json.dumps({"text_input": "Hi"} | members).encode() if body is None else body
    with pytest.raises(ParleyError) as caught:
        read_bytes(body, path=path, strict=strict)
    status, data, _ = error_answers.triton_error_answer(caught.value)
    assert list(json.loads(data)) == ["error"]
    return status, json.loads(data)["error"]


def done(index: int = 0, reason: Any = "stop", tokens: int = 2, stop: Any = None) -> ChoiceDone:
    return ChoiceDone(index, reason, Usage(3, tokens), stop)


def token(token_id: int, text: str, logprob: float, top: list[TokenInfo] | None = None) -> TokenInfo:
    return TokenInfo(token_id, text, text.encode(), logprob, 1, top or [])


# -- the example of the documentation

EXAMPLE = b"""{
"id" : "42",
"text_input" : "client input",
"parameters" :
{
"stream": false,
"temperature": 0
}
}"""
CURL = b'{"id": "42", "text_input": "client input", "parameters": {"stream": false, "temperature": 0}}'


@pytest.mark.parametrize("body", [EXAMPLE, CURL])
def test_triton_generate_answers_documented_example(body):
    reply = read_bytes(body)
    assert reply.request.prompts == [TextPrompt("client input")]
    assert reply.request.sampling == SamplingOptions(temperature=0.0)
    reply.add_events([PromptAccepted(0, [1]), ChoiceDelta(0, " model output"), done()])
    assert reply.render_body(Usage()) == (
        b'{"id":"42","model_name":"mymodel","model_version":"1","text_output":"client input model output"}'
    )


def test_triton_writes_documented_error():
    assert error_answers.triton_error_answer(Unsupported("error message"))[:2] == (400, b'{"error":"error message"}')


# -- answers


def test_triton_generate_omits_id_when_not_given():
    reply = read(exclude_input_in_output=True)
    reply.add_events([ChoiceDelta(0, "a"), ChoiceDelta(0, "b\n"), done()])
    assert reply.render_body(Usage()) == b'{"model_name":"mymodel","model_version":"1","text_output":"ab\\n"}'


def test_triton_generate_writes_several_sequences_as_array():
    reply = read(n=2, exclude_input_in_output=True, return_finish_reason=True)
    reply.add_events([ChoiceDelta(1, "b"), ChoiceDelta(0, "a"), done(1, "length"), done(0)])
    assert reply.render_body(Usage()) == (
        b'{"finish_reason":["stop","length"],"model_name":"mymodel","model_version":"1","text_output":["a","b"]}'
    )


def test_triton_generate_writes_every_output():
    reply = read(
        exclude_input_in_output=True,
        return_finish_reason=True,
        return_stop_reason=True,
        return_cumulative_logprob=True,
        return_logprobs=True,
        return_num_input_tokens=True,
        return_num_output_tokens=True,
        return_log_probs=True,
        logprobs=1,
    )
    assert reply.request.output_options == OutputOptions(logprobs=1, ids=True)
    tokens = [token(5, "a", -0.5, [token(5, "a", -0.5)]), token(6, "b", -1.5, [token(7, "c", -0.25)])]
    reply.add_events([PromptAccepted(0, [1, 2, 3]), ChoiceDelta(0, "ab", tokens=tokens), done(stop="###")])
    logprobs = (
        '[{"5":{"logprob":-0.5,"rank":1,"decoded_token":"a"}},'
        '{"6":{"logprob":-1.5,"rank":1,"decoded_token":"b"},"7":{"logprob":-0.25,"rank":1,"decoded_token":"c"}}]'
    )
    assert reply.render_body(Usage()) == (
        b'{"cum_log_probs":-2.0,"cumulative_logprob":-2.0,"finish_reason":"stop","logprobs":'
        + json.dumps(logprobs).encode()
        + b',"model_name":"mymodel","model_version":"1","num_input_tokens":3,"num_output_tokens":2,'
        b'"output_log_probs":[-0.5,-1.5],"stop_reason":"###","text_output":"ab"}'
    )


def embedding(**parameters: Any) -> dict[str, Any]:
    return {"text_input": "", "embedding_request": json.dumps(parameters)}


@pytest.mark.parametrize("stream", [False, True])
def test_triton_generate_writes_embedding_as_text(stream):
    reply = read(
        **embedding(input="Hi"), return_num_input_tokens=True, return_num_output_tokens=True, stream_route=stream
    )
    assert (reply.request.prompts, reply.request.pooling) == ([TextPrompt("Hi")], PoolingOptions())
    events = [PromptAccepted(0, [1, 2]), PromptVector(0, struct.pack("<2f", 0.5, -2)), ChoiceDone(0, "stop", Usage(2))]
    answer = (
        b'{"model_name":"mymodel","model_version":"1","num_input_tokens":2,"num_output_tokens":0,'
        b'"text_output":"[0.5,-2.0]"}'
    )
    if stream:
        assert reply.render_chunk(events[:2]) == b""
        assert reply.render_chunk(events[2:]) == b"data: " + answer + b"\n\n"
    else:
        reply.add_events(events)
        assert reply.render_body(Usage()) == answer


def test_triton_generate_reads_embedding_request():
    ids = read(
        **embedding(input=[5, 6], pooling_params={"dimensions": [8]}),
        truncate_prompt_tokens=3,
        priority=1,
        timeout=5000,
    ).request
    assert (ids.prompts, ids.pooling, ids.max_prompt_tokens, ids.kept_side) == (
        [TokensPrompt([5, 6])],
        PoolingOptions(8),
        3,
        "head",
    )
    assert (ids.priority, ids.timeout) == (-4, 0.005)
    assert read(**embedding(input="a", pooling_params={"dimensions": 4})).request.pooling == PoolingOptions(4)
    assert read(embedding_request="").request.pooling is None


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("x", "embedding_request"),
        ("[]", "embedding_request"),
        ("{}", "embedding_request.input"),
        ('{"input":""}', "embedding_request.input"),
        ('{"input":[]}', "embedding_request.input"),
        ('{"input":5}', "embedding_request.input"),
        ('{"input":["a"]}', "embedding_request.input[0]"),
        ('{"input":[-1]}', "embedding_request.input[0]"),
        ('{"input":"a","pooling_params":5}', "embedding_request.pooling_params"),
        ('{"input":"a","pooling_params":{"dimensions":[0]}}', "embedding_request.pooling_params.dimensions[0]"),
        ('{"input":"a","pooling_params":{"dimensions":[1,2]}}', "embedding_request.pooling_params.dimensions"),
        ("[" * 200, "embedding_request"),
    ],
)
def test_triton_generate_error_names_wrong_embedding_member(text, where):
    status, message = refusal(embedding_request=text)
    assert status == 400 and f"'{where}'" in message


def test_triton_generate_truncates_prompt_to_its_end():
    assert read(truncate_prompt_tokens=5).request.max_prompt_tokens == 5
    assert read(truncate_prompt_tokens="5").request.max_prompt_tokens == 5
    context = RequestContext("0f", 1, "fp", context_length=64, path_parts=PATH)
    body = b'{"text_input":"a","max_tokens":24,"truncate_prompt_tokens":-1}'
    reply = generate.read_triton_generate(body, context, stream=False, strict=False)
    assert (reply.request.max_prompt_tokens, reply.request.kept_side) == (40, "tail")
    assert refusal(truncate_prompt_tokens=0)[0] == 400


def test_triton_generate_logprobs_are_null_without_parameter():
    reply = read(return_logprobs=True, return_cumulative_logprob=True)
    reply.add_events([ChoiceDelta(0, "a", tokens=[token(5, "a", float("-inf"))]), done()])
    answer = json.loads(reply.render_body(Usage()))
    assert answer["logprobs"] == "null" and answer["cumulative_logprob"] == -9999.0


def test_triton_generate_writes_floats_as_float32():
    reply = read(return_cumulative_logprob=True)
    reply.add_events([ChoiceDelta(0, "a", tokens=[token(5, "a", -0.1)]), done()])
    assert b'"cumulative_logprob":-0.10000000149011612,' in reply.render_body(Usage())


# -- streams

BEFORE, AFTER = b'data: {"model_name":"mymodel","model_version":"1","text_output":', b"}\n\n"


def test_triton_generate_stream_has_one_event_per_response():
    reply = read(stream=True, stream_route=True)
    assert reply.request.stream
    assert reply.render_chunk([PromptAccepted(0, [1])]) == b""
    assert reply.render_chunk([ChoiceDelta(0, "a"), ChoiceDelta(0, "é")]) == BEFORE + '"aé"'.encode() + AFTER
    assert reply.render_chunk([ChoiceDelta(0, "c"), done()]) == BEFORE + b'"c"' + AFTER
    assert reply.finish_stream(Usage()) == b""


def test_triton_generate_stream_writes_finish_reason_when_asked():
    reply = read(stream=True, stream_route=True, id="7", return_finish_reason=True, return_num_output_tokens=True)
    first = reply.render_chunk([ChoiceDelta(0, "a", tokens=[token(5, "a", -0.5)])])
    last = reply.render_chunk([done()])  # the end token has no text
    event_start = (
        b'data: {"finish_reason":"%b","id":"7","model_name":"mymodel","model_version":"1","num_output_tokens":1,'
    )
    assert first == event_start % b"None" + b'"text_output":"a"}\n\n'
    assert last == event_start % b"stop" + b'"text_output":""}\n\n'


def test_triton_generate_streams_two_sequences():
    reply = read(stream=True, stream_route=True, n=2)
    assert reply.render_chunk([ChoiceDelta(1, "b")]) == BEFORE + b'["","b"]' + AFTER
    assert reply.render_chunk([done(1), ChoiceDelta(0, "a")]) == BEFORE + b'["a",""]' + AFTER


def test_triton_generate_stream_sends_one_event_without_stream_input():
    reply = read(stream_route=True)
    assert reply.render_chunk([ChoiceDelta(0, " a")]) == b""
    assert reply.render_chunk([ChoiceDelta(0, "b"), done()]) == BEFORE + b'"Hi ab"' + AFTER
    assert reply.finish_stream(Usage()) == b""


def test_triton_generate_stream_includes_prompt_only_when_asked():
    reply = read(stream=True, stream_route=True, exclude_input_in_output=False)
    assert reply.render_chunk([ChoiceDelta(0, " a")]) == BEFORE + b'"Hi a"' + AFTER
    assert reply.render_chunk([ChoiceDelta(0, " b")]) == BEFORE + b'" b"' + AFTER


def test_triton_generate_joins_responses_on_plain_route():
    reply = read(stream=True)
    assert not reply.request.stream
    reply.add_events([ChoiceDelta(0, "a"), ChoiceDelta(0, "b"), done()])
    assert json.loads(reply.render_body(Usage()))["text_output"] == "ab"


def test_triton_generate_stream_ends_with_error():
    assert read(stream_route=True).fail_stream(ParleyError("It broke.")) == b'data: {"error":"It broke."}\n\n'


# -- meaning of members


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("members", "part"),
    [
        ({"temperature": 0.5}, SamplingOptions(temperature=0.5)),
        ({"temperature": 7}, SamplingOptions(temperature=7.0)),
        ({"temperature": "0.5"}, SamplingOptions(temperature=0.5)),
        ({"top_p": 0.5}, SamplingOptions(top_p=0.5)),
        ({"top_k": 5}, SamplingOptions(top_k=5)),
        ({"top_k": "5"}, SamplingOptions(top_k=5)),
        ({"top_k": -1}, SamplingOptions()),
        ({"min_p": 0.25}, SamplingOptions(min_p=0.25)),
        ({"seed": 2**64 - 1}, SamplingOptions(seed=2**64 - 1)),
        ({"random_seed": 7}, SamplingOptions(seed=7)),
        ({"sampling_param_seed": 7}, SamplingOptions(seed=7)),
        ({"repetition_penalty": 1.5}, SamplingOptions(repetition_penalty=1.5)),
        ({"presence_penalty": 1}, SamplingOptions(presence_penalty=1.0)),
        ({"frequency_penalty": -1}, SamplingOptions(frequency_penalty=-1.0)),
        ({"logit_bias": {"5": -100}}, SamplingOptions(logit_bias={5: -100.0})),
        ({"allowed_token_ids": [5, 6]}, SamplingOptions(allowed=[5, 6])),
        ({"no_repeat_ngram_size": "3"}, SamplingOptions(no_repeat_ngram=3)),
        ({"watermark": True}, SamplingOptions(watermark=True)),
        ({"length_penalty": 2.0, "pad_id": 2, "beam_width": 1}, SamplingOptions()),
        ({"max_tokens": 99}, stop_with_reserve(max_tokens=99)),
        ({"max_tokens": "99"}, stop_with_reserve(max_tokens=99)),
        ({}, stop_with_reserve(max_tokens=16)),
        ({"min_tokens": 3}, stop_with_reserve(max_tokens=16, min_tokens=3)),
        ({"min_length": 3}, stop_with_reserve(max_tokens=16, min_tokens=3)),
        ({"stop": "x"}, stop_with_reserve(["x"], max_tokens=16)),
        ({"stop": ["x", "y"]}, stop_with_reserve(["x", "y"], max_tokens=16)),
        ({"stop_words": "x"}, stop_with_reserve(["x"], max_tokens=16)),
        ({"stop_words": ["x", ""], "bad_words": ""}, stop_with_reserve(["x"], max_tokens=16)),
        ({"stop_words": "", "stop": ""}, stop_with_reserve(max_tokens=16)),
        ({"stop_token_ids": [5, 6]}, stop_with_reserve(ids=[5, 6], max_tokens=16)),
        ({"end_id": 5}, stop_with_reserve(ids=[5], max_tokens=16)),
        ({"end_id": -1}, stop_with_reserve(max_tokens=16, ignore_eos=True)),
        ({"ignore_eos": True}, stop_with_reserve(max_tokens=16, ignore_eos=True)),
        ({"ignore_eos": "true"}, stop_with_reserve(max_tokens=16, ignore_eos=True)),
        ({"include_stop_str_in_output": True}, stop_with_reserve(max_tokens=16, include_in_output=True)),
        ({"skip_special_tokens": False}, OutputOptions(skip_special=False)),
        ({"return_cumulative_logprob": True}, OutputOptions(logprobs=0)),
        ({"return_log_probs": True}, OutputOptions(logprobs=0)),
        ({"return_num_output_tokens": True}, OutputOptions(ids=True)),
        ({"logprobs": 5}, OutputOptions()),
        ({"nobody_knows": 5, "it": "x", "cares": True, "little": 0.5}, SamplingOptions()),
        ({"id": "x"}, SamplingOptions()),
    ],
    ids=str,
)
def test_triton_generate_members_reach_the_request_nested_or_not(members, part, nested):
    request = (read(parameters=members) if nested else read(**members)).request
    assert part in (request.sampling, request.stop_conditions, request.output_options)


@pytest.mark.parametrize(
    ("vocabulary_size", "end_id", "stop"),
    [
        (3072, 3071, stop_with_reserve(ids=[3071], max_tokens=16)),
        (3072, 3072, stop_with_reserve(max_tokens=16, ignore_eos=True)),
        (3072, 1048576, stop_with_reserve(max_tokens=16, ignore_eos=True)),
        (0, 1048576, stop_with_reserve(ids=[1048576], max_tokens=16)),  # the vocabulary is not known yet
    ],
)
def test_triton_generate_end_id_outside_the_vocabulary_ends_no_answer(vocabulary_size, end_id, stop):
    context = RequestContext("0f", 1, "fp", path_parts=PATH, vocabulary_size=vocabulary_size)
    body = json.dumps({"text_input": "Hi", "end_id": end_id}).encode()
    assert generate.read_triton_generate(body, context, stream=False, strict=False).request.stop_conditions == stop


def test_triton_generate_reads_sequence_counts_and_beams():
    assert read(n=3).request.n == read(num_return_sequences=3).request.n == read(n=3, best_of=3).request.n == 3
    assert read(n=3, best_of=3).request.best_of is None
    searched = read(beam_width="4", num_return_sequences=2, length_penalty="0.5").request
    assert (searched.n, searched.beam) == (2, BeamOptions(4, 0.5, field="beam_width"))
    assert read(beam_width=4).request.n == 4 and read(beam_width=1).request.beam is None
    assert refusal(beam_width=2, n=3)[0] == 400
    assert read(n=2, best_of=3, use_beam_search="true").request.beam == BeamOptions(3)
    assert (read(n=2, sampling_param_best_of="5").request.n, read(best_of=5).request.best_of) == (2, 5)


def test_triton_generate_reads_bad_words():
    assert read(bad_words="x").request.banned_words == read(bad_words=["x", ""]).request.banned_words == ["x"]
    assert read(bad_words="").request.banned_words == []


def test_triton_generate_sampling_parameters_replace_other_members():
    parameters = json.dumps({"temperature": "0.1", "stop": ["x"], "max_tokens": None, "stream": True})
    reply = read(sampling_parameters=parameters, max_tokens=5, top_k=3, return_finish_reason=True)
    assert reply.request.sampling == SamplingOptions(temperature=0.1)
    assert reply.request.stop_conditions == stop_with_reserve(["x"], max_tokens=16)
    reply.add_events([done()])
    assert "finish_reason" in json.loads(reply.render_body(Usage()))
    assert read(sampling_parameters="", top_k=3).request.sampling.top_k == 3
    for wrong in ("[]", "{", "x"):
        status, message = refusal(sampling_parameters=wrong)
        assert (status, message) == (400, "'sampling_parameters' must be the text of a JSON object.")


# -- refusals

PARSE = "failed to parse the request JSON buffer: "
PARAMETER = "parameter 'x' has invalid type. It should be either 'int', 'bool', or 'string'."
NESTED = "Converting keyword: 'parameters': "
NO_BOOL = "Unable to parse 'data': attempt to access JSON non-boolean as boolean"
NO_TEXT = "Unable to parse JSON bytes array: attempt to access JSON non-string as string"
NO_ID = "Unable to parse 'id': attempt to access JSON non-string as string"
SHAPE = "The schema can not convert input 'text_input' to tensor with proper shape"


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"", 500, PARSE + "The document is empty. at 0"),
        (b"x", 500, PARSE + "Invalid value. at 0"),
        (b" \n", 500, PARSE + "The document is empty. at 2"),
        (b'{"a":1 "b":2}', 500, PARSE + "Missing a comma or } after an object member. at 7"),
        (b'{"text_input":"a"', 500, PARSE + "Missing a comma or } after an object member. at 17"),
        ('{"é":[1,{"b":"]"}} '.encode(), 500, PARSE + "Missing a comma or ] after an array element. at 18"),
        (b'{"a":1,}', 500, PARSE + "Missing a name for object member. at 7"),
        (b'{"a" 1}', 500, PARSE + "Missing a colon after a name of object member. at 5"),
        (b'{} x', 500, PARSE + "The document root must not be followed by other values. at 3"),
        (b'{"a":"x', 500, PARSE + "Missing a closing quotation mark in string. at 7"),
        (b'{"a":"x\n"}', 500, PARSE + "Invalid encoding in string. at 7"),
        (b'{"a":"x\\y"}', 500, PARSE + "Invalid escape character in string. at 7"),
        (b'{"a":"x\\u12g4"}', 500, PARSE + "Incorrect hex digit after \\u escape in string. at 7"),
        (b'{"a":"\\\\\\ud800"}', 500, PARSE + "The surrogate pair in string is invalid. at 8"),
        (b'{"a":1.}', 500, PARSE + "Miss fraction part in number. at 7"),
        ('{"é":[-1.5E+]}'.encode(), 500, PARSE + "Miss exponent in number. at 13"),
        (b'{"a":1.5.2}', 500, PARSE + "Missing a comma or } after an object member. at 8"),
        (b'{"a":012.}', 500, PARSE + "Missing a comma or } after an object member. at 6"),
        (b'1e', 500, PARSE + "Miss exponent in number. at 2"),
        (b'{"a":NaN}', 500, PARSE + "Invalid value. at 5"),
        (b'{"a":[1e999]}', 500, PARSE + "Number too big to be stored in double. at 6"),
        (b'{"2e999":-1e999}', 500, PARSE + "Number too big to be stored in double. at 9"),
        (b'{"text_input":"a\xff"}', 500, PARSE + "Invalid encoding in string. at 16"),
        (b'{"text_input":"\xff"}', 500, None),
        (b'{"text_input":"\\ud800"}', 500, None),
        (b"[]", 500, "attempt to access JSON non-object as object"),
        (b'{"text_input":"a","x":' + b"[" * 101 + b"]" * 101 + b"}", 400, "JSON nesting depth exceeds maximum allowed "
         "limit (100)"),
        (b"[" * 100_000, 400, "JSON nesting depth exceeds maximum allowed limit (100)"),
        (b'{"text_input":"a","id":5}', 500, NO_ID),
        (b'{"text_input":"a","parameters":[]}', 500, "Expected JSON object for keyword: 'parameters': attempt to "
         "access JSON non-object as object"),
        (b'{"text_input":"a","x":[1]}', 400, PARAMETER),
        (b'{"text_input":"a","x":{}}', 400, PARAMETER),
        (b'{"text_input":"a","parameters":{"x":[]}}', 400, NESTED + PARAMETER),
        (b'{"text_input":"a","parameters":{"stream":0}}', 500, NESTED + NO_BOOL),
        (b'{"text_input":"a","stream":"false"}', 500, NO_BOOL),
        (b'{"text_input":"a","exclude_input_in_output":1}', 500, NO_BOOL),
        (b'{"text_input":5}', 500, NO_TEXT),
        (b'{"text_input":["a",5]}', 500, NO_TEXT),
        (b'{"text_input":["a","b"]}', 400, SHAPE),
        (b'{"text_input":[]}', 400, SHAPE),
        (b'{"text_input":"a","parameters":{"text_input":"b"}}', 400, NESTED + "[request id: <id_unknown>] input "
         "'text_input' already exists in request"),
        (b'{"id":"7","stream":true,"text_input":"a","parameters":{"stream":true}}', 400, NESTED + "[request id: 7] "
         "input 'stream' already exists in request"),
        (b'{"text_input":"a","guided_decoding_guide":"x","lora_weights":[0.5]}', 400, "receiving FP16 data via JSON is "
         "not supported. Please use the binary data format for input lora_weights"),
        (b'{"id":"7","stream":true,"x":1}', 400, "[request id: 7] expected number of inputs between 1 and 50 but got 1 "
         "inputs for model 'mymodel'. Got input(s) ['stream'], but missing required input(s) ['text_input']. Please "
         "provide all required input(s)."),
        (b"{}", 400, "[request id: <id_unknown>] expected number of inputs between 1 and 50 but got 0 inputs for model "
         "'mymodel'. Got input(s) [], but missing required input(s) ['text_input']. Please provide all required "
         "input(s)."),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_triton_generate_refuses_wrong_body(body, status, message):
    response = refusal(body)
    assert response[0] == status
    assert message is None or response[1] == message


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b'{"text_input":"a","id":null}', 500, NO_ID),
        (b'{"text_input":"a","x":null}', 400, PARAMETER),
        (b'{"text_input":"a","stream":null}', 500, NO_BOOL),
        (b'{"text_input":"a","parameters":{"x":null}}', 400, NESTED + PARAMETER),
        (b'{"text_input":"a","parameters":null}', 500, "Expected JSON object for keyword: 'parameters': attempt to "
         "access JSON non-object as object"),
    ],
)  # fmt: skip
def test_triton_generate_null_means_absent_unless_strict(body, status, message):
    assert refusal(body, strict=True) == (status, message)
    assert read_bytes(body).request == read_bytes(b'{"text_input":"a"}').request
    assert "missing required input" in refusal(b'{"text_input":null}')[1]
    assert refusal(b'{"text_input":null}', strict=True) == (500, NO_TEXT)


def test_triton_generate_reports_load_in_requested_format():
    body, timings = b'{"text_input":"a"}', RequestTimings(1, 1, 1, 1)
    headers_by_format = {}
    for form in (b"text", b"JSON", b"xml", b""):
        headers = {b"endpoint-load-metrics-format": form} if form else {}
        context = RequestContext("0f", 1, "fp", path_parts=PATH, headers=headers, cached_tokens=16, cache_capacity=64)
        reply = generate.read_triton_generate(body, context, stream=False, strict=False)
        headers_by_format[form] = dict(reply.answer_headers(timings)).get(b"endpoint-load-metrics")
        assert not reply.answer_headers(None)
    assert headers_by_format == {
        b"text": b"TEXT named_metrics.kv_cache_utilization=0.250000, named_metrics.max_token_capacity=64.000000",
        b"JSON": b'JSON {"named_metrics":{"kv_cache_utilization":0.25,"max_token_capacity":64}}',
        b"xml": None,
        b"": None,
    }


@pytest.mark.parametrize(
    ("members", "field"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 0.5}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"seed": 2**64}, "seed"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": "x"}, "frequency_penalty"),
        ({"length_penalty": "x"}, "length_penalty"),
        ({"pad_id": "x"}, "pad_id"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"stop": ["x"] * 1025}, "stop"),
        ({"stop": [5]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": "5"}, "stop_token_ids"),
        ({"end_id": -2}, "end_id"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"beam_width": 0}, "beam_width"),
        ({"logprobs": 21}, "logprobs"),
        ({"ignore_eos": "perhaps"}, "ignore_eos"),
        ({"skip_special_tokens": 1}, "skip_special_tokens"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output"),
        ({"seed": 1, "random_seed": 2}, "random_seed"),
    ],
    ids=str,
)
def test_triton_generate_error_names_wrong_value(members, field):
    status, message = refusal(**members)
    assert status == 400 and f"'{field}" in message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lora_task_id", 1),
        ("lora_config", [1]),
        ("logits_processors", ["x"]),
        ("prompt_logprobs", 1),
        ("image", "aGk="),
        ("image_url", ["http://x/"]),
        ("decoder_text_input", "x"),
        ("return_context_logits", True),
        ("return_generation_logits", True),
        ("return_perf_metrics", True),
        ("sampling_param_return_perf_metrics", True),
        ("prompt_table_extra_id", [1]),
        ("prompt_vocab_size", 5),
        ("embedding_bias_words", "x"),
        ("embedding_bias_weights", 0.5),
        ("num_draft_tokens", 1),
        ("use_draft_logits", True),
    ],
)
def test_triton_generate_refuses_unavailable_inputs(name, value):
    status, message = refusal(**{name: value})
    assert status == 400
    assert message.startswith(f"'{name.removeprefix('sampling_param_')}': ")


CONSTRAINTS: list[tuple[dict[str, Any], Grammar]] = [
    ({"structured_outputs": '{"json":{}}'}, Grammar("json", {}, field="structured_outputs.json")),
    ({"structured_outputs": {"regex": "a"}}, Grammar("regex", "a", field="structured_outputs.regex")),
    ({"guided_decoding": '{"choice":["a"]}'}, Grammar("choice", ["a"], field="guided_decoding.choice")),
    ({"guided_json": {"type": "null"}}, Grammar("json", {"type": "null"}, field="guided_json")),
    ({"guided_json": '{"type":"null"}'}, Grammar("json", {"type": "null"}, field="guided_json")),
    ({"guided_regex": "a"}, Grammar("regex", "a", field="guided_regex")),
    ({"guided_choice": ["a"]}, Grammar("choice", ["a"], field="guided_choice")),
    ({"guided_grammar": "root ::= x"}, Grammar("ebnf", "root ::= x", field="guided_grammar")),
    ({"sampling_parameters": '{"guided_grammar":"start: x"}'}, Grammar("lark", "start: x", field="guided_grammar")),
    ({"guided_decoding_guide_type": "json"},
     Grammar("json", {"type": "object"}, field="guided_decoding_guide_type")),
    ({"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": "{}"},
     Grammar("json", {}, field="guided_decoding_guide")),
    ({"guided_decoding_guide_type": "regex", "guided_decoding_guide": "a"},
     Grammar("regex", "a", field="guided_decoding_guide")),
    ({"guided_decoding_guide_type": "ebnf_grammar", "guided_decoding_guide": "root ::= x"},
     Grammar("ebnf", "root ::= x", field="guided_decoding_guide")),
]  # fmt: skip


@pytest.mark.parametrize(("members", "grammar"), CONSTRAINTS, ids=str)
def test_triton_generate_constraints_reach_the_request(members, grammar):
    assert read(**members).request.grammar == grammar


@pytest.mark.parametrize(
    ("members", "field"),
    [
        ({"guided_decoding_guide": "{}"}, "guided_decoding_guide_type"),
        ({"guided_decoding_guide_type": "regex"}, "guided_decoding_guide"),
        ({"guided_decoding_guide_type": "x", "guided_decoding_guide": "a"}, "guided_decoding_guide_type"),
        ({"structured_outputs": "{}"}, "structured_outputs.json"),
        ({"structured_outputs": "{"}, "structured_outputs"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "{}", "guided_regex": "a"}, "guided_regex"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"guided_choice": ["a"], "guided_decoding_guide_type": "json"}, "guided_decoding_guide_type"),
    ],
    ids=str,
)
def test_triton_generate_error_names_wrong_constraint(members, field):
    status, message = refusal(**members)
    assert status == 400 and field in message


def test_triton_generate_accepts_unavailable_inputs_set_to_off():
    read(
        structured_outputs="",
        guided_json="",
        guided_choice=[],
        bad_words="",
        stop_words="",
        use_draft_logits=False,
        num_draft_tokens=0,
        lora_name="",
        return_perf_metrics=False,
        tensorrt_llm_model_name="x",
        embedding_bias_words="",
        guided_decoding_guide="",
        best_of=1,
        beam_width=1,
        embedding_request="",
    )


def test_triton_generate_reads_version_from_path():
    body = b'{"text_input":"a"}'
    for version in ("1", "01"):
        read_bytes(body, path=PATH | {"version": version})
    assert refusal(body, PATH | {"version": "2"}) == (
        404,
        "Request for unknown model: 'mymodel' version 2 is not found",
    )
    for version in ("x", "1.0", "-1", "", "¹"):
        assert refusal(body, PATH | {"version": version}) == (404, "Not Found")
    for version in (str(2**63), "9" * 5000):
        status, message = refusal(body, PATH | {"version": version})
        assert status == 400 and message.startswith("failed to get model version from specified version string '")
        assert len(message) < 500


def test_triton_generate_refuses_fp16_as_json():
    status, message = refusal(prompt_embedding_table=[0.5])
    assert status == 400
    assert message.startswith("receiving FP16 data via JSON is not supported.")


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (NotFound("Unknown request URL"), 404, "Not Found"),
        (NotAllowed("GET is not allowed"), 405, "Method Not Allowed"),
        (UnknownModel("no", name="x"), 404, "Request for unknown model: 'x' is not found"),
        (UnknownModel("no", name="x", field="adapter"), 404, "LoRA feature is not enabled."),
        (
            UnknownModel("no", name="x", served=["a", "b"], field="adapter"),
            404,
            "LoRA x is not supported, we currently support ['a', 'b']",
        ),
        (NotReady("The model is still loading."), 503, "The model is still loading."),
        (Overloaded("Full."), 503, "Full."),
        (TooLarge("Too large."), 400, "Too large."),
        (
            TooLarge("Too large.", size=9, limit=8),
            400,
            "request JSON size of 9 bytes exceeds the maximum allowed input size of 8 bytes. Use --http-max-input-size "
            "to increase the limit.",
        ),
        (ParleyError("Broken."), 500, "Broken."),
    ],
)
def test_triton_error_has_one_member(error, status, message):
    assert error_answers.triton_error_answer(error)[:2] == (
        status,
        json.dumps({"error": message}, separators=(",", ":")).encode(),
    )


# -- strict profile


def test_triton_generate_strict_plain_route_allows_one_response():
    """Strictly, a streaming request on the plain route fails if it made several responses."""
    reply = read(stream=True, strict=True)
    reply.add_events(
        [PromptAccepted(0, [1]), ChoiceDelta(0, "ab"), done(tokens=2)]
    )  # two tokens are several responses, even in one batch
    assert reply.render_body(Usage()) == (
        b'{"error":"generate expects model to produce exactly 1 response, use generate stream for model that generates '
        b'various number of responses"}'
    )
    reply = read(stream=True, strict=True)
    reply.add_events([PromptAccepted(0, [1])])
    reply.add_events([ChoiceDelta(0, "a"), done(tokens=1)])
    assert json.loads(reply.render_body(Usage()))["text_output"] == "a"
    reply = read(strict=True)
    reply.add_events([ChoiceDelta(0, "a")])
    reply.add_events([ChoiceDelta(0, "b"), done()])
    assert json.loads(reply.render_body(Usage()))["text_output"] == "Hiab"


@pytest.mark.parametrize("members", [{"stop": ["x"]}, {"stop_token_ids": [5]}, {"logit_bias": {"5": 1}}], ids=str)
def test_triton_generate_strict_refuses_array_parameters(members):
    (name,) = members
    message = f"parameter '{name}' has invalid type. It should be either 'int', 'bool', or 'string'."
    assert refusal(strict=True, **members) == (400, message)
    assert refusal(strict=True, parameters=members) == (400, NESTED + message)
    read(strict=True, sampling_parameters=json.dumps(members), stop_words=["x"])


def test_triton_generate_strict_refuses_prompt_in_stream():
    message = "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed."
    assert refusal(strict=True, stream=True, exclude_input_in_output=False) == (500, message)
    assert (
        read(strict=True, stream=True, stream_route=True).render_chunk([ChoiceDelta(0, "a")]) == BEFORE + b'"a"' + AFTER
    )


def test_triton_generate_strict_refuses_duplicate_input():
    duplicate_text, duplicate_nested = (
        b'{"text_input":"a","x":1,"text_input":"b"}',
        b'{"text_input":"a","parameters":{"stream":true,"stream":true}}',
    )
    duplicate = "[request id: <id_unknown>] input '{}' already exists in request"
    assert refusal(duplicate_text, strict=True) == (400, duplicate.format("text_input"))
    assert refusal(duplicate_nested, strict=True) == (400, NESTED + duplicate.format("stream"))
    assert read_bytes(duplicate_text).request.prompts == [TextPrompt("b")]
    parameters = b'{"text_input":"a","max_tokens":3,"max_tokens":4,"parameters":[["stream",1],["stream",1]]}'
    assert refusal(parameters, strict=True)[0] == 500  # refused for the array; the last of duplicate parameters counts
    assert (
        read_bytes(
            parameters.replace(b',"parameters":[["stream",1],["stream",1]]', b""), strict=True
        ).request.stop_conditions.max_tokens
        == 4
    )
