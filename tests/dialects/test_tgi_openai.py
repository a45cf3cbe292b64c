"""TGI's chat, completions and Vertex routes: meaning of bodies, refusals, and the exact bytes of answers."""

import dataclasses
import json
from typing import Any

import pytest

from parley.dialects.facts import ModelCard
from parley.dialects.reply import Answer, RequestTimings
from parley.dialects.request_context import RequestContext
from parley.dialects.tgi import STRICT, chat, completions, generate, messages, openai, tokens, vertex
from parley.dialects.tgi.api_rules import EXTENDED_TGI_RULES, STRICT_TGI_RULES, TgiRules
from parley.errors import BadRequest, EngineError, Overloaded, ParleyError, UnknownModel
from parley.types import (
    ChatPrompt,
    ChoiceDelta,
    ChoiceDone,
    Grammar,
    Message,
    OutputOptions,
    PromptAccepted,
    SamplingOptions,
    StopConditions,
    TextPrompt,
    TokenInfo,
    ToolCall,
    ToolCallDelta,
    Usage,
)

CONTEXT = RequestContext("0f", 1700000000, "fp_1", context_length=100, device="cpu")
USAGE = Usage(prompt_tokens=5, completion_tokens=2)
TIMINGS = RequestTimings(total=0.482913, validation=0.0021, queue=0.0109, inference=0.4685)
MESSAGES = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
FINGERPRINT = openai.SYSTEM_FINGERPRINT.encode()


def read_chat(rules: TgiRules = STRICT_TGI_RULES, **members: Any) -> Any:
    return chat.read_tgi_chat(rules, json.dumps({"messages": MESSAGES} | members).encode(), CONTEXT)


def read_completion(rules: TgiRules = STRICT_TGI_RULES, **members: Any) -> Any:
    return completions.read_tgi_completion(rules, json.dumps({"prompt": "Hi"} | members).encode(), CONTEXT)


def refusal(make: Any) -> tuple[int, Any]:
    with pytest.raises(ParleyError) as caught:
        make()
    answer = STRICT.render_error(caught.value)
    return answer.status, json.loads(
        answer.body
    ) if answer.content_type == b"application/json" else answer.body.decode()


def word(token_id: int, text: str, special: bool = False, **more: Any) -> TokenInfo:
    return TokenInfo(token_id, text, text.encode(), -0.5, 1, is_special=special, **more)


def done(index: int = 0, reason: Any = "stop", count: int = 2, stop: Any = None) -> ChoiceDone:
    return ChoiceDone(index, reason, Usage(5, count), stop)


# -- meaning of chat bodies


def test_tgi_chat_minimal_body_means_defaults():
    request = read_chat().request
    assert request.prompts == [ChatPrompt([Message("user", "Hi")])]
    assert request.sampling == SamplingOptions()
    assert request.stop_conditions == StopConditions(include_in_output=True, reserved_tokens=1024)
    assert request.output_options == OutputOptions(unparsed=True)
    assert (request.model, request.n, request.stream) == ("", 1, False)


@pytest.mark.parametrize(
    ("members", "sampling"),
    [
        ({"temperature": 0}, SamplingOptions(temperature=0)),
        ({"temperature": 0.5}, SamplingOptions(temperature=0.5)),
        ({"temperature": 1}, SamplingOptions()),
        ({"temperature": None}, SamplingOptions()),
        ({"top_p": 0.9, "seed": 3}, SamplingOptions(top_p=0.9, seed=3)),
        ({"frequency_penalty": -1.5}, SamplingOptions(frequency_penalty=-1.5)),
        ({"presence_penalty": 0}, SamplingOptions(repetition_penalty=2.0)),
        ({"presence_penalty": -1}, SamplingOptions(repetition_penalty=1.0)),
        ({"logit_bias": [1.0, 2.0], "n": 5, "top_k": 3, "user": "u"}, SamplingOptions()),
    ],
    ids=str,
)
def test_tgi_chat_sampling_parameters_reach_the_request(members, sampling):
    assert read_chat(**members).request.sampling == sampling


def test_tgi_chat_reads_length_stop_and_logprobs():
    assert read_chat(max_tokens=7, stop=["a"]).request.stop_conditions == StopConditions(
        ["a"], max_tokens=7, include_in_output=True, reserved_tokens=1024
    )
    assert read_chat(max_completion_tokens=7).request.stop_conditions.max_tokens == 7
    assert read_chat(logprobs=True, top_logprobs=3).request.output_options == OutputOptions(logprobs=3, unparsed=True)
    assert read_chat(logprobs=True).request.output_options == OutputOptions(logprobs=0, unparsed=True)
    assert read_chat(top_logprobs=3).request.output_options == OutputOptions(unparsed=True)
    streamed = read_chat(stream=True, stream_options={"include_usage": True}).request
    assert (streamed.stream, streamed.output_options) == (True, OutputOptions(usage=True, ids=True, unparsed=True))


def test_tgi_chat_model_names_a_known_adapter_or_else_the_base_model():
    context = dataclasses.replace(CONTEXT, model_names=("tiny",), adapters=("lora",))
    for name, chosen in [("tgi", ""), ("lora", "lora"), ("tiny", "tiny"), ("org/Model", ""), ("", "")]:
        for read, members in (
            (chat.read_tgi_chat, {"messages": MESSAGES}),
            (completions.read_tgi_completion, {"prompt": "Hi"}),
        ):
            reply = read(STRICT_TGI_RULES, json.dumps(members | {"model": name}).encode(), context)
            assert reply.request.model == chosen, (name, members)
    assert read_chat().request.model == ""
    unknown = STRICT.render_error(UnknownModel("There is none.", name="lora"))
    assert (unknown.status, json.loads(unknown.body)) == (
        424, {"error": "Request failed during generation: There is none.", "error_type": "generation"}
    )  # fmt: skip


def test_tgi_chat_joins_parts_and_continues_last_assistant_turn():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": "So \n"}]
    assert read_chat(messages=turns).request.prompts == [
        ChatPrompt(
            [Message("user", "ab"), Message("assistant", "So")], add_generation_prompt=False, continue_final=True
        )
    ]  # fmt: skip
    assert read_chat(guideline="Be kind.").request.prompts[0].options == {"guideline": "Be kind."}


def test_tgi_chat_appends_tool_prompt_to_last_message():
    (prompt,) = read_chat(tools=[TOOL], tool_prompt="Call one.").request.prompts
    assert prompt.tools == [{"type": "function", "function": TOOL["function"] | {"strict": True}}]
    assert (prompt.tool_choice, prompt.forced_tool, prompt.parallel_calls) == ("auto", None, False)
    assert prompt.messages == [Message("user", "Hi\n---\nCall one.")]
    assert read_chat(tools=[TOOL]).request.output_options == OutputOptions()
    described = {"type": "function", "function": {"name": "f", "description": "d", "arguments": {"a": 1}}}
    assert read_chat(tools=[described]).request.prompts[0].tools == [
        {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"a": 1}, "strict": True}}
    ]
    unused = read_chat(tools=[TOOL], tool_choice="none", tool_prompt="x").request
    assert unused.prompts == [ChatPrompt([Message("user", "Hi")])]


@pytest.mark.parametrize("named", ["f", {"type": "function", "function": {"name": "f"}}])
def test_tgi_chat_tool_choice_forces_a_call(named):
    for choice, only in (("required", None), (named, "f")):
        (chat,) = read_chat(tools=[TOOL], tool_choice=choice).request.prompts
        assert (chat.tool_choice, chat.forced_tool, chat.parallel_calls) == ("required", only, False)


@pytest.mark.parametrize("member", ["arguments", "parameters"])
@pytest.mark.parametrize("arguments", [{"a": "é"}, '{"a":"é"}'], ids=["object", "text"])
def test_tgi_chat_reads_tool_calls_of_older_versions(member, arguments):
    call = {"id": "0", "type": "function", "function": {"description": None, "name": "f", member: arguments}}
    turns = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "6.7"}]
    (chat,) = read_chat(messages=[{"role": "user", "content": "Hi"}, *turns]).request.prompts
    assert chat.messages[1].tool_calls == [ToolCall("0", "f", '{"a":"é"}')]
    assert chat.messages[2] == Message("tool", "6.7")


def test_tgi_chat_numbers_tool_call_ids():
    def chat_of(*ids: str) -> ChatPrompt:
        return ChatPrompt([Message("assistant", tool_calls=[ToolCall(call_id, "f", "{}")]) for call_id in ids])

    assert [messages.next_call_id(chat_of(*ids)) for ids in ((), ("0",), ("3", "1"), ("call_a",), ("9" * 40,))] == [
        "0", "1", "4", "", ""
    ]  # fmt: skip


# -- refusals


@pytest.mark.parametrize(
    ("members", "text"),
    [
        ({"messages": None}, "missing field `messages`"),
        ({"max_tokens": -1}, "max_tokens: invalid value: integer `-1`, expected u32"),
        ({"max_tokens": 1.0}, "max_tokens: invalid type: floating point `1.0`, expected u32"),
        ({"max_tokens": 1, "max_completion_tokens": 1}, "duplicate field `max_tokens`"),
        ({"stop": "a"}, 'stop: invalid type: string "a", expected a sequence'),
        ({"stream": None}, "stream: invalid type: null, expected a boolean"),
        ({"stream_options": None}, "stream_options: invalid type: null, expected a map"),
        ({"logit_bias": {"5": 1}}, "logit_bias: invalid type: map, expected a sequence"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format: missing field `value`"),
        ({"response_format": {"type": "text"}}, "response_format.type: unknown variant `text`, expected one of "
         "`json`, `json_object`, `regex`, `json_schema`"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].function: missing field `arguments`"),
        ({"tools": [{"function": {"name": "f"}}]}, "tools[0]: missing field `type`"),
        ({"seed": -1}, "seed: invalid value: integer `-1`, expected u64"),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_tgi_chat_refuses_wrong_type_in_plain_text(members, text, stream):
    status, message = refusal(lambda: read_chat(**{"stream": stream} | members))
    assert (status, message) == (422, f"Failed to deserialize the JSON body into the target type: {text}")


FAULTS = [
    ({"temperature": -1}, "`temperature` must be strictly positive"),
    ({"top_p": 1.0}, "`top_p` must be > 0.0 and < 1.0"),
    ({"top_p": 0}, "`top_p` must be > 0.0 and < 1.0"),
    ({"presence_penalty": -2}, "`repetition_penalty` must be strictly positive"),
    ({"frequency_penalty": 3}, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
    ({"top_logprobs": 6}, "`top_n_tokens` must be >= 0 and <= 5. Given: 6"),
    ({"max_tokens": 0}, "`max_new_tokens` must be strictly positive"),
    ({"stop": list("abcde")}, "`stop` supports up to 4 stop sequences. Given: 5"),
    ({"response_format": {"type": "json", "value": 5}}, "grammar is not supported"),
    (
        {"response_format": {"type": "json", "value": {}}},
        "grammar is not valid: Grammar must have a 'properties' field",
    ),
]  # fmt: skip


def test_tgi_chat_response_format_sets_grammar():
    request = read_chat(response_format={"type": "json_object", "value": {"properties": {}}}).request
    grammar = Grammar("json", {"type": "object", "properties": {}}, field="response_format")
    assert request.grammar == grammar
    assert read_chat(stream=True, response_format={"type": "regex", "value": "a"}).request.grammar.value == "a"


@pytest.mark.parametrize(("members", "text"), FAULTS, ids=str)
def test_tgi_chat_validation_error_is_status_or_stream_event(members, text):
    """A strict stream has already answered 200, so the error is an event in it."""
    assert refusal(lambda: read_chat(**members)) == (
        422, {"error": f"Input validation error: {text}", "error_type": "validation"}
    )  # fmt: skip
    error_event = json.dumps({"error": {"message": f"Input validation error: {text}", "http_status_code": 422}})
    stream_body = b"data: " + error_event.replace('": ', '":').replace(', "', ',"').encode() + b"\n\ndata: [DONE]\n\n"
    assert read_chat(stream=True, **members) == Answer(200, stream_body, b"text/event-stream")
    with pytest.raises(BadRequest):
        read_chat(EXTENDED_TGI_RULES, stream=True, **{"temperature": -1})


@pytest.mark.parametrize("stream", [False, True])
def test_tgi_chat_reports_tool_and_template_errors_before_stream(stream):
    named = {"type": "function", "function": {"name": "g"}}
    for choice in ("g", named):
        assert refusal(lambda c=choice: read_chat(tools=[TOOL], tool_choice=c, stream=stream)) == (
            422, {"error": "Tool error: Tool with name g not found", "error_type": "tool_error"}
        )  # fmt: skip
    grammar = {"type": "json", "value": {"properties": {}}}
    assert refusal(lambda: read_chat(tools=[], response_format=grammar, stream=stream))[1] == {
        "error": "Tool error: Grammar and tools are mutually exclusive", "error_type": "tool_error"
    }  # fmt: skip
    template = BadRequest("roles must alternate", field="messages")
    assert read_chat(stream=stream).render_refusal(template) is None
    assert json.loads(STRICT.render_error(template).body) == {
        "error": "Template error: roles must alternate", "error_type": "template_error"
    }  # fmt: skip


def test_tgi_chat_stream_errors_all_have_code_422():
    for error, text in (
        (EngineError("It broke."), "Request failed during generation: It broke."),
        (Overloaded("Full."), "Model is overloaded"),
    ):
        expected = b'data: {"error":{"message":"' + text.encode() + b'","http_status_code":422}}\n\ndata: [DONE]\n\n'
        assert read_chat(stream=True).fail_stream(error) == expected
        assert read_chat(stream=True).render_refusal(error) == Answer(200, expected, b"text/event-stream")
        assert read_chat().render_refusal(error) is None
        assert read_chat(EXTENDED_TGI_RULES, stream=True).render_refusal(error) is None


# -- answers


HEADING = b'"id":"","created":1700000000,"model":"m","system_fingerprint":"' + FINGERPRINT + b'",'


def chunk(text: str, finish: str = "null", logprobs: str = "null") -> bytes:
    return (
        b'data: {"object":"chat.completion.chunk",' + HEADING
        + b'"choices":[{"index":0,"delta":{"role":"assistant","content":' + json.dumps(text).encode()
        + b'},"logprobs":' + logprobs.encode() + b',"finish_reason":' + finish.encode() + b'}],"usage":null}\n\n'
    )  # fmt: skip


def test_tgi_chat_streams_one_chunk_per_token():
    reply = read_chat(stream=True)
    reply.request.model = "m"
    two_tokens = ChoiceDelta(0, "Hi there", tokens=[word(7, "Hi"), word(8, " there")])
    assert reply.render_chunk([PromptAccepted(0, [1] * 5)]) == b""
    assert reply.render_chunk([two_tokens]) == chunk("Hi") + chunk(" there")
    assert reply.render_chunk([ChoiceDelta(0, "!", tokens=[word(9, "!")])]) == chunk("!")
    last = [ChoiceDelta(0, "", tokens=[word(2, "</s>", True)]), done(count=4)]
    assert reply.render_chunk(last) == chunk("", '"stop"')
    assert reply.finish_stream(USAGE) == b"data: [DONE]\n\n"
    assert (reply.media_type, reply.ping_bytes, reply.ping_interval) == ("text/event-stream", b":\n\n", 15.0)


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (done(), "stop"),
        (done(reason="length"), "length"),
        (done(stop="x"), "stop_sequence"),
        (done(count=3), "length"),
    ],
)
def test_tgi_chat_maps_finish_reason(event, reason):
    reply = read_chat(stream=True, max_tokens=3)
    reply.request.model = "m"
    assert reply.render_chunk([ChoiceDelta(0, "x", tokens=[word(7, "x")]), event]) == chunk("x", f'"{reason}"')
    whole = read_chat(max_tokens=3)
    whole.add_events([ChoiceDelta(0, "x"), event])
    assert json.loads(whole.render_body(USAGE))["choices"][0]["finish_reason"] == reason


def test_tgi_chat_cuts_chunk_where_stop_string_cut_the_text():
    """Chunks are made per token, but a stop string can end inside a token."""
    reply = read_chat(stream=True)
    delta = ChoiceDelta(0, "one two", tokens=[word(1, "one"), word(2, " twofold")])
    events = [json.loads(line[6:]) for line in reply.render_chunk([delta, done(stop="two")]).split(b"\n\n")[:-1]]
    assert [event["choices"][0]["delta"]["content"] for event in events] == ["one", " two"]
    split_character = ChoiceDelta(0, "é", tokens=[TokenInfo(1, "", b"\xc3"), TokenInfo(2, "", b"\xa9")])
    assert [text for _, text in openai.split_delta(split_character)] == ["", "é"]


def test_tgi_chat_streams_logprobs_and_usage():
    reply = read_chat(stream=True, logprobs=True, top_logprobs=1, stream_options={"include_usage": True})
    reply.request.model = "m"
    token = word(7, "Hi", top_tokens=[word(7, "Hi")])
    logprobs = '{"content":[{"token":"Hi","logprob":-0.5,"top_logprobs":[{"token":"Hi","logprob":-0.5}]}]}'
    assert reply.render_chunk([ChoiceDelta(0, "Hi", tokens=[token]), done()]) == chunk("Hi", '"stop"', logprobs)
    assert reply.finish_stream(USAGE) == (
        b'data: {"object":"chat.completion.chunk",' + HEADING + b'"choices":[],"usage":{"prompt_tokens":5,'
        b'"completion_tokens":2,"total_tokens":7}}\n\ndata: [DONE]\n\n'
    )


def test_tgi_chat_writes_body_and_headers():
    reply = read_chat()
    reply.request.model = "m"
    reply.add_events([PromptAccepted(0, [1] * 5), ChoiceDelta(0, "Hi "), ChoiceDelta(0, "you"), done()])
    assert reply.render_body(USAGE) == (
        b'{"object":"chat.completion",' + HEADING + b'"choices":[{"index":0,"message":{"role":"assistant",'
        b'"content":"Hi you"},"logprobs":null,"finish_reason":"stop"}],"usage":{"prompt_tokens":5,'
        b'"completion_tokens":2,"total_tokens":7}}'
    )
    assert dict(reply.answer_headers(TIMINGS)) == {
        b"x-compute-type": b"cpu+optimized",
        b"x-compute-time": b"0.482913000",
        b"x-compute-characters": b"2",
        b"x-total-time": b"482",
        b"x-validation-time": b"2",
        b"x-queue-time": b"10",
        b"x-inference-time": b"468",
        b"x-time-per-token": b"234",
        b"x-prompt-tokens": b"5",
        b"x-generated-tokens": b"2",
    }


def test_tgi_chat_answers_with_requested_model_name():
    reply = read_chat(model="dummy")
    reply.request.model = "m"
    reply.add_events([done()])
    assert json.loads(reply.render_body(USAGE))["model"] == "dummy"


CALL_EVENTS = [
    ChoiceDelta(0, "", output_part="tool", tool_call=ToolCallDelta(0, "call_x", "f", "")),
    ChoiceDelta(0, "", output_part="tool", tool_call=ToolCallDelta(0, arguments='{"a":1}')),
    done(reason="tool"),
]


def test_tgi_chat_writes_tool_call_without_content():
    reply = read_chat(tools=[TOOL])
    reply.add_events(CALL_EVENTS)
    (choice,) = json.loads(reply.render_body(USAGE))["choices"]
    function = {"description": None, "name": "f", "arguments": '{"a":1}'}
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "tool_calls": [{"id": "0", "type": "function", "function": function}]},
        "logprobs": None,
        "finish_reason": "stop",
    }


def test_tgi_chat_streamed_call_repeats_id_without_finish_reason():
    reply = read_chat(stream=True, tools=[TOOL])
    choices = [json.loads(line[6:])["choices"][0] for line in reply.render_chunk(CALL_EVENTS).split(b"\n\n")[:-1]]
    assert [choice["delta"] for choice in choices] == [
        {
            "role": "assistant",
            "tool_calls": [
                {"index": 0, "id": "0", "type": "function", "function": {"name": name, "arguments": arguments}}
            ],
        }
        for name, arguments in (("f", ""), (None, '{"a":1}'))
    ]
    assert all(choice["finish_reason"] is None for choice in choices)


# -- completions


def test_tgi_completions_members_reach_the_request():
    request = read_completion(max_tokens=4, stop=["x"], repetition_penalty=1.5, seed=1).request
    assert request.prompts == [TextPrompt("Hi")]
    assert request.sampling == SamplingOptions(seed=1, repetition_penalty=1.5)
    assert request.stop_conditions == StopConditions(["x"], max_tokens=4, include_in_output=True, reserved_tokens=1024)
    assert read_completion(prompt=["a", "b"], temperature=0).request.sampling == SamplingOptions(temperature=0)
    assert read_completion(prompt=["a", "b"]).request.prompts == [TextPrompt("a"), TextPrompt("b")]


def test_tgi_completions_refuses_wrong_prompts_and_suffix():
    prefix = "Failed to deserialize the JSON body into the target type: "
    for prompt, text in (
        ([], "prompt: Empty array detected. Do not use an empty array for the prompt."),
        ([1, 2], "prompt[0]: invalid type: integer `1`, expected a string"),
        (5, "prompt: invalid type: integer `5`, expected a sequence"),
        (None, "prompt: invalid type: null, expected a sequence"),
    ):
        assert refusal(lambda p=prompt: read_completion(prompt=p)) == (422, prefix + text)
    assert refusal(lambda: read_completion(suffix="s")) == (422, {
        "error": "Suffix is not supported and can be achieved by preprocessing the prompt.",
        "error_type": "suffix not supported",
    })  # fmt: skip
    assert refusal(lambda: read_completion(prompt=["a"] * 5)) == (422, {
        "error": "Number of prompts exceeds the maximum allowed batch size of 4", "error_type": "batch size exceeded",
    })  # fmt: skip
    assert (
        refusal(lambda: read_completion(prompt=["a", ""]))[1]["error"]
        == "Input validation error: `inputs` cannot be empty"
    )
    assert read_completion(suffix="s", stream=True).status == 200


def test_tgi_completions_writes_choices_in_finishing_order():
    reply = read_completion(prompt=["a", "b"])
    reply.request.model = "m"
    reply.add_events([ChoiceDelta(0, "x"), ChoiceDelta(1, "y"), done(1, "length"), ChoiceDelta(0, "z"), done(0)])
    assert reply.render_body(USAGE) == (
        b'{"object":"text_completion",' + HEADING + b'"choices":[{"index":1,"text":"y","logprobs":null,'
        b'"finish_reason":"length"},{"index":0,"text":"xz","logprobs":null,"finish_reason":"stop"}],'
        b'"usage":{"prompt_tokens":5,"completion_tokens":2,"total_tokens":7}}'
    )
    names = [name for name, _ in reply.answer_headers(TIMINGS)]
    assert b"x-total-time" in names and b"x-compute-time" not in names


def test_tgi_completions_writes_stream():
    reply = read_completion(stream=True)
    reply.request.model = "m"
    assert reply.render_chunk([PromptAccepted(0, [1] * 5), ChoiceDelta(0, "x", tokens=[word(7, "x")])]) == (
        b'data: {"object":"text_completion","id":"","created":1700000000,"choices":[{"index":0,"text":"x",'
        b'"logprobs":null,"finish_reason":""}],"model":"m","system_fingerprint":"' + FINGERPRINT + b'"}\n\n'
    )
    assert reply.render_chunk([ChoiceDelta(0, "", tokens=[word(2, "</s>", True)]), done()]) == (
        b'data: {"object":"text_completion",' + HEADING + b'"choices":[{"index":0,"text":"","logprobs":null,'
        b'"finish_reason":"eos_token"}],"usage":{"prompt_tokens":5,"completion_tokens":2,"total_tokens":7}}\n\n'
    )
    assert reply.finish_stream(USAGE) == b"data: [DONE]\n\n"


# -- SageMaker and Vertex envelopes


def test_tgi_invocations_choose_task_by_body():
    def invoke(**members: Any) -> Any:
        return generate.read_sagemaker(STRICT_TGI_RULES, json.dumps(members).encode(), CONTEXT)

    assert isinstance(invoke(inputs="a"), generate.TgiGenerateReply)
    assert isinstance(invoke(messages=MESSAGES), chat.TgiChatReply)
    assert isinstance(invoke(prompt="a"), completions.TgiCompletionReply)
    assert refusal(lambda: invoke(input="a")) == (
        422, "Failed to deserialize the JSON body into the target type: data did not match any variant of untagged "
        "enum SagemakerRequest"
    )  # fmt: skip


def instances(*items: Any, rules: TgiRules = STRICT_TGI_RULES) -> Any:
    return vertex.read_vertex(rules, json.dumps({"instances": items}).encode(), CONTEXT)


def test_tgi_vertex_answers_instances_with_predictions():
    short = {"max_new_tokens": 3, "seed": 4}
    reply = instances(
        {"inputs": "a", "parameters": {**short, "temperature": 0.1, "stop": ["x"]}},
        {"messages": MESSAGES, "max_tokens": 3, "seed": 4},
    )
    request = reply.request
    assert request.prompts == [TextPrompt("a"), ChatPrompt([Message("user", "Hi")])]
    assert (request.sampling, request.stop_conditions) == (
        SamplingOptions(seed=4),
        StopConditions(max_tokens=3, include_in_output=True, reserved_tokens=1024),
    )
    reply.add_events([ChoiceDelta(1, "two"), ChoiceDelta(0, "one"), done(1), done(0)])
    assert reply.render_body(USAGE) == b'{"predictions":["one","two"]}'


def test_tgi_vertex_refuses_wrong_instances():
    failed = Answer(500, b'{"error":"Incomplete generation","error_type":"Incomplete generation"}')
    assert refusal(instances) == (
        422, {"error": "Input validation error", "error_type": "Input validation error"}
    )  # fmt: skip
    assert instances({"inputs": ""}) == failed
    assert instances({"inputs": "a", "parameters": {"max_new_tokens": 0}}) == failed
    assert instances({"inputs": "a", "parameters": {"seed": 1}}, {"inputs": "a"}) == failed
    assert instances({"inputs": "a"}).render_refusal(EngineError("x")) == failed
    assert instances({"inputs": "a"}, rules=EXTENDED_TGI_RULES).render_refusal(EngineError("x")) is None
    for bad in (b"{}", b'{"instances":null}', b'{"instances":[5]}', b'{"instances":[{}]}'):
        status, text = refusal(lambda b=bad: vertex.read_vertex(STRICT_TGI_RULES, b, CONTEXT))
        assert status == 422 and text.startswith("Failed to deserialize")


def test_tgi_lists_models():
    assert tokens.write_tgi_models([ModelCard("m", 5, 100)]) == (
        b'{"object":"list","data":[{"id":"m","object":"model","created":0,"owned_by":"m"}]}'
    )
