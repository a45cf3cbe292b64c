"""Images over HTTP: the tokens are those of Transformers for the same checkpoint and image, in every API."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from typing import Any

import pytest
from support.media_answers import (
    altered_image_url,
    chat_text,
    image_base64,
    image_bytes,
    image_data_url,
    reference_ids,
)
from support.media_host import http_answer, run_media_host
from support.multimodal_models import FAMILIES, multimodal_folder
from support.prefill_decode_pair import assert_same_answer

from parley.engine.media_messages import MediaJobRequest
from parley.serving import served_model
from parley.serving.media.workers import MediaWorkerPool
from parley.serving.server_options import MediaOptions
from parley.settings.media_hosts import parse_media_host
from parley.types import ParleySettings

TOKENS = 10
IS_NIGHT = bool(os.environ.get("PARLEY_NIGHTLY"))
QUESTION = "What is this?"
IMAGE_FAMILIES = sorted(family for family, shape in FAMILIES.items() if "image" in shape.parts)
# The fused decoder with three axes of positions, with added embeddings and with one axis; and Transformers' own code.
SAMPLE = ["qwen3_vl", "llava", "gemma3"]


def media_settings(family: str, **options: Any) -> ParleySettings:
    folder = str(multimodal_folder(family))
    return ParleySettings(model=folder, dtype="float32", kv_memory=8 << 20, max_batch=8, threads=1, **options)


def image_part(seed: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": image_data_url(seed)}}


def chat_body(*parts: Any, **members: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    messages = [{"role": "user", "content": content}]
    return {"model": "tiny", "messages": messages, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True} | members


def reference_prompt_ids(family: str, parts: list[str | None], *seeds: int) -> tuple[list[int], list[int]]:
    return reference_ids(family, chat_text(family, ("user", parts)), seeds, TOKENS)


async def test_embedding_routes_read_images(serve):
    server = await serve(settings=media_settings("qwen3_vl"))
    turns = [[{"role": "user", "content": content}] for content in ([image_part(1)], [image_part(2)], QUESTION)]
    mixed = [{"type": "text", "text": QUESTION}, image_part(1)]
    turns.append([{"role": "user", "content": mixed}])
    embedded = await server.post("/vllm/v1/embeddings", {"messages": turns})
    assert embedded.status == 200, embedded.body
    wanted = [item["embedding"] for item in embedded.json["data"]]
    assert all(one != other for one, other in itertools.combinations(wanted, 2))
    for path in ("/v2/embed", "/vllm/v2/embed", "/cohere/v2/embed"):
        images = await server.post(path, {"model": "tiny", "images": [image_data_url(1), image_data_url(2)]})
        assert images.status == 200, images.body
        assert images.json["embeddings"]["float"] == [pytest.approx(vector, abs=1e-6) for vector in wanted[:2]]
        inputs = [{"content": [{"type": "text", "text": QUESTION}]}, {"content": mixed}]
        contents = await server.post(path, {"model": "tiny", "inputs": inputs})
        assert contents.json["embeddings"]["float"] == [pytest.approx(vector, abs=1e-6) for vector in wanted[2:]]
        billed = contents.json["meta"]["billed_units"]
        assert billed["image_tokens"] > 0 and billed["input_tokens"] == 0
    broken = await server.post("/vllm/v2/embed", {"images": ["data:image/png;base64,AAAA"]})
    assert (broken.status, broken.error["param"]) == (400, "images[0]")
    await server.wait_until_idle()


@pytest.mark.parametrize("family", IMAGE_FAMILIES if IS_NIGHT else SAMPLE)
async def test_chat_has_the_tokens_of_transformers(serve, family):
    server = await serve(settings=media_settings(family))
    for parts, seeds, content in (
        ([None, QUESTION], (1,), (image_part(1), QUESTION)),
        (["First ", None, " then ", None], (2, 3), ("First ", image_part(2), " then ", image_part(3))),
        ([QUESTION], (), (QUESTION,)),
    ):
        prompt_ids, output_ids = reference_prompt_ids(family, parts, *seeds)
        body = chat_body(*content, return_token_ids=True)
        answer = await server.post("/v1/chat/completions", body)
        assert answer.status == 200, answer.body
        assert answer.json["prompt_token_ids"] == prompt_ids
        assert answer.json["choices"][0]["token_ids"] == output_ids
        assert answer.json["usage"]["prompt_tokens"] == len(prompt_ids)


async def test_stream_with_media_equals_the_whole_answer(serve):
    server = await serve(settings=media_settings("qwen3_vl"))
    body = chat_body(image_part(1), QUESTION)
    whole = await server.post("/v1/chat/completions", body)
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    stream = await server.post("/v1/chat/completions", body | streamed)
    pieces = [choice["delta"].get("content") or "" for event in stream.events for choice in event["choices"]]
    assert "".join(pieces) == whole.json["choices"][0]["message"]["content"]
    for usage in (whole.json["usage"], stream.events[-1]["usage"]):
        details = usage["prompt_tokens_details"]
        assert details["image_tokens"] > 0 and details["audio_tokens"] == 0
        assert details["image_tokens"] + details["text_tokens"] == usage["prompt_tokens"]
    tokenized = await server.post("/tokenize", {"model": "tiny", "messages": body["messages"]})
    prompt_ids, _ = reference_prompt_ids("qwen3_vl", [None, QUESTION], 1)
    assert tokenized.json["tokens"] == prompt_ids


async def test_the_same_image_is_found_in_the_prefix_cache_and_another_is_not(serve):
    server = await serve(settings=media_settings("llava"))
    altered = {"type": "image_url", "image_url": {"url": altered_image_url(1)}}
    parts = [image_part(1), image_part(1), image_part(2), altered]
    answers = [await server.post("/v1/chat/completions", chat_body(part, QUESTION)) for part in parts]
    first, again, *_ = answers
    cached = [answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert cached[0] == 0 and cached[1] > 16
    assert cached[2] < cached[1] and cached[3] < cached[1]  # one pixel is enough
    assert again.json["choices"] == first.json["choices"]


async def test_a_hundred_requests_with_one_image_fetch_decode_and_encode_it_once(serve, monkeypatch):
    jobs: list[MediaJobRequest] = []
    process_media = MediaWorkerPool.process_media

    async def record_job(self: MediaWorkerPool, source: Any, target: Any, job: MediaJobRequest, tenant: str) -> Any:
        jobs.append(job)
        return await process_media(self, source, target, job, tenant)

    monkeypatch.setattr(MediaWorkerPool, "process_media", record_job)
    async with run_media_host() as host:
        host.answers["/a.png"] = http_answer(image_bytes(5))
        media = MediaOptions(hosts=(parse_media_host(f"127.0.0.1:{host.port}"),))
        server = await serve(settings=media_settings("qwen3_vl"), media=media)
        url = f"http://127.0.0.1:{host.port}/a.png"
        body = chat_body({"type": "image_url", "image_url": {"url": url}}, QUESTION)
        answers = await asyncio.gather(*(server.post("/v1/chat/completions", body) for _ in range(100)))
        assert len(host.heads) == 1
    assert {answer.status for answer in answers} == {200}
    assert len({answer.json["choices"][0]["message"]["content"] for answer in answers}) == 1
    stats = server.model.engine.stats
    assert len(jobs) == stats.media_cache_queries - stats.media_cache_hits == 1


BAD_PARTS = {
    "damaged": {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    "address": {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/cat.png"}},
    "file": {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
    "audio": {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
}


async def test_media_that_cannot_be_used_are_refused(serve):
    server = await serve(settings=media_settings("llava"))
    for name, part in BAD_PARTS.items():
        answer = await server.post("/v1/chat/completions", chat_body("See", part))
        assert 400 <= answer.status < 500, (name, answer.body)
        assert answer.error["param"].startswith("messages[0].content[1]"), (name, answer.body)
        assert "/etc" not in answer.error["message"] and "0x" not in answer.error["message"]
    control = await server.post("/v1/chat/completions", chat_body(image_part(1), QUESTION))
    assert control.status == 200


async def test_every_api_gives_the_same_text(serve):
    """MindIE's parts, TGI's Markdown, Triton's tensors and Databricks' parts, on the shared port."""
    server = await serve(settings=media_settings("llava"))
    plain = await server.post("/v1/chat/completions", chat_body(image_part(1), QUESTION))
    text = plain.json["choices"][0]["message"]["content"]
    parts = [{"type": "image_url", "image_url": image_data_url(1)}, {"type": "text", "text": QUESTION}]
    mindie = await server.post("/mindie/v1/chat/completions", chat_body(*parts))
    assert mindie.json["choices"][0]["message"]["content"] == text
    databricks = {"messages": chat_body(image_part(1), QUESTION)["messages"], "max_tokens": TOKENS, "temperature": 0}
    answer = await server.post("/databricks/serving-endpoints/tiny/invocations", databricks)
    assert answer.json["choices"][0]["message"]["content"] == text, answer.body
    _, expected_ids = reference_ids("llava", f"<image>\n{QUESTION}", (1,), TOKENS)
    expected_text = server.model.text_pipeline.tokenizer.decode(expected_ids)
    inputs = f"![](data:image/png;base64,{image_base64(1)})\n{QUESTION}"
    parameters = {"max_new_tokens": TOKENS, "ignore_eos_token": True}
    tgi = await server.post("/tgi/generate", {"inputs": inputs, "parameters": parameters})
    assert tgi.json["generated_text"] == expected_text, tgi.body
    triton = {
        "text_input": f"<image>\n{QUESTION}",
        "image": [image_base64(1)],
        "exclude_input_in_output": True,
        "sampling_parameters": json.dumps({"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}),
    }
    generate = await server.post("/triton/v2/models/tiny/generate", triton)
    assert generate.json["text_output"] == expected_text, generate.body


@pytest.mark.parametrize("family", ["qwen2_vl", "gemma4", "gemma4_31b"] if IS_NIGHT else ["gemma4"])
async def test_a_decode_instance_answers_about_an_image_without_opening_it(alike, monkeypatch, family):
    monkeypatch.setattr(served_model, "MediaWorkerPool", MediaWorkerPool)  # each server has its own

    def settings() -> ParleySettings:
        return media_settings(family, shared=True)

    single_server, pair = await alike(settings=settings)
    for stream in (False, True):
        body = json.dumps(chat_body("A ", image_part(4), " and ", image_part(5), stream=stream)).encode()
        await assert_same_answer(single_server, pair, "/v1/chat/completions", body)
    assert started_media_processes(single_server) == started_media_processes(pair.prefill) == 1
    assert started_media_processes(pair.decode) == 0


def started_media_processes(server: Any) -> int:
    return len(server.model.media_workers.idle_process_ids)


async def test_tokenized_prompts_have_the_tokens_of_their_images(serve):
    server = await serve(settings=media_settings("llava"))
    prompt_ids, _ = reference_prompt_ids("llava", [None, QUESTION], 1)
    conversation = chat_body(image_part(1), QUESTION)
    for path in ("/tokenize", "/vllm/tokenize"):
        answer = await server.post(path, conversation)
        assert answer.json["tokens"] == prompt_ids, (path, answer.body)
    tokens = (await server.post("/tgi/chat_tokenize", conversation)).json["tokenize_response"]
    assert [token["id"] for token in tokens] == prompt_ids
    link = f"![](data:image/png;base64,{image_base64(1)})\n{QUESTION}"
    linked_ids, _ = reference_ids("llava", f"<image>\n{QUESTION}", (1,), TOKENS)
    tokens = (await server.post("/tgi/tokenize", {"inputs": link})).json
    assert [token["id"] for token in tokens] == linked_ids
    refused = await server.post("/tokenize", chat_body(BAD_PARTS["damaged"]))
    assert (refused.status, refused.error["code"]) == (400, "invalid_image_format")
