"""Completions and the small routes: meaning of bodies, and the exact bytes of answers."""

import dataclasses
import json
from typing import Any

import pytest

from parley.dialects.admin_requests import TokenizeResult
from parley.dialects.facts import ModelCard
from parley.dialects.openai import completions, tokens
from parley.dialects.request_context import RequestContext
from parley.errors import BadRequest, Unsupported
from parley.types import (
    BeamOptions,
    ChatPrompt,
    ChoiceDelta,
    ChoiceDone,
    PromptAccepted,
    PromptScored,
    TextPrompt,
    TokenInfo,
    TokensPrompt,
    Usage,
)

CONTEXT = RequestContext("0f", 1700000000, "fp_1")
USAGE = Usage(prompt_tokens=2, completion_tokens=1)


def read_completion(prompt: Any = "Hi", **members: Any) -> completions.CompletionReply:
    return completions.read_completion_request(json.dumps({"model": "m", "prompt": prompt} | members).encode(), CONTEXT)


def refusal(prompt: Any = "Hi", **members: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        read_completion(prompt, **members)
    return caught.value


@pytest.mark.parametrize(
    ("prompt", "neutral"),
    [
        ("a", [TextPrompt("a")]),
        (["a", "b"], [TextPrompt("a"), TextPrompt("b")]),
        ([1, 2], [TokensPrompt([1, 2])]),
        ([[1, 2], [3]], [TokensPrompt([1, 2]), TokensPrompt([3])]),
    ],
)
def test_openai_completions_reads_four_prompt_forms(prompt, neutral):
    assert read_completion(prompt).request.prompts == neutral


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (None, "prompt"),
        ("", "prompt"),
        ([], "prompt"),
        (5, "prompt"),
        ({}, "prompt"),
        ([[]], "prompt[0]"),
        (["a", ""], "prompt[1]"),
        (["a", 1], "prompt[1]"),
        ([1, "a"], "prompt[1]"),
        ([1, -1], "prompt[1]"),
        ([1, 2**31], "prompt[1]"),
        ([1.5], "prompt[0]"),
        ([True], "prompt[0]"),
        ([[1], "a"], "prompt[1]"),
        ([[1], [2, None]], "prompt[1][1]"),
        (["a"] * 1025, "prompt"),
        ([None], "prompt[0]"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_openai_completions_error_names_wrong_prompt(prompt, field):
    assert refusal(prompt).field == field


def test_openai_completions_can_omit_special_tokens():
    assert read_completion("a", add_special_tokens=False).request.prompts == [TextPrompt("a", add_special_tokens=False)]


def test_openai_completions_defaults_to_16_tokens():
    assert read_completion().request.stop_conditions.max_tokens == 16
    assert read_completion(max_tokens=None).request.stop_conditions.max_tokens == 16
    assert read_completion(max_tokens=99).request.stop_conditions.max_tokens == 99


def test_openai_completions_allows_zero_tokens_only_with_echo():
    assert read_completion(max_tokens=0, echo=True).request.stop_conditions.max_tokens == 0
    assert refusal(max_tokens=0).field == "max_tokens"


def test_openai_completions_reads_beam_search():
    searched = read_completion(
        ["a", "b"], n=2, best_of=5, use_beam_search=True, length_penalty=0, early_stopping="never"
    ).request
    assert (searched.n, searched.best_of, searched.beam, searched.sequences) == (
        2,
        None,
        BeamOptions(5, 0.0, "never"),
        10,
    )
    assert read_completion(use_beam_search=True).request.beam == BeamOptions(1)
    assert read_completion(n=3, use_beam_search=True, stream=True, early_stopping=True).request.beam == BeamOptions(
        3, 1.0, True
    )
    for members in ({"length_penalty": 11}, {"early_stopping": "always"}, {"use_beam_search": 1}):
        assert refusal(**members).field in members


def test_openai_completions_reads_best_of():
    request = read_completion(["a", "b"], n=2, best_of=5, stream=True).request
    assert (request.n, request.best_of, request.choices_per_prompt, request.sequences) == (2, 5, 5, 10)
    assert read_completion(n=2, best_of=2).request.best_of is None
    assert refusal(["a"] * 100, best_of=21).field == "best_of"
    assert refusal(n=3, best_of=2).field == refusal(best_of=129).field == "best_of"


def test_openai_completions_echo_with_logprobs_scores_prompt():
    assert read_completion(logprobs=2).request.output_options.prompt_logprobs is None
    assert read_completion(logprobs=2, echo=True).request.output_options.prompt_logprobs == 2
    assert read_completion(logprobs=2, echo=True, prompt_logprobs=5).request.output_options.prompt_logprobs == 5
    assert read_completion(echo=True).request.output_options.prompt_logprobs is None


def test_openai_completions_caps_choices_over_all_prompts():
    assert read_completion(["a"] * 1024, n=2).request.n == 2
    assert refusal(["a"] * 1024, n=3).field == "n"


@pytest.mark.parametrize(
    ("members", "field"),
    [
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": -2}, "logprobs"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"echo": "yes"}, "echo"),
        ({"n": 0}, "n"),
        ({"stream_options": {}}, "stream_options"),
        ({"suffix": 5}, "suffix"),
    ],
)
def test_openai_completions_error_names_wrong_member(members, field):
    assert refusal(**members).field == field


def test_openai_completions_refuses_return_prompt_text():
    assert isinstance(refusal(return_prompt_text=True), Unsupported)
    assert read_completion(return_prompt_text=False).request == read_completion().request


def test_openai_completions_reads_a_suffix_if_the_model_has_marks_for_it():
    request = read_completion(prompt=["a", "b"], suffix="end").request
    assert request.prompts == [TextPrompt("a", suffix="end"), TextPrompt("b", suffix="end")]
    assert read_completion(suffix="").request.prompts == [TextPrompt("Hi")]
    assert "echo" in refusal(suffix="end", echo=True).message
    assert "text" in refusal(suffix="end", prompt=[1, 2]).message
    unable = dataclasses.replace(CONTEXT, abilities=frozenset())
    with pytest.raises(Unsupported):
        completions.read_completion_request(b'{"prompt": "a", "suffix": "end"}', unable)


OPENING = (
    b'{"id":"cmpl-0f","object":"text_completion","created":1700000000,"model":"m","system_fingerprint":"fp_1",'
    b'"choices":['
)
COUNTED = (
    b'"usage":{"prompt_tokens":2,"completion_tokens":1,"total_tokens":3,"prompt_tokens_details":{"cached_tokens":0,'
    b'"audio_tokens":0},"completion_tokens_details":{"reasoning_tokens":0,"audio_tokens":0,'
    b'"accepted_prediction_tokens":0,"rejected_prediction_tokens":0}}}'
)


def test_openai_completions_writes_body():
    reply = read_completion()
    reply.add_events(
        [PromptAccepted(0, [1]), ChoiceDelta(0, "a"), ChoiceDelta(0, "b"), ChoiceDone(0, "stop", USAGE, "###")]
    )
    assert reply.render_body(USAGE) == (
        OPENING + b'{"index":0,"text":"ab","logprobs":null,"finish_reason":"stop","stop_reason":"###"}],' + COUNTED
    )


def test_openai_completions_writes_stream():
    reply = read_completion(["a", "b"], stream=True, stream_options={"include_usage": True})
    data = reply.render_chunk(
        [
            PromptAccepted(0, [1]),
            PromptAccepted(1, [2]),
            ChoiceDelta(1, "x"),
            ChoiceDelta(0, ""),
            ChoiceDone(1, "length", USAGE),
        ]
    )
    context, tail = b"data: " + OPENING, b'],"usage":null}\n\n'
    piece = b'{"index":1,"text":"x","logprobs":null,"finish_reason":null}'
    last = b'{"index":1,"text":"","logprobs":null,"finish_reason":"length","stop_reason":null}'
    assert data == context + piece + tail + context + last + tail
    assert reply.finish_stream(USAGE) == b"data: " + OPENING + b"]," + COUNTED + b"\n\ndata: [DONE]\n\n"


PROMPT_TOKENS = [
    TokenInfo(1, "The", b"The"),
    TokenInfo(2, " \ufffd", b" \xc3", -0.5, 2, [TokenInfo(9, "x", b"x", -0.1, 1)]),
    TokenInfo(3, "\ufffd", b"\xa9", -0.25, 1, [TokenInfo(3, "\ufffd", b"\xa9", -0.25, 1)]),
]
OUTPUT_TOKENS = [TokenInfo(4, "!", b"!", -1.5, 1, [TokenInfo(4, "!", b"!", -1.5, 1)])]
SCORED = {
    "tokens": ["The", "bytes:\\x20\\xc3", "bytes:\\xa9", "!"],
    "token_logprobs": [None, -0.5, -0.25, -1.5],
    "top_logprobs": [None, {"x": -0.1, "bytes:\\x20\\xc3": -0.5}, {"bytes:\\xa9": -0.25}, {"!": -1.5}],
    "text_offset": [0, 3, 4, 5],
}


def test_openai_completions_writes_echo_with_logprobs():
    reply = read_completion(echo=True, logprobs=1)
    reply.add_events(
        [
            PromptAccepted(0, [1, 2, 3]),
            PromptScored(0, PROMPT_TOKENS, "The é"),
            ChoiceDelta(0, "!", tokens=OUTPUT_TOKENS),
            ChoiceDone(0, "length", USAGE),
        ]
    )
    choice = json.loads(reply.render_body(USAGE))["choices"][0]
    assert choice["logprobs"] == SCORED
    assert choice["text"] == "The é!"


def frames(data: bytes) -> list[dict[str, Any]]:
    return [
        json.loads(frame.removeprefix(b"data: ")) for frame in data.split(b"\n\n") if frame and b"[DONE]" not in frame
    ]


def test_openai_completions_streams_same_echo_and_logprobs():
    """The chunks of a stream, joined, equal the lists of a whole answer."""
    reply = read_completion(echo=True, logprobs=1, stream=True)
    data = reply.render_chunk([PromptAccepted(0, [1, 2, 3]), PromptScored(0, PROMPT_TOKENS, "The é")])
    data += reply.render_chunk([ChoiceDelta(0, "!", tokens=OUTPUT_TOKENS)]) + reply.render_chunk(
        [ChoiceDone(0, "length", USAGE)]
    )
    joined: dict[str, list[Any]] = {name: [] for name in SCORED}
    for frame in frames(data):
        for name, values in (frame["choices"][0]["logprobs"] or {}).items():
            joined[name] += values
    assert joined == SCORED


def test_openai_completions_logprobs_of_zero_list_only_the_token():
    reply = read_completion(logprobs=0)
    reply.add_events([ChoiceDelta(0, "!", tokens=OUTPUT_TOKENS), ChoiceDone(0, "length", USAGE)])
    logprobs = json.loads(reply.render_body(USAGE))["choices"][0]["logprobs"]
    assert (logprobs["token_logprobs"], logprobs["top_logprobs"]) == ([-1.5], [{"!": -1.5}])


BOS = TokenInfo(8, "<s>", b"<s>", is_special=True)
ECHOED_TOKENS = [
    BOS,
    TokenInfo(5, " He", b" He", -0.5, 1),
    TokenInfo(6, "y", b"y", -0.5, 1),
    TokenInfo(9, "<x>", b"<x>", -1.0, 1, is_special=True),
]
LAST_TOKENS = [
    TokenInfo(4, "!", b"!", -1.5, 1),
    TokenInfo(9, "<x>", b"<x>", -2.0, 1, is_special=True),
    TokenInfo(4, "!", b"!", -1.5, 1),
]


@pytest.mark.parametrize(
    ("echoed", "prompt", "members", "text", "output"),
    [
        ("Hey", [0, 0, 2, 3], {}, "!!", [3, 4, 4]),  # the tokenizer added the BOS token and the space
        (" Hey<x>", [0, 0, 3, 4], {}, "!!", [7, 8, 8]),  # the client wrote <x> itself
        ("<s> Hey<x>", [0, 3, 6, 7], {"skip_special_tokens": False}, "!<x>!", [10, 11, 14]),
    ],
)
def test_openai_completions_text_offsets_point_into_the_text(echoed, prompt, members, text, output):
    """Guards against offsets that count special tokens or a leading space missing from the text."""
    reply = read_completion(echo=True, logprobs=0, **members)
    reply.add_events(
        [
            PromptScored(0, ECHOED_TOKENS, echoed),
            ChoiceDelta(0, text, tokens=LAST_TOKENS),
            ChoiceDone(0, "length", USAGE),
        ]
    )
    choice = json.loads(reply.render_body(USAGE))["choices"][0]
    offsets = choice["logprobs"]["text_offset"]
    assert choice["text"] == echoed + text and offsets == prompt + output
    assert [choice["text"][offset] for offset in offsets[-3::2]] == ["!", "!"]
    reply = read_completion(
        logprobs=0, stream=True, **members
    )  # without echo, offsets count from the start of the output
    (frame,) = frames(reply.render_chunk([ChoiceDelta(0, text, tokens=LAST_TOKENS)]))
    assert frame["choices"][0]["logprobs"]["text_offset"] == [place - len(echoed) for place in output]


def test_openai_completions_sampled_token_wins_over_same_text():
    """top_logprobs is keyed by text, so two tokens with equal text collide."""
    reply = read_completion(logprobs=1)
    reply.add_events(
        [ChoiceDelta(0, "a", tokens=[TokenInfo(2, "a", b"a", -2.0, 2, [TokenInfo(9, "a", b"a", -0.1, 1)])])]
    )
    reply.add_events([ChoiceDone(0, "length", USAGE)])
    assert json.loads(reply.render_body(USAGE))["choices"][0]["logprobs"]["top_logprobs"] == [{"a": -2.0}]


@pytest.mark.parametrize(("own", "requested"), [(0, 1), (2, 1), (None, 1), (0, 0)])
def test_openai_completions_prompt_scores_keep_both_counts(own, requested):
    """logprobs with echo and prompt_logprobs may ask for different numbers of alternatives."""
    reply = read_completion(echo=True, logprobs=requested, prompt_logprobs=own)
    largest = max(requested, own or 0)
    assert reply.request.output_options.prompt_logprobs == largest
    alternatives = [TokenInfo(9, "x", b"x", -0.1, 1), TokenInfo(7, "y", b"y", -0.2, 2)][:largest]
    reply.add_events(
        [PromptScored(0, [TokenInfo(2, "a", b"a", -0.5, 3, alternatives)], "a"), ChoiceDone(0, "length", USAGE)]
    )
    choice = json.loads(reply.render_body(USAGE))["choices"][0]
    assert list(choice["logprobs"]["top_logprobs"][0]) == ["a", "x", "y"][: requested + 1]
    assert own is None or list(choice["prompt_logprobs"][0]) == ["2", *["9", "7"][:own]]


def test_openai_completions_writes_token_ids_and_prompt_logprobs():
    reply = read_completion([[1, 2], [3]], return_token_ids=True, prompt_logprobs=0)
    reply.add_events(
        [
            PromptAccepted(0, [1, 2]),
            PromptAccepted(1, [3]),
            PromptScored(0, PROMPT_TOKENS[:2]),
            PromptScored(1, PROMPT_TOKENS[:1]),
        ]
    )
    reply.add_events(
        [
            ChoiceDelta(0, "!", tokens=OUTPUT_TOKENS),
            ChoiceDone(0, "stop", USAGE),
            ChoiceDelta(1, "!", tokens=OUTPUT_TOKENS),
            ChoiceDone(1, "stop", USAGE),
        ]
    )
    first, second = json.loads(reply.render_body(USAGE))["choices"]
    assert (first["prompt_token_ids"], first["token_ids"], second["prompt_token_ids"]) == ([1, 2], [4], [3])
    assert len(first["prompt_logprobs"]) == 2 and second["prompt_logprobs"] == [None]
    assert first["text"] == "!"  # prompt_logprobs alone does not echo the prompt
    reply = read_completion([[1, 2], [3]], prompt_logprobs=0, logprobs=0, stream=True)  # sent before the first text
    second, first, text = frames(
        reply.render_chunk(
            [
                PromptScored(1, PROMPT_TOKENS[:1]),
                PromptScored(0, PROMPT_TOKENS[:2]),
                ChoiceDelta(1, "!", tokens=OUTPUT_TOKENS),
            ]
        )
    )
    assert [event["choices"][0]["index"] for event in (second, first, text)] == [1, 0, 1]
    assert second["choices"][0]["prompt_logprobs"] == [None] and len(first["choices"][0]["prompt_logprobs"]) == 2
    assert text["choices"][0]["logprobs"]["text_offset"] == [0] and "prompt_logprobs" not in text["choices"][0]
    reply = read_completion([[1, 2], [3]], return_token_ids=True, stream=True)
    reply.render_chunk([PromptAccepted(0, [1, 2]), PromptAccepted(1, [3])])
    frame_1, frame_2, frame_3 = frames(
        reply.render_chunk(
            [
                ChoiceDelta(1, "!", tokens=OUTPUT_TOKENS),
                ChoiceDelta(1, "!", tokens=OUTPUT_TOKENS),
                ChoiceDelta(0, "!", tokens=OUTPUT_TOKENS),
            ]
        )
    )
    assert [c["choices"][0].get("prompt_token_ids") for c in (frame_1, frame_2, frame_3)] == [[3], None, [1, 2]]


# -- the small routes


def test_tokenize_reads_text_and_chat():
    request = tokens.read_openai_tokenize(b'{"model":"m","prompt":"Hi","return_token_strs":true}')
    assert (request.model, request.prompt, request.with_pieces) == ("m", TextPrompt("Hi"), True)
    assert tokens.read_openai_tokenize(b'{"prompt":"","add_special_tokens":false}').prompt == TextPrompt(
        "", add_special_tokens=False
    )
    assert isinstance(tokens.read_openai_tokenize(b'{"messages":[{"role":"user","content":"Hi"}]}').prompt, ChatPrompt)
    for wrong in (b"{}", b'{"prompt":5}', b'{"messages":[]}'):
        with pytest.raises(BadRequest):
            tokens.read_openai_tokenize(wrong)


def test_tokenize_and_detokenize_write_answers():
    assert tokens.write_openai_tokens(TokenizeResult([5, 6], None, 256)) == (
        b'{"count":2,"max_model_len":256,"tokens":[5,6],"token_strs":null}'
    )
    assert tokens.write_token_text("é") == '{"prompt":"é"}'.encode()


def test_detokenize_reads_token_ids():
    assert tokens.read_detokenize(b'{"tokens":[]}').token_ids == []
    assert tokens.read_detokenize(b'{"tokens":[3,4]}').token_ids == [3, 4]
    for wrong in (b"{}", b'{"tokens":"a"}', b'{"tokens":[-1]}', b'{"tokens":["a"]}'):
        with pytest.raises(BadRequest):
            tokens.read_detokenize(wrong)


def test_openai_writes_models_version_and_load():
    card = (
        b'{"id":"a/b","object":"model","created":5,"owned_by":"parley","root":"a/b","parent":null,"max_model_len":64}'
    )
    assert tokens.write_openai_model(ModelCard("a/b", 5, 64)) == card
    assert tokens.write_openai_models([ModelCard("a/b", 5, 64)]) == b'{"object":"list","data":[' + card + b"]}"
    assert tokens.write_openai_version("1.2") == b'{"version":"1.2"}'
    assert tokens.write_load(3) == b'{"server_load":3}'
