"""Images, video and sound in MindIE's five interfaces: how a value is understood, its sentences, and their status."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from parley.dialects.mindie.api_rules import MindieRules
from parley.dialects.mindie.error_answers import mindie_error_answer, mindie_failure_text
from parley.dialects.mindie.interfaces import chat, native, tgi, triton, vllm
from parley.dialects.request_context import RequestContext
from parley.errors import BadMedia, BadRequest, MediaFault
from parley.types import ChatPrompt, EncodedMedia, Media, MediaAddress, MediaPath, Message, PlacedMedia, TextPrompt

PATHS = {"model": "m"}
CONTEXT = RequestContext("0f", 1, "fp", path_parts=PATHS, media_limits={"image": 20, "video": 20, "audio": 20})
BLIND = RequestContext("0f", 1, "fp", path_parts=PATHS)
STRICT = MindieRules("strict")
Reader = Callable[[bytes, RequestContext], Any]
INTERFACES: dict[str, tuple[str, Reader]] = {  # the member with the prompt, and the reader
    "tgi": ("inputs", partial(tgi.read_mindie_whole, STRICT)),
    "native": ("inputs", partial(native.read_mindie_native, STRICT)),
    "vllm": ("prompt", partial(vllm.read_mindie_vllm, STRICT)),
    "triton": ("text_input", partial(triton.read_mindie_triton, STRICT, stream=False)),
    "chat": ("messages", partial(chat.read_mindie_chat, STRICT)),
}
PREFIX = "[InferTokenizer::DownloadUrl] Download fail: ValueError: "
TEXT = {"type": "text", "text": "What is it?"}
IMAGE = {"type": "image_url", "image_url": "/data/multimodal_inputs/a.png"}


def read_reply(interface: str, parts: Any, context: RequestContext = CONTEXT) -> Any:
    member, read = INTERFACES[interface]
    body: dict[str, Any] = {"model": "m", member: parts}
    if member == "messages":
        body[member] = [{"role": "user", "content": parts}]
    elif interface != "vllm":
        del body["model"]
    return read(json.dumps(body).encode(), context)


def read_prompt(interface: str, parts: Any) -> TextPrompt | Message:
    prompt = read_reply(interface, parts).request.prompts[0]
    return prompt.messages[0] if isinstance(prompt, ChatPrompt) else prompt


def refusal(parts: Any, interface: str = "tgi", context: RequestContext = CONTEXT) -> str:
    with pytest.raises(BadRequest) as caught:
        read_reply(interface, parts, context)
    answer = mindie_error_answer(caught.value)
    body = json.loads(answer.body)
    assert (answer.status, body["error_type"]) == (422, "Input Validation Error")
    return body["error"]


@pytest.mark.parametrize("interface", INTERFACES)
def test_mindie_media_are_read_in_every_interface(interface):
    prompt = read_prompt(interface, [TEXT, IMAGE, TEXT])
    text = prompt.content if isinstance(prompt, Message) else prompt.text
    assert text == "What is it?What is it?"
    member = "messages[0].content" if interface == "chat" else INTERFACES[interface][0]
    path = f"{member}[1].image_url"
    assert prompt.media == [PlacedMedia(11, Media("image", MediaPath("/data/multimodal_inputs/a.png"), path))]


@pytest.mark.parametrize("interface", sorted(set(INTERFACES) - {"chat"}))
def test_mindie_media_make_a_prompt_a_user_turn(interface):
    with_media, without = read_prompt(interface, [IMAGE]), read_prompt(interface, [TEXT])
    assert isinstance(with_media, TextPrompt) and isinstance(without, TextPrompt)
    assert (with_media.text, with_media.as_user_turn, without.as_user_turn) == ("", True, False)


@pytest.mark.parametrize("interface", INTERFACES)
def test_mindie_media_to_a_text_model_are_refused_by_name(interface):
    assert refusal([TEXT, IMAGE], interface, BLIND) == "Request param image_url is not available on this server"


@pytest.mark.parametrize(
    ("part", "kind", "source"),
    [
        ({"type": "image_url", "image_url": "https://a.b/c.JPG"}, "image", MediaAddress("https://a.b/c.JPG")),
        ({"type": "image_url", "image_url": {"url": "http://a.b/c.png"}}, "image", MediaAddress("http://a.b/c.png")),
        ({"image_url": "http://a.b/c.jpeg"}, "image", MediaAddress("http://a.b/c.jpeg")),
        ({"type": "video_url", "video_url": "http://a.b/c.mp4?X-Amz-Signature=1"}, "video",
         MediaAddress("http://a.b/c.mp4?X-Amz-Signature=1")),
        ({"type": "video_url", "video_url": "file:///data/a.wmv"}, "video", MediaPath("/data/a.wmv")),
        ({"type": "audio_url", "audio_url": "a/b.flac"}, "audio", MediaPath("a/b.flac")),
        ({"type": "image_url", "image_url": "data:image/png;base64,aGk="}, "image", EncodedMedia("aGk=", "image/png")),
        ({"type": "video_url", "video_url": "data:video/x-msvideo;base64,aGk="}, "video",
         EncodedMedia("aGk=", "video/x-msvideo")),
        ({"type": "image_url", "image_url": "/9j/aGk="}, "image", EncodedMedia("/9j/aGk=", "image/jpeg")),
        ({"type": "input_audio", "input_audio": {"data": "aGk=", "format": "flac"}}, "audio",
         EncodedMedia("aGk=", "audio/flac")),
    ],
)  # fmt: skip
def test_mindie_media_value_is_understood(part, kind, source):
    (placed,) = read_prompt("tgi", [part]).media
    assert (placed.media.kind, placed.media.source) == (kind, source)


EXTENSION_SENTENCE = PREFIX + "The media type is {}, url must end with one of {}."
AUDIO_SENTENCE = (
    PREFIX + "'input_audio.data' should be base64 encoded data, and the 'input_audio.format' should be in ['mp3', "
    "'wav', 'flac']."
)


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ([{"type": "image_url", "image_url": None}], "Request param image_url null"),
        ([{"type": "video_url", "video_url": {"url": None}}], "Request param video_url null"),
        ([{"type": "audio_url"}], "Request param audio_url null"),
        ([IMAGE] * 21, "The number of multimodal url should be no more than 20"),
        ([{"type": "text", "text": 5}, IMAGE], "Request param text must be string"),
        ([{"type": "image_url", "image_url": "https://a.b/c"}],
         EXTENSION_SENTENCE.format("image_url", "['.jpg', '.jpeg', '.png']")),
        ([{"type": "image_url", "image_url": "https://a.b/c.png?x=1"}],
         EXTENSION_SENTENCE.format("image_url", "['.jpg', '.jpeg', '.png']")),
        ([{"type": "video_url", "video_url": "https://a.b/c.png"}],
         EXTENSION_SENTENCE.format("video_url", "['.mp4', '.avi', '.wmv']")),
        ([{"type": "audio_url", "audio_url": "aGk="}],
         EXTENSION_SENTENCE.format("audio_url", "['.mp3', '.wav', '.flac']")),
        ([{"type": "image_url", "image_url": "http://" + "a" * 4090 + ".png"}],
         PREFIX + "The length of media_url should be less than 4096, but got 4101."),
        ([{"type": "image_url", "image_url": "/a b.png"}],
         PREFIX + "The media url contains dangerous characters, only allow a-zA-Z0-9_-."),
        ([{"type": "image_url", "image_url": "/ä.png"}],
         PREFIX + "The media url contains dangerous characters, only allow a-zA-Z0-9_-."),
        ([{"type": "image_url", "image_url": "data:image/gif;base64,aGk="}],
         PREFIX + "Expected format: data:<mime_type>/<subtype>;base64,<base64_data>"),
        ([{"type": "image_url", "image_url": 5}], PREFIX + "Input of image_url should be str or dict."),
        ([{"type": "image_url", "image_url": {"url": ["x"]}}], PREFIX + "Input of image_url should be str or dict."),
        ([{"type": "input_audio", "input_audio": {"data": "aGk=", "format": "ogg"}}], AUDIO_SENTENCE),
        ([{"type": "input_audio", "input_audio": "aGk="}], AUDIO_SENTENCE),
        ([{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}], AUDIO_SENTENCE),
    ],
)  # fmt: skip
def test_mindie_media_refusal_has_the_originals_sentence(parts, sentence):
    assert refusal(parts) == sentence


def test_mindie_media_of_the_operators_limit_are_counted():
    context = RequestContext("0f", 1, "fp", path_parts=PATHS, media_limits={"image": 2})
    for interface in ("tgi", "chat"):
        sentence = refusal([IMAGE] * 3, interface, context)
        assert sentence == PREFIX + "The number of multimodal url should be no more than 2"


def test_mindie_media_in_input_audio_are_not_counted_among_twenty():
    clip = {"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}}
    context = RequestContext("0f", 1, "fp", path_parts=PATHS, media_limits={"image": 20, "audio": 9})
    assert len(read_reply("tgi", [IMAGE] * 20 + [clip], context).request.prompts[0].media) == 21


FAULTS: list[tuple[MediaFault, str, dict[str, Any], str]] = [
    ("too_large", "image", {"limit": 40 << 20}, "The size of image_url exceeds the limit of 40.00 MB."),
    ("too_large", "video", {"limit": 1000 << 20, "total": 1}, "The total media input cannot exceed 1000.0 MB."),
    ("forbidden_address", "video", {}, "Your input local file path is not allowed!please ensure your multimedia files "
     "are placed under /data/multimodal_inputs/"),
    ("forbidden_address", "image", {"host": "a"}, "The domain of the media url is not in ALLOWED_MEDIA_DOMAINS_ENV."),
    ("not_found", "image", {}, "Can not find the input media file."),
    ("bad_base64", "image", {}, "Invalid base64 url"),
    ("bad_address", "image", {}, "The media url is not valid."),
    ("undecodable", "audio", {}, "The audio_url can not be decoded."),
    ("too_many_pixels", "image", {}, "The image_url has too many pixels."),
    ("bad_embeddings", "image", {}, "It is bad."),
]  # fmt: skip


@pytest.mark.parametrize(("reason", "kind", "detail", "sentence"), FAULTS)
def test_mindie_media_fault_that_shows_later_has_the_originals_sentence(reason, kind, detail, sentence):
    error = BadMedia("It is bad.", reason=reason, kind=kind, field="inputs[0].image_url", **detail)
    answer = mindie_error_answer(error)
    assert (answer.status, json.loads(answer.body)["error"]) == (422, PREFIX + sentence)
    assert mindie_failure_text(error) == (PREFIX + sentence).encode()


def test_mindie_media_answer_of_vllm_begins_with_the_first_text():
    for parts, start in (([IMAGE, TEXT, TEXT], "What is it? "), ([IMAGE], " ")):
        assert json.loads(read_reply("vllm", parts).render_body(None)) == {"text": [start]}


def test_mindie_media_of_the_documents_are_read_letter_by_letter():
    examples = json.loads((Path(__file__).parents[1] / "data" / "examples.json").read_text("utf-8"))
    (body,) = [example["body"] for example in examples if example.get("name") == "multimodal"]
    prompt = tgi.read_mindie_any(STRICT, body.encode(), CONTEXT).request.prompts[0]
    media = [PlacedMedia(24, Media("image", MediaPath("/xxxx/test.png"), "inputs[1].image_url"))]
    assert prompt == TextPrompt("My name is Olivier and I", as_user_turn=True, media=media)
