"""Random lists of texts and items: their order and places are the same in every API, and no part causes a crash."""

import json
import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.http_client import fill_path
from support.odd_bodies import media_parts
from support.random_requests import generating_routes, random_body, with_image

from parley.dialects.media import InterleavedText, interleave_parts
from parley.dialects.mounts import API_MOUNTS, mount_table, non_null_members, universal_mounts
from parley.dialects.reply import Answer
from parley.dialects.request_context import ApiOptions, RequestContext
from parley.dialects.route import Route
from parley.errors import ParleyError, hide_data
from parley.types import ChatPrompt, EncodedMedia, Media, PlacedMedia, TextPrompt

CONTEXT = RequestContext(
    "0f",
    1,
    "fp",
    context_length=4096,
    path_parts={"model": "m", "version": "1", "endpoint": "e", "served": "m"},
    headers={b"content-type": b"application/json", b"anthropic-version": b"2023-06-01"},
    media_limits={"image": 99, "video": 99, "audio": 99},
    api_options=ApiOptions(enable_mm_embeds=True, trust_request_mm_kwargs=True),
)
CHAT_ROUTES = [
    (f"{mount.prefix} {mount.dialect.name}", route)
    for mount in API_MOUNTS
    for route in mount.dialect.routes
    if route.kind == "generate" and route.path.endswith("chat/completions")
]
ROUTES_BY_PATH = {
    fill_path(path): routes for (method, path), routes in mount_table(universal_mounts()).items() if method == "POST"
}
IMAGE = "data:image/png;base64,aGk="
TEXT_ONLY_PATH = re.compile(  # the last are Databricks' strict form, which refuses the members of random requests
    r"(?<!chat)/completions$|/infer_token$|^/vllm.*/generate$|^/mindie.*/v2/.*/infer$|^/inference/v1/generate$"
    r"|/generative_scoring$|/v1/chat$|^/databricks/.*/invocations$"
)
MIXED_PARTS = st.lists(st.text(max_size=9) | st.integers(0, 99), max_size=6)  # texts, and numbers of images


def image_url(number: int) -> str:
    return f"data:image/png;base64,{number:04}"


def split_at_media(text: str, media: list[PlacedMedia]) -> list[str | int]:
    """Return texts and numbers of images in order; texts are joined, empty ones left out."""
    pieces: list[str | int] = []
    position = 0
    for placed in media:
        assert isinstance(placed.media.source, EncodedMedia)
        pieces += [text[position : placed.position], int(placed.media.source.base64)]
        position = placed.position
    return [piece for piece in [*pieces, text[position:]] if piece != ""]


def join_texts(parts: list[str | int], joint: str) -> list[str | int]:
    pieces: list[str | int] = []
    follows_text = False
    for part in parts:
        if isinstance(part, str) and follows_text:
            pieces[-1] = f"{pieces[-1]}{joint}{part}"
        else:
            pieces.append(part)
        follows_text = isinstance(part, str)
    return [piece for piece in pieces if piece != ""]


@given(MIXED_PARTS)
def test_media_keep_order_and_places_in_every_conversation(parts):
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else
        {"type": "image_url", "image_url": {"url": image_url(part)}} for part in parts
    ]  # fmt: skip
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": content or "x"}]}).encode()
    for name, route in CHAT_ROUTES:
        assert route.reader is not None
        reply = route.reader(body, CONTEXT)
        (message,) = reply.request.prompts[0].messages
        joint = "" if "tgi" in name or "mindie" in name else "\n"
        assert split_at_media(message.content, message.media) == (join_texts(parts, joint) if parts else ["x"])


@given(st.lists(st.text(max_size=3) | st.integers(0, 9), max_size=8), st.sampled_from(["", "\n"]))
def test_media_stand_where_parts_do(parts, joint):
    items = [part if isinstance(part, str) else Media("image", EncodedMedia(str(part)), "f") for part in parts]
    joined = interleave_parts(items, joint)
    assert split_at_media(*joined) == join_texts(parts, joint)
    assert isinstance(joined, InterleavedText)


@given(st.lists(media_parts, max_size=3), media_parts)
@settings(max_examples=20, deadline=None)
def test_media_parts_of_any_form_are_read_or_refused(parts, part):
    bodies: list[dict[str, Any]] = [
        {"model": "m", "messages": [{"role": "user", "content": parts}]},
        {"inputs": parts},
        {"prompt": parts},
        {"text_input": "a", "image": parts},
        {"text_input": parts},
        {"inputs": f"![]({part})"},
        {"model": "m", "messages": [{"role": "user", "content": "a"}], "media_io_kwargs": part},
    ]
    for mount in API_MOUNTS:
        for route in mount.dialect.routes:
            if route.kind != "generate" or route.method != "POST":
                continue
            for body in bodies:
                try:
                    assert route.reader is not None
                    reply = route.reader(json.dumps(body).encode(), CONTEXT)
                except ParleyError as error:
                    answer = mount.dialect.render_error(error)
                    assert 400 <= answer.status <= 500 and b"A" * 40 not in answer.body
                    continue
                if not isinstance(reply, Answer):
                    check_places(reply.request.prompts)


def find_route(path: str, body: bytes) -> Route:
    """Return the route that reads a body, as a server chooses it."""
    routes = [route for route, _ in ROUTES_BY_PATH[path]]
    unclaimed = next((route for route in routes if not route.yields_unclaimed), routes[0])
    names = non_null_members(body)
    return next((route for route in routes if not names.isdisjoint(route.claiming_members)), unclaimed)


@pytest.mark.parametrize(("path", "dialect"), generating_routes())
def test_media_are_read_by_every_route_whose_api_has_them(path, dialect):
    rng, read = random.Random(path), 0
    for _ in range(12):
        body = with_image(random_body(path, rng), dialect, IMAGE)
        if body is None:
            continue
        route = find_route(path, body)
        assert route.reader is not None
        try:
            reply = route.reader(body, CONTEXT)
        except ParleyError as error:
            assert "image" not in error.message.lower()
            continue
        if isinstance(reply, Answer):
            assert b"image" not in reply.body.lower()
            continue
        turns = [turn for prompt in reply.request.prompts for turn in getattr(prompt, "messages", [prompt])]
        links = path.startswith("/tgi-0.9.4")  # which are text there
        sources = [placed.media.source for turn in turns for placed in getattr(turn, "media", ())]
        assert sources == ([] if links else [EncodedMedia("aGk=", "image/png")]), (path, body)
        read += 1
    assert read or TEXT_ONLY_PATH.search(path)


def check_places(prompts: list[Any]) -> None:
    for prompt in prompts:
        turns = (
            prompt.messages if isinstance(prompt, ChatPrompt) else [prompt] if isinstance(prompt, TextPrompt) else []
        )
        for turn in turns:
            text = (turn.text if isinstance(turn, TextPrompt) else turn.content) or ""
            positions = [placed.position for placed in turn.media]
            assert positions == sorted(positions) and all(0 <= position <= len(text) for position in positions)


def test_data_urls_are_hidden_in_messages():
    assert hide_data(f"got 'data:image/png;base64,{'A' * 99}', and 'b'") == "got 'data:image/png;base64,…', and 'b'"
    assert hide_data(f"DATA:;base64,{'A' * 16}") == "DATA:;base64,…"
    assert hide_data("the data: 1, 2") == "the data: 1, 2"
