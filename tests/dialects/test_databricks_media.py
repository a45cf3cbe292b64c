"""Images, video and sound in Databricks' conversations, under strict and lenient rules."""

import json
from typing import Any

import pytest

from parley.dialects.databricks import chat
from parley.dialects.databricks.api_rules import LENIENT_DATABRICKS_RULES, STRICT_DATABRICKS_RULES, DatabricksRules
from parley.dialects.databricks.error_answers import databricks_error_answer
from parley.dialects.request_context import RequestContext
from parley.errors import BadMedia, BadRequest
from parley.types import ChatPrompt, EncodedMedia, Media, MediaAddress, PlacedMedia

CONTEXT = RequestContext("0f", 1, "fp", context_length=256, media_limits={"image": 3, "video": 1, "audio": 1})
DATA = "data:image/png;base64,aGk="
PARTS = [
    {"type": "text", "text": "What?"},
    {"type": "image_url", "image_url": {"url": DATA}},
    {"type": "audio_url", "audio_url": {"url": "https://a.b/c.mp3"}},
    {"type": "video_url", "video_url": {"url": "https://a.b/c.mp4"}},
]


def read_media(rules: DatabricksRules, content: Any, context: RequestContext = CONTEXT) -> list[PlacedMedia]:
    body = json.dumps({"messages": [{"role": "user", "content": content}]}).encode()
    prompt = chat.read_databricks_chat(rules, body, context).request.prompts[0]
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages[0].content == "What?"
    return prompt.messages[0].media


def refusal(rules: DatabricksRules, content: Any, context: RequestContext = CONTEXT) -> dict[str, str]:
    with pytest.raises(BadRequest) as caught:
        read_media(rules, content, context)
    answer = databricks_error_answer(caught.value)
    assert answer.status == 400
    return json.loads(answer.body)


@pytest.mark.parametrize("rules", [STRICT_DATABRICKS_RULES, LENIENT_DATABRICKS_RULES])
def test_databricks_media_parts_are_read(rules):
    assert read_media(rules, PARTS) == [
        PlacedMedia(5, Media("image", EncodedMedia("aGk=", "image/png"), "messages[0].content[1].image_url")),
        PlacedMedia(5, Media("audio", MediaAddress("https://a.b/c.mp3"), "messages[0].content[2].audio_url")),
        PlacedMedia(5, Media("video", MediaAddress("https://a.b/c.mp4"), "messages[0].content[3].video_url")),
    ]


def test_databricks_media_parts_are_refused_to_text_models_as_the_original_does():
    error = refusal(STRICT_DATABRICKS_RULES, PARTS, RequestContext("0f", 1, "fp"))
    assert error["message"].endswith(
        "field 'messages.content' expects input with json type 'string' but got 'array'"
    )  # fmt: skip


def test_databricks_media_parts_of_undocumented_types_are_refused_when_strict():
    part = {"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}}
    message = 'must be one of "text", "image_url", "audio_url", "video_url", but got \'input_audio\''
    assert message in refusal(STRICT_DATABRICKS_RULES, [part])["message"]
    assert "type" in refusal(STRICT_DATABRICKS_RULES, [{}])["message"]
    assert len(read_media(LENIENT_DATABRICKS_RULES, [PARTS[0], part])) == 1


def test_databricks_media_fault_that_shows_later_is_a_bad_request():
    error = BadMedia("The image is damaged.", reason="undecodable", kind="image", field="messages[0].content[1]")
    answer = databricks_error_answer(error)
    expected = {"error_code": "BAD_REQUEST", "message": "Bad request: The image is damaged."}
    assert (answer.status, json.loads(answer.body)) == (400, expected)
