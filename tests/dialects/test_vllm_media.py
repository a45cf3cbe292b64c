"""Images, video and sound in vLLM's conversations: its forms of parts, its sentences and statuses, and its usage."""

import json
from typing import Any

import pytest

from parley.dialects.request_context import ApiOptions, RequestContext
from parley.dialects.vllm import chat
from parley.dialects.vllm.error_answers import vllm_error_answer
from parley.errors import BadMedia, BadRequest, MediaFault
from parley.types import (
    CachedMedia,
    ChatPrompt,
    ChoiceDelta,
    ChoiceDone,
    EncodedMedia,
    Media,
    MediaAddress,
    MediaEmbeddings,
    Message,
    Usage,
)

JSON = {b"content-type": b"application/json"}
LIMITS = {"image": 2, "video": 1, "audio": 1}
CONTEXT = RequestContext("0f" * 16, 1, "fp", context_length=256, headers=JSON, media_limits=LIMITS)
TRUSTING = RequestContext(
    "0f" * 16,
    1,
    "fp",
    context_length=256,
    headers=JSON,
    media_limits=LIMITS,
    api_options=ApiOptions(enable_mm_embeds=True, trust_request_mm_kwargs=True),
)
URL = "https://a.b/c"
ADDRESS = MediaAddress(URL)
PATH = "messages[0].content[0]"
IMAGE = {"type": "image_url", "image_url": {"url": URL}}


def read_reply(
    content: Any, context: RequestContext = CONTEXT, role: str = "user", **members: Any
) -> chat.VllmChatReply:
    body = {"model": "m", "messages": [{"role": role, "content": content}]} | members
    reply = chat.read_vllm_chat(json.dumps(body).encode(), context)
    assert isinstance(reply, chat.VllmChatReply)
    return reply


def read_message(content: Any, context: RequestContext = CONTEXT, **members: Any) -> Message:
    prompt = read_reply(content, context, **members).request.prompts[0]
    assert isinstance(prompt, ChatPrompt)
    return prompt.messages[0]


def refusal(content: Any, context: RequestContext = CONTEXT, **members: Any) -> tuple[int, dict[str, Any]]:
    with pytest.raises(BadRequest) as caught:
        read_message(content, context, **members)
    answer = vllm_error_answer(caught.value)
    return answer.status, json.loads(answer.body)["error"]


@pytest.mark.parametrize(
    ("part", "item"),
    [
        (IMAGE, Media("image", ADDRESS, f"{PATH}.image_url")),
        ({"type": "video_url", "video_url": {"url": URL}}, Media("video", ADDRESS, f"{PATH}.video_url")),
        ({"type": "audio_url", "audio_url": {"url": URL}, "uuid": "u"},
         Media("audio", ADDRESS, f"{PATH}.audio_url", uuid="u")),
        ({"image_url": URL}, Media("image", ADDRESS, f"{PATH}.image_url")),
        ({"image_url": {"url": URL, "detail": "low"}}, Media("image", ADDRESS, f"{PATH}.image_url", "low")),
        ({"audio_url": URL}, Media("audio", ADDRESS, f"{PATH}.audio_url")),
        ({"video_url": URL}, Media("video", ADDRESS, f"{PATH}.video_url")),
        ({"input_audio": {"data": "aGk=", "format": "mp3"}},
         Media("audio", EncodedMedia("aGk=", "audio/mp3"), f"{PATH}.input_audio")),
        ({"type": "input_image", "image_url": URL}, Media("image", ADDRESS, f"{PATH}.image_url")),
        ({"type": "image_url", "image_url": None, "uuid": "u"},
         Media("image", CachedMedia(), f"{PATH}.image_url", uuid="u")),
        ({"type": "image_url", "image_url": {}, "uuid": "u"},
         Media("image", CachedMedia(), f"{PATH}.image_url", uuid="u")),
        ({"type": "input_audio", "input_audio": None, "uuid": "u"},
         Media("audio", CachedMedia(), f"{PATH}.input_audio", uuid="u")),
    ],
)  # fmt: skip
def test_vllm_media_part_is_read(part, item):
    (placed,) = read_message([part]).media
    assert placed.media == item


def test_vllm_media_stand_among_bare_strings_in_messages_of_any_role():
    for role in ("user", "system", "assistant", "tool", "x"):
        message = read_message(["a", {"image_url": URL}, "b", "c"], role=role)
        assert (message.content, [placed.position for placed in message.media]) == ("ab\nc", [1])


def test_vllm_media_options_and_embeddings_need_the_operators_flags():
    options = {"media_io_kwargs": {"video": {"num_frames": 4}}, "mm_processor_kwargs": {"fps": 1}}
    (placed,) = read_message([{"video_url": URL}], TRUSTING, **options).media
    assert (placed.media.loading_options, placed.media.processor_options) == ({"num_frames": 4}, {"fps": 1})
    for name, value in options.items():
        status, error = refusal([IMAGE], **{name: value})
        assert status == 400 and "--trust-request-mm-kwargs" in error["message"]
    part = {"type": "audio_embeds", "audio_embeds": "AAAA"}
    for written in (part, {"type": "audio_embeds", "data": "AAAA"}):
        assert read_message([written], TRUSTING).media[0].media.source == MediaEmbeddings("AAAA")
    assert refusal([part])[1]["message"] == "You must set `--enable-mm-embeds` to input `audio_embeds`"


def test_vllm_media_url_without_its_object_is_refused_where_the_part_has_a_type():
    status, error = refusal([{"type": "image_url", "image_url": URL}])
    assert (status, error["type"], error["param"]) == (400, "Bad Request", "body.messages.0.content.0.image_url")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ([{"type": "x", "x": 1}], "Unsupported chat content part type: 'x'. Supported types: text, input_text, "
         "output_text, refusal, thinking, image_url, input_audio, file, input_image, video_url, audio_url, "
         "image_embeds, video_embeds, audio_embeds"),
        ([IMAGE] * 3, "At most 2 image(s) may be provided in one prompt. Set `--limit-mm-per-prompt` to increase this "
         "limit."),
        ([{"type": "video_url", "video_url": {"url": URL}}], "At most 0 video(s) may be provided in one prompt."),
        ([{"image_url": "ftp://a/b"}], "The URL must be either a HTTP, data or file URL."),
        ([{"image_url": "data:image/png,abc"}], "Only base64 data URLs are supported for now."),
    ],
)  # fmt: skip
def test_vllm_media_refusal_has_the_originals_sentence(content, sentence):
    context = RequestContext("0f", 1, "fp", headers=JSON, media_limits={"image": 2, "audio": 1})
    status, error = refusal(content, context)
    assert (status, error["message"], error["type"]) == (400, sentence, "BadRequestError")


def test_vllm_media_with_too_long_a_url_are_unprocessable():
    status, error = refusal([{"image_url": "https://" + "a" * 4096}])
    assert (status, error["message"]) == (422, "Failed to fetch media from URL: Invalid URL")


FAULTS: list[tuple[MediaFault, dict[str, Any], int, str]] = [
    ("unreachable", {"status": 404}, 422, "Failed to fetch media from URL: HTTP 404 error"),
    ("unreachable", {}, 422, "Failed to fetch media from URL: Connection error"),
    ("not_found", {}, 422, "Failed to fetch media from URL: File not found"),
    ("too_large", {"limit": 5, "host": "a"}, 422,
     "Failed to fetch media from URL: The image exceeds the limit of 5 bytes"),
    ("too_large", {"limit": 5}, 400, "Failed to load image: It is bad."),
    ("forbidden_address", {"host": "a.b", "allowed": "['c.d']"}, 400,
     "The URL must be from one of the allowed domains: ['c.d']. Input URL domain: a.b"),
    ("forbidden_address", {}, 400, "Cannot load local files without `--allowed-local-media-path`."),
    ("too_many", {"limit": 0}, 400, "At most 0 image(s) may be provided in one prompt."),
    ("undecodable", {}, 400, "Failed to load image: the data is damaged"),
    ("bad_base64", {}, 400, "Failed to load image: the data is not valid base64"),
    ("too_many_pixels", {}, 400, "Failed to load image: It is bad."),
    ("unknown_uuid", {}, 400, "Cache miss for image at index 0 but data is not provided"),
]  # fmt: skip


@pytest.mark.parametrize(("reason", "detail", "status", "sentence"), FAULTS)
def test_vllm_media_fault_that_shows_later_has_the_originals_sentence(reason, detail, status, sentence):
    answer = vllm_error_answer(BadMedia("It is bad.", reason=reason, kind="image", field=PATH, **detail))
    error = json.loads(answer.body)["error"]
    assert (answer.status, error["message"]) == (status, sentence)
    assert error["type"] == ("UnprocessableEntityError" if status == 422 else "BadRequestError")


def test_vllm_media_unknown_uuid_is_named_by_its_place_among_its_kind():
    reply = read_reply([{"audio_url": URL}, IMAGE, {"type": "image_url", "image_url": None, "uuid": "u"}])
    error = BadMedia("x", reason="unknown_uuid", kind="image", field="messages[0].content[2].image_url")
    assert reply.render_refusal(error) is None
    assert b"Cache miss for image at index 1 but" in vllm_error_answer(error).body


def test_vllm_media_usage_counts_embeddings_by_kind():
    reply = read_reply([IMAGE])
    reply.add_events([ChoiceDelta(0, "a"), ChoiceDone(0, "stop", None, Usage())])
    usage = Usage(prompt_tokens=9, media_tokens={"image": 4, "audio": 2})
    details = json.loads(reply.render_body(usage))["usage"]["prompt_tokens_details"]
    assert details["multimodal_tokens"] == {"image": 4, "audio": 2}
    streamed = read_reply([IMAGE], stream=True, stream_options={"include_usage": True})
    assert b'"multimodal_tokens":{"image":4,"audio":2}' in streamed.finish_stream(usage)
    assert b"multimodal" not in streamed.finish_stream(Usage(prompt_tokens=9))
