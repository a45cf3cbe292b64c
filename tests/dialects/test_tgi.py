"""TGI: meaning of bodies, the layer that refuses a bad one, and the exact bytes of answers."""

import dataclasses
import json
import struct
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from parley.dialects import vectors
from parley.dialects.admin_requests import TokenizeResult
from parley.dialects.facts import ModelCard, ServerInfo
from parley.dialects.fields import MAX_F32
from parley.dialects.reply import RequestTimings
from parley.dialects.request_context import RequestContext
from parley.dialects.tgi import DIALECT, OLD, STRICT, generate, parameters, tokens
from parley.dialects.tgi.api_rules import EXTENDED_TGI_RULES, OLD_TGI_RULES, STRICT_TGI_RULES, TgiRules
from parley.errors import (
    ContextLength,
    EngineDied,
    EngineError,
    Forbidden,
    InvalidValue,
    MalformedBody,
    NotAllowed,
    NotFound,
    NotReady,
    Overloaded,
    ParleyError,
    TooLarge,
    Unauthorized,
)
from parley.types import (
    ChatPrompt,
    ChoiceDelta,
    ChoiceDone,
    Grammar,
    Message,
    OutputOptions,
    PromptAccepted,
    PromptScored,
    SamplingOptions,
    StopConditions,
    TextPrompt,
    TokenInfo,
    Usage,
)

CONTEXT = RequestContext("0f", 1700000000, "fp_1", context_length=100, device="cpu")
USAGE = Usage(prompt_tokens=5, completion_tokens=2)
TIMINGS = RequestTimings(total=0.482913, validation=0.0021, queue=0.0109, inference=0.4685)
INPUTS = "My name is Olivier and I"


def body(parameters: Any = None, **members: Any) -> bytes:
    optional = {} if parameters is None else {"parameters": parameters}
    return json.dumps({"inputs": INPUTS} | optional | members).encode()


def read_generate(
    route: Any = generate.read_generate, rules: TgiRules = STRICT_TGI_RULES, **parameters: Any
) -> generate.TgiGenerateReply:
    return route(rules, body(parameters), CONTEXT)


def refusal_response(make: Any) -> tuple[int, str, Any]:
    """Return status, content type and body of the refusal of a call."""
    with pytest.raises(ParleyError) as caught:
        make()
    status, data, type_ = DIALECT.render_error(caught.value)
    return status, type_.decode(), json.loads(data) if type_ == b"application/json" else data.decode()


def refusal(
    parameters: Any, route: Any = generate.read_generate, rules: TgiRules = STRICT_TGI_RULES, **members: Any
) -> str:
    """Return the text of a validation error."""
    data = body(parameters, **members)
    if rules.strict and (route is generate.read_generate_stream or members.get("stream")):
        refused = route(rules, data, CONTEXT)
        assert (refused.status, refused.content_type) == (200, b"text/event-stream")
        (error_event,) = events(refused.body)
    else:
        status, type_, error_event = refusal_response(lambda: route(rules, data, CONTEXT))
        assert (status, type_) == (422, "application/json")
    assert error_event["error_type"] == "validation"
    assert list(error_event) == ["error", "error_type"]
    return error_event["error"].removeprefix("Input validation error: ")


# -- meaning of bodies


def test_tgi_body_without_parameters_means_sampling():
    request = generate.read_generate(STRICT_TGI_RULES, body(), CONTEXT).request
    assert request.prompts == [TextPrompt(INPUTS)]
    assert request.sampling == SamplingOptions()
    assert request.stop_conditions == StopConditions(include_in_output=True, reserved_tokens=1024)
    assert (request.output_options, request.n, request.stream, request.max_prompt_tokens) == (
        OutputOptions(),
        1,
        False,
        None,
    )


def test_tgi_empty_parameters_mean_greedy():
    assert read_generate().request.sampling == SamplingOptions(temperature=0)


@pytest.mark.parametrize(
    ("parameters", "sampling"),
    [
        ({"do_sample": True}, SamplingOptions()),
        ({"temperature": 0.7}, SamplingOptions(temperature=0.7)),
        ({"temperature": 1.0}, SamplingOptions(temperature=0)),
        ({"temperature": 1.0, "do_sample": True}, SamplingOptions()),
        ({"top_k": 10}, SamplingOptions(top_k=10)),
        ({"top_p": 0.9}, SamplingOptions(top_p=0.9)),
        ({"typical_p": 0.95}, SamplingOptions(typical_p=0.95)),
        ({"seed": 5}, SamplingOptions(temperature=0, seed=5)),
        ({"seed": 2**64 - 1, "do_sample": True}, SamplingOptions(seed=2**64 - 1)),
        ({"repetition_penalty": 1.2}, SamplingOptions(temperature=0, repetition_penalty=1.2)),
        ({"frequency_penalty": -2.0}, SamplingOptions(temperature=0, frequency_penalty=-2.0)),
        ({"frequency_penalty": 0}, SamplingOptions(temperature=0)),
        ({"watermark": True}, SamplingOptions(temperature=0, watermark=True)),
    ],
    ids=str,
)
def test_tgi_sampling_parameters_turn_sampling_on(parameters, sampling):
    assert read_generate(**parameters).request.sampling == sampling


def test_tgi_reads_length_stop_and_truncate():
    assert read_generate(max_new_tokens=7).request.stop_conditions == StopConditions(
        max_tokens=7, include_in_output=True, reserved_tokens=1024
    )
    assert read_generate(stop=["a", "b"]).request.stop_conditions.strings == ["a", "b"]
    assert read_generate(truncate=99).request.max_prompt_tokens == 99


def test_tgi_details_and_streams_request_logprobs():
    assert read_generate().request.output_options == OutputOptions()
    assert read_generate(top_n_tokens=3).request.output_options == OutputOptions()
    assert read_generate(details=True).request.output_options == OutputOptions(logprobs=0)
    assert read_generate(details=True, top_n_tokens=3).request.output_options == OutputOptions(logprobs=3)
    assert read_generate(decoder_input_details=True).request.output_options == OutputOptions(
        logprobs=0, prompt_logprobs=0
    )
    assert read_generate(generate.read_generate_stream).request.output_options == OutputOptions(logprobs=0)
    assert read_generate(generate.read_generate_stream, top_n_tokens=5).request.output_options == OutputOptions(
        logprobs=5
    )


def test_tgi_best_of_sets_number_of_choices():
    request = read_generate(best_of=2, do_sample=True).request
    assert (request.n, request.output_options) == (2, OutputOptions(logprobs=0))
    assert (
        read_generate(best_of=1).request.n
        == read_generate(best_of=0).request.n
        == read_generate(best_of=None).request.n
        == 1
    )


def test_tgi_route_or_body_decides_on_streaming():
    for rules in (STRICT_TGI_RULES, EXTENDED_TGI_RULES):
        assert generate.read_generate_stream(rules, body(stream=False), CONTEXT).request.stream
        assert not generate.read_generate(rules, body(stream=True), CONTEXT).request.stream
        for route in (generate.read_generate_any, generate.read_sagemaker):
            assert route(rules, body(stream=True), CONTEXT).request.stream
            assert not route(rules, body(), CONTEXT).request.stream


NULLABLE = (
    "best_of", "temperature", "repetition_penalty", "frequency_penalty", "top_k", "top_p", "typical_p",
    "max_new_tokens", "return_full_text", "truncate", "seed", "top_n_tokens", "grammar", "adapter_id",
)  # fmt: skip


def test_tgi_accepts_nulls_of_the_old_client():
    parameters = dict.fromkeys(NULLABLE) | {"do_sample": False, "stop": [], "watermark": False, "details": True}
    assert read_generate(**parameters).request == read_generate(details=True).request


@pytest.mark.parametrize("name", ["do_sample", "stop", "watermark", "details", "decoder_input_details"])
def test_tgi_strict_refuses_null_parameters(name):
    status, type_, text = refusal_response(lambda: read_generate(**{name: None}))
    assert (status, type_) == (422, "text/plain; charset=utf-8")
    assert text.startswith(
        f"Failed to deserialize the JSON body into the target type: parameters.{name}: invalid type: null, expected a "
    )
    assert (
        read_generate(rules=EXTENDED_TGI_RULES, **{name: None}).request
        == read_generate(rules=EXTENDED_TGI_RULES).request
    )


def test_tgi_strict_refuses_null_for_top_level_members():
    nulls = {"inputs": {"inputs": None}, "parameters": {"inputs": "a", "parameters": None},
             "stream": {"inputs": "a", "stream": None}}  # fmt: skip
    for name, members in nulls.items():
        text = refusal_response(
            lambda m=members: generate.read_generate_any(STRICT_TGI_RULES, json.dumps(m).encode(), CONTEXT)
        )[2]
        assert f"type: {name}: invalid type: null, expected" in text
    for name in ("parameters", "stream"):
        generate.read_generate_any(EXTENDED_TGI_RULES, json.dumps(nulls[name]).encode(), CONTEXT)


# -- the first layer: types, refused in plain text


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"max_new_tokens": -1}, "parameters.max_new_tokens: invalid value: integer `-1`, expected u32"),
        ({"max_new_tokens": 2**32}, "parameters.max_new_tokens: invalid value: integer `4294967296`, expected u32"),
        ({"max_new_tokens": 1.5}, "parameters.max_new_tokens: invalid type: floating point `1.5`, expected u32"),
        ({"top_k": 1.0}, "parameters.top_k: invalid type: floating point `1.0`, expected i32"),
        ({"seed": -1}, "parameters.seed: invalid value: integer `-1`, expected u64"),
        ({"seed": "1"}, 'parameters.seed: invalid type: string "1", expected u64'),
        ({"truncate": -1}, "parameters.truncate: invalid value: integer `-1`, expected usize"),
        ({"top_n_tokens": -1}, "parameters.top_n_tokens: invalid value: integer `-1`, expected u32"),
        ({"best_of": -1}, "parameters.best_of: invalid value: integer `-1`, expected usize"),
        ({"top_k": 2**31}, "parameters.top_k: invalid value: integer `2147483648`, expected i32"),
        ({"temperature": "hot"}, 'parameters.temperature: invalid type: string "hot", expected f32'),
        ({"temperature": 1e39}, "parameters.temperature: invalid value: floating point `1e+39`, expected f32"),
        ({"top_p": True}, "parameters.top_p: invalid type: boolean `true`, expected f32"),
        ({"typical_p": []}, "parameters.typical_p: invalid type: sequence, expected f32"),
        ({"repetition_penalty": {}}, "parameters.repetition_penalty: invalid type: map, expected f32"),
        ({"frequency_penalty": "x"}, 'parameters.frequency_penalty: invalid type: string "x", expected f32'),
        ({"stop": "word"}, 'parameters.stop: invalid type: string "word", expected a sequence'),
        ({"stop": ["a", 1]}, "parameters.stop[1]: invalid type: integer `1`, expected a string"),
        ({"watermark": 1}, "parameters.watermark: invalid type: integer `1`, expected a boolean"),
        ({"do_sample": "true"}, 'parameters.do_sample: invalid type: string "true", expected a boolean'),
        ({"details": 0}, "parameters.details: invalid type: integer `0`, expected a boolean"),
        (
            {"decoder_input_details": 0},
            "parameters.decoder_input_details: invalid type: integer `0`, expected a boolean",
        ),
        ({"return_full_text": 0}, "parameters.return_full_text: invalid type: integer `0`, expected a boolean"),
        ({"adapter_id": 5}, "parameters.adapter_id: invalid type: integer `5`, expected a string"),
        ({"grammar": "x"}, 'parameters.grammar: invalid type: string "x", expected a map'),
        ({"grammar": {"type": "json"}}, "parameters.grammar: missing field `value`"),
        ({"grammar": {"value": {}}}, "parameters.grammar: missing field `type`"),
        (
            {"grammar": {"type": "bnf", "value": ""}},
            "parameters.grammar.type: unknown variant `bnf`, "
            "expected one of `json`, `json_object`, `regex`, `json_schema`",
        ),
        (
            {"grammar": {"type": "regex", "value": {}}},
            "parameters.grammar.value: invalid type: map, expected a string",
        ),
        (
            {"grammar": {"type": "json_schema", "value": {"name": "n"}}},
            "parameters.grammar.value: missing field `schema`",
        ),
        ([], "parameters: invalid type: sequence, expected a map"),
    ],
    ids=str,
)
def test_tgi_refuses_wrong_type_in_plain_text(parameters, text):
    status, type_, message = refusal_response(
        lambda: generate.read_generate(STRICT_TGI_RULES, body(parameters), CONTEXT)
    )
    assert (status, type_) == (422, "text/plain; charset=utf-8")
    assert message == f"Failed to deserialize the JSON body into the target type: {text}"


def test_tgi_refuses_body_that_does_not_fit_the_route():
    start = "Failed to deserialize the JSON body into the target type: "
    plain = "text/plain; charset=utf-8"
    for data, status, text in (
        (b"{}", 422, start + "missing field `inputs`"),
        (b"[]", 422, start + "invalid type: sequence, expected a map"),
        (b'{"inputs":5}', 422, start + "inputs: invalid type: integer `5`, expected a string"),
        (b'{"inputs', 400, "Failed to parse the request body as JSON: "),
        (b"", 400, "Failed to parse the request body as JSON: "),
        (b'{"inputs":"\xff"}', 400, "Failed to parse the request body as JSON: "),
    ):
        response = refusal_response(lambda d=data: generate.read_generate_any(STRICT_TGI_RULES, d, CONTEXT))
        assert response[:2] == (status, plain)
        assert response[2] == text if status == 422 else response[2].startswith(text)
    chat = b'{"message":[]}'
    assert refusal_response(lambda: generate.read_sagemaker(STRICT_TGI_RULES, chat, CONTEXT))[2] == (
        start + "data did not match any variant of untagged enum SagemakerRequest"
    )


def test_tgi_ignores_unknown_members():
    reply = generate.read_generate(STRICT_TGI_RULES, body({"frobnicate": 1}, model="x", options={}), CONTEXT)
    assert reply.request == read_generate().request


# -- the second layer: validation of values

TEXTS = [
    ({"best_of": 3, "do_sample": True}, "`best_of` must be > 0 and <= 2. Given: 3"),
    ({"best_of": 2}, "you must use sampling when `best_of` is > 1"),
    ({"best_of": 2, "top_p": 0.5, "seed": 0}, "`seed` must not be set when `best_of` > 1"),
    ({"temperature": 0}, "`temperature` must be strictly positive"),
    ({"temperature": -0.5}, "`temperature` must be strictly positive"),
    ({"repetition_penalty": 0}, "`repetition_penalty` must be strictly positive"),
    ({"frequency_penalty": 2.01}, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
    ({"frequency_penalty": -2.01}, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
    ({"top_p": 0}, "`top_p` must be > 0.0 and < 1.0"),
    ({"top_p": 1.0}, "`top_p` must be > 0.0 and < 1.0"),
    ({"typical_p": 0}, "`typical_p` must be > 0.0 and < 1.0"),
    ({"typical_p": 1.0}, "`typical_p` must be > 0.0 and < 1.0"),
    ({"top_k": 0}, "`top_k` must be strictly positive"),
    ({"top_k": -1}, "`top_k` must be strictly positive"),
    ({"max_new_tokens": 0}, "`max_new_tokens` must be strictly positive"),
    ({"stop": list("abcde")}, "`stop` supports up to 4 stop sequences. Given: 5"),
    ({"top_n_tokens": 6}, "`top_n_tokens` must be >= 0 and <= 5. Given: 6"),
    ({"truncate": 0}, "`truncate` must be strictly positive and less than 99. Given: 0"),
    ({"truncate": 100}, "`truncate` must be strictly positive and less than 99. Given: 100"),
    ({"grammar": {"type": "json", "value": 5}}, "grammar is not supported"),
    ({"grammar": {"type": "json_schema", "value": {"schema": None}}}, "grammar is not supported"),
    ({"grammar": {"type": "json", "value": {}}}, "grammar is not valid: Grammar must have a 'properties' field"),
    ({"grammar": {"type": "json", "value": "{}"}}, "grammar is not valid: Grammar must have a 'properties' field"),
    (
        {"grammar": {"type": "json_schema", "value": {"schema": {"type": "object"}}}},
        "grammar is not valid: Grammar must have a 'properties' field",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("parameters", "text"), TEXTS, ids=str)
def test_tgi_refuses_values_out_of_range(parameters, text):
    assert refusal(parameters) == text


def test_tgi_reports_first_of_several_wrong_values():
    """Each wrong value is refused for its own reason; several are refused for the first one's reason."""
    wrong = {"temperature": 0, "repetition_penalty": 0, "frequency_penalty": 3, "top_p": 0, "typical_p": 0, "top_k": 0,
             "max_new_tokens": 0, "stop": list("abcde"), "top_n_tokens": 6, "truncate": 0}  # fmt: skip
    for name in list(wrong):
        assert f"`{name}`" in refusal(wrong)
        del wrong[name]
        if name == "top_n_tokens":
            assert refusal(wrong, inputs="") == "`inputs` cannot be empty"
    assert refusal({}, inputs="") == "`inputs` cannot be empty"


@pytest.mark.parametrize("rules", [STRICT_TGI_RULES, EXTENDED_TGI_RULES], ids=["strict", "extended"])
def test_tgi_refuses_best_of_and_prompt_details_in_streams(rules):
    for best_of in (0, 2):
        text = "`best_of` != 1 is not supported when streaming tokens"
        assert refusal({"best_of": best_of}, generate.read_generate_stream, rules) == text
    text = "`decoder_input_details` == true is not supported when streaming tokens"
    assert refusal({"decoder_input_details": True, "temperature": -1}, generate.read_generate_stream, rules) == text
    assert refusal({"decoder_input_details": True}, generate.read_generate_any, rules, stream=True) == text
    assert read_generate(generate.read_generate_stream, rules, best_of=1).request.n == 1


def test_tgi_strict_stream_reports_errors_as_events():
    response = read_generate(generate.read_generate_stream).render_refusal(Overloaded("5 answers"))
    assert response == (
        200,
        b'data: {"error":"Model is overloaded","error_type":"overloaded"}\n\n',
        b"text/event-stream",
    )
    assert read_generate().render_refusal(Overloaded("5 answers")) is None
    assert (
        read_generate(generate.read_generate_stream, EXTENDED_TGI_RULES).render_refusal(Overloaded("5 answers")) is None
    )
    assert refusal_response(lambda: read_generate(generate.read_generate_stream, stop=5))[:2] == (
        422,
        "text/plain; charset=utf-8",
    )
    assert refusal_response(lambda: generate.read_generate_stream(STRICT_TGI_RULES, b"{}", CONTEXT))[0] == 422


@pytest.mark.parametrize(("rules", "adapters", "name", "chosen"), [
    (STRICT_TGI_RULES, ["org/lora"], "org/lora", "org/lora"), (STRICT_TGI_RULES, ["org/lora"], "other", None),
    (STRICT_TGI_RULES, [], "null", None), (EXTENDED_TGI_RULES, ["org/lora"], "org/lora", "org/lora"),
    (EXTENDED_TGI_RULES, ["org/lora"], "other", "other"), (EXTENDED_TGI_RULES, [], "other", None),
    *((EXTENDED_TGI_RULES, ["org/lora"], name, None) for name in ("", "None", "null", "tiny")),
])  # fmt: skip
def test_tgi_takes_the_base_model_for_an_unknown_adapter(rules, adapters, name, chosen):
    context = dataclasses.replace(CONTEXT, model_names=("tiny",), adapters=adapters)
    reply = generate.read_generate(rules, body({"adapter_id": name}), context)
    assert reply.request.adapter == chosen


GRAMMARS: list[tuple[dict[str, Any], Grammar]] = [
    ({"type": "regex", "value": "a+"}, Grammar("regex", "a+", field="grammar")),
    ({"type": "json", "value": {"properties": {}}},
     Grammar("json", {"type": "object", "properties": {}}, field="grammar")),
    ({"type": "json_object", "value": '{"type":"array","properties":{}}'},
     Grammar("json", {"type": "array", "properties": {}}, field="grammar")),
    ({"type": "json_schema", "value": {"name": "n", "strict": 5, "schema": {"properties": {}}}},
     Grammar("json", {"type": "object", "properties": {}}, field="grammar")),
]  # fmt: skip


@pytest.mark.parametrize("rules", [STRICT_TGI_RULES, EXTENDED_TGI_RULES], ids=["strict", "extended"])
@pytest.mark.parametrize(("member", "grammar"), GRAMMARS, ids=str)
def test_tgi_grammar_reaches_the_request(member, grammar, rules):
    assert read_generate(rules=rules, grammar=member).request.grammar == grammar
    assert read_generate(generate.read_generate_stream, rules, grammar=member).request.grammar == grammar


def test_tgi_only_extended_accepts_schema_without_properties():
    request = read_generate(rules=EXTENDED_TGI_RULES, grammar={"type": "json", "value": "{}"}).request
    assert request.grammar == Grammar("json", {"type": "object"}, field="grammar")


def test_tgi_refuses_json_grammar_that_is_not_json():
    assert refusal({"grammar": {"type": "json", "value": "{"}}).startswith("grammar is not valid: ")
    assert refusal({"grammar": {"type": "json", "value": "[" * 100_000}}).startswith("grammar is not valid: ")


def test_tgi_extended_accepts_wider_ranges():
    def lenient(**parameters: Any) -> generate.TgiGenerateReply:
        return read_generate(rules=EXTENDED_TGI_RULES, **parameters)

    assert lenient(temperature=0, do_sample=True).request.sampling == SamplingOptions(temperature=0)
    assert (
        lenient(top_p=1.0).request.sampling == lenient(typical_p=1).request.sampling == SamplingOptions(temperature=0)
    )
    assert lenient(top_p=1.0, typical_p=1.0, top_k=0, do_sample=True).request.sampling == SamplingOptions()
    assert lenient(top_k=2.0, do_sample=True).request.sampling == SamplingOptions(top_k=2)
    assert lenient(stop="end").request.stop_conditions.strings == ["end"]
    assert lenient(stop=list("abcdefgh")).request.stop_conditions.strings == list("abcdefgh")
    assert lenient(top_n_tokens=20, details=True).request.output_options.logprobs == 20
    assert lenient(best_of=128, do_sample=True).request.n == 128
    assert refusal({"top_n_tokens": 21}, rules=EXTENDED_TGI_RULES) == "`top_n_tokens` must be >= 0 and <= 20. Given: 21"
    assert refusal({"stop": ["a"] * 1025}, rules=EXTENDED_TGI_RULES).endswith("Given: 1025")
    assert "characters" in refusal({"stop": ["a" * 20_000]}, rules=EXTENDED_TGI_RULES)
    assert refusal({"stop": [""]}, rules=EXTENDED_TGI_RULES) == "`parameters.stop[0]` cannot be empty"


# -- server errors


@pytest.mark.parametrize(
    ("error", "status", "data"),
    [
        (Overloaded("5 answers"), 429, {"error": "Model is overloaded", "error_type": "overloaded"}),
        (
            EngineError("It broke."),
            424,
            {"error": "Request failed during generation: It broke.", "error_type": "generation"},
        ),
        (EngineDied("Gone."), 424, {"error": "Request failed during generation: Gone.", "error_type": "generation"}),
        (
            ParleyError("A fault."),
            500,
            {"error": "Incomplete generation", "error_type": "incomplete_generation"},
        ),
        (NotReady("Loading."), 503, {"error": "unhealthy", "error_type": "healthcheck"}),
        (Forbidden("No."), 403, {"error": "No.", "error_type": "refused"}),
        (
            ContextLength("Long.", limit=100, prompt=90, requested=20),
            422,
            {
                "error": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 100. "
                "Given: 90 `inputs` tokens and 20 `max_new_tokens`",
                "error_type": "validation",
            },
        ),
        (
            ContextLength("Long.", limit=100, prompt=100),
            422,
            {
                "error": "Input validation error: `inputs` must have less than 99 tokens. Given: 100",
                "error_type": "validation",
            },
        ),
        (
            ContextLength("Far too long.", limit=100, prompt_over=200),
            422,
            {
                "error": "Input validation error: `inputs` must have less than 99 tokens. Given: over 200",
                "error_type": "validation",
            },
        ),
        (
            ContextLength("Far too long."),
            422,
            {"error": "Input validation error: Far too long.", "error_type": "validation"},
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_tgi_error_has_type(error, status, data):
    response = STRICT.render_error(error)
    assert (response.status, response.content_type, json.loads(response.body)) == (status, b"application/json", data)
    assert response.body == json.dumps(data, separators=(",", ":")).encode()
    if data["error_type"] != "incomplete_generation":
        assert read_generate(generate.read_generate_stream).fail_stream(error) == b"data: " + response.body + b"\n\n"


def test_tgi_internal_error_has_own_type_in_streams():
    fault = ParleyError("A fault.")
    assert read_generate(generate.read_generate_stream).fail_stream(fault) == (
        b'data: {"error":"Incomplete generation stream","error_type":"incomplete_generation_stream"}\n\n'
    )
    lenient = b'data: {"error":"Incomplete generation: A fault.","error_type":"incomplete_generation"}\n\n'
    assert read_generate(generate.read_generate_stream, EXTENDED_TGI_RULES).fail_stream(fault) == lenient
    old = b'data:{"error":"Incomplete generation","error_type":"incomplete_generation"}\n\n'
    assert read_generate(generate.read_generate_stream, OLD_TGI_RULES).fail_stream(fault) == old


def test_tgi_extended_errors_include_the_reason():
    assert (
        DIALECT.render_error(NotReady("Loading.")).body == b'{"error":"unhealthy: Loading.","error_type":"healthcheck"}'
    )
    assert json.loads(DIALECT.render_error(ParleyError("A fault.")).body)["error"] == "Incomplete generation: A fault."


def test_tgi_writes_some_errors_without_json():
    plain = b"text/plain; charset=utf-8"
    for error in (Unauthorized("x"), NotFound("x"), NotAllowed("x")):
        assert DIALECT.render_error(error) == (error.status, b"", plain)
    assert DIALECT.render_error(TooLarge("x")) == (
        413, b"Failed to buffer the request body: length limit exceeded", plain
    )  # fmt: skip
    assert DIALECT.render_error(MalformedBody("Bad.")) == (
        400,
        b"Failed to parse the request body as JSON: Bad.",
        plain,
    )
    assert DIALECT.render_error(InvalidValue("`x` is wrong")).status == 422


# -- answers


def token(token_id: int, text: str, logprob: float | None = -0.5, *, special: bool = False, top: int = 0) -> TokenInfo:
    alternatives = [TokenInfo(token_id + k, f"{text}{k}", text.encode(), -0.5 - k, k + 1) for k in range(top)]
    return TokenInfo(token_id, text, text.encode(), logprob, 1, alternatives, special)


FOR = token(363, " for", -1.5351562)
EOS = token(2, "</s>", -0.03, special=True)
ENDED = [ChoiceDelta(0, " for", tokens=[FOR]), ChoiceDelta(0, "", tokens=[EOS]), ChoiceDone(0, "stop", USAGE)]
ACCEPTED = PromptAccepted(0, [1, 2, 3, 4, 5], seed=77)


def answer_body(reply: generate.TgiGenerateReply, events: list[Any] = ENDED) -> bytes:
    reply.add_events([ACCEPTED, *events])
    return reply.render_body(USAGE)


def test_tgi_writes_answer_without_details():
    assert answer_body(read_generate()) == b'{"generated_text":" for"}'
    assert answer_body(read_generate(return_full_text=True)) == b'{"generated_text":"My name is Olivier and I for"}'
    assert (
        answer_body(read_generate(generate.read_generate_any)) == b'[{"generated_text":"My name is Olivier and I for"}]'
    )
    assert answer_body(read_generate(generate.read_sagemaker)) == b'[{"generated_text":"My name is Olivier and I for"}]'
    assert (
        answer_body(read_generate(generate.read_generate_any, return_full_text=False)) == b'[{"generated_text":" for"}]'
    )


TOKENS = (
    b'"tokens":[{"id":363,"text":" for","logprob":-1.5351562,"special":false},'
    b'{"id":2,"text":"</s>","logprob":-0.03,"special":true}]'
)


def test_tgi_writes_answer_with_details():
    assert answer_body(read_generate(details=True)) == (
        b'{"generated_text":" for",'
        b'"details":{"finish_reason":"eos_token","generated_tokens":2,"seed":null,"prefill":[],' + TOKENS + b"}}"
    )


def test_tgi_details_include_prompt_tokens():
    scores = PromptScored(0, [TokenInfo(1, "My", b"My"), TokenInfo(9, " n\ufffd", b" n\xc3", -2.25)])
    assert answer_body(read_generate(decoder_input_details=True), [scores, *ENDED]) == (
        b'{"generated_text":" for","details":{"finish_reason":"eos_token","generated_tokens":2,"seed":null,"prefill":['
        b'{"id":1,"text":"My","logprob":null},{"id":9,"text":" n\xef\xbf\xbd","logprob":-2.25}],' + TOKENS + b"}}"
    )


def test_tgi_details_include_top_tokens():
    events = [ChoiceDelta(0, "a", tokens=[token(5, "a", top=2)]), ChoiceDone(0, "length", Usage(1, 1))]
    details = json.loads(answer_body(read_generate(details=True, top_n_tokens=2), events))["details"]
    assert list(details) == ["finish_reason", "generated_tokens", "seed", "prefill", "tokens", "top_tokens"]
    assert details["top_tokens"] == [
        [
            {"id": 5, "text": "a0", "logprob": -0.5, "special": False},
            {"id": 6, "text": "a1", "logprob": -1.5, "special": False},
        ]
    ]
    assert "top_tokens" not in json.loads(answer_body(read_generate(details=True, top_n_tokens=0), events))["details"]


def test_tgi_best_of_writes_likeliest_sequence_first():
    """The seed of each sequence is the request's seed plus its index."""
    reply = read_generate(best_of=2, do_sample=True, details=True)
    worse = [ChoiceDelta(0, "a", tokens=[token(5, "a", -3.0)]), ChoiceDone(0, "length", Usage(5, 1))]
    better = [ChoiceDelta(1, "b", tokens=[token(6, "b", -1.0)]), ChoiceDone(1, "stop", Usage(5, 1), "b")]
    reply.add_events([ACCEPTED, *worse, *better])
    assert reply.render_body(USAGE) == (
        b'{"generated_text":"b","details":{"finish_reason":"stop_sequence","generated_tokens":1,"seed":78,"prefill":[],'
        b'"tokens":[{"id":6,"text":"b","logprob":-1.0,"special":false}],"best_of_sequences":[{"generated_text":"a",'
        b'"finish_reason":"length","generated_tokens":1,"seed":77,"prefill":[],'
        b'"tokens":[{"id":5,"text":"a","logprob":-3.0,"special":false}]}]}}'
    )
    assert dict(reply.answer_headers(TIMINGS))[b"x-generated-tokens"] == b"1"


@pytest.mark.parametrize(
    ("done", "reason"),
    [
        (ChoiceDone(0, "stop", Usage(5, 2)), "eos_token"),
        (ChoiceDone(0, "stop", Usage(5, 2), "for"), "stop_sequence"),
        (ChoiceDone(0, "length", Usage(5, 2)), "length"),
        (ChoiceDone(0, "length", Usage(5, 9)), "length"),
        (ChoiceDone(0, "stop", Usage(5, 9)), "length"),
        (ChoiceDone(0, "stop", Usage(5, 9), "for"), "length"),
    ],
    ids=str,
)
def test_tgi_maps_finish_reason(done, reason):
    details = json.loads(
        answer_body(read_generate(details=True, max_new_tokens=9), [ChoiceDelta(0, "a", tokens=[FOR]), done])
    )["details"]
    assert (details["finish_reason"], details["generated_tokens"]) == (reason, done.usage.completion_tokens)


def test_tgi_details_report_seed_only_when_sampling():
    def seed(**parameters: Any) -> Any:
        return json.loads(answer_body(read_generate(details=True, **parameters)))["details"]["seed"]

    assert seed(do_sample=True, seed=77) == seed(do_sample=True) == seed(temperature=0.5) == 77
    assert seed(seed=77) is None


def test_tgi_writes_stream():
    reply = read_generate(generate.read_generate_stream, details=True)
    assert reply.render_chunk([ACCEPTED]) == b""
    assert reply.render_chunk(ENDED[:1]) == (
        b'data: {"index":1,"token":{"id":363,"text":" for","logprob":-1.5351562,"special":false},'
        b'"generated_text":null,"details":null}\n\n'
    )
    assert reply.render_chunk(ENDED[1:]) == (
        b'data: {"index":2,"token":{"id":2,"text":"</s>","logprob":-0.03,"special":true},"generated_text":" for",'
        b'"details":{"finish_reason":"eos_token","generated_tokens":2,"seed":null,"input_length":5}}\n\n'
    )
    assert reply.finish_stream(USAGE) == b""
    assert reply.media_type == "text/event-stream"
    assert (reply.ping_bytes, reply.ping_interval) == (b":\n\n", 15.0)


def events(data: bytes) -> list[Any]:
    *frames, rest = data.split(b"\n\n")
    assert rest == b""
    return [json.loads(frame.removeprefix(b"data: ")) for frame in frames]


def test_tgi_last_event_has_full_text_and_null_details():
    reply = generate.read_generate_any(STRICT_TGI_RULES, body({}, stream=True), CONTEXT)
    last = events(reply.render_chunk([ACCEPTED, *ENDED]))[-1]
    assert last["generated_text"] == INPUTS + " for" and last["details"] is None


def test_tgi_stream_events_include_top_tokens():
    reply = read_generate(generate.read_generate_stream, top_n_tokens=1)
    data = reply.render_chunk([ChoiceDelta(0, "a", tokens=[token(5, "a", top=1)])])
    assert data == (
        b'data: {"index":1,"token":{"id":5,"text":"a","logprob":-0.5,"special":false},'
        b'"top_tokens":[{"id":5,"text":"a0","logprob":-0.5,"special":false}],"generated_text":null,"details":null}\n\n'
    )


def test_tgi_gives_split_character_to_its_last_token():
    """Guards against replacement characters in event texts."""
    parts = [TokenInfo(7, "\ufffd", b"\xc3", -1.0), TokenInfo(8, "\ufffd", b"\xa9", -1.0)]
    delta = ChoiceDelta(0, "é", tokens=parts)
    reply = read_generate(generate.read_generate_stream)
    stream_events = events(reply.render_chunk([delta]) + reply.render_chunk(ENDED))
    assert [event["token"]["text"] for event in stream_events] == ["", "é", " for", "</s>"]
    assert [event["index"] for event in stream_events] == [1, 2, 3, 4]
    assert stream_events[-1]["generated_text"] == "é for"
    details = json.loads(answer_body(read_generate(details=True), [delta, *ENDED]))["details"]
    assert [token["text"] for token in details["tokens"]] == ["", "é", " for", "</s>"]


def test_tgi_stream_adds_token_to_end_without_one():
    reply = read_generate(generate.read_generate_stream)
    stream_events = events(reply.render_chunk(ENDED[:1]) + reply.render_chunk([ChoiceDone(0, "length", Usage(5, 1))]))
    assert stream_events[-1]["token"] == {"id": 0, "text": "", "logprob": None, "special": True}
    assert stream_events[-1]["generated_text"] == " for"


def test_tgi_writes_timing_headers():
    reply = read_generate()
    answer_body(reply)
    assert reply.answer_headers(TIMINGS) == [
        (b"x-compute-type", b"cpu+optimized"),
        (b"x-compute-time", b"0.482913000"),
        (b"x-compute-characters", b"24"),
        (b"x-total-time", b"482"),
        (b"x-validation-time", b"2"),
        (b"x-queue-time", b"10"),
        (b"x-inference-time", b"468"),
        (b"x-time-per-token", b"234"),
        (b"x-prompt-tokens", b"5"),
        (b"x-generated-tokens", b"2"),
    ]
    assert reply.answer_headers(None) == [(b"x-compute-type", b"cpu+optimized"), (b"x-compute-characters", b"24")]


@given(st.floats(width=32, allow_subnormal=False))
@example(9052559478095872.0)  # has a six-digit and a different seven-digit form
def test_tgi_single_gives_shortest_float32_form(value):
    """The shortest decimal form that reads back to the same float32, as TGI writes it."""
    shortest = vectors.shortest_float32(value)
    if shortest is None:
        assert not -MAX_F32 <= value <= MAX_F32
        return
    assert struct.pack("f", shortest) == struct.pack("f", value)
    digits = len(Decimal(repr(shortest)).normalize().as_tuple().digits)
    assert digits <= 9
    for fewer in range(1, digits):
        assert struct.pack("f", float(f"{value:.{fewer}g}")) != struct.pack("f", value)


def test_tgi_single_rounds_to_float32():
    assert vectors.shortest_float32(-1.107274843) == -1.1072749
    assert (
        vectors.shortest_float32(None),
        vectors.shortest_float32(float("-inf")),
        vectors.shortest_float32(float("nan")),
    ) == (None, None, None)


# -- the small routes


def test_tgi_writes_info():
    about = ServerInfo(ModelCard("org/m", 1, 4096), slots=300, version="1.2")
    assert tokens.write_tgi_info(STRICT_TGI_RULES, about) == (
        b'{"model_id":"org/m","model_sha":null,"model_pipeline_tag":"text-generation","max_concurrent_requests":300,'
        b'"max_best_of":2,"max_stop_sequences":4,"max_input_tokens":4095,"max_total_tokens":4096,"validation_workers":1,'
        b'"max_client_batch_size":4,"router":"text-generation-router","version":"3.3.7","sha":null,'
        b'"docker_label":"parley-1.2"}'
    )
    loading = json.loads(tokens.write_tgi_info(EXTENDED_TGI_RULES, ServerInfo(ModelCard("m", 1, None), 1, "1")))
    assert loading["max_input_tokens"] is loading["max_total_tokens"] is None


def test_tgi_tokenize_writes_utf8_offsets():
    request = tokens.read_tgi_tokenize(body({"truncate": 3, "temperature": -1}))
    assert (request.prompt, request.with_spans, request.last_tokens) == (TextPrompt(INPUTS), True, 3)
    tokenized = TokenizeResult([1, 70, 71], None, 100, "né!", [(0, 0), (0, 2), (2, 3)])
    assert (
        tokens.write_tgi_tokens(tokenized)
        == (
            '[{"id":1,"text":"","start":0,"stop":0},{"id":70,"text":"né","start":0,"stop":3},'
            '{"id":71,"text":"!","start":3,"stop":4}]'
        ).encode()
    )
    plain = TokenizeResult([5], None, 100, "ab", [(0, 2)])
    assert tokens.write_tgi_tokens(plain) == b'[{"id":5,"text":"ab","start":0,"stop":2}]'


def test_tgi_chat_tokenize_reads_messages():
    def read_chat(*messages: Any) -> Any:
        return tokens.read_chat_tokenize(json.dumps({"messages": messages}).encode()).prompt

    user = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert read_chat(user) == ChatPrompt([Message("user", "ab")])
    open_ = read_chat(user, {"role": "assistant", "content": "So"})
    assert (open_.continue_final, open_.add_generation_prompt) == (True, False)
    tokenized = TokenizeResult([5], None, 100, "ab", [(0, 2)])
    assert tokens.write_chat_tokens(tokenized) == (
        b'{"tokenize_response":[{"id":5,"text":"ab","start":0,"stop":2}],"templated_text":"ab"}'
    )


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"{}", "missing field `inputs`"),
        (b'{"inputs":[]}', "inputs: invalid type: sequence, expected a string"),
        (b'{"inputs":null}', "inputs: invalid type: null, expected a string"),
        (b'{"inputs":"","parameters":{"truncate":-1}}', "truncate: invalid value"),
    ],
)
def test_tgi_tokenize_refuses_wrong_body(data, text):
    assert text in refusal_response(lambda: tokens.read_tgi_tokenize(data))[2]


def test_tgi_tests_name_every_parameter():
    """Guards against a new parameter that the null tests above do not list."""
    known = {*NULLABLE, "do_sample", "stop", "watermark", "details", "decoder_input_details"}
    assert set(parameters.TgiParameters.__struct_fields__) - {"reserve"} == known


# -- version 0.9.4


def test_tgi_old_version_has_other_defaults():
    old = OLD_TGI_RULES
    assert generate.read_generate(old, body(), CONTEXT).request.sampling == SamplingOptions(temperature=0)
    assert generate.read_generate(old, body(), CONTEXT).request.stop_conditions == StopConditions(
        max_tokens=20, include_in_output=True
    )
    ignored = {"frequency_penalty": 9, "top_n_tokens": 9, "grammar": 5, "adapter_id": 5, "do_sample": True}
    assert read_generate(rules=old, **ignored).request.sampling == SamplingOptions()
    assert refusal_response(lambda: read_generate(rules=old, max_new_tokens=None))[2].endswith(
        "parameters.max_new_tokens: invalid type: null, expected u32"
    )
    chat = b'{"messages":[{"role":"user","content":"a"}]}'
    assert refusal_response(lambda: generate.read_sagemaker(old, chat, CONTEXT))[2].endswith("missing field `inputs`")
    paths = {route.path for route in OLD.routes}
    assert paths == {"/", "/generate", "/generate_stream", "/invocations", "/info", "/health", "/ping", "/metrics"} | {
        "/api-doc/openapi.json", "/docs", "/docs/"
    }  # fmt: skip


def test_tgi_old_version_writes_events_without_space_and_index():
    reply = generate.read_generate_stream(OLD_TGI_RULES, body({"details": True}), CONTEXT)
    assert reply.render_chunk(
        [PromptAccepted(0, [1] * 5), ChoiceDelta(0, " for", tokens=[TokenInfo(363, " for", b" for", -1.5351562)])]
    ) == (
        b'data:{"token":{"id":363,"text":" for","logprob":-1.5351562,"special":false},"generated_text":null,'
        b'"details":null}\n\n'
    )
    last = [
        ChoiceDelta(0, "", tokens=[TokenInfo(2, "</s>", b"</s>", -0.03, is_special=True)]),
        ChoiceDone(0, "stop", USAGE),
    ]
    assert reply.render_chunk(last) == (
        b'data:{"token":{"id":2,"text":"</s>","logprob":-0.03,"special":true},"generated_text":" for",'
        b'"details":{"finish_reason":"eos_token","generated_tokens":2,"seed":null}}\n\n'
    )
    assert reply.fail_stream(EngineError("x")).startswith(b'data:{"error"')
    assert generate.read_generate_stream(OLD_TGI_RULES, body({"temperature": 0}), CONTEXT).body.startswith(
        b'data:{"error"'
    )


def test_tgi_old_version_writes_milliseconds_and_info():
    reply = generate.read_generate(OLD_TGI_RULES, body(), CONTEXT)
    reply.add_events([PromptAccepted(0, [1] * 5), ChoiceDelta(0, "a"), ChoiceDone(0, "stop", USAGE)])
    reply.render_body(USAGE)
    headers = dict(reply.answer_headers(TIMINGS))
    assert headers[b"x-compute-time"] == b"482"
    assert not {b"x-prompt-tokens", b"x-generated-tokens"} & headers.keys()
    about = ServerInfo(ModelCard("m", 5, 100), 7, "0.1", "float32", "cuda:1")
    assert tokens.write_tgi_info(OLD_TGI_RULES, about) == (
        b'{"model_id":"m","model_sha":null,"model_dtype":"torch.float32","model_device_type":"cuda",'
        b'"model_pipeline_tag":"text-generation","max_concurrent_requests":7,"max_best_of":2,"max_stop_sequences":4,'
        b'"max_input_length":99,"max_total_tokens":100,"waiting_served_ratio":0.0,"max_batch_total_tokens":700,'
        b'"max_waiting_tokens":0,"validation_workers":1,"version":"0.9.4","sha":null,"docker_label":"parley-0.1"}'
    )
