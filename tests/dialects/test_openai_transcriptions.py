"""Transcriptions: meaning of forms, refusals, and the exact bytes of answers."""

import json
from typing import Any

import pytest
from support.sound_forms import FORM_TYPE, clip_form, encode_form

from parley.dialects.openai import transcriptions
from parley.dialects.request_context import RequestContext
from parley.errors import BadMedia, BadRequest, MalformedBody, UnsuitableModel, Unsupported
from parley.types import (
    ChatPrompt,
    ChoiceDelta,
    ChoiceDone,
    Media,
    OutputOptions,
    PlacedMedia,
    SamplingOptions,
    TokenInfo,
    UploadedMedia,
    Usage,
)

CONTEXT = RequestContext(
    "0f",
    1700000000,
    "fp_1",
    headers={b"content-type": FORM_TYPE},
    media_limits={"audio": 1},
    media_family="qwen3_asr",
    model_names=("m",),
)
WORDS_HEAD = RequestContext("0f", 1700000000, "fp_1", headers=CONTEXT.headers, media_limits={"audio": 1})
TEXT_HEAD = RequestContext("0f", 1700000000, "fp_1", headers=CONTEXT.headers, model_names=("m",))
USAGE = Usage(prompt_tokens=20, completion_tokens=5, media_tokens={"audio": 14}, media_seconds={"audio": 3.32})
WORD_TIMES: dict[str, Any] = {"timestamp_granularities": "word", "response_format": "verbose_json"}
PIECES = ["language", " English", "<asr_text>", "Hel", "lo."]
EVENTS = [
    *(ChoiceDelta(0, text, tokens=[TokenInfo(7, text, text.encode(), -0.5)]) for text in PIECES),
    ChoiceDone(0, "stop", Usage()),
]
TRANSCRIPT_USAGE = (
    b'"usage":{"type":"tokens","input_tokens":20,"input_token_details":{"text_tokens":6,"audio_tokens":14},'
    b'"output_tokens":5,"total_tokens":25}'
)


def read(context: RequestContext = CONTEXT, **members: str | list[str]) -> transcriptions.TranscriptionReply:
    return transcriptions.read_transcription(clip_form(**{"model": "m", **members}), context)


def answer(reply: transcriptions.TranscriptionReply) -> bytes:
    reply.add_events(EVENTS)
    return reply.render_body(USAGE)


def chat_of(reply: transcriptions.TranscriptionReply) -> ChatPrompt:
    (prompt,) = reply.request.prompts
    assert isinstance(prompt, ChatPrompt)
    return prompt


# -- the form


def test_form_becomes_a_conversation_with_the_clip():
    request = read(prompt="Zaphod", language="en", temperature="0.25").request
    (chat,) = request.prompts
    assert isinstance(chat, ChatPrompt) and chat.continue_final
    assert [(turn.role, turn.content) for turn in chat.messages] == [
        ("system", "Zaphod"),
        ("user", ""),
        ("assistant", "language English<asr_text>"),
    ]
    assert chat.messages[1].media == [PlacedMedia(0, Media("audio", UploadedMedia(b"RIFF"), "file"))]
    assert (request.model, request.sampling, request.stream) == ("m", SamplingOptions(temperature=0.25), False)
    assert request.output_options == OutputOptions(unparsed=True) and request.stop_conditions.max_tokens is None


@pytest.mark.parametrize(
    "body",
    [
        encode_form([("file", b"RIFF", "a.wav"), ("model", "m", None)]),
        encode_form([("model", "m", None), ("file", b"RIFF", "blob")]),
        encode_form([("model", "m", None), ("file", b"RIFF", None)]),
        encode_form([("model", "m", None), ("language", "", None), ("file", b"RIFF", "")]),
        clip_form(model="m", chunking_strategy="auto", response_format="json", unknown="x", n="1"),
    ],
)
def test_forms_of_different_clients_give_the_same_request(body):
    assert transcriptions.read_transcription(body, CONTEXT).request == read().request


def test_extra_members_of_vllm_reach_the_request():
    request = read(
        seed="7",
        top_p="0.5",
        top_k="3",
        min_p="0.1",
        frequency_penalty="0.5",
        presence_penalty="-0.5",
        repetition_penalty="1.5",
        max_completion_tokens="9",
        length_penalty="1",
        use_beam_search="false",
        include_stop_str_in_output="false",
        vllm_xargs='{"a":1}',
        stream="true",
        stream_include_usage="true",
        stream_continuous_usage_stats="true",
    ).request
    assert request.sampling == SamplingOptions(
        temperature=0.0,
        top_p=0.5,
        top_k=3,
        min_p=0.1,
        seed=7,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.5,
    )
    assert request.stop_conditions.max_tokens == 9 and request.stream and request.output_options.usage


def test_prompt_and_hints_become_the_context():
    chat = chat_of(read(prompt="a", keywords=["b", "c"], hotwords="d"))
    assert chat.messages[0].content == "a\nb, c\nd"


@pytest.mark.parametrize("language", ["de", "DE", "German", "german"])
def test_language_may_be_a_code_or_a_name(language):
    assert chat_of(read(language=language)) == chat_of(read(languages=[language]))
    content = chat_of(read(WORDS_HEAD, language=language)).messages[-1].content
    assert content == "Transcribe the speech in German. Answer with the transcript only."


def test_translation_needs_a_model_that_follows_instructions():
    body = clip_form(model="m", to_language="fr", language="de")
    content = chat_of(transcriptions.read_translation(body, WORDS_HEAD)).messages[-1].content
    assert content == "Translate the speech from German into French. Answer with the translation only."
    with pytest.raises(UnsuitableModel, match="The model 'm' does not support Translations API"):
        transcriptions.read_translation(body, CONTEXT)


# -- refusals


def test_model_without_audio_is_refused_by_name():
    with pytest.raises(UnsuitableModel, match="The model 'm' does not support Transcriptions API") as caught:
        read(TEXT_HEAD)
    assert (caught.value.status, caught.value.field) == (400, "model")
    with pytest.raises(UnsuitableModel, match="does not support Translations API"):
        transcriptions.read_translation(clip_form(), TEXT_HEAD)


def test_body_that_is_not_a_form_is_refused():
    with pytest.raises(MalformedBody, match="must be multipart/form-data"):
        transcriptions.read_transcription(
            b'{"model":"m"}', RequestContext("0f", 1, "", headers={b"content-type": b"application/json"})
        )


@pytest.mark.parametrize(
    ("members", "field", "code"),
    [
        ({"response_format": "xml"}, "response_format", "invalid_value"),
        ({"response_format": "diarized_json"}, "response_format", "unsupported_value"),
        ({"response_format": "srt", "stream": "true"}, "response_format", "unsupported_value"),
        ({"response_format": "verbose_json", "stream": "true"}, "response_format", "unsupported_value"),
        ({"timestamp_granularities": ["segment"]}, "timestamp_granularities", "unsupported_value"),
        (WORD_TIMES, "timestamp_granularities", "unsupported_value"),
        ({"timestamp_granularities": ["hour"]}, "timestamp_granularities", "invalid_value"),
        ({"include": ["logprobs"], "response_format": "text"}, "include", "unsupported_value"),
        ({"include": ["words"]}, "include", "invalid_value"),
        ({"temperature": "1.5"}, "temperature", "decimal_above_max_value"),
        ({"temperature": "warm"}, "temperature", "invalid_value"),
        ({"stream": "perhaps"}, "stream", "invalid_value"),
        ({"language": "xx"}, "language", "invalid_language_format"),
        ({"languages": ["xx"]}, "languages[0]", "invalid_language_format"),
        ({"language": "gl"}, "language", "invalid_language_format"),
        ({"to_language": "fr"}, "to_language", "invalid_value"),
        ({"n": "2"}, "n", "integer_above_max_value"),
        ({"vllm_xargs": "{"}, "vllm_xargs", "invalid_value"),
        ({"model": ["m", "n"]}, "model", "invalid_type"),
    ],
)  # fmt: skip
def test_wrong_members_are_refused_by_name(members, field, code):
    with pytest.raises(BadRequest) as caught:
        read(**members)
    assert (caught.value.field, caught.value.code, caught.value.status) == (field, code, 400)


@pytest.mark.parametrize(
    ("members", "field"),
    [
        ({"languages": ["en", "de"]}, "languages"),
        ({"known_speaker_names": ["Ann"]}, "known_speaker_names"),
        ({"known_speaker_references": ["data:audio/wav;base64,AAAA"]}, "known_speaker_references"),
        ({"chunking_strategy[type]": "server_vad"}, "chunking_strategy"),
        ({"use_beam_search": "true"}, "use_beam_search"),
    ],
)
def test_members_of_features_that_are_missing_are_refused_by_name(members, field):
    with pytest.raises(Unsupported) as caught:
        read(**members)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (encode_form([("model", "m", None)]), "missing_required_parameter"),
        (clip_form(b"", model="m"), "audio_too_short"),
        (encode_form([("file", b"a", "a.wav"), ("file", b"b", "b.wav")]), "invalid_value"),
        (encode_form([("file[]", b"a", "a.wav")]), "invalid_value"),
        (encode_form([("file[a]", b"a", "a.wav")]), "invalid_value"),
    ],
)
def test_request_has_exactly_one_file(body, code):
    with pytest.raises(BadRequest) as caught:
        transcriptions.read_transcription(body, CONTEXT)
    assert (caught.value.field, caught.value.code) == ("file", code)


def test_clip_refusals_have_the_errors_of_openai():
    def refusal(reason: Any, **detail: int) -> tuple[int, dict[str, Any]]:
        answer = read().render_refusal(BadMedia("No.", reason=reason, kind="audio", field="file", **detail))
        assert answer is not None
        return answer.status, json.loads(answer.body)["error"]

    status, error = refusal("too_large", limit=26214400, size=30000000)
    assert (status, error["message"]) == (413, "Maximum content size limit (26214400) exceeded (30000000 bytes read)")
    status, error = refusal("unknown_format")
    assert status == 400 and error["param"] == "file" and error["message"].startswith("Invalid file format. Supported")
    status, error = refusal("too_long")
    assert (status, error["message"], error["param"]) == (400, "No.", "file")


# -- answers


def test_json_has_the_text_and_its_usage():
    assert answer(read()) == b'{"text":"Hello.",' + TRANSCRIPT_USAGE + b"}"


def test_json_has_log_probabilities_of_the_text():
    reply = read(include=["logprobs"])
    assert reply.request.output_options.logprobs == 0
    assert answer(reply) == (
        b'{"text":"Hello.","logprobs":[{"token":"Hel","logprob":-0.5,"bytes":[72,101,108]},'
        b'{"token":"lo.","logprob":-0.5,"bytes":[108,111,46]}],' + TRANSCRIPT_USAGE + b"}"
    )


@pytest.mark.parametrize(
    ("response_format", "body"),
    [
        ("text", b"Hello.\n"),
        ("srt", b"1\n00:00:00,000 --> 00:00:03,320\nHello.\n\n"),
        ("vtt", b"WEBVTT\n\n00:00:00.000 --> 00:00:03.320\nHello.\n\n"),
    ],
)
def test_plain_formats_have_the_text(response_format, body):
    reply = read(response_format=response_format)
    assert answer(reply) == body and reply.content_type == b"text/plain; charset=utf-8"


def test_verbose_json_has_one_segment_for_the_whole_clip():
    reply = read(response_format="verbose_json", timestamp_granularities=["segment"])
    assert answer(reply) == (
        b'{"task":"transcribe","language":"english","duration":3.32,"text":"Hello.","segments":[{"id":0,"seek":0,'
        b'"start":0.0,"end":3.32,"text":"Hello.","tokens":[7,7],"temperature":0.0,"avg_logprob":-0.5,'
        b'"compression_ratio":0.42857142857142855,"no_speech_prob":0.0}],"usage":{"type":"duration","seconds":4}}'
    )


def test_transcript_of_silence_is_empty():
    silence = [ChoiceDelta(0, "language None<asr_text>"), ChoiceDone(0, "stop", Usage())]
    bodies = {}
    for response_format in ("json", "text", "srt", "vtt", "verbose_json"):
        reply = read(response_format=response_format)
        reply.add_events(silence)
        bodies[response_format] = reply.render_body(USAGE)
    assert (bodies["text"], bodies["srt"], bodies["vtt"]) == (b"\n", b"", b"WEBVTT\n\n")
    assert bodies["json"].startswith(b'{"text":"",')
    verbose = json.loads(bodies["verbose_json"])
    assert (verbose["language"], verbose["text"], verbose["segments"]) == ("", "", [])


def test_subtitles_stay_valid_whatever_the_text_is():
    def subtitles(response_format: str) -> bytes:
        reply = read(language="en", response_format=response_format)
        reply.add_events([ChoiceDelta(0, "a --> <b> & c\n\n\n d")])
        return reply.render_body(Usage(media_seconds={"audio": 3723.9996}))

    assert subtitles("srt") == b"1\n00:00:00,000 --> 01:02:04,000\na -> <b> & c\nd\n\n"
    assert subtitles("vtt") == b"WEBVTT\n\n00:00:00.000 --> 01:02:04.000\na -&gt; &lt;b&gt; &amp; c\nd\n\n"


def test_stream_has_deltas_and_the_whole_text():
    reply = read(stream="true")
    assert b"".join(reply.render_chunk([event]) for event in EVENTS) + reply.finish_stream(USAGE) == (
        b'data: {"type":"transcript.text.delta","delta":"Hel"}\n\n'
        b'data: {"type":"transcript.text.delta","delta":"lo."}\n\n'
        b'data: {"type":"transcript.text.done","text":"Hello.",' + TRANSCRIPT_USAGE + b"}\n\n"
    )


def test_stream_has_log_probabilities_of_each_delta():
    reply = read(stream="true", include=["logprobs"])
    frames = (reply.render_chunk(EVENTS) + reply.finish_stream(USAGE)).split(b"\n\n")[:-1]
    deltas = [json.loads(frame.removeprefix(b"data: ")) for frame in frames]
    assert [[token["token"] for token in delta["logprobs"]] for delta in deltas] == [["Hel"], ["lo."], ["Hel", "lo."]]


def test_stream_of_an_answer_without_header_has_its_text():
    reply = read(stream="true")
    assert reply.render_chunk([ChoiceDelta(0, "Hel"), ChoiceDelta(0, "lo.")]) == b""
    assert reply.finish_stream(USAGE).startswith(
        b'data: {"type":"transcript.text.delta","delta":"Hello."}\n\n'
        b'data: {"type":"transcript.text.done","text":"Hello.",'
    )


def test_stream_ends_with_the_error():
    assert read(stream="true").fail_stream(BadRequest("No.")) == (
        b'data: {"error":{"message":"No.","type":"invalid_request_error","param":null,"code":null}}\n\n'
    )
