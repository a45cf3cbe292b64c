"""Examples with media in the vendors' own documents, whole and streamed: they get the documented members.

``tests/data/media_examples.json`` holds the documented bodies and answers. The bodies are sent byte for byte, but for
the folder of their image; after that, with each other form of a value that the documents describe.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.http_client import Answer, RunningServer
from support.media_answers import make_image
from support.media_files import SOUND_FORMATS, VIDEO_FORMATS, image_file, sine_wave, sound_file, video_file
from support.media_host import http_answer, run_media_host
from support.member_paths import member_paths
from support.multimodal_models import multimodal_folder

from parley.dialects.mindie import service_dialect
from parley.dialects.mindie.api_rules import MindieRules
from parley.dialects.mounts import ApiMount, universal_mounts
from parley.serving.server_options import MediaOptions
from parley.settings.media_hosts import parse_media_host
from parley.types import ParleySettings

EXAMPLES = json.loads((Path(__file__).parent.parent / "data" / "media_examples.json").read_text("utf-8"))
IMAGE = "/xxxx/test.png"
# The documented chat is that of the server's own OpenAI interface; vLLM's interface refuses its top_k.
MOUNTS = (*universal_mounts(), ApiMount("/native", service_dialect(MindieRules("strict", vllm=False))))
SOUND = sine_wave(0.2, 48_000)[None]
# By the part's type: the media type of a file's data: URL, and the file, with each documented extension.
FILES: dict[str, dict[str, tuple[str, bytes]]] = {
    "image_url": {
        ".png": ("image/png", image_file(make_image(1))),
        ".jpg": ("image/jpeg", image_file(make_image(1), "JPEG")),
        ".JPEG": ("image/jpeg", image_file(make_image(1), "JPEG")),
    },
    "video_url": {
        ".mp4": ("video/mp4", video_file(**VIDEO_FORMATS["mp4"], frames=6)),
        ".avi": ("video/x-msvideo", video_file(**VIDEO_FORMATS["avi"], frames=6)),
        ".wmv": ("video/x-ms-wmv", video_file(**VIDEO_FORMATS["wmv"], frames=6)),
    },
    "audio_url": {
        ".mp3": ("audio/mpeg", sound_file(*SOUND_FORMATS["mp3"], SOUND, 48_000)),
        ".wav": ("audio/x-wav", sound_file(*SOUND_FORMATS["wav"], SOUND, 48_000)),
        ".flac": ("audio/flac", sound_file(*SOUND_FORMATS["flac"], SOUND, 48_000)),
    },
}


@pytest.fixture
async def host():
    async with run_media_host() as media_host:
        yield media_host


@pytest.fixture
async def start(serve, host, tmp_path: Path):
    """Start a server of a model family that may read ``tmp_path`` and fetch from the host; both have all files."""
    for files in FILES.values():
        for extension, (_, data) in files.items():
            (tmp_path / f"test{extension}").write_bytes(data)
            host.answers[f"/test{extension}"] = http_answer(data)

    async def start_server(family: str) -> RunningServer:
        return await serve(
            settings=ParleySettings(
                model=str(multimodal_folder(family)), dtype="float32", kv_memory=8 << 20, threads=1
            ),
            names=("qwen2.5_vl",),
            surfaces=MOUNTS,
            media=MediaOptions(hosts=(parse_media_host(f"127.0.0.1:{host.port}"),), folder=str(tmp_path)),
        )

    return start_server


async def send(server: RunningServer, path: str, body: str) -> Answer:
    answer = await server.call("POST", path, body.encode(), {"content-type": "application/json"})
    assert answer.status == 200, (path, body, answer.body)
    return answer


def answer_text(answer: Any) -> str:
    return answer[0]["generated_text"] if isinstance(answer, list) else answer["choices"][0]["message"]["content"]


def streamed_text(answer: Answer) -> str:
    """Return the text of a stream, which ends with one terminal event."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, last = [
        json.loads(event.removeprefix("data:"))
        for event in answer.body.decode().split("\n\n")
        if event.startswith("data: {")
    ]
    if "choices" in last:
        assert answer.body.endswith(b"data: [DONE]\n\n")
        assert [event["choices"][0]["finish_reason"] for event in events] == [None] * len(events)
        assert last["choices"][0]["finish_reason"] and last["usage"]
        return "".join(event["choices"][0]["delta"]["content"] for event in [*events, last])
    assert [event["generated_text"] for event in events] == [None] * len(events) and last["details"]
    return last["generated_text"]


async def test_documented_examples_get_the_documented_members(start, tmp_path: Path):
    server = await start("qwen2_vl")
    for example in EXAMPLES:
        body = example["body"].replace(IMAGE, f"{tmp_path}/test.png")
        answer = await send(server, example["path"], body)
        assert member_paths(answer.json) == member_paths(example["answer"])
        streamed = body.replace('"stream": false', '"stream": true')
        streamed = streamed.replace('"decoder_input_details": true', '"decoder_input_details": false')  # as documented
        streamed_text(await send(server, example["path"], streamed))
        # The documents leave the seed open. With one, the stream has the text of the whole answer.
        whole = await send(server, example["path"], body.replace('"seed": null', '"seed": 5'))
        stream = await send(server, example["path"], streamed.replace('"seed": null', '"seed": 5'))
        assert streamed_text(stream) == answer_text(whole.json)


def documented_forms(part_type: str, extension: str, folder: Path, port: int) -> Iterator[Any]:
    """Yield a file in each form that a part's value may have."""
    media_type, data = FILES[part_type][extension]
    text = base64.b64encode(data).decode()
    forms = [
        f"{folder}/test{extension}",
        f"file://{folder}/test{extension}",
        f"http://127.0.0.1:{port}/test{extension}",
        f"http://127.0.0.1:{port}/test{extension}?X-Amz-Signature=0f",
        f"data:{media_type};base64,{text}",
    ]
    if media_type == "image/jpeg":
        forms.append(text)
    yield from forms
    yield {"url": forms[0]}


async def assert_forms_give_one_text(server: RunningServer, part_type: str, folder: Path, port: int) -> None:
    """Send each form in the documented bodies: the same file gives the same text."""
    for example in EXAMPLES:
        for extension in FILES[part_type]:
            texts = set()
            for form in documented_forms(part_type, extension, folder, port):
                body = example["body"].replace('"image_url"', f'"{part_type}"').replace(f'"{IMAGE}"', json.dumps(form))
                body = body.replace('"seed": null', '"seed": 5').replace('tokens": 20', 'tokens": 3')
                answer = await send(server, example["path"], body)
                texts.add(answer_text(answer.json))
            assert len(texts) == 1, (example["path"], extension)


async def test_every_documented_form_of_an_image_and_a_video_is_read(start, host, tmp_path: Path):
    server = await start("qwen2_vl")
    for extension in FILES["image_url"] | FILES["video_url"]:
        host.answers[f"/test{extension}?X-Amz-Signature=0f"] = host.answers[f"/test{extension}"]
    await assert_forms_give_one_text(server, "image_url", tmp_path, host.port)
    await assert_forms_give_one_text(server, "video_url", tmp_path, host.port)


@pytest.mark.skipif(not os.environ.get("PARLEY_NIGHTLY"), reason="starts a second model: PARLEY_NIGHTLY=1")
async def test_every_documented_form_of_sound_is_read(start, host, tmp_path: Path):
    server = await start("qwen3_asr")
    for extension in FILES["audio_url"]:
        host.answers[f"/test{extension}?X-Amz-Signature=0f"] = host.answers[f"/test{extension}"]
    await assert_forms_give_one_text(server, "audio_url", tmp_path, host.port)
    chat = json.loads(EXAMPLES[0]["body"])
    for extension, (_, data) in FILES["audio_url"].items():
        sound = {"data": base64.b64encode(data).decode(), "format": extension[1:]}
        chat["messages"][0]["content"][1] = {"type": "input_audio", "input_audio": sound}
        await send(server, EXAMPLES[0]["path"], json.dumps(chat))
