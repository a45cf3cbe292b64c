"""Requests with images that one instance prefills and another decodes."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from support.http_client import RunningServer
from support.media_answers import image_base64, image_data_url
from support.multimodal_models import IS_NIGHT, multimodal_folder
from support.prefill_decode_pair import ServerPair, assert_same_answer, post_json

from parley.types import ParleySettings

IMAGE = {"type": "image_url", "image_url": {"url": image_data_url(1)}}


def media_settings() -> ParleySettings:
    folder = str(multimodal_folder("qwen3_vl"))
    return ParleySettings(model=folder, dtype="float32", kv_memory=8 << 20, max_batch=8, threads=1, shared=True)


def chat_with(*parts: Any, **members: Any) -> bytes:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 10}
    return json.dumps(body | {"temperature": 0, "ignore_eos": True} | members).encode()


def led_settings() -> ParleySettings:
    """Those of a model that images lead the prompts of."""
    return msgspec.structs.replace(media_settings(), model=str(multimodal_folder("mllama")))


@pytest.mark.skipif(not IS_NIGHT, reason="its servers take ten seconds to start")
async def test_separated_stages_answer_about_images_that_lead_the_prompt(alike) -> None:
    single_server, pair = await alike(settings=led_settings)
    for body in (
        chat_with(IMAGE, "what is this, and where, and is there anything else"),
        chat_with("first ", IMAGE, " then ", IMAGE, n=2),
        chat_with("see ", IMAGE, use_beam_search=True, best_of=2),
        chat_with("see ", IMAGE, prompt_logprobs=1),
    ):
        await assert_same_answer(single_server, pair, "/v1/chat/completions", body)
    await pair.wait_until_idle()


async def test_separated_stages_answer_about_images_like_one_server(alike) -> None:
    """Also where an image reaches into the last page, which is incomplete and so does not travel."""
    single_server, pair = await alike(settings=media_settings)
    bodies = [chat_with("a" * length, IMAGE) for length in range(16)]  # one of them ends so
    bodies += [
        chat_with(IMAGE, "what is this, and where, and is there anything else"),
        chat_with("first ", IMAGE, " then ", IMAGE, n=2),
        chat_with("see ", IMAGE, use_beam_search=True, best_of=2),
        chat_with("see ", IMAGE, prompt_logprobs=1),
    ]
    for body in bodies:
        await assert_same_answer(single_server, pair, "/v1/chat/completions", body)
    await check_cleared_results(single_server, pair)
    await pair.wait_until_idle()


async def check_cleared_results(single_server: RunningServer, pair: ServerPair) -> None:
    """Both stages clear the same results of tools, with their images, and the token count is that of the request."""
    turns: list[dict[str, Any]] = [{"role": "user", "content": "look"}]
    for number in range(3):
        data = image_base64(number)
        source = {"type": "base64", "media_type": "image/png", "data": data}
        content = [{"type": "text", "text": "seen " * 20}, {"type": "image", "source": source}]
        turns += [
            {"role": "assistant", "content": [{"type": "tool_use", "id": f"t{number}", "name": "f", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": f"t{number}", "content": content}]},
        ]
    edit = {
        "type": "clear_tool_uses_20250919",
        "trigger": {"type": "tool_uses", "value": 1},
        "keep": {"type": "tool_uses", "value": 1},
    }
    body = {"model": "tiny", "messages": turns, "context_management": {"edits": [edit]}}
    count_path = "/v1/messages/count_tokens"
    count = (await post_json(single_server, count_path, json.dumps(body).encode())).json
    del body["context_management"]
    plain_count = (await post_json(single_server, count_path, json.dumps(body).encode())).json["input_tokens"]
    assert count["context_management"] == {"original_input_tokens": plain_count}
    body |= {"context_management": {"edits": [edit]}, "max_tokens": 10, "temperature": 0, "ignore_eos": True}
    for stream in (False, True):
        sent = json.dumps(body | {"stream": stream}).encode()
        await assert_same_answer(single_server, pair, "/v1/messages", sent)
    answer = (await post_json(single_server, "/v1/messages", json.dumps(body).encode())).json
    counts = ("input_tokens", "cache_read_input_tokens")
    assert sum(answer["usage"][name] for name in counts) == count["input_tokens"]
    (applied,) = answer["context_management"]["applied_edits"]
    assert applied["cleared_tool_uses"] == 2
    assert applied["cleared_input_tokens"] == plain_count - count["input_tokens"]
