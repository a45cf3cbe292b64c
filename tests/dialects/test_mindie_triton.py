"""MindIE's Triton interface: text, token tensors, stopInfer and metadata, to the byte."""

import json
from typing import Any

import msgspec
import pytest
from support.mindie_errors import validation_error

from parley.dialects.facts import ModelCard, ServerFacts
from parley.dialects.mindie import STRICT, control
from parley.dialects.mindie.api_rules import MindieRules
from parley.dialects.mindie.interfaces import tensors, triton
from parley.dialects.request_context import RequestContext
from parley.errors import ParleyError
from parley.types import ChoiceDelta, ChoiceDone, PromptAccepted, TextPrompt, TokenCost, TokenInfo, TokensPrompt, Usage

RULES = MindieRules("strict")
STRICTLY = [RULES, MindieRules("strict-old")]
PROFILES = [MindieRules("strict-old"), RULES, MindieRules("extended")]
CONTEXT = RequestContext("0f" * 16, 1700000000, "fp_1", context_length=100, path_parts={"model": "llama_65b"})
FACTS = ServerFacts("1.2", [ModelCard("llama_65b", 1, 100)], True)
USAGE = Usage(prompt_tokens=3, completion_tokens=2)
ONE = TokenInfo(306, " I", b" I", cost=TokenCost(2, 0.005318, 0.04))
TWO = TokenInfo(4966, " am", b" am", cost=TokenCost(3, 0.000117, 0.028))
ACCEPTED = PromptAccepted(0, [1, 2, 3], 77)
DONE = ChoiceDone(0, "stop", USAGE)
ID = "The id can contain only digits, letters, underscores(_), hyphens(-) and no more than 256 words in length."
TENSOR = {"name": "input0", "shape": [1, 3], "datatype": "UINT32", "data": [396, 319, 5]}
OUTPUTS = [{"name": "output0"}]


def read_generate(
    rules: MindieRules = RULES, *, stream: bool = False, context: RequestContext = CONTEXT, **body: Any
) -> triton.MindieTritonReply:
    members = {"id": "a123", "text_input": "a b"} | body
    return triton.read_mindie_triton(rules, json.dumps(members).encode(), context, stream=stream)


def read_infer(rules: MindieRules = RULES, tensor: Any = None, **body: Any) -> tensors.TensorReply:
    members = {"id": "42", "inputs": [TENSOR | (tensor or {})], "outputs": OUTPUTS} | body
    return tensors.read_mindie_tensors(rules, json.dumps(members).encode(), CONTEXT)


def refusal(read: Any = read_generate, **body: Any) -> str:
    with pytest.raises(ParleyError) as caught:
        read(**body)
    return validation_error(caught.value)


# -- texts


@pytest.mark.parametrize("rules", STRICTLY, ids=lambda rules: rules.profile)
def test_mindie_triton_writes_answer(rules):
    reply = read_generate(rules)
    reply.add_events([ACCEPTED, ChoiceDelta(0, " I am", tokens=[ONE, TWO]), DONE])
    assert not reply.request.output_options.token_costs and reply.request.prompts == [TextPrompt("a b")]
    assert reply.render_body(USAGE) == (
        b'{"id":"a123","model_name":"llama_65b","model_version":null,"text_output":" I am"}'
    )
    reply = read_generate(rules, parameters={"details": True})
    reply.add_events([ACCEPTED, ChoiceDelta(0, " I am", tokens=[ONE, TWO]), DONE])
    assert reply.request.output_options.token_costs
    assert reply.render_body(USAGE) == (
        b'{"id":"a123","model_name":"llama_65b","model_version":null,"text_output":" I am","details":{"finish_reason":'
        b'"eos_token","generated_tokens":2,"first_token_cost":null,"decode_cost":null,"batch_size":[2,3],'
        b'"queue_wait_time":[5318,117]}}'
    )
    extended = read_generate(MindieRules("extended"), parameters={"details": True})
    extended.add_events([ACCEPTED, ChoiceDelta(0, " I am", tokens=[ONE, TWO]), DONE])
    details = json.loads(extended.render_body(USAGE))["details"]
    assert (details["first_token_cost"], details["decode_cost"]) == (45, [28])


def test_mindie_triton_omits_figures_of_tokens_drawn_elsewhere():
    """Tokens that another instance drew have no costs; both lists leave them out, like those of the OpenAI routes."""
    reply = read_generate(RULES, parameters={"details": True})
    drawn_elsewhere = [msgspec.structs.replace(ONE, cost=None)] * 2
    reply.add_events([ACCEPTED, ChoiceDelta(0, "a", tokens=drawn_elsewhere), ChoiceDelta(0, "b", tokens=[TWO]), DONE])
    details = json.loads(reply.render_body(USAGE))["details"]
    assert (details["batch_size"], details["queue_wait_time"]) == ([3], [117])


@pytest.mark.parametrize("rules", PROFILES, ids=lambda rules: rules.profile)
def test_mindie_triton_writes_stream(rules):
    reply = read_generate(rules, stream=True, parameters={"details": True})
    assert reply.render_chunk([ACCEPTED]) == b""
    assert reply.render_chunk([ChoiceDelta(0, " I", tokens=[ONE])]) == (
        b'data:{"id":"a123","model_name":"llama_65b","model_version":null,"text_output":" I","details":'
        b'{"generated_tokens":1,"first_token_cost":null,"decode_cost":null,"batch_size":2,"queue_wait_time":5318},'
        b'"prefill_time":45,"decode_time":null}\n\n'
    )
    assert reply.render_chunk([ChoiceDelta(0, " am", tokens=[TWO]), DONE]) == (
        b'data:{"id":"a123","model_name":"llama_65b","model_version":null,"text_output":" am","details":'
        b'{"finish_reason":"eos_token","generated_tokens":2,"first_token_cost":null,"decode_cost":null,"batch_size":3,'
        b'"queue_wait_time":117},"prefill_time":null,"decode_time":28}\n\n'
    )
    bare = read_generate(rules, stream=True)
    assert bare.render_chunk([ACCEPTED, ChoiceDelta(0, " I", tokens=[ONE]), ChoiceDone(0, "length", USAGE)]) == (
        b'data:{"id":"a123","model_name":"llama_65b","model_version":null,"text_output":" I"}\n\n'
    )
    full = read_generate(MindieRules(full_text=True), stream=True)
    full.render_chunk([ACCEPTED, ChoiceDelta(0, " I", tokens=[ONE])])
    assert json.loads(full.render_chunk([ChoiceDelta(0, " am", tokens=[TWO])])[5:])["text_output"] == " I am"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"text_input": None}, "The text_input not found"),
        ({"text_input": 5}, "The type of text_input is abnormal. The requestId is a123"),
        ({"text_input": []}, "Parameter text_input arr is empty"),
        ({"text_input": ""}, "text_input must be necessary and data type must be string and length in (0, 41943040], "
                             "but the length of inputs is 0"),
        ({"id": 5, "text_input": None}, "id must be string type."),
        ({"id": "a b", "text_input": None}, ID),
        ({"id": ""}, ID),
        ({"id": "a" * 257}, ID),
    ],
)  # fmt: skip
def test_mindie_triton_refuses_wrong_body(body, text):
    assert refusal(**body) == text


def test_mindie_triton_request_without_id_gets_one():
    assert read_generate(id=None).request.cancel_ids[0].startswith("endpoint_common_")
    context = RequestContext(
        "0f" * 16, 1, "fp", context_length=100, path_parts=CONTEXT.path_parts, headers={b"req-id": b"mine"}
    )
    request = read_generate(context=context).request
    assert request.cancel_ids == ("mine", "a123") and request.exclusive_id == "mine"
    request = read_generate(id="x" * 256).request
    assert request.cancel_ids[1] == "x" * 256 and not request.exclusive_id


# -- tensors


@pytest.mark.parametrize("rules", PROFILES, ids=lambda rules: rules.profile)
def test_mindie_triton_reads_and_writes_token_tensor(rules):
    reply = read_infer(rules, tensor={"parameters": {"temperature": 0.5, "max_new_tokens": 2}})
    assert reply.request.prompts == [TokensPrompt([396, 319, 5])] and reply.request.stop_conditions.max_tokens == 2
    assert reply.request.sampling.temperature == 0.5 and reply.render_chunk([ACCEPTED]) == b""
    reply.add_events([ACCEPTED, ChoiceDelta(0, " I am", tokens=[ONE, TWO]), DONE])
    assert reply.render_body(USAGE) == (
        b'{"id":"42","outputs":[{"name":"output0","shape":[1,2],"datatype":"UINT32","data":[306,4966]}]}'
    )
    assert read_infer(rules, tensor={"shape": [3]}).request.prompts == [TokensPrompt([396, 319, 5])]
    for name, answer_name in (("", "output0"), ("mine", "mine")):
        named = read_infer(rules, outputs=[{"name": name}])
        named.add_events([ACCEPTED, ChoiceDelta(0, " I", tokens=[ONE]), DONE])
        assert json.loads(named.render_body(USAGE))["outputs"][0]["name"] == answer_name
    int64 = read_infer(MindieRules("extended"), tensor={"datatype": "INT64"})
    int64.add_events([ACCEPTED, ChoiceDelta(0, " I", tokens=[ONE]), DONE])
    assert json.loads(int64.render_body(USAGE))["outputs"][0]["datatype"] == "INT64"


SHAPE = "Shape must be at most two-dimensional, and the last element's value must be in (0,1048576]."


@pytest.mark.parametrize(
    ("tensor", "body", "text"),
    [
        ({}, {"inputs": None}, "Req should contain 'inputs' and the type should be array."),
        ({}, {"inputs": {}}, "Req should contain 'inputs' and the type should be array."),
        ({}, {"inputs": []}, "Inputs count must be 1."),
        ({}, {"inputs": [TENSOR, TENSOR]}, "Inputs count must be 1."),
        ({}, {"inputs": [5]}, "Cannot find name in inputs or its type is not string"),
        ({"name": 5}, {}, "Cannot find name in inputs or its type is not string"),
        ({"name": "x" * 257}, {}, "The length of name set in inputs exceeds 256."),
        ({"shape": None}, {}, "Cannot find shape in inputs or its type is not array"),
        ({"shape": [1, 3.0]}, {}, "Shape element must be integer type."),
        ({"shape": []}, {}, SHAPE),
        ({"shape": [2, 3]}, {}, SHAPE),
        ({"shape": [1, 1, 3]}, {}, SHAPE),
        ({"shape": [0]}, {}, SHAPE),
        ({"shape": [1, 1048577]}, {}, SHAPE),
        ({"datatype": None}, {}, "Cannot find datatype in inputs or its type is not string"),
        ({"datatype": "uint32"}, {}, "Unsupported datatype, got uint32."),
        ({"datatype": "INT64"}, {}, "Unsupported datatype, got INT64."),
        ({"data": None}, {}, "Cannot find data in inputs or its type is not array"),
        ({"data": [1, 2]}, {}, "Data size should be 3, got 2."),
        ({"data": [1, 2, "3"]}, {}, "Data element must be integer type."),
        ({"data": [1, 2, 3.0]}, {}, "Data element must be integer type."),
        ({"data": [1, 2, -3]}, {}, "Data element must be integer type."),
        ({"data": [1, 2, 2**32]}, {}, "Data element must be integer type."),
        ({"data": [1, 2]}, {"id": "a b"}, "Data size should be 3, got 2."),
        ({}, {"id": "a b", "outputs": None}, ID),
        ({}, {"id": 5}, "id must be string type."),
        ({}, {"outputs": None}, "Req should contain 'outputs' and the type should be array."),
        ({}, {"outputs": []}, "Outputs size should be 1, got 0."),
        ({}, {"outputs": [{"name": "a"}] * 2}, "Outputs size should be 1, got 2."),
        ({}, {"outputs": [{}]}, "Outputs name must be non-empty string."),
        ({}, {"outputs": [5]}, "Outputs name must be non-empty string."),
        ({"parameters": 5}, {}, "parameters must be object type."),
    ],
)
def test_mindie_triton_refuses_wrong_tensor(tensor, body, text):
    assert refusal(read_infer, tensor=tensor, **body) == text


@pytest.mark.parametrize(("profile", "limit"), [("strict", 20), ("strict-old", 7), ("extended", 7)])
def test_mindie_triton_strict_ignores_top_level_parameters(profile, limit):
    """Strictly, only parameters inside the tensor count; the default limit is 20 tokens."""
    top_level = {"parameters": {"max_new_tokens": 7}}
    assert read_infer(MindieRules(profile), **top_level).request.stop_conditions.max_tokens == limit
    assert (
        read_infer(
            MindieRules(profile), tensor={"parameters": {"max_new_tokens": 2}}, **top_level
        ).request.stop_conditions.max_tokens
        == 2
    )


# -- control


def test_mindie_triton_stop_reads_request_id():
    halt = triton.read_stop_infer(b'{ "id": "a123" }', CONTEXT)
    assert halt.request_label == "a123" and halt.success == (200, b'{ "id": "a123" }', b"application/json")
    assert halt.not_found.status == 404
    assert halt.not_found.body == b'{"error":"RequestId is a123 not found.","error_type":"NotFoundError"}'
    for body, text in (
        (b"{}", "Not found id."),
        (b'{"id": null}', "id must not be null."),
        (b'{"id": 5}', "id must be string type."),
        (b'{"id": "a b"}', ID),
        (b"[", "Failed to parse context to json body."),
    ):
        with pytest.raises(ParleyError) as caught:
            triton.read_stop_infer(body, CONTEXT)
        assert caught.value.message == text and STRICT.render_error(caught.value).status == 422


def test_mindie_triton_writes_metadata():
    assert control.mindie_server_metadata(RULES, b"", CONTEXT, FACTS).body == (
        b'{"name":"MindIE Server","version":"1.2","extensions":{"max_iter_times":100,"prefill_policy_type":0,'
        b'"decode_policy_type":0,"max_prefill_batch_size":50,"max_prefill_tokens":8192}}'
    )
    assert control.mindie_model_metadata(RULES, b"", CONTEXT, FACTS).body == (
        b'{"name":"llama_65b","platform":"MindIE Server","inputs":[{"name":"input0","shape":[-1],"datatype":"UINT32"}],'
        b'"outputs":[{"name":"output0","shape":[-1],"datatype":"UINT32"}]}'
    )
    configured = MindieRules(max_seq_len=2560, npu_mem_size=8, world_size=4, model_folder_name="llama")
    assert control.mindie_model_config(configured, b"", CONTEXT, FACTS).body == (
        b'{"model_name":"llama_65b","input_datatype":"UINT32","output_datatype":"UINT32","max_seq_len":2560,'
        b'"npu_mem_size":8,"cpu_mem_size":5,"world_size":4,"model_weight_path":"llama",'
        b'"model_instance_type":"Standard"}'
    )
    unknown = RequestContext("0f", 1, "fp", path_parts={"model": "x"})
    for route in (control.mindie_model_metadata, control.mindie_model_config):
        with pytest.raises(ParleyError) as caught:
            route(RULES, b"", unknown, FACTS)
        assert STRICT.render_error(caught.value) == (
            404, b'{"error":"Model x not found.","error_type":"NotFoundError"}', b"application/json",
        )  # fmt: skip
