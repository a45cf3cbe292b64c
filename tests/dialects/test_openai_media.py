"""Images, video and sound in OpenAI's conversations: what is read of each part, refusals, and the usage."""

import json
from typing import Any

import pytest

from parley.dialects.openai import chat
from parley.dialects.openai.error_answers import openai_error_answer
from parley.dialects.request_context import ApiOptions, RequestContext
from parley.errors import BadMedia, BadRequest, InvalidValue, MediaFault
from parley.types import (
    CachedMedia,
    ChatPrompt,
    ChoiceDelta,
    ChoiceDone,
    EncodedMedia,
    Media,
    MediaAddress,
    MediaEmbeddings,
    MediaPath,
    Message,
    PlacedMedia,
    Usage,
)

CONTEXT = RequestContext(
    "0f", 1700000000, "fp_1", context_length=256, media_limits={"image": 3, "video": 1, "audio": 2}
)
TRUSTING = RequestContext(
    "0f",
    1700000000,
    "fp_1",
    context_length=256,
    media_limits={"image": 3, "video": 1},
    api_options=ApiOptions(enable_mm_embeds=True, trust_request_mm_kwargs=True),
)
SEES = RequestContext("0f", 1700000000, "fp_1", context_length=256, media_limits={"image": 3})
DATA_URL = "data:image/png;base64,iVBORw0KGgo="
ENCODED = EncodedMedia("iVBORw0KGgo=", "image/png")
IMAGE = {"type": "image_url", "image_url": {"url": DATA_URL}}
PATH = "messages[0].content[0]"


def read_message(content: Any, context: RequestContext = CONTEXT, role: str = "user", **members: Any) -> Message:
    body = {"model": "m", "messages": [{"role": role, "content": content}]} | members
    prompt = chat.read_chat_request(json.dumps(body).encode(), context).request.prompts[0]
    assert isinstance(prompt, ChatPrompt)
    return prompt.messages[0]


def read_item(part: Any, context: RequestContext = CONTEXT, **members: Any) -> Media:
    message = read_message([part], context, **members)
    assert message.content == ""
    (placed,) = message.media
    assert placed.position == 0
    return placed.media


def refusal(content: Any, context: RequestContext = CONTEXT, **members: Any) -> dict[str, Any]:
    with pytest.raises(BadRequest) as caught:
        read_message(content, context, **members)
    answer = openai_error_answer(caught.value)
    assert answer.status == 400
    return json.loads(answer.body)["error"]


@pytest.mark.parametrize(
    ("part", "item"),
    [
        (IMAGE, Media("image", ENCODED, f"{PATH}.image_url")),
        ({"type": "image_url", "image_url": {"url": "https://a.b/c.png", "detail": "low"}},
         Media("image", MediaAddress("https://a.b/c.png"), f"{PATH}.image_url", "low")),
        ({"type": "image_url", "image_url": "HTTP://a.b/c"},
         Media("image", MediaAddress("HTTP://a.b/c"), f"{PATH}.image_url")),
        ({"type": "image_url", "image_url": {"url": DATA_URL, "detail": "original"},
          "prompt_cache_breakpoint": {"type": "x"}}, Media("image", ENCODED, f"{PATH}.image_url", "original")),
        ({"type": "input_image", "image_url": DATA_URL, "detail": "high"},
         Media("image", ENCODED, f"{PATH}.image_url", "high")),
        ({"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}},
         Media("audio", EncodedMedia("UklGRg==", "audio/wav"), f"{PATH}.input_audio")),
        ({"type": "file", "file": {"file_data": DATA_URL, "filename": "a.png"}},
         Media("image", ENCODED, f"{PATH}.file")),
        ({"type": "file", "file": {"file_data": "data:audio/mpeg;base64,SUQz"}},
         Media("audio", EncodedMedia("SUQz", "audio/mpeg"), f"{PATH}.file")),
        ({"type": "video_url", "video_url": {"url": "file:///a/b%20c.mp4"}},
         Media("video", MediaPath("/a/b c.mp4"), f"{PATH}.video_url")),
        ({"type": "audio_url", "audio_url": {"url": "DATA:audio/wav;rate=1;BASE64,UklG"}, "uuid": "u"},
         Media("audio", EncodedMedia("UklG", "audio/wav"), f"{PATH}.audio_url", uuid="u")),
        ({"type": "image_url", "image_url": None, "uuid": "u"},
         Media("image", CachedMedia(), f"{PATH}.image_url", uuid="u")),
        ({"type": "image_url", "image_url": {"url": None}, "uuid": "u"},
         Media("image", CachedMedia(), f"{PATH}.image_url", uuid="u")),
    ],
)  # fmt: skip
def test_openai_media_part_is_read(part, item):
    assert read_item(part) == item


def test_openai_media_keep_their_places_among_the_texts():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}, IMAGE, IMAGE,
             {"type": "text", "text": "three"}, IMAGE]  # fmt: skip
    message = read_message(parts)
    assert message.content == "one\ntwothree"
    assert [(placed.position, placed.media.field) for placed in message.media] == [
        (7, "messages[0].content[2].image_url"),
        (7, "messages[0].content[3].image_url"),
        (12, "messages[0].content[5].image_url"),
    ]


def test_openai_media_options_need_the_operators_trust():
    options = {"media_io_kwargs": {"video": {"fps": 2}}, "mm_processor_kwargs": {"max_pixels": 784}}
    video = {"type": "video_url", "video_url": {"url": DATA_URL}}
    item = read_item(video, TRUSTING, **options)
    assert (item.loading_options, item.processor_options) == ({"fps": 2}, {"max_pixels": 784})
    assert read_item(IMAGE, TRUSTING, **options).loading_options == {}
    for name in options:
        error = refusal([video], **{name: options[name]})
        assert error["param"] == name and "--trust-request-mm-kwargs" in error["message"]
    assert refusal([video], TRUSTING, media_io_kwargs={"video": 1})["param"] == "media_io_kwargs"
    assert refusal([video], TRUSTING, media_io_kwargs={"document": {}})["param"] == "media_io_kwargs"


def test_openai_media_embeddings_need_the_operators_flag():
    part = {"type": "image_embeds", "image_embeds": "AAAA"}
    assert read_item(part, TRUSTING) == Media("image", MediaEmbeddings("AAAA"), f"{PATH}.image_embeds")
    error = refusal([part])
    assert error["message"] == "You must set `--enable-mm-embeds` to input `image_embeds`"
    assert error["param"] == f"{PATH}.image_embeds"
    assert refusal([{"type": "video_embeds"}], TRUSTING)["code"] == "missing_required_parameter"
    assert refusal([{"type": "audio_embeds", "audio_embeds": "AAAA"}], TRUSTING)["code"] == "unsupported_value"


@pytest.mark.parametrize(
    ("part", "param", "code"),
    [
        ({"type": "image_url"}, "image_url", "missing_required_parameter"),
        ({"type": "image_url", "image_url": {}}, "image_url.url", "missing_required_parameter"),
        ({"type": "image_url", "image_url": None, "uuid": ""}, "image_url", "missing_required_parameter"),
        ({"type": "image_url", "image_url": 5}, "image_url", "invalid_type"),
        ({"type": "image_url", "image_url": {"url": 5}}, "image_url.url", "invalid_type"),
        ({"type": "image_url", "image_url": {"url": DATA_URL, "detail": "x"}}, "image_url.detail", "invalid_value"),
        ({"type": "image_url", "image_url": {"url": "ftp://a/b"}}, "image_url", "invalid_image_url"),
        ({"type": "image_url", "image_url": {"url": "/a/b.png"}}, "image_url", "invalid_image_url"),
        ({"type": "image_url", "image_url": {"url": "data:image/png,abc"}}, "image_url", "invalid_image_url"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64"}}, "image_url", "invalid_image_url"),
        ({"type": "image_url", "image_url": {"url": "http://" + "a" * 4090}}, "image_url", "invalid_image_url"),
        ({"type": "audio_url", "audio_url": {"url": "x"}}, "audio_url", "invalid_audio_url"),
        ({"type": "input_audio", "input_audio": {"format": "wav"}}, "input_audio.data", "missing_required_parameter"),
        ({"type": "input_audio", "input_audio": {"data": "a"}}, "input_audio.format", "missing_required_parameter"),
        ({"type": "input_audio", "input_audio": {"data": "a", "format": "ogg"}}, "input_audio.format",
         "invalid_value"),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "input_audio", "invalid_base64"),
        ({"type": "file"}, "file", "missing_required_parameter"),
        ({"type": "file", "file": {"file_id": "file-1"}}, "file.file_id", "unsupported_parameter"),
        ({"type": "file", "file": {"filename": "a"}}, "file.file_data", "missing_required_parameter"),
        ({"type": "file", "file": {"file_data": "aGk="}}, "file.file_data", "invalid_image_url"),
        ({"type": "file", "file": {"file_data": "data:application/pdf;base64,aGk="}}, "file.file_data",
         "invalid_value"),
        ({"type": "image"}, "type", "invalid_value"),
        ({"image_url": {"url": DATA_URL}}, "type", "missing_required_parameter"),
        ({"type": "image_url", "image_url": {"url": DATA_URL}, "uuid": 5}, "uuid", "invalid_type"),
    ],
)  # fmt: skip
def test_openai_media_error_names_part_and_code(part, param, code):
    error = refusal([part])
    assert (error["param"], error["code"], error["type"]) == (f"{PATH}.{param}", code, "invalid_request_error")


def test_openai_media_error_lists_the_types_of_parts():
    assert refusal([{"type": "x"}], SEES)["message"].startswith(
        "Invalid value for 'messages[0].content[0].type': 'x'. Supported values are: 'text', 'input_text', "
        "'output_text', 'refusal', 'image_url', 'input_audio', 'file'"
    )


@pytest.mark.parametrize(
    ("part", "reads"),
    [
        ({"type": "input_audio", "input_audio": {"data": "a", "format": "wav"}}, "text and images"),
        ({"type": "video_url", "video_url": {"url": "x"}}, "text and images"),
        ({"type": "file", "file": {"file_data": "data:video/mp4;base64,aGk="}}, "text and images"),
    ],
)
def test_openai_media_of_a_kind_that_the_model_lacks_are_refused_by_name(part, reads):
    error = refusal([part], SEES)
    assert error["message"] == f"'{PATH}.type' is '{part['type']}', but this model reads {reads} only."
    assert (error["param"], error["code"]) == (f"{PATH}.type", "unsupported_value")


def test_openai_media_refusal_lists_the_kinds_that_the_model_reads():
    context = RequestContext("0f", 1, "fp", media_limits={"audio": 1, "image": 1})
    assert "reads text, images and audio only." in refusal([{"type": "video_url"}], context)["message"]


@pytest.mark.parametrize("role", ["system", "assistant", "developer"])
def test_openai_media_are_refused_outside_of_user_messages(role):
    error = refusal([{"type": "text", "text": "a"}, IMAGE], messages=[{"role": role, "content": [IMAGE]}])
    assert error["message"] == (
        "Invalid 'messages[0]'. Image URLs are only allowed for messages with role 'user', but this message with role "
        f"'{role}' contains one."
    )
    assert error["param"] == "messages[0]"


def test_openai_media_are_counted_over_all_messages():
    messages = [{"role": "user", "content": [IMAGE, IMAGE]}] * 2
    error = refusal("", messages=messages)
    assert error["message"] == "Invalid 'messages[1].content[1].image_url': a request may have at most 3 image items."
    assert error["param"] == "messages[1].content[1].image_url"


FAULTS: dict[MediaFault, str] = {
    "bad_address": "invalid_image_url",
    "forbidden_address": "invalid_image_url",
    "unreachable": "invalid_image_url",
    "not_found": "invalid_image_url",
    "bad_data_url": "invalid_image_url",
    "bad_base64": "invalid_base64",
    "unknown_format": "invalid_image_format",
    "undecodable": "image_parse_error",
    "refused_by_model": "image_parse_error",
    "too_slow": "image_parse_error",
    "too_large": "image_too_large",
    "too_many_pixels": "image_too_large",
    "too_long": "image_too_large",
    "too_many": "invalid_value",
    "unknown_uuid": "invalid_value",
    "bad_embeddings": "invalid_value",
}


@pytest.mark.parametrize("reason", FAULTS)
def test_openai_media_fault_that_shows_later_has_its_code(reason):
    error = BadMedia("It is bad.", reason=reason, kind="image", field=f"{PATH}.image_url")
    answer = openai_error_answer(error)
    assert answer.status == 400
    assert json.loads(answer.body)["error"] == {
        "message": "It is bad.",
        "type": "invalid_request_error",
        "param": f"{PATH}.image_url",
        "code": FAULTS[reason],
    }


def test_openai_media_errors_never_echo_a_data_url():
    secret = "data:image/png;base64," + "QUJD" * 40
    for part in (
        {"type": secret},
        {"type": "image_url", "image_url": {"url": DATA_URL, "detail": secret}},
        {"type": "input_audio", "input_audio": {"data": secret, "format": secret}},
        {"type": "image_url", "image_url": {"url": " " + secret}},
    ):
        assert "QUJDQUJD" not in refusal([part])["message"]
    assert "QUJDQUJD" not in str(InvalidValue(f"Got {secret}."))


def test_openai_media_usage_counts_tokens_by_kind():
    body = {"messages": [{"role": "user", "content": [IMAGE]}]}
    reply = chat.read_chat_request(json.dumps(body).encode(), CONTEXT)
    reply.add_events([ChoiceDelta(0, "a"), ChoiceDone(0, "stop", None, Usage())])
    usage = Usage(prompt_tokens=20, cached_tokens=4, media_tokens={"image": 5, "video": 6, "audio": 2})
    details = b'"prompt_tokens_details":{"cached_tokens":4,"audio_tokens":2,"image_tokens":11,"text_tokens":7}'
    assert details in reply.render_body(usage)


def test_openai_media_to_a_text_model_are_refused():
    error = refusal([IMAGE], RequestContext("0f", 1, "fp"))
    assert error["message"] == "'messages[0].content[0].type' is 'image_url', but this model reads text only."


def test_openai_media_are_placed_before_the_character_at_their_position():
    message = read_message([IMAGE, {"type": "text", "text": "a"}])
    assert message.media == [PlacedMedia(0, Media("image", ENCODED, f"{PATH}.image_url"))]
