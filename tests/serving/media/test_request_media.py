"""The media of a request: they are forgotten once its tokens and features have taken their place."""

from parley.serving.media.request_media import drop_media, request_media
from parley.types import (
    ChatPrompt,
    EncodedMedia,
    Media,
    Message,
    PlacedMedia,
    Request,
    TextPrompt,
    TokensPrompt,
    UploadedMedia,
)

CLIP = Media("audio", UploadedMedia(b"RIFF"), "file")
IMAGE = Media("image", EncodedMedia("aGk="), "messages[0].content[0]")


def test_dropped_media_leave_the_texts_as_they_are():
    chat = ChatPrompt(
        [Message("system", "a"), Message("user", "b", media=[PlacedMedia(0, CLIP), PlacedMedia(1, IMAGE)])]
    )
    text = TextPrompt("c", media=[PlacedMedia(0, IMAGE)])
    request = Request(id="1", model="m", prompts=[chat, text, TokensPrompt([5]), TextPrompt("d")])
    assert request_media(request) == [CLIP, IMAGE, IMAGE]
    drop_media(request)
    assert request.prompts == [
        ChatPrompt([Message("system", "a"), Message("user", "b")]),
        TextPrompt("c"),
        TokensPrompt([5]),
        TextPrompt("d"),
    ]
