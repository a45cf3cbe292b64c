"""Each documented MindIE parameter: accepted in its range, refused outside it with the documented text."""

import json
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from support.mindie_errors import validation_error

from parley.dialects.mindie import OLD, STRICT
from parley.dialects.mindie.api_rules import MindieRules
from parley.dialects.mindie.interfaces import chat, completions, native, tensors, tgi, triton, vllm
from parley.dialects.reply import Reply
from parley.dialects.request_context import RequestContext
from parley.errors import ParleyError
from parley.types import BeamOptions, Request, TextPrompt

CONTEXT = RequestContext("0f" * 16, 1700000000, "fp_1", context_length=100, path_parts={"model": "m"})
STRICTLY, OLD_RULES, EXTENDED = MindieRules("strict"), MindieRules("strict-old"), MindieRules("extended")
MAX = "3.40282e+38"
TENSOR = {"name": "input0", "shape": [1, 2], "datatype": "UINT32", "data": [5, 6]}

TEMPERATURE = f"Parameter temperature must be in (0.0,{MAX}], got {{}}."
TOP_K = "Parameter top_k must be in -1 || (0,2147483647], got {}"
TOP_P = "Parameter top_p must be in (0.0,1.0], got {}."
TYPICAL = "Parameter typical_p must be in (0.0,1.0], got {}."
SEED = "Parameter seed must be in [0, 9223372036854775807], got {}."
REPETITION = f"Parameter 'repetition_penalty' must be in (0.0, {MAX}], got {{}}."
PRESENCE = "Parameter presence_penalty not in [-2.0, 2.0], but got {}."
FREQUENCY = "Parameter frequency_penalty should be in [-2.0, 2.0], got {}."
NEW_TOKENS = "Parameter max_new_tokens must be in (0,2147483647], got {}."
MAX_TOKENS = "Parameter max_tokens must be (0,2147483647], got {}"
TRUNCATE = "truncate must be in (0,2147483647], got {}."
BATCH = "Parameter batch_size must be in (0,2147483647], got {}."
PRIORITY = "Parameter priority must be in [1,5], got {}."
TIMEOUT = "Parameter timeout must be strictly positive and small than 65535 seconds, got {}."
N = "Parameter [n] should be in [1, 8192], got {}. "
OPENAI_TEMPERATURE = "Parameter temperature must be in (0.0,2], got {}."
OPENAI_REPETITION = "Parameter 'repetition_penalty' must be in (0.0, 2], got {}."
TOP_LOGPROBS = "Parameter top logprobs must be in [0, 20], got {}."
COMPLETION_LOGPROBS = "logprobs should be in range [0, 5], got {}."
BEST_OF = "Parameter [best_of] should be in [1, 128], got {}."
I32, U64 = 2**31, 2**64


@dataclass
class Row:
    """``taken``: pairs of a value and its effect on the request. ``refused``: values outside the range, refused with
    ``text``. ``others``: values of other types than ``type``."""

    name: str
    interfaces: str
    taken: list[tuple[Any, Any]]
    refused: list[Any] = field(default_factory=list)
    text: str = ""
    type: str = ""
    others: tuple[Any, ...] = ("x", [], {}, True)


def sampling(name: str) -> Any:
    return lambda request: getattr(request.sampling, name)


def stop(name: str) -> Any:
    return lambda request: getattr(request.stop_conditions, name)


EFFECTS: dict[str, Any] = {  # the part of the request that a parameter sets
    "temperature": sampling("temperature"),
    "top_k": sampling("top_k"),
    "top_p": sampling("top_p"),
    "seed": sampling("seed"),
    "repetition_penalty": sampling("repetition_penalty"),
    "presence_penalty": sampling("presence_penalty"),
    "frequency_penalty": sampling("frequency_penalty"),
    "max_new_tokens": stop("max_tokens"),
    "max_tokens": stop("max_tokens"),
    "stop": stop("strings"),
    "stop_token_ids": stop("ids"),
    "ignore_eos": stop("ignore_eos"),
    "truncate": lambda request: request.max_prompt_tokens,
    "timeout": lambda request: request.timeout,
    "priority": lambda request: request.priority,
    "skip_special_tokens": lambda request: request.output_options.skip_special,
    "logprobs": lambda request: request.output_options.logprobs,
    "top_logprobs": lambda request: request.output_options.logprobs,
    "stream": lambda request: request.stream,
    "do_sample": lambda request: request.sampling.temperature > 0,
}

# T: TGI interface, N: native, X and K: Triton for text and for tokens, V: vLLM, C and O: chat in the flavours of vLLM
# and of MindIE itself, P: completions
ROWS = [
    Row("temperature", "TNXK", [(1e-7, 1e-7), (1, 1.0), (2.5, 2.5)], [0, 0.0, -1, 1e39], TEMPERATURE, "float"),
    Row("temperature", "VCP", [(0, 0.0), (0.5, 0.5)], [-1, 1e39], TEMPERATURE, "float"),
    Row("temperature", "O", [(0, 0.0), (0.5, 0.5), (2, 2.0)], [-1, 2.5], OPENAI_TEMPERATURE, "float"),
    Row("top_k", "TN", [(1, 1), (I32 - 1, I32 - 1)], [0, -1, I32], TOP_K, "integer", ("x", [], 5.0, False)),
    Row("top_k", "XKO", [(0, 0), (7, 7)], [-1, I32], TOP_K, "integer", ("x", {}, 5.0, True)),
    Row("top_k", "VCP", [(-1, 0), (7, 7)], [0, -2, I32], TOP_K, "integer", ("x", {}, 5.0, True)),
    Row("top_p", "TN", [(0.5, 0.5), (1e-5, 1e-5)], [0, 0.0, 1, 1.0, 1.5, -0.5], TOP_P, "float"),
    Row("top_p", "XKVCOP", [(0.5, 0.5), (1, 1.0)], [0.0, 1.5, -0.5], TOP_P, "float"),
    Row("typical_p", "TNX", [(0.5, None), (1, None)], [0, 1.5, -0.5], TYPICAL, "float"),
    Row("do_sample", "TNXK", [(True, True), (False, False)], type="boolean", others=(0, 1, "true", [])),
    Row("watermark", "TNXK", [(True, None), (False, None)], type="boolean", others=(0, 1, "true", [])),
    Row("seed", "TNXKVCOP", [(0, 0), (1, 1), (U64 - 1, U64 - 1)], [U64], SEED, "unsigned", ("x", [], 1.0, -1, True)),
    Row("repetition_penalty", "TNXKV", [(0.1, 0.1), (2, 2.0), (5, 5.0)], [0, 0.0, -1, 1e39], REPETITION, "float"),
    Row("repetition_penalty", "COP", [(0.1, 0.1), (2, 2.0)], [0, 0.0, -1, 2.5], OPENAI_REPETITION, "float"),
    Row("presence_penalty", "VCOP", [(-2, -2.0), (0.5, 0.5), (2, 2.0)], [-2.1, 3], PRESENCE, "float"),
    Row("frequency_penalty", "VCOP", [(-2, -2.0), (0.5, 0.5), (2, 2.0)], [-2.1, 3], FREQUENCY, "float"),
    Row("max_new_tokens", "TNXK", [(1, 1), (I32 - 1, I32 - 1)], [0, -1, I32], NEW_TOKENS, "integer",
        ("x", 2.0, [], True)),
    Row("max_tokens", "VCOP", [(1, 1), (I32 - 1, I32 - 1)], [0, -1, I32], MAX_TOKENS, "", ()),
    Row("truncate", "T", [(1, 1), (I32 - 1, I32 - 1)], [0, -1, I32], TRUNCATE, "integer", ("x", 2.0, [], True)),
    Row("batch_size", "XK", [(1, None), (I32 - 1, None)], [0, -1, I32], BATCH, "integer", ("x", 2.0, [], True)),
    Row("priority", "NXK", [(1, -4), (5, 0)], [0, 6], PRIORITY, "unsigned", ("x", 2.0, -1, True)),
    Row("timeout", "NXK", [(1, 1), (65535, 65535)], [0, 65536], TIMEOUT, "unsigned", ("x", 2.0, -1, True)),
    Row("details", "TNXK", [(True, None), (False, None)], type="boolean", others=(0, "x", [])),
    Row("decoder_input_details", "T", [(True, None), (False, None)], type="boolean", others=(0, "x", [])),
    Row("return_full_text", "T", [(True, None), (False, None)], type="boolean", others=(0, "x", [])),
    Row("stream", "NVCOP", [(True, True), (False, False)], type="boolean", others=(0, "x", [])),
    Row("skip_special_tokens", "VCOP", [(True, True), (False, False)], type="boolean", others=(0, "x", [])),
    Row("ignore_eos", "VCOP", [(True, True), (False, False)], type="boolean", others=(0, "x", [])),
    Row("n", "VCOP", [(1, None)], [0, 8193], N, "unsigned", ("x", 2.0, -1, True)),
    Row("best_of", "VCOP", [(1, None)], [0, 129], BEST_OF, "unsigned", ("x", 2.0, -1, True)),
    Row("use_beam_search", "COP", [(False, None)], type="boolean", others=(0, "x", [])),
    Row("logprobs", "CO", [(True, 0), (False, None)], type="boolean", others=(0, 1, "x", [])),
    Row("logprobs", "P", [(0, 0), (5, 5)], [6], COMPLETION_LOGPROBS, "unsigned", ("x", 2.0, -1, True)),
    Row("top_logprobs", "CO", [(0, 0), (20, 20)], [21], TOP_LOGPROBS, "unsigned", ("x", 2.0, -1, True)),
    Row("adapter_id", "T", [("None", None)], type="string", others=(1, [], True)),
]  # fmt: skip


def read_parameter(
    interface: str, name: str = "", value: Any = None, rules: MindieRules = STRICTLY, **more: Any
) -> Reply:
    """Return the reply of an interface to a body with this parameter."""
    parameters = ({name: value} if name else {}) | more
    body: dict[str, Any]
    match interface:
        case "T":
            return tgi.read_mindie_whole(
                rules, json.dumps({"inputs": "a b", "parameters": parameters}).encode(), CONTEXT
            )
        case "N":
            top_level = {"stream": parameters.pop("stream")} if "stream" in parameters else {}
            body = {"inputs": "a b", "parameters": parameters} | top_level
            return native.read_mindie_native(rules, json.dumps(body).encode(), CONTEXT)
        case "X":
            body = {"text_input": "a b", "parameters": parameters}
            return triton.read_mindie_triton(rules, json.dumps(body).encode(), CONTEXT, stream=False)
        case "K":
            body = {"inputs": [TENSOR | {"parameters": parameters}], "outputs": [{"name": "output0"}]}
            return tensors.read_mindie_tensors(rules, json.dumps(body).encode(), CONTEXT)
        case "C" | "O":
            body = {"model": "m", "messages": [{"role": "user", "content": "a b"}]} | parameters
            return chat.read_mindie_chat(replace(rules, vllm=interface == "C"), json.dumps(body).encode(), CONTEXT)
        case "P":
            return completions.read_mindie_completion(
                rules, json.dumps({"model": "m", "prompt": "a b"} | parameters).encode(), CONTEXT
            )
        case _:
            return vllm.read_mindie_vllm(rules, json.dumps({"prompt": "a b"} | parameters).encode(), CONTEXT)


def refusal(interface: str, name: str = "", value: Any = None, **more: Any) -> str:
    with pytest.raises(ParleyError) as caught:
        read_parameter(interface, name, value, **more)
    return validation_error(caught.value)


CASES = [(row, interface) for row in ROWS for interface in row.interfaces]
NAMES = [f"{row.name} of {interface}" for row, interface in CASES]


def enable_sampling(name: str) -> dict[str, Any]:
    """Return parameters that turn sampling on, unless the tested parameter decides about sampling itself."""
    return {} if name in ("temperature", "do_sample", "n", "best_of") else {"temperature": 0.7}


@pytest.mark.parametrize(("row", "interface"), CASES, ids=NAMES)
def test_mindie_parameter_in_range_takes_effect(row: Row, interface: str) -> None:
    for value, effect in row.taken:
        request = read_parameter(interface, row.name, value, **enable_sampling(row.name)).request
        if row.name in EFFECTS:
            assert EFFECTS[row.name](request) == effect
        else:  # the parameter is only validated, or shows only in the answer
            bare = read_parameter(interface, **enable_sampling(row.name)).request
            assert engine_parts(request) == engine_parts(bare)


@pytest.mark.parametrize(("row", "interface"), CASES, ids=NAMES)
def test_mindie_parameter_out_of_range_is_refused_as_documented(row: Row, interface: str) -> None:
    for value in row.refused:
        assert refusal(interface, row.name, value) == row.text.format(format_json(value))
    for value in row.others:
        assert refusal(interface, row.name, value) == f"{row.name} must be {row.type} type."


@pytest.mark.parametrize(("row", "interface"), CASES, ids=NAMES)
def test_mindie_null_parameter_means_absent(row: Row, interface: str) -> None:
    assert engine_parts(read_parameter(interface, row.name, None).request) == engine_parts(
        read_parameter(interface).request
    )


def engine_parts(request: Request) -> Any:
    """Return the parts of a request that matter to the engine; details only change the answer."""
    return (
        request.prompts,
        request.sampling,
        request.stop_conditions,
        request.n,
        request.stream,
        request.max_prompt_tokens,
    )


def format_json(value: Any) -> str:
    """Format a value as JSON does."""
    return json.dumps(value).replace("e+", "e")


INTERFACES = {  # members in the order of validation, each with a wrong value
    "T": [("stop", 1), ("temperature", 0), ("top_k", 0), ("top_p", 0), ("typical_p", 0), ("do_sample", 0),
          ("seed", -1), ("repetition_penalty", 0), ("watermark", 0), ("adapter_id", ""), ("max_new_tokens", 0),
          ("details", 0), ("decoder_input_details", 0), ("return_full_text", 0), ("truncate", 0)],
    "N": [("temperature", 0), ("top_k", 0), ("top_p", 0), ("typical_p", 0), ("do_sample", 0), ("seed", -1),
          ("repetition_penalty", 0), ("watermark", 0), ("priority", 0), ("max_new_tokens", 0), ("timeout", 0),
          ("details", 0), ("stream", 0)],
    "X": [("temperature", 0), ("top_k", -1), ("top_p", 0), ("typical_p", 0), ("do_sample", 0), ("seed", -1),
          ("repetition_penalty", 0), ("watermark", 0), ("priority", 0), ("max_new_tokens", 0), ("details", 0),
          ("batch_size", 0), ("timeout", 0)],
    "K": [("temperature", 0), ("top_k", -1), ("top_p", 0), ("do_sample", 0), ("seed", -1), ("repetition_penalty", 0),
          ("watermark", 0), ("priority", 0), ("max_new_tokens", 0), ("timeout", 0), ("details", 0), ("batch_size", 0)],
    "V": [("ignore_eos", 0), ("stop", 1), ("stop_token_ids", 1), ("temperature", -1), ("top_k", 0), ("top_p", 0),
          ("seed", -1), ("repetition_penalty", 0), ("frequency_penalty", 3), ("presence_penalty", 3),
          ("skip_special_tokens", 0), ("best_of", 0), ("n", 0), ("model", 0), ("max_tokens", 0), ("stream", 0)],
    "C": [("model", 0), ("tool_choice", 0), ("tools", 0), ("chat_template_kwargs", 0), ("chat_template", 0),
          ("messages", 0), ("ignore_eos", 0), ("stop", 1), ("stop_token_ids", 1), ("temperature", -1), ("top_k", 0),
          ("top_p", 0), ("seed", -1), ("repetition_penalty", 0), ("frequency_penalty", 3), ("presence_penalty", 3),
          ("skip_special_tokens", 0), ("best_of", 0), ("n", 0), ("use_beam_search", 0), ("logprobs", 0),
          ("top_logprobs", -1), ("max_tokens", 0), ("stream", 0), ("response_format", 0)],
    "O": [("model", 0), ("tool_choice", 0), ("tools", 0), ("messages", 0), ("ignore_eos", 0), ("stop", 1),
          ("stop_token_ids", 1), ("temperature", 3), ("top_k", -1), ("top_p", 0), ("seed", -1),
          ("repetition_penalty", 0), ("frequency_penalty", 3), ("presence_penalty", 3), ("skip_special_tokens", 0),
          ("best_of", 0), ("n", 0), ("use_beam_search", 0), ("logprobs", 0), ("top_logprobs", -1), ("max_tokens", 0),
          ("stream", 0)],
    "P": [("model", 0), ("prompt", 0), ("ignore_eos", 0), ("stop", 1), ("stop_token_ids", 1), ("temperature", -1),
          ("top_k", 0), ("top_p", 0), ("seed", -1), ("repetition_penalty", 0), ("frequency_penalty", 3),
          ("presence_penalty", 3), ("skip_special_tokens", 0), ("best_of", 0), ("n", 0), ("use_beam_search", 0),
          ("logprobs", -1), ("max_tokens", 0), ("stream", 0), ("response_format", 0)],
}  # fmt: skip


@pytest.mark.parametrize("interface", INTERFACES)
def test_mindie_reports_first_of_several_faults(interface: str) -> None:
    """The order of validation is MindIE's own and decides which refusal a client gets."""
    order = INTERFACES[interface]
    for place, (name, wrong) in enumerate(order):
        expected = refusal(interface, name, wrong)
        assert refusal(interface, **dict(reversed(order[place:]))) == expected, name


def test_mindie_ignores_parameters_of_other_interfaces() -> None:
    for interface in "TNXK":
        assert engine_parts(
            read_parameter(interface, "presence_penalty", 9, n="x", logprobs=[]).request
        ) == engine_parts(read_parameter(interface).request)
    assert engine_parts(read_parameter("N", "truncate", 0, stop=5).request) == engine_parts(read_parameter("N").request)
    assert engine_parts(read_parameter("V", "typical_p", 9, watermark=1, do_sample="x").request) == engine_parts(
        read_parameter("V").request
    )
    assert engine_parts(read_parameter("K", "typical_p", 9).request) == engine_parts(read_parameter("K").request)


STOP_LIST = (
    "Input validation error: `stop` must be list[string] if list, and item length in [1, 1024] with total <= 32768"
)


@pytest.mark.parametrize("interface", ["T", "V", "C", "O", "P"])
def test_mindie_limits_stop_strings_per_interface(interface: str) -> None:
    longest = 1024 if interface in "TO" else 32768
    for value in ("a", "a" * longest, "é" * longest, "😀" * (longest // 2)):
        assert read_parameter(interface, "stop", value).request.stop_conditions.strings == [value]
    assert read_parameter(interface, "stop", ["a", "b" * 1024]).request.stop_conditions.strings == ["a", "b" * 1024]
    assert read_parameter(interface, "stop", []).request.stop_conditions.strings == []
    text = f"Input validation error: length of `stop` must be in [1, {longest}], but got {{}}"
    assert refusal(interface, "stop", "") == text.format(0)
    assert refusal(interface, "stop", "😀" * (longest // 2 + 1)) == text.format(longest + 2)
    for value in (1, True, {"a": 1}):
        assert refusal(interface, "stop", value) == "Input validation error: param stop must be string or list[string]"
    for value in (["a", 1], [""], ["a" * 1025], ["a" * 1000] * 33):
        assert refusal(interface, "stop", value) == STOP_LIST
    many = ["a"] * 1025
    if interface in "TO":
        assert refusal(interface, "stop", many) == STOP_LIST
    else:
        assert read_parameter(interface, "stop", many).request.stop_conditions.strings == many


@pytest.mark.parametrize("interface", ["V", "C", "O", "P"])
def test_mindie_reads_stop_token_ids_and_include_stop_str(interface: str) -> None:
    token_ids = [5, -1, 6, 5, 2**31, 2**63]
    assert read_parameter(interface, "stop_token_ids", token_ids).request.stop_conditions.ids == [5, 6]
    assert refusal(interface, "stop_token_ids", "x") == "Parameter stop_token_ids not array"
    for value in (["x"], [1.0], [True], [None]):
        assert refusal(interface, "stop_token_ids", value) == "Parameter stop_token_ids not list[int]"
    assert read_parameter(
        interface, "include_stop_str_in_output", True, stop="a"
    ).request.stop_conditions.include_in_output
    assert (
        read_parameter(
            interface, "include_stop_str_in_output", "nobody looks at it"
        ).request.stop_conditions.include_in_output
        is False
    )
    text = "include_stop_str_in_output must be boolean type."
    assert refusal(interface, "include_stop_str_in_output", 1, stop_token_ids=[5]) == text


def test_mindie_ignores_stop_token_ids_that_are_not_integers_unless_strict() -> None:
    """As the manual says; today's server refuses them."""
    value = [13, "a", 2.5, True, None, [], 2**31, 13]
    for interface in "VCOP":
        for rules in (OLD_RULES, EXTENDED):
            reply = read_parameter(interface, "stop_token_ids", value, rules=rules)
            assert reply.request.stop_conditions.ids == [13]
        assert refusal(interface, "stop_token_ids", 13, rules=OLD_RULES) == "Parameter stop_token_ids not array"
        assert refusal(interface, "stop_token_ids", value) == "Parameter stop_token_ids not list[int]"


def test_mindie_old_allows_128_answers() -> None:
    """The manual of that time knows no maxPrefillBatchSize for ``n``."""
    for interface in "VCOP":
        assert read_parameter(interface, n=128, temperature=1, rules=OLD_RULES).request.n == 128
        assert "exceeds 'maxN' (128)" in refusal(interface, n=129, temperature=1, rules=OLD_RULES)


ONE_ANSWER = "can only be set to 1 in pd disaggregation mode, got 2."
SEPARATION_REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    ("VCOP", {"n": 2, "temperature": 1}, f"Parameter [n] {ONE_ANSWER}"),
    ("VCOP", {"best_of": 2, "temperature": 1}, f"Paramter [best_of] {ONE_ANSWER}"),
    ("COP", {"use_beam_search": True}, "Request param use_beam_search can not be true in pd disaggregation mode."),
    ("CO", {"logprobs": True}, "logprobs is not supported in dmi mode"),
    ("CO", {"top_logprobs": 0}, "logprobs is not supported in dmi mode"),
    ("P", {"logprobs": 0}, "logprobs is not supported in dmi mode"),
    ("TV", {"stop": "a"}, "stop is not supported in dmi mode"),
    ("TV", {"stop": ["a"]}, "stop is not supported in dmi mode"),
    ("V", {"stop_token_ids": [5]}, "stop_token_ids is not supported in dmi mode"),
]


@pytest.mark.parametrize(("interfaces", "members", "text"), SEPARATION_REFUSALS)
def test_mindie_strict_refuses_features_that_separated_instances_lack(
    interfaces: str, members: dict[str, Any], text: str
) -> None:
    for interface in interfaces:
        assert refusal(interface, rules=replace(STRICTLY, is_separated=True), **members) == text
        for rules in (STRICTLY, replace(EXTENDED, is_separated=True)):
            assert read_parameter(interface, rules=rules, **members).request


def test_mindie_strict_separated_instances_accept_values_without_effect() -> None:
    members = {"n": 1, "best_of": 1, "use_beam_search": False, "stop": [], "stop_token_ids": [], "temperature": 1}
    for interface in "TNXKVCOP":
        assert read_parameter(interface, rules=replace(STRICTLY, is_separated=True), **members).request
    for interface in "CO":
        assert read_parameter(interface, logprobs=False, rules=replace(STRICTLY, is_separated=True)).request


def test_mindie_old_separated_instances_refuse_stops_everywhere() -> None:
    """Later ones accept them in chat and completions."""
    later, old = replace(STRICTLY, is_separated=True), replace(OLD_RULES, is_separated=True)
    for interface in "COP":
        for members in ({"stop": "a"}, {"stop_token_ids": [5]}):
            assert read_parameter(interface, rules=later, **members).request
            assert refusal(interface, rules=old, **members) == f"{next(iter(members))} is not supported in dmi mode"


def test_mindie_vllm_validates_n_and_best_of() -> None:
    def n(rules: MindieRules = STRICTLY, **members: Any) -> int:
        return read_parameter("V", temperature=0.5, rules=rules, **members).request.n

    assert n() == 1 and n(n=3) == 3 and n(best_of=3) == 3 and n(n=2, best_of=3) == 2
    assert n(n=3, best_of=3, stream=True) == 3 and n(best_of=3, stream=True) == 3
    too_few = "best_of should greater than or equal to n, but best_of is 2, n is 3."
    assert refusal("V", n=3, best_of=2) == refusal("V", n=3, best_of=2, stream=True) == too_few
    without_sampling = "Best_of/N can not greater than 1 when temperature is 0 or not set, but best_of is {}, n is {}."
    assert refusal("V", n=2) == refusal("V", n=2, temperature=0) == without_sampling.format("None", 2)
    assert refusal("V", best_of=2) == without_sampling.format(2, "None")
    assert read_parameter("V", n=2, rules=EXTENDED).request.n == 2
    streamed = read_parameter("V", n=2, best_of=3, stream=True, temperature=1).request
    assert (streamed.n, streamed.best_of) == (2, 3)
    prefill = (
        "The n parameter (51) exceeds 'maxPrefillBatchSize' (50). Please reduce n or increase maxPrefillBatchSize."
    )
    assert refusal("V", n=51, temperature=1) == prefill
    batch = "The n parameter (4) exceeds 'max_batch_size' (3). Please reduce n or increase max_batch_size."
    assert refusal("V", n=4, temperature=1, rules=MindieRules(max_batch_size=3)) == batch
    above_max_n = "The n parameter (9) exceeds 'maxN' (8). Please reduce n or increase maxN."
    assert refusal("V", n=9, temperature=1, rules=MindieRules(max_n=8)) == above_max_n


CHAT_WITHOUT_SAMPLING = (
    "best_of/n can not greater than 1 without using beam search when temperature is 0 or not set, but best_of is {}, n "
    "is {}."
)
COMPLETION_WITHOUT_SAMPLING = (
    "Best_of and n shouldn't be greater than 1 when sampling is disabled, but best_of is {} and n is {}."
)


@pytest.mark.parametrize(
    ("members", "chat", "completions"),
    [
        ({"n": 2}, CHAT_WITHOUT_SAMPLING.format("None", 2), COMPLETION_WITHOUT_SAMPLING.format("null", 2)),
        (
            {"best_of": 2, "temperature": 0},
            CHAT_WITHOUT_SAMPLING.format(2, "None"),
            COMPLETION_WITHOUT_SAMPLING.format(2, "null"),
        ),
        (
            {"n": 3, "best_of": 2, "temperature": 1},
            "best_of must be greater than or equal to n, but best_of is 2, n is 3.",
            "Best_of must be greater than or equal to n, but best_of is 2 and n is 3.",
        ),
        (
            {"n": 2, "best_of": 3, "temperature": 1, "stream": True},
            "best_of must be equal to n in stream mode, but best_of is 3, n is 2.",
            "best_of must be equal to n, but best_of is 3 and n is 2.",
        ),
        (
            {"best_of": 2, "temperature": 1, "stream": True},
            "best_of must be equal to n in stream mode, but best_of is 2, n is None.",
            "best_of must be equal to n in stream mode, but best_of is 2, n is None.",
        ),
        (
            {"use_beam_search": True, "max_tokens": 129},
            "Please set the max_tokens to be not larger than 128 when the use_beam_search is on.",
            "Please set the max_tokens to be not larger than 128 when the use_beam_search is on.",
        ),
    ],
)
def test_mindie_openai_refuses_wrong_n_and_best_of(members: dict[str, Any], chat: str, completions: str) -> None:
    assert refusal("C", **members) == refusal("O", **members) == chat
    assert refusal("P", **members) == completions


def test_mindie_openai_reads_n_and_best_of() -> None:
    for interface in "COP":
        ranked = read_parameter(interface, temperature=0.5, n=2, best_of=3).request
        assert (ranked.n, ranked.best_of) == (2, 3)
        assert read_parameter(interface, temperature=0.5, best_of=3).request.n == 3
        searched = read_parameter(interface, n=3, best_of=7, use_beam_search=True, stream=True).request
        assert (searched.n, searched.best_of, searched.beam) == (3, None, BeamOptions(3))
        assert read_parameter(interface, temperature=0.5, n=2, best_of=2, stream=True).request.n == 2
        assert read_parameter(interface, n=2, rules=EXTENDED).request.n == 2


def test_mindie_top_logprobs_implies_logprobs() -> None:
    message = "Value error, when using top_logprobs, logprobs must be true or null in chat completions"
    for interface in "CO":
        assert read_parameter(interface, top_logprobs=3).request.output_options.logprobs == 3
        assert refusal(interface, top_logprobs=3, logprobs=False) == message


def test_mindie_reads_adapter_name() -> None:
    text = "The format of adapter_id is invalid."
    assert refusal("T", "adapter_id", "a b") == refusal("T", "adapter_id", "") == text
    assert refusal("T", "adapter_id", "x" * 257) == text
    for interface, name in (("T", "adapter_id"), ("V", "model")):
        assert read_parameter(interface, name, "x" * 256).request.adapter == "x" * 256
        request = read_parameter(interface, name, "None").request
        assert (request.adapter, request.model) == (None, "")
    named = replace(CONTEXT, model_names=("chat", "alias"))
    for name, adapter in (("alias", None), ("other", "other")):
        body = json.dumps({"prompt": "a", "model": name}).encode()
        assert vllm.read_mindie_vllm(STRICTLY, body, named).request.adapter == adapter
    assert refusal("V", "model", 5) == "Model must be string type."
    for name in ("", "x" * 257):
        message = f"Input validation error: length of `model` must be in [1, 256], but got {len(name)}"
        assert refusal("V", "model", name) == message


def test_mindie_sampling_parameters_turn_sampling_on() -> None:
    for interface in "TNXKVCOP":
        assert read_parameter(interface).request.sampling.temperature == 0
        assert read_parameter(interface, "top_p", 0.5).request.sampling.temperature == 1
        assert read_parameter(interface, "top_k", 5).request.sampling.temperature == 1
    for interface in "TNXK":
        assert read_parameter(interface, "do_sample", True).request.sampling.temperature == 1
        assert read_parameter(interface, "do_sample", False, temperature=2).request.sampling.temperature == 0


def test_mindie_extended_accepts_off_values_and_applies_watermark() -> None:
    for interface in "TNXK":
        assert read_parameter(interface, "temperature", 0, rules=EXTENDED).request.sampling.temperature == 0
        assert read_parameter(interface, "top_k", 0, rules=EXTENDED).request.sampling.top_k == 0
        assert read_parameter(interface, "top_p", 1, rules=EXTENDED).request.sampling.top_p == 1
        for value in (True, False):
            assert read_parameter(interface, "watermark", value, rules=EXTENDED).request.sampling.watermark is value
    assert read_parameter("V", "top_k", 0, rules=EXTENDED).request.sampling.top_k == 0
    assert read_parameter("T", "truncate", 0, rules=EXTENDED).request.max_prompt_tokens is None
    for interface in "TNX":
        assert read_parameter(interface, "typical_p", 0.5, rules=EXTENDED).request.sampling.typical_p == 0.5
        assert read_parameter(interface, "typical_p", 0.5).request.sampling.typical_p == 1


def test_mindie_default_max_tokens_depends_on_interface() -> None:
    for interface in "TNXK":
        assert (
            read_parameter(interface).request.stop_conditions.max_tokens == 20
            and read_parameter(interface).request.stop_conditions.reserved_tokens == 1
        )
    assert read_parameter("V").request.stop_conditions.max_tokens is None
    assert read_parameter("V", rules=MindieRules("strict-old")).request.stop_conditions.max_tokens == 16
    assert OLD.routes != STRICT.routes


def test_mindie_accepts_integers_as_floats_and_unknown_members() -> None:
    assert read_parameter("T", "temperature", 1).request.sampling.temperature == 1.0
    assert read_parameter("T", "whatever", {"a": []}).request.prompts == [TextPrompt("a b")]
    for interface in "TNX":
        with pytest.raises(ParleyError) as caught:
            match interface:
                case "T":
                    tgi.read_mindie_whole(STRICTLY, b'{"inputs": "a", "parameters": 5}', CONTEXT)
                case "N":
                    native.read_mindie_native(STRICTLY, b'{"inputs": "a", "parameters": 5}', CONTEXT)
                case _:
                    triton.read_mindie_triton(STRICTLY, b'{"text_input": "a", "parameters": 5}', CONTEXT, stream=False)
        assert caught.value.message == "parameters must be object type."
