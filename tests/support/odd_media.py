"""Hypothesis strategies for requests with media in every API: files whole and damaged, URLs, options, odd parts.

``{host}`` and ``{folder}`` in a body stand for a host that the server may fetch from and the folder that it may read.
"""

from __future__ import annotations

import base64
import functools
import random
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from support.media_files import (
    IMAGE_FILES,
    SOUND_FORMATS,
    VIDEO_FORMATS,
    damage_bytes,
    image_array,
    image_file,
    png_header,
    sine_wave,
    sound_file,
    video_file,
)
from support.member_strategies import client_texts, json_values, scalars
from support.odd_bodies import media_parts, media_urls
from support.sound_forms import encode_form

FILES: dict[str, Callable[[], bytes]] = {
    **{name: functools.partial(IMAGE_FILES.__getitem__, name) for name in IMAGE_FILES},
    **{
        name: functools.partial(sound_file, *form, sine_wave(0.1, 48_000)[None], 48_000)
        for name, form in SOUND_FORMATS.items()
    },
    **{name: functools.partial(video_file, **form, frames=6) for name, form in VIDEO_FORMATS.items()},
    "huge header": functools.partial(png_header, 60_000, 60_000),
    "no pixels": functools.partial(png_header, 0, 0),
    "narrow": lambda: image_file(image_array(300, 1)),
    "one pixel": lambda: image_file(image_array(1, 1)),
    "jpeg 2000": lambda: image_file(image_array(), "JPEG2000"),
    "tiff": lambda: image_file(image_array(), "TIFF"),
    "svg": lambda: b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>",
    "sdp": lambda: b"v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\ns=x\r\nc=IN IP4 127.0.0.1\r\nt=0 0\r\nm=audio 9 RTP/AVP 0\r\n",
    "text": lambda: b"no image",
    "nothing": bytes,
}
MEDIA_TYPES = {
    "image": ["image/png", "image/jpeg", "image/x"],
    "video": ["video/mp4", "video/jpeg", "video/x-msvideo"],
    "audio": ["audio/wav", "audio/mpeg", ""],
}
BASE64_CHANGES: dict[str, Callable[[str], str]] = {
    "cut": lambda text: text[:-3],
    "padded": lambda text: text + "===",
    "lines": lambda text: "\n".join(text[at : at + 76] for at in range(0, len(text), 76)),
    "url safe": lambda text: text.replace("+", "-").replace("/", "_"),
    "percent": lambda text: text.replace("+", "%2B").replace("=", "%3D"),
    "other characters": lambda text: text[:20] + "é\x00\ud800" + text[20:],
    "commas": lambda text: f"{text},{text},,",
    "gone": lambda text: "",
}


@functools.cache
def file_bytes(name: str) -> bytes:
    return FILES[name]()


def odd_file(name: str, seed: int | None) -> bytes:
    """Return a file. ``seed``: damage it."""
    data = file_bytes(name)
    return damage_bytes(data, random.Random(seed)) if seed is not None and data else data


def encode_file(name: str, seed: int | None, change: str | None) -> str:
    """Return a file in base64. ``seed``: damage it; ``change``: damage the base64."""
    text = base64.b64encode(odd_file(name, seed)).decode()
    return text if change is None else BASE64_CHANGES[change](text)


seldom_damaged = st.sampled_from([False, False, True]).flatmap(
    lambda damaged: st.integers(0, 10**6) if damaged else st.none()
)
base64_changes = st.sampled_from([None] * 12 + sorted(BASE64_CHANGES))
encoded_images = st.builds(encode_file, st.sampled_from(sorted(IMAGE_FILES)), seldom_damaged, base64_changes)
encoded_files = st.builds(encode_file, st.sampled_from(sorted(FILES)), seldom_damaged, base64_changes)
base64_marks = st.sampled_from([";base64,"] * 12 + [",", ";base64", ";charset=x;base64,"])


def build_data_url(media_type: str, mark: str, data: str) -> str:
    return f"data:{media_type}{mark}{data}"


image_urls = st.builds(build_data_url, st.sampled_from(MEDIA_TYPES["image"]), base64_marks, encoded_images)
video_urls = st.builds(
    build_data_url,
    st.sampled_from(MEDIA_TYPES["video"]),
    base64_marks,
    st.builds(encode_file, st.sampled_from(sorted(VIDEO_FORMATS)), seldom_damaged, base64_changes),
)
data_urls = st.builds(
    build_data_url,
    st.sampled_from([media_type for types in MEDIA_TYPES.values() for media_type in types]),
    base64_marks,
    encoded_files,
)
host_urls = st.sampled_from(
    ["http://{host}/a.png", "http://{host}/b.jpg", "http://{host}/cut.png", "http://{host}/missing.png",
     "http://{host}/loop.png", "http://{host}/private.png", "http://{host}/empty.mp4", "http://x@{host}/a.png",
     "http://{host}\\@a.b/a.png", "http://{host}/a.png?x=1#y", "HTTP://{host}/a.png", "http://{host}:1/a.png"]
)  # fmt: skip
file_urls = st.sampled_from(
    ["file://{folder}/a.png", "file://{folder}/link.png", "file://{folder}/pipe.png", "file://{folder}/a.wav",
     "{folder}/a.png", "{folder}/cut.jpg", "{folder}/../a.png", "{folder}/%2e%2e/a.png", "file://{folder}/",
     "file:///etc/passwd.png", "{folder}/a.png\x00.png", "{folder}/" + "d/" * 300 + "a.png", "{folder}/pipe.png"]
)  # fmt: skip
urls = st.one_of(image_urls, data_urls, host_urls, file_urls, media_urls)
uuids = st.sampled_from(["u", "v", "", "../u", "\x00"]) | scalars
details = st.sampled_from(["low", "high", "auto", "original", "x"]) | scalars

# Values of the options that processors and decoders know, none of which asks for minutes of work.
option_names = st.sampled_from(
    ["min_pixels", "max_pixels", "size", "fps", "num_frames", "do_resize", "do_rescale", "patch_size", "merge_size",
     "temporal_patch_size", "image_mean", "resample", "return_tensors", "text", "images", "sampling_rate", "device",
     "padding", "truncation", "max_frames", "do_sample_frames", "video_backend", "image_mode", "rgba_background_color"]
)  # fmt: skip
option_values = json_values | st.sampled_from(
    [0, 1, 784, 3136, 50_000, 2**31, 2**63, -1, 0.5, float("nan"), "pt", "cuda", [0.5] * 3, {"height": 28, "width": 28},
     {"shortest_edge": 784, "longest_edge": 3136}, {"shortest_edge": 0, "longest_edge": 0}]
)  # fmt: skip
media_options = st.dictionaries(option_names, option_values, max_size=3)
option_members = st.just({}) | st.fixed_dictionaries(
    {},
    optional={
        "mm_processor_kwargs": media_options | json_values,
        "media_io_kwargs": st.dictionaries(st.sampled_from(["image", "video", "audio"]), media_options) | json_values,
    },
)


def _typed_part(part_type: str, value: Any, more: dict[str, Any]) -> dict[str, Any]:
    return {"type": part_type, part_type: value} | more


url_values = st.one_of(
    st.builds(lambda url, more: {"url": url} | more, urls, st.fixed_dictionaries({}, optional={"detail": details})),
    urls,
    scalars,
)
seen_parts = st.one_of(  # most of them reach the decoder
    st.builds(lambda url: {"type": "image_url", "image_url": {"url": url}}, image_urls),
    st.builds(lambda url: {"type": "video_url", "video_url": {"url": url}}, video_urls),
)
encoded_clips = st.builds(encode_file, st.sampled_from(sorted(SOUND_FORMATS)), seldom_damaged, base64_changes)
clip_urls = st.builds(build_data_url, st.sampled_from(MEDIA_TYPES["audio"]), base64_marks, encoded_clips)
heard_parts = st.one_of(
    st.builds(lambda url: {"type": "audio_url", "audio_url": {"url": url}}, clip_urls),
    st.builds(
        lambda data, form: {"type": "input_audio", "input_audio": {"data": data, "format": form}},
        encoded_clips,
        st.sampled_from(["wav", "mp3"]),
    ),
)
media_items = st.one_of(
    st.builds(
        _typed_part,
        st.sampled_from(["image_url", "image_url", "video_url", "audio_url"]),
        url_values,
        st.fixed_dictionaries({}, optional={"uuid": uuids}),
    ),
    st.builds(lambda name, url: {name: url}, st.sampled_from(["image_url", "video_url", "audio_url"]), url_values),
    st.builds(
        lambda data, form: {"type": "input_audio", "input_audio": {"data": data, "format": form}},
        encoded_files,
        st.sampled_from(["wav", "mp3", "flac", "x"]) | scalars,
    ),
    st.builds(
        lambda data, name: {"type": "file", "file": {"file_data": data, "filename": name}}, data_urls, client_texts
    ),
    st.builds(
        _typed_part,
        st.sampled_from(["image_embeds", "video_embeds", "audio_embeds"]),
        encoded_files | st.dictionaries(st.text(max_size=9), encoded_files, max_size=2) | json_values,
        st.fixed_dictionaries({}, optional={"uuid": uuids}),
    ),
    st.builds(lambda uuid: {"type": "image_url", "image_url": None, "uuid": uuid}, uuids),
    media_parts,
)
texts = client_texts | st.sampled_from(["<|image_pad|>", "<|vision_start|><|video_pad|>", "<image>", "![](x)"])
text_parts = st.builds(lambda text: {"type": "text", "text": text}, texts)


def messages_of(known_parts: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    """Return conversations with parts that the model knows, and with others."""
    contents = st.lists(known_parts | text_parts, min_size=1, max_size=3) | st.lists(
        known_parts | media_items | text_parts | json_values, max_size=4
    )
    roles = st.sampled_from(["user"] * 8 + ["system", "assistant", "tool"])
    message = st.builds(lambda role, content: {"role": role, "content": content}, roles, contents)
    return st.lists(message, min_size=1, max_size=2)


messages = messages_of(seen_parts)
chat_members = st.just({}) | st.fixed_dictionaries(
    {}, optional={"stream": st.booleans(), "n": st.integers(1, 2), "prompt_logprobs": st.just(1)}
)


def chats_of(conversations: st.SearchStrategy[list[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(
        lambda messages, options, more: {"model": "tiny", "messages": messages, "max_tokens": 2} | options | more,
        conversations,
        option_members,
        chat_members,
    )


chat_bodies = chats_of(messages)
mindie_parts = st.lists(
    st.builds(_typed_part, st.sampled_from(["image_url", "video_url", "audio_url"]), url_values, st.just({}))
    | text_parts
    | media_items
    | seen_parts,
    max_size=4,
)
links = st.builds(lambda url, text: f"![]({url}){text}", image_urls | urls, texts)
tgi_bodies = st.builds(
    lambda parts: {"inputs": "".join(parts), "parameters": {"max_new_tokens": 2}},
    st.lists(links | texts, min_size=1, max_size=3),
)
image_lists = (
    st.lists(encoded_images, max_size=2)
    | st.lists(encoded_files | urls | scalars, max_size=3)
    | encoded_files
    | scalars
)
generate_bodies = st.builds(
    lambda more: {"text_input": "<|image_pad|> what?", "sampling_parameters": '{"max_tokens": 2}'} | more,
    st.fixed_dictionaries({}, optional={"image": image_lists, "image_url": image_lists, "stream": st.booleans()}),
)
image_tensors = st.builds(
    lambda name, data: {"name": name, "datatype": "BYTES", "shape": [len(data)], "data": data},
    st.sampled_from(["image", "image_url"]),
    st.lists(encoded_images, max_size=2) | st.lists(encoded_files | urls | scalars, max_size=3),
)
infer_bodies = st.builds(
    lambda tensors: {
        "inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["<|image_pad|>"]}, *tensors]
    },
    st.lists(image_tensors, max_size=2),
)
MINDIE_MEMBERS = {
    "/mindie": "inputs",
    "/mindie/infer": "inputs",
    "/mindie/generate": "prompt",
    "/mindie/v2/models/tiny/generate": "text_input",
}
mindie_calls = st.builds(
    lambda path, parts: (path, {MINDIE_MEMBERS[path]: parts, "parameters": {"max_new_tokens": 2}}),
    st.sampled_from(sorted(MINDIE_MEMBERS)),
    mindie_parts,
)


def calls(paths: list[str], bodies: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[str, Any]]:
    return st.tuples(st.sampled_from(paths), bodies)


FORM_MEMBERS: dict[str, list[str]] = {  # of transcriptions, with values that are mostly good
    "model": ["tiny"],
    "language": ["en", "de", ""],
    "prompt": ["Zaphod", "<|audio_pad|>", "<|im_end|>"],
    "response_format": ["json", "text", "srt", "vtt", "verbose_json", "diarized_json"],
    "temperature": ["0", "1", "1e3"],
    "stream": ["true", "false"],
    "stream_include_usage": ["true"],
    "include[]": ["logprobs"],
    "timestamp_granularities[]": ["segment", "word"],
    "chunking_strategy": ["auto"],
    "chunking_strategy[type]": ["server_vad"],
    "to_language": ["en"],
    "seed": ["7", "-1"],
    "top_p": ["0.5", "2"],
    "hotwords": ["a"],
    "file": ["a"],
    "x": ["a"],
}
form_texts = client_texts | scalars.map(str)
form_parts = st.sampled_from(sorted(FORM_MEMBERS)).flatmap(
    lambda name: st.tuples(
        st.just(name), st.sampled_from(FORM_MEMBERS[name]) | st.sampled_from(FORM_MEMBERS[name]) | form_texts
    )
)
clip_forms = st.builds(
    lambda clip, parts: encode_form(
        [
            ("max_completion_tokens", "2", None),
            *((name, text.encode("utf-8", "surrogatepass"), None) for name, text in parts),
            ("file", clip, "clip.wav"),
        ]
    ),
    st.builds(odd_file, st.sampled_from(sorted(SOUND_FORMATS)) | st.sampled_from(sorted(FILES)), seldom_damaged),
    st.lists(form_parts, max_size=2),
)
DATABRICKS = "/databricks/serving-endpoints/tiny/invocations"
databricks_bodies = st.builds(lambda messages: {"messages": messages, "max_tokens": 2}, messages)
input_parts = st.one_of(
    st.builds(lambda url: {"type": "input_image", "image_url": url}, image_urls | urls | scalars),
    st.builds(lambda text: {"type": "input_text", "text": text}, texts),
    st.builds(lambda data: {"type": "input_file", "file_data": data, "filename": "a.png"}, data_urls),
    st.builds(lambda value: {"type": "input_image"} | value, st.dictionaries(st.text(max_size=9), json_values)),
)
response_bodies = st.builds(
    lambda parts, more: (
        {"model": "tiny", "input": [{"role": "user", "content": parts}], "max_output_tokens": 16} | more
    ),
    st.lists(input_parts, min_size=1, max_size=3),
    st.just({}) | st.just({"stream": True}),
)
sources = st.one_of(
    st.builds(
        lambda media_type, data: {"type": "base64", "media_type": media_type, "data": data},
        st.sampled_from(["image/png", "image/jpeg", "image/x"]) | scalars,
        encoded_images | encoded_files | scalars,
    ),
    st.builds(lambda url: {"type": "url", "url": url}, urls),
    json_values,
)
image_blocks = st.builds(lambda source: {"type": "image", "source": source}, sources) | text_parts
blocks = image_blocks | st.builds(
    lambda parts: {"type": "tool_result", "tool_use_id": "t", "content": parts}, st.lists(image_blocks, max_size=2)
)
message_bodies = st.builds(
    lambda parts, more: {"model": "tiny", "messages": [{"role": "user", "content": parts}], "max_tokens": 2} | more,
    st.lists(blocks, min_size=1, max_size=3),
    st.just({}) | st.just({"stream": True}),
)
ollama_bodies = st.builds(
    lambda text, images, more: (
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": text, "images": images}],
            "prompt": text,
            "images": images,
            "options": {"num_predict": 2},
        }
        | more
    ),
    texts,
    st.lists(encoded_images, max_size=2) | st.lists(encoded_files | urls | scalars, max_size=2) | scalars,
    st.just({}) | st.just({"stream": False}),
)
TYPE_AND_ERROR = ("type", "error", "request_id")
ERROR, ERROR_AND_TYPE, CODE_AND_MESSAGE = ("error",), ("error", "error_type"), ("error_code", "message")
# Paths with bodies for each API, beside the members of its errors.
media_calls = st.one_of(
    st.tuples(st.just(ERROR), calls(["/v1/chat/completions", "/vllm/v1/chat/completions", "/tokenize"], chat_bodies)),
    st.tuples(st.just(ERROR), calls(["/triton/v2/models/tiny/generate", "/v2/models/tiny/generate"], generate_bodies)),
    st.tuples(st.just(ERROR), calls(["/triton/v2/models/tiny/infer"], infer_bodies)),
    st.tuples(st.just(ERROR_AND_TYPE), mindie_calls),
    st.tuples(
        st.just(ERROR_AND_TYPE),
        calls(["/mindie/v1/chat/completions", "/tgi/v1/chat/completions", "/tgi/chat_tokenize"], chat_bodies),
    ),
    st.tuples(st.just(ERROR_AND_TYPE), calls(["/tgi/generate", "/tgi/generate_stream", "/tgi/tokenize"], tgi_bodies)),
    st.tuples(st.just(CODE_AND_MESSAGE), calls([DATABRICKS], databricks_bodies)),
    st.tuples(st.just(ERROR), calls(["/v1/responses"], response_bodies)),
    st.tuples(st.just(ERROR), calls(["/api/chat", "/api/generate"], ollama_bodies)),
    st.tuples(st.just(TYPE_AND_ERROR), calls(["/v1/messages", "/v1/messages/count_tokens"], message_bodies)),
)
heard_chats = chats_of(messages_of(heard_parts))
clip_calls = st.one_of(  # for a model that hears: chats, and forms of transcriptions
    st.tuples(st.just(ERROR), calls(["/v1/chat/completions", "/vllm/v1/chat/completions"], heard_chats)),
    st.tuples(st.just(ERROR_AND_TYPE), calls(["/mindie/v1/chat/completions"], heard_chats)),
    st.tuples(st.just(ERROR), calls(["/v1/audio/transcriptions", "/vllm/v1/audio/transcriptions"], clip_forms)),
)
