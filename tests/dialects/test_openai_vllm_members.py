"""Members that vLLM and others added to OpenAI's API: their effect or refusal on both routes."""

import json
from dataclasses import replace
from typing import Any

import pytest

from parley.dialects.openai import chat, completions
from parley.dialects.request_context import RequestContext
from parley.errors import BadRequest, InvalidValue, Unsupported
from parley.types import (
    ChoiceDelta,
    ChoiceDone,
    Grammar,
    PromptAccepted,
    RepetitionPattern,
    StructuralTag,
    TokenInfo,
    TriggeredTags,
    Usage,
)

CONTEXT = RequestContext("0f", 1700000000, "fp_1", context_length=256)
USER = [{"role": "user", "content": "Hi"}]
READERS = {
    "chat": lambda context=CONTEXT, **members: chat.read_chat_request(
        json.dumps({"messages": USER} | members).encode(), context
    ),
    "text": lambda context=CONTEXT, **members: completions.read_completion_request(
        json.dumps({"prompt": "Hi"} | members).encode(), context
    ),
}


def head_with(value: bytes, name: bytes = b"x-vllm-priority") -> RequestContext:
    return replace(CONTEXT, headers={name: value})


@pytest.fixture(params=READERS)
def read(request) -> Any:
    return READERS[request.param]


def refusal(read, **members) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        read(**members)
    return caught.value


UNAVAILABLE: list[dict[str, Any]] = [
    {"logits_processors": ["x"]},
    {"mm_processor_kwargs": {"a": 1}},
    {"media_io_kwargs": {"a": 1}},
    {"prompt_embeds": "AAAA"},
    {"stop_regex": "a+"},
    {"return_hidden_states": True},
    {"custom_logit_processor": "x"},
    {"lora_path": "a"},
    {"return_weight_versions": True},
]


@pytest.mark.parametrize("members", UNAVAILABLE, ids=str)
def test_vllm_members_refuse_unavailable_members(read, members):
    error = refusal(read, **members)
    assert isinstance(error, Unsupported) and error.field == next(iter(members))


SET_TO_OFF: dict[str, Any] = {
    "use_beam_search": False, "logits_processors": [], "bad_words": [], "allowed_token_ids": [],
    "logprob_token_ids": [], "thinking_token_budget": -1, "repetition_detection": {"max_pattern_size": 0},
    "stream_interval": 1, "return_token_offsets": True, "return_prompt_text": False, "kv_transfer_params": {"a": 1},
    "ec_transfer_params": {"a": 1}, "mm_processor_kwargs": {}, "media_io_kwargs": {}, "structured_outputs": None,
    "guided_regex": "", "guided_choice": [], "structural_tag": "", "guided_decoding_backend": "auto", "priority": 0,
    "mm_payload": "none", "return_mm_kwargs": True, "routed_experts_prompt_start": 3, "return_weight_versions": False,
    "watermarking": False, "session_id": "s", "spaces_between_special_tokens": False, "length_penalty": 2.0,
    "early_stopping": "never",
    "vllm_xargs": {"a": 1, "b": "x", "c": 0.5, "d": [1]}, "truncation_side": "left", "no_stop_trim": False,
    "stop_regex": [], "return_hidden_states": False, "custom_logit_processor": None, "lora_path": None, "grammar": "",
}  # fmt: skip


def test_vllm_members_read_banned_and_allowed_tokens(read):
    request = read(bad_words=["x", " y"], allowed_token_ids=[7, 5], no_repeat_ngram_size=3, watermark=True).request
    sampling = request.sampling
    assert request.banned_words == ["x", " y"]
    assert (sampling.allowed, sampling.no_repeat_ngram, sampling.watermark) == ([7, 5], 3, True)
    assert read(watermarking=True).request.sampling.watermark  # vLLM's name
    for name, value in (("no_repeat_ngram_size", -1), ("watermark", "yes"), ("allowed_token_ids", [-1])):
        assert str(refusal(read, **{name: value}).field).startswith(name)


def test_vllm_members_read_repetition_detection(read):
    detection = {"max_pattern_size": 4, "min_count": 3}
    assert read(repetition_detection=detection).request.stop_conditions.repetition == RepetitionPattern(1, 4, 3)
    assert read(
        repetition_detection=detection | {"min_pattern_size": 2}
    ).request.stop_conditions.repetition == RepetitionPattern(2, 4, 3)
    assert read(repetition_detection={"min_count": 3}).request.stop_conditions.repetition is None
    for wrong in ({"min_pattern_size": 5}, {"min_count": 1}, {"max_pattern_size": 1025}):
        error = refusal(read, repetition_detection=detection | wrong)
        assert error.field == f"repetition_detection.{next(iter(wrong))}"


def test_vllm_members_read_logprob_token_ids(read):
    members: dict[str, Any] = {"logprobs": True if read is READERS["chat"] else 1}
    assert read(logprob_token_ids=[7, 5, 7], **members).request.output_options.logprob_ids == [7, 5]
    assert read(logprob_token_ids=None, **members).request.output_options.logprob_ids == []
    error = refusal(read, logprob_token_ids=[5])
    assert error.field == "logprob_token_ids" and "'logprobs'" in error.message
    assert refusal(read, logprob_token_ids=list(range(129)), **members).field == "logprob_token_ids"
    if read is READERS["text"]:
        members |= {"max_tokens": 0, "echo": True}
        assert refusal(read, logprob_token_ids=[5], **members).field == "logprob_token_ids"


def test_vllm_members_read_stream_interval(read):
    assert (
        read(stream_interval=5).request.output_options.stream_interval == 5
        and read().request.output_options.stream_interval == 1
    )


def test_vllm_members_max_time_allows_partial_answer(read):
    request = read(max_time=1.5).request
    assert (request.timeout, request.return_partial) == (1.5, True)
    assert (read().request.timeout, read().request.return_partial) == (None, False)


def test_vllm_members_header_overrides_body(read):
    assert read(priority=-7).request.priority == -7
    for header, priority in ((b"3", 3), (b"-9223372036854775808", -(2**63))):
        assert read(head_with(header), priority=-7).request.priority == priority
    for header in (b"", b"high", b"1.5", b"9223372036854775808", b"1" * 5000):
        with pytest.raises(InvalidValue, match="X-Vllm-Priority"):
            read(head_with(header))
    salted = head_with(b"tenant-42", b"x-cache-salt")
    assert read(salted).request.cache_salt == read(salted, cache_salt="own").request.cache_salt == "tenant-42"
    for header in (b"", b"with/slash", b"with@at", b"x" * 129):
        with pytest.raises(BadRequest) as caught:
            read(head_with(header, b"x-cache-salt"))
        assert caught.value.field == "cache_salt"


def test_vllm_members_include_stop_string_by_either_name(read):
    assert (
        read(no_stop_trim=True).request.stop_conditions.include_in_output
        and read(include_stop_str_in_output=True).request.stop_conditions.include_in_output
    )


def test_vllm_members_set_to_off_change_nothing(read):
    assert read(**SET_TO_OFF).request == read().request


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"use_beam_search": "x"}, "use_beam_search"),
    ({"logits_processors": "x"}, "logits_processors"),
    ({"bad_words": [""]}, "bad_words[0]"),
    ({"bad_words": [5]}, "bad_words[0]"),
    ({"allowed_token_ids": ["x"]}, "allowed_token_ids[0]"),
    ({"logprob_token_ids": [-1]}, "logprob_token_ids[0]"),
    ({"thinking_token_budget": -2}, "thinking_token_budget"),
    ({"repetition_detection": {"min_count": -1}}, "repetition_detection.min_count"),
    ({"stream_interval": 0}, "stream_interval"),
    ({"priority": "high"}, "priority"),
    ({"max_time": 0}, "max_time"),
    ({"max_time": "1s"}, "max_time"),
    ({"session_id": 5}, "session_id"),
    ({"mm_payload": "all"}, "mm_payload"),
    ({"routed_experts_prompt_start": -1}, "routed_experts_prompt_start"),
    ({"watermarking": "x"}, "watermarking"),
    ({"request_id": ""}, "request_id"),
    ({"request_id": "a\nb"}, "request_id"),
    ({"request_id": "x" * 257}, "request_id"),
    ({"early_stopping": "always"}, "early_stopping"),
    ({"vllm_xargs": {"a": None}}, "vllm_xargs"),
    ({"kv_transfer_params": 5}, "kv_transfer_params"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "a@b"}, "cache_salt"),
    ({"cache_salt": "x" * 129}, "cache_salt"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 5, "truncation_side": "middle"}, "truncation_side"),
    ({"structured_outputs": {}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.json"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice[0]"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": "5"}}, "structured_outputs.json"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
    ({"structured_outputs": {"regex": "b"}, "guided_regex": "a"}, "guided_regex"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.format"),
    ({"response_format": {"type": "structural_tag", "structures": [{"begin": "a"}]}},
     "response_format.structures[0].end"),
    ({"response_format": {"type": "structural_tag", "structures": []}}, "response_format.triggers"),
    ({"response_format": {"type": "structural_tag", "format": {}}}, "response_format.format.type"),
    ({"response_format": {"type": "structural_tag", "format": {"type": "odd"}}}, "response_format.format.type"),
    ({"response_format": {"type": "structural_tag", "format": {"type": "tag"}}}, "response_format.format.content"),
    ({"response_format": {"type": "structural_tag", "format": {"type": "regex"}}}, "response_format.format.pattern"),
    ({"response_format": {"type": "structural_tag", "structures": [{"begin": "a", "end": "b"}], "triggers": ["b"]}},
     "response_format.structures[0]"),
    ({"structural_tag": "{}"}, "structural_tag.format"),
    ({"structural_tag": "5"}, "structural_tag"),
    ({"guided_json": "[" * 70 + "]" * 70}, "guided_json"),
    ({"structured_outputs": {"regex": "a", "whitespace_pattern": " ", "disable_any_whitespace": True}},
     "structured_outputs.whitespace_pattern"),
    ({"response_format": {"type": "regex", "value": {}}}, "response_format.value"),
    ({"response_format": {"type": "json", "value": 5}}, "response_format.value"),
    ({"response_format": {"type": "json_schema", "value": {}}}, "response_format.value.schema"),
    ({"response_format": {"type": "json_object", "schema": 123}}, "response_format.schema"),
    ({"response_format": {"type": "json_schema", "value": "{}"}}, "response_format.value"),
    ({"response_format": {"type": "text", "value": "a"}}, "response_format.type"),
]  # fmt: skip


@pytest.mark.parametrize(("members", "field"), MISTAKES, ids=lambda value: str(value)[:50])
def test_vllm_members_error_names_wrong_field(read, members, field):
    assert refusal(read, **members).field == field


CLOSED = {"type": "object", "properties": {"a": {"type": "null"}}}
TAG = {"begin": "<f>", "schema": CLOSED, "end": "</f>"}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<"], "tags": [
    {"begin": "<f>", "content": {"type": "json_schema", "json_schema": CLOSED}, "end": "</f>"}
]}  # fmt: skip
TAGS = TriggeredTags([StructuralTag("<f>", CLOSED, "</f>")], ["<"])
LARK, GBNF = 'start: "::=" x\nx: /a+/', 'root ::= "a" x\nx ::= "b"'
CONSTRAINTS: list[tuple[dict[str, Any], Grammar]] = [
    ({"guided_json": CLOSED}, Grammar("json", CLOSED, field="guided_json")),
    ({"guided_json": "{}"}, Grammar("json", {}, field="guided_json")),
    ({"guided_json": "true", "guided_whitespace_pattern": " ?"}, Grammar("json", True, " ?", field="guided_json")),
    ({"guided_regex": "a+", "guided_decoding_backend": "any"}, Grammar("regex", "a+", field="guided_regex")),
    ({"guided_choice": ["a", "b"]}, Grammar("choice", ["a", "b"], field="guided_choice")),
    ({"guided_grammar": LARK}, Grammar("lark", LARK, field="guided_grammar")),
    ({"guided_grammar": GBNF}, Grammar("ebnf", GBNF, field="guided_grammar")),
    ({"regex": "a+"}, Grammar("regex", "a+", field="regex")),
    ({"ebnf": GBNF}, Grammar("ebnf", GBNF, field="ebnf")),
    ({"json_schema": "{}"}, Grammar("json", {}, field="json_schema")),
    ({"grammar": GBNF}, Grammar("ebnf", GBNF, field="grammar")),
    ({"response_format": {"type": "json_object", "schema": CLOSED}}, Grammar("json", CLOSED)),
    ({"response_format": {"type": "json_schema", "schema": CLOSED}}, Grammar("json", CLOSED)),
    ({"structural_tag": json.dumps({"structures": [TAG], "triggers": ["<"]})},
     Grammar("tags", TAGS, field="structural_tag")),
    ({"structured_outputs": {"json": CLOSED, "disable_any_whitespace": True}},
     Grammar("json", CLOSED, "", field="structured_outputs.json")),
    ({"structured_outputs": {"json": "{}", "whitespace_pattern": " ", "disable_additional_properties": True}},
     Grammar("json", {}, " ", field="structured_outputs.json")),
    ({"structured_outputs": {"regex": "a"}}, Grammar("regex", "a", field="structured_outputs.regex")),
    ({"structured_outputs": {"choice": ["a"]}}, Grammar("choice", ["a"], field="structured_outputs.choice")),
    ({"structured_outputs": {"grammar": GBNF}}, Grammar("ebnf", GBNF, field="structured_outputs.grammar")),
    ({"structured_outputs": {"grammar": LARK}, "guided_grammar": LARK},  # the same one for two versions of vLLM
     Grammar("lark", LARK, field="structured_outputs.grammar")),
    ({"structured_outputs": {"json_object": True}},
     Grammar("json", {"type": "object"}, field="structured_outputs.json_object")),
    ({"structured_outputs": {"structural_tag": json.dumps({"format": TRIGGERED})}},
     Grammar("tags", TAGS, field="structured_outputs.structural_tag")),
    ({"response_format": {"type": "json_object"}}, Grammar("json", {"type": "object"})),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": CLOSED}}},
     Grammar("json", CLOSED)),
    ({"response_format": {"type": "structural_tag", "structures": [TAG], "triggers": "<"}},
     Grammar("tags", TAGS)),
    ({"response_format": {"type": "structural_tag", "format": TRIGGERED}},
     Grammar("tags", TAGS)),
    ({"response_format": {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": CLOSED}}},
     Grammar("json", CLOSED)),
    ({"response_format": {"type": "structural_tag", "format": {"type": "regex", "pattern": "a"}}},
     Grammar("regex", "a")),
    ({"response_format": {"type": "structural_tag", "format": {"type": "grammar", "grammar": GBNF}}},
     Grammar("ebnf", GBNF)),
    ({"response_format": {"type": "structural_tag", "format": {"type": "const_string", "value": "a"}}},
     Grammar("choice", ["a"])),
    ({"response_format": {"type": "json_object", "value": CLOSED}}, Grammar("json", CLOSED)),
    ({"response_format": {"type": "json", "value": "{}"}}, Grammar("json", {"type": "object"})),
    ({"response_format": {"type": "json_schema", "value": {"name": "n", "schema": CLOSED}}},
     Grammar("json", CLOSED)),
    ({"response_format": {"type": "regex", "value": "a"}}, Grammar("regex", "a")),
]  # fmt: skip


@pytest.mark.parametrize(("members", "grammar"), CONSTRAINTS, ids=lambda value: str(value)[:70])
def test_vllm_members_constraints_reach_the_request(read, members, grammar):
    assert read(n=2, stream=True, **members).request.grammar == grammar


@pytest.mark.parametrize("first", [0, 9, 15])
@pytest.mark.parametrize("second", [4, 10, 17])
def test_vllm_members_error_names_both_conflicting_constraints(read, first, second):
    """With two constraints, the client must learn which two members conflict."""
    (left, _), (right, _) = CONSTRAINTS[first], CONSTRAINTS[second]
    both = {"structured_outputs": {"json": {}, "regex": "a"}} if left.keys() == right.keys() else left | right
    error = refusal(read, **both)
    names = ("json", "regex") if left.keys() == right.keys() else (*left, *right)
    assert error.status == 400 and all(name in error.message for name in names)


def test_vllm_members_read_prompt_truncation(read):
    assert read(truncate_prompt_tokens=5).request.max_prompt_tokens == 5 and read().request.kept_side == "tail"
    assert [read(truncation_side=side).request.kept_side for side in ("left", "right")] == ["tail", "head"]
    assert read(truncate_prompt_tokens=-1, max_tokens=6).request.max_prompt_tokens == 250
    assert read(truncate_prompt_tokens=-1, max_tokens=1000).request.max_prompt_tokens == 1


def test_vllm_members_answer_with_given_request_id(read):
    reply = read(request_id="mine")
    assert reply.request.id == "0f"
    reply.add_events([ChoiceDone(0, "stop", Usage(1, 1))])
    assert json.loads(reply.render_body(Usage(1, 1)))["id"].endswith("-mine")


def test_openai_chat_passes_documents_to_template():
    document = {"title": "a", "text": "b"}
    (prompt,) = READERS["chat"](documents=[document]).request.prompts
    assert prompt.options["documents"] == [document]
    assert refusal(READERS["chat"], documents=[{"text": 5}]).field == "documents[0].text"
    assert refusal(READERS["chat"], documents=["x"]).field == "documents[0]"


def test_vllm_members_report_usage_in_every_chunk(read):
    options = {"include_usage": True, "continuous_usage_stats": True}
    reply = read(stream=True, stream_options=options)
    assert reply.request.output_options.usage and reply.request.output_options.ids
    token = TokenInfo(5, "a", b"a")
    sent = reply.render_chunk([PromptAccepted(0, [1, 2, 3])])
    for event in (
        ChoiceDelta(0, "ab", tokens=[token, token]),
        ChoiceDelta(0, "c", tokens=[token]),
        ChoiceDone(0, "stop", Usage(3, 3)),
    ):
        sent += reply.render_chunk([event])
    sent += reply.finish_stream(Usage(3, 3))
    chunks = [json.loads(frame.removeprefix("data: ")) for frame in sent.decode().split("\n\n")[:-2]]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk["choices"]]
    assert counts in ([0, 2, 3, 3], [2, 3, 3])  # a chat stream starts with a chunk for the role
    assert all(chunk["usage"]["prompt_tokens"] == 3 for chunk in chunks)
    assert "token_ids" not in chunks[-2]["choices"][0]
    assert not read(stream=True, stream_options={"continuous_usage_stats": True}).request.output_options.usage
