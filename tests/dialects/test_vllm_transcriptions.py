"""Transcriptions in vLLM's form: chunks, usage, and its sentences."""

import json

import pytest
from support.sound_forms import FORM_TYPE, clip_form, encode_form

from parley.dialects.request_context import RequestContext
from parley.dialects.vllm import transcriptions
from parley.dialects.vllm.error_answers import vllm_error_answer
from parley.errors import BadMedia, BadRequest
from parley.types import ChoiceDelta, ChoiceDone, PromptAccepted, TokenInfo, Usage

CONTEXT = RequestContext(
    "0f",
    1700000000,
    "fp_1",
    headers={b"content-type": FORM_TYPE},
    media_limits={"audio": 1},
    media_family="qwen3_asr",
)
USAGE = Usage(prompt_tokens=20, completion_tokens=5, media_tokens={"audio": 14}, media_seconds={"audio": 3.32})
EVENTS = [
    PromptAccepted(0, [1] * 20),
    *(
        ChoiceDelta(0, text, tokens=[TokenInfo(7, text, text.encode(), -0.5)])
        for text in ("language Chinese", "<asr_text>", "Hel", "lo.")
    ),
    ChoiceDone(0, "stop", Usage()),
]
START = b'data: {"id":"trsc-0f","object":"transcription.chunk","created":1700000000,"model":"m","choices":['


def read(**members: str | list[str]) -> transcriptions.VllmTranscriptionReply:
    return transcriptions.read_vllm_transcription(clip_form(**{"model": "m", **members}), CONTEXT)


def error_of(body: bytes, context: RequestContext = CONTEXT) -> tuple[int, str]:
    with pytest.raises(BadRequest) as caught:
        transcriptions.read_vllm_transcription(body, context)
    answer = vllm_error_answer(caught.value)
    return answer.status, json.loads(answer.body)["error"]["message"]


def test_vllm_transcription_counts_the_length_of_the_clip():
    reply = read()
    reply.add_events(EVENTS)
    assert reply.render_body(USAGE) == b'{"text":"Hello.","usage":{"type":"duration","seconds":4}}'


def test_vllm_transcription_names_the_language_by_its_code():
    reply = read(response_format="verbose_json")
    reply.add_events(EVENTS)
    assert json.loads(reply.render_body(USAGE))["language"] == "zh"


def test_vllm_transcription_streams_chunks():
    reply = read(stream="true")
    assert b"".join(reply.render_chunk([event]) for event in EVENTS) + reply.finish_stream(USAGE) == (
        START + b'{"delta":{"content":"Hel"}}]}\n\n'
        + START + b'{"delta":{"content":"lo."}}]}\n\n'
        + START + b'{"delta":{"content":""},"finish_reason":"stop","stop_reason":null}]}\n\ndata: [DONE]\n\n'
    )  # fmt: skip


def test_vllm_transcription_streams_usage():
    reply = read(stream="true", stream_include_usage="true", stream_continuous_usage_stats="true")
    frames = (reply.render_chunk(EVENTS) + reply.finish_stream(USAGE)).decode().split("\n\n")[:-2]
    chunks = [json.loads(frame.removeprefix("data: ")) for frame in frames]
    assert [chunk["usage"] for chunk in chunks] == [
        {"prompt_tokens": 20, "total_tokens": 20 + count, "completion_tokens": count} for count in (3, 4, 4, 5)
    ]
    assert chunks[-1]["choices"] == []
    assert read(stream_continuous_usage_stats="true").usage_per_chunk is False


def test_vllm_translation_has_chunks_of_its_own():
    context = RequestContext("0f", 1700000000, "fp_1", headers=CONTEXT.headers, media_limits={"audio": 1})
    reply = transcriptions.read_vllm_translation(clip_form(model="m", stream="true", to_language="de"), context)
    assert b'"id":"trsl-0f","object":"translation.chunk"' in reply.render_chunk([ChoiceDelta(0, "Hi")])


def test_vllm_transcription_reads_conversions_of_pydantic():
    request = read(temperature="1.5", stream="yes", seed="7", top_k="5").request
    assert (request.sampling.temperature, request.stream, request.sampling.seed) == (1.5, True, 7)


@pytest.mark.parametrize(
    ("members", "sentence"),
    [
        ({"response_format": "srt"}, "Currently only support response_format: `text`, `json`, `verbose_json` or"),
        ({"response_format": "verbose_json", "stream": "true"}, "verbose_json format doesn't support streaming case"),
        ({"language": "xx"}, "Unsupported language: 'xx'. Must be one of ['ar', 'yue'"),
        ({"response_format": "xml"}, "Input should be 'json', 'text'"),
    ],
)  # fmt: skip
def test_vllm_transcription_refusals_use_original_wording(members, sentence):
    status, message = error_of(clip_form(**members))
    assert status == 400 and sentence in message


def test_vllm_transcription_refuses_a_text_an_empty_file_and_no_file():
    assert error_of(encode_form([("file", "a", None)]))[0] == 422
    assert error_of(clip_form(b"")) == (400, "Invalid or unsupported audio file.")
    assert error_of(encode_form([]))[0] == 400


def test_vllm_model_without_audio_is_refused():
    context = RequestContext("0f", 1, "", headers=CONTEXT.headers)
    assert error_of(clip_form(), context) == (400, "The model does not support Transcriptions API")


@pytest.mark.parametrize(
    ("reason", "sentence"),
    [
        ("too_large", "Maximum file size exceeded"),
        ("undecodable", "Invalid or unsupported audio file."),
        ("unknown_format", "Invalid or unsupported audio file."),
    ],
)
def test_vllm_clip_refusals_use_original_wording(reason, sentence):
    answer = read().render_refusal(BadMedia("No.", reason=reason, kind="audio", field="file"))
    assert answer is not None and answer.status == 400 and json.loads(answer.body)["error"]["message"] == sentence
    assert read().render_refusal(BadRequest("No.")) is None


def test_vllm_transcription_stream_ends_with_the_error():
    assert read(stream="true").fail_stream(BadRequest("No.")).endswith(b"data: [DONE]\n\n")
