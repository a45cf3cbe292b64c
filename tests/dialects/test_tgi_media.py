"""Images in TGI's requests: Markdown links and parts of conversations, and the sentences of refusals."""

import json
from typing import Any

import pytest

from parley.dialects.request_context import RequestContext
from parley.dialects.tgi import chat, completions, generate, vertex
from parley.dialects.tgi.api_rules import OLD_TGI_RULES, STRICT_TGI_RULES, TgiRules
from parley.dialects.tgi.error_answers import tgi_error_answer
from parley.errors import BadMedia, BadRequest, MediaFault
from parley.types import ChatPrompt, EncodedMedia, Media, MediaAddress, PlacedMedia, TextPrompt

CONTEXT = RequestContext("0f", 1, "fp", context_length=256, media_limits={"image": 2})
HEARS = RequestContext("0f", 1, "fp", context_length=256, media_limits={"audio": 2})
BLIND = RequestContext("0f", 1, "fp", context_length=256)
DATA = "data:image/png;base64,iVBORw0KGgo="
ENCODED = EncodedMedia("iVBORw0KGgo=", "image/png")


def read_inputs(inputs: str, context: RequestContext = CONTEXT, rules: TgiRules = STRICT_TGI_RULES) -> Any:
    return generate.read_generate(rules, json.dumps({"inputs": inputs}).encode(), context).request.prompts[0]


def read_chat(content: Any, context: RequestContext = CONTEXT, role: str = "user") -> ChatPrompt:
    body = {"messages": [{"role": role, "content": content}], "max_tokens": 5}
    reply = chat.read_tgi_chat(STRICT_TGI_RULES, json.dumps(body).encode(), context)
    assert isinstance(reply, chat.TgiChatReply)
    prompt = reply.request.prompts[0]
    assert isinstance(prompt, ChatPrompt)
    return prompt


def refusal(read: Any, *arguments: Any) -> tuple[int, str]:
    with pytest.raises(BadRequest) as caught:
        read(*arguments)
    answer = tgi_error_answer(STRICT_TGI_RULES, caught.value)
    return answer.status, answer.body.decode()


def test_tgi_links_to_images_are_read_in_their_places():
    prompt = read_inputs(f"![](https://a.b/c.png)What is ![]({DATA})this?")
    assert prompt == TextPrompt(
        "What is this?",
        media=[
            PlacedMedia(0, Media("image", MediaAddress("https://a.b/c.png"), "inputs")),
            PlacedMedia(8, Media("image", ENCODED, "inputs")),
        ],
    )


@pytest.mark.parametrize("text", ["![a](https://a.b/c.png)", "[](https://a.b/c.png)", "! [](x)", "![](x", "a ) b"])
def test_tgi_other_text_is_no_link_to_an_image(text):
    assert read_inputs(text) == TextPrompt(text)


def test_tgi_links_are_text_to_a_text_model_and_to_the_old_version():
    text = f"![]({DATA})"
    assert read_inputs(text, BLIND) == read_inputs(text, rules=OLD_TGI_RULES) == TextPrompt(text)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("file:///etc/passwd", "file:///etc/passwd"),
        ("", ""),
        ("data:image/png,abc", "data:image/png,abc"),
        ("data:image/png;x=1;base64,abc", "data:image/png;x=1;base64,abc"),
        ("data:image/png;base64," + "A" * 99, None),
        ("data:image/png;base32," + "A" * 99, "data:image/png;base32,…"),
    ],
)
def test_tgi_link_to_anything_else_is_refused(url, shown):
    if shown is None:
        assert read_inputs(f"![]({url})").media
        return
    error = {"error": f"Input validation error: invalid image content: {shown}", "error_type": "validation"}
    status, body = refusal(read_inputs, f"![]({url})")
    assert (status, json.loads(body)) == (422, error)


def test_tgi_images_are_counted_and_refused_by_name():
    assert "at most 2 image items" in refusal(read_inputs, f"![]({DATA})" * 3)[1]
    expected = '{"error":"Input validation error: image modality is not supported","error_type":"validation"}'
    assert refusal(read_inputs, f"![]({DATA})", HEARS) == (422, expected)
    part = {"type": "image_url", "image_url": {"url": DATA}}
    assert refusal(read_chat, [part], HEARS) == (422, expected)
    assert "this model reads text only" in refusal(read_chat, [part], BLIND)[1]


def test_tgi_conversation_has_images():
    image = {"type": "image_url", "image_url": {"url": DATA}}
    text = {"type": "text", "text": "a"}
    (message,) = read_chat([text, image, text, text]).messages
    item = Media("image", ENCODED, "messages[0].content[1].image_url")
    assert (message.content, message.media) == ("aaa", [PlacedMedia(1, item)])


def test_tgi_image_after_the_text_that_is_continued_stays_after_it():
    content = [{"type": "text", "text": "so "}, {"type": "image_url", "image_url": {"url": DATA}}]
    (message,) = read_chat(content, role="assistant").messages
    assert (message.content, [placed.position for placed in message.media]) == ("so", [2])


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        ({"type": "audio_url", "audio_url": {"url": DATA}}, "unknown variant `audio_url`, expected one of"),
        ({"type": "image_url"}, "messages[0].content[0]: missing field `image_url`"),
        ({"type": "image_url", "image_url": {}}, "messages[0].content[0].image_url: missing field `url`"),
        ({"type": "image_url", "image_url": DATA}, "expected a map"),
        ({"type": "image_url", "image_url": {"url": "file:///a"}}, "invalid image content: file:///a"),
    ],
)
def test_tgi_conversation_refuses_wrong_parts(part, sentence):
    status, body = refusal(read_chat, [part])
    assert status == 422 and sentence in body


def test_tgi_links_are_read_in_completions_and_instances():
    body = json.dumps({"prompt": f"![]({DATA})x", "max_tokens": 5}).encode()
    reply = completions.read_tgi_completion(STRICT_TGI_RULES, body, CONTEXT)
    assert reply.request.prompts[0].media[0].media.field == "prompt"  # type: ignore[union-attr]
    instances = [{"inputs": f"a![]({DATA})"}, {"messages": [{"role": "user", "content": "b"}]}]
    read = vertex.read_vertex(STRICT_TGI_RULES, json.dumps({"instances": instances}).encode(), CONTEXT)
    placed = read.request.prompts[0].media[0]  # type: ignore[union-attr]
    assert (placed.position, placed.media.field) == (1, "instances[0].inputs")


FAULTS: list[tuple[MediaFault, dict[str, Any], str]] = [
    ("bad_base64", {}, "base64 encoding is invalid: the data could not be decoded"),
    ("undecodable", {}, "invalid image: Format error decoding the image"),
    ("unreachable", {"status": 404}, "Could not fetch image: HTTP status 404"),
    ("unreachable", {}, "Could not fetch image: the server could not be reached"),
    ("forbidden_address", {"host": "a"}, "Could not fetch image: the server does not fetch from this address"),
    ("too_large", {"size": 9, "limit": 5}, "Image size 9 bytes exceeds maximum allowed size of 5 bytes"),
    ("too_large", {}, "It is bad."),
]


@pytest.mark.parametrize(("reason", "detail", "sentence"), FAULTS)
def test_tgi_media_fault_that_shows_later_has_the_originals_sentence(reason, detail, sentence):
    error = BadMedia("It is bad.", reason=reason, kind="image", field="inputs", **detail)
    answer = tgi_error_answer(STRICT_TGI_RULES, error)
    assert answer.status == 422
    assert json.loads(answer.body) == {"error": f"Input validation error: {sentence}", "error_type": "validation"}
