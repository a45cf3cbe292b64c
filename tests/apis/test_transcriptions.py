"""Transcriptions over HTTP: the text is that of Transformers for the same checkpoint and clip, in every format."""

from __future__ import annotations

import functools
import json
from typing import Any

import httpx
import openai
import pytest
from support.media_answers import load_reference
from support.multimodal_models import multimodal_folder
from support.sound_forms import FORM_TYPE, clip_form, encode_form, tone_clip

from parley.serving.media.request_media import request_media
from parley.serving.request_metrics import RequestMetrics
from parley.types import ParleySettings, Request, Usage

TOKENS = 12
SECONDS = 1.5
CLIP = tone_clip(SECONDS)


def speech_settings(family: str = "qwen3_asr", *, shared: bool = False) -> ParleySettings:
    folder = str(multimodal_folder(family))
    return ParleySettings(model=folder, dtype="float32", kv_memory=8 << 20, max_batch=4, threads=1, shared=shared)


@functools.cache
def reference_text(language: str | None, prompt: str | None) -> str:
    """Return what Transformers writes for CLIP."""
    import numpy as np
    import torch

    model, processor = load_reference("qwen3_asr")
    samples = np.frombuffer(CLIP[44:], "<i2").astype(np.float32) / 32768
    batch = processor.apply_transcription_request(samples, language=language, prompt=prompt)
    with torch.inference_mode():
        output = model.generate(**batch, max_new_tokens=TOKENS, do_sample=False)
    text: str = processor.decode(output[0, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return text.strip()


@pytest.fixture
async def server(serve):
    return await serve(settings=speech_settings())


async def post_form(server: Any, path: str, body: bytes, content_type: str = "") -> httpx.Response:
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        headers = {"content-type": content_type or FORM_TYPE.decode()}
        return await client.post(path, content=body, headers=headers)


def client_of(server: Any, path: str = "/v1") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}{path}", api_key="sk-none", max_retries=0)


async def test_transcript_is_that_of_transformers(server):
    for members, language, prompt in (
        ({}, None, None),
        ({"prompt": "Zaphod"}, None, "Zaphod"),
        ({"prompt": "Zaphod", "language": "en"}, "English", "Zaphod"),
    ):
        body = clip_form(CLIP, model="tiny", max_completion_tokens=str(TOKENS), **members)
        answer = await post_form(server, "/v1/audio/transcriptions", body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["text"] == reference_text(language, prompt)
        usage = answer.json()["usage"]
        assert usage["output_tokens"] == TOKENS and usage["input_token_details"]["audio_tokens"] > 0


async def test_openai_client_gets_every_format_and_error(server):
    extra = {"max_completion_tokens": TOKENS}
    async with client_of(server) as client:

        async def transcribe(**options: Any) -> Any:
            file = ("clip.wav", CLIP)
            return await client.audio.transcriptions.create(model="tiny", file=file, extra_body=extra, **options)

        plain = await transcribe(include=["logprobs"])
        text = plain.text
        assert text == reference_text(None, None) and len(plain.logprobs) == TOKENS
        verbose = await transcribe(response_format="verbose_json", timestamp_granularities=["segment"])
        assert (verbose.text, verbose.duration) == (text, SECONDS)
        assert [(segment.start, segment.end, segment.text) for segment in verbose.segments] == [(0.0, SECONDS, text)]
        assert len(verbose.segments[0].tokens) == TOKENS and verbose.usage.seconds == 2
        assert await transcribe(response_format="text") == f"{text}\n"
        assert "00:00:00,000 --> 00:00:01,500" in await transcribe(response_format="srt")
        assert (await transcribe(response_format="vtt")).startswith("WEBVTT\n\n00:00:00.000 --> 00:00:01.500\n")
        events = [event async for event in await transcribe(stream=True)]
        assert "".join(event.delta for event in events[:-1]) == text
        assert (events[-1].type, events[-1].text) == ("transcript.text.done", text)
        assert events[-1].usage.total_tokens == plain.usage.total_tokens
        await check_errors_of_forms(server, client)
    await check_chunks_of_vllm(server, text)


async def check_errors_of_forms(server: Any, client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await client.audio.transcriptions.create(model="whisper-1", file=("a.wav", CLIP))
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        await client.audio.transcriptions.create(model="tiny", file=("a.wav", b"This is a text."))
    assert wrong.value.param == "file" and "Invalid file format" in wrong.value.message
    with pytest.raises(openai.BadRequestError, match="Text to speech is not available"):
        await client.audio.speech.create(model="tiny", input="Hi", voice="alloy")
    answer = await post_form(server, "/v1/audio/translations", clip_form(CLIP, model="tiny"))
    assert "does not support Translations API" in answer.json()["error"]["message"]
    answer = await post_form(server, "/v1/audio/transcriptions", b"{}", "application/json")
    assert answer.status_code == 400 and "multipart/form-data" in answer.json()["error"]["message"]


async def check_chunks_of_vllm(server: Any, text: str) -> None:
    body = clip_form(CLIP, model="tiny", max_completion_tokens=str(TOKENS), stream="true")
    answer = await post_form(server, "/vllm/v1/audio/transcriptions", body)
    frames = answer.text.removesuffix("data: [DONE]\n\n").split("\n\n")[:-1]
    chunks = [json.loads(frame.removeprefix("data: ")) for frame in frames]
    assert {chunk["object"] for chunk in chunks} == {"transcription.chunk"}
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == text
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


async def test_model_asked_in_words_translates(serve, monkeypatch):
    held_media = []
    record_submit = RequestMetrics.record_submit

    def record_media(self: RequestMetrics, request: Request, usage: Usage, **options: Any) -> None:
        held_media.append(request_media(request))
        record_submit(self, request, usage, **options)

    monkeypatch.setattr(RequestMetrics, "record_submit", record_media)
    server = await serve(settings=speech_settings("qwen2_audio"))
    body = clip_form(CLIP, model="tiny", max_completion_tokens="3", to_language="de")
    answer = await post_form(server, "/v1/audio/translations", body)
    assert answer.status_code == 200 and answer.json()["usage"]["output_tokens"] == 3
    assert held_media == [[]]  # the clip's bytes are gone while the answer is being written


@pytest.mark.parametrize("prefix", ["", "/openai", "/vllm"])
async def test_model_of_texts_refuses_clips_by_name(serve, prefix):
    server = await serve()
    for api, path in (("Transcriptions", "transcriptions"), ("Translations", "translations")):
        body = encode_form([("file", CLIP, "a.wav"), ("model", "tiny", None)])
        answer = await post_form(server, f"{prefix}/v1/audio/{path}", body)
        assert answer.status_code == 400 and f"does not support {api} API" in answer.json()["error"]["message"]
    await server.control()


async def test_cluster_transcribes_like_one_server(live_cluster):
    cluster = await live_cluster("prefill", "decode", settings=lambda: speech_settings(shared=True))
    members = {"model": "tiny", "max_completion_tokens": str(TOKENS)}
    path, text = "/v1/audio/transcriptions", reference_text(None, None)
    verbose = await post_form(cluster.front, path, clip_form(CLIP, response_format="verbose_json", **members))
    assert verbose.status_code == 200, verbose.text
    assert (verbose.json()["text"], verbose.json()["duration"]) == (text, SECONDS)
    plain = await post_form(cluster.front, path, clip_form(CLIP, response_format="text", **members))
    assert (plain.text, plain.headers["content-type"]) == (f"{text}\n", "text/plain; charset=utf-8")
    stream = await post_form(cluster.front, path, clip_form(CLIP, stream="true", **members))
    done = json.loads(stream.text.split("\n\n")[-2].removeprefix("data: "))
    assert (done["type"], done["text"]) == ("transcript.text.done", text)
    assert done["usage"]["input_token_details"]["audio_tokens"] > 0
