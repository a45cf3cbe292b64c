"""Options of ``parley serve`` about images, videos and audio: where from, and how large."""

from __future__ import annotations

from parley.settings.option_kinds import (
    integer_kind,
    media_host_kind,
    media_limit_kind,
    size_kind,
    switch_kind,
    text_kind,
)
from parley.settings.options import Option

MEDIA_OPTIONS: list[Option] = [
    Option(
        "media-hosts",
        media_host_kind(),
        "Host that images, videos and audio may be fetched from: `example.com`, `*.example.com` for all hosts below "
        "it, `any-public` for all whose addresses are public. Ports are 80 and 443, or the one that is written "
        "(`example.com:8443`). With `internal:` before it, its address may be private.",
        section="media",
        unset_text="nothing is fetched",
        repeatable=True,
        configurable=True,
    ),
    Option(
        "media-path",
        text_kind("FOLDER"),
        "Folder below which requests may name image, video and audio files.",
        section="media",
        unset_text="no file is read",
        configurable=True,
    ),
    Option(
        "media-limit",
        media_limit_kind(integer_kind(0, 4096)),
        "Most images, videos or audio clips in a request. Kinds that are not named keep their limit.",
        [("image", 16), ("video", 2), ("audio", 4)],
        section="media",
        repeatable=True,
        configurable=True,
    ),
    Option(
        "media-size",
        media_limit_kind(size_kind(1)),
        "Largest file of a kind, as the client sends it. Kinds that are not named keep their limit.",
        [("image", 20 << 20), ("video", 256 << 20), ("audio", 25 << 20)],
        section="media",
        repeatable=True,
        configurable=True,
    ),
    Option(
        "media-request-size",
        size_kind(1),
        "Largest total size of the images, videos and audio of a request.",
        512 << 20,
        section="media",
        configurable=True,
    ),
    Option(
        "media-memory",
        size_kind(1 << 20),
        "Memory for media that are being fetched, and the same amount for media that have been processed for running "
        "requests. When it is full, requests get 429.",
        1 << 30,
        section="media",
        configurable=True,
    ),
    Option(
        "media-pixels",
        integer_kind(1, 1 << 30),
        "Most pixels of an image or a video frame, before it is resized for the model.",
        50_000_000,
        section="media",
        configurable=True,
    ),
    Option(
        "media-workers",
        integer_kind(1, 64),
        "Processes that decode images, videos and audio for a model, each one item at a time.",
        1,
        section="media",
        configurable=True,
    ),
    Option(
        "media-eager",
        switch_kind(),
        "Start a media process with the server, and load the encoders with the model, not with the first request "
        "that needs them. A checkpoint whose encoders lack a tensor is then refused at the start, as by `parley "
        "doctor`.",
        False,
        section="media",
        configurable=True,
    ),
    Option(
        "media-feature-cache",
        size_kind(),
        "Memory for the processed images, videos and audio of a model, which later requests use again.",
        256 << 20,
        section="media",
        configurable=True,
    ),
    Option(
        "media-cache",
        size_kind(),
        "Memory for the embeddings of the images, videos and audio that a model has encoded, which later requests "
        "use again. Requests that are being computed may need more.",
        256 << 20,
        section="media",
        configurable=True,
    ),
    Option(
        "enable-mm-embeds",
        switch_kind(),
        "OpenAI's and vLLM's APIs: accept embeddings of images, videos and audio that clients have computed.",
        False,
        section="media",
        configurable=True,
    ),
    Option(
        "trust-request-mm-kwargs",
        switch_kind(),
        "OpenAI's and vLLM's APIs: accept media_io_kwargs and mm_processor_kwargs, which let a request decide how "
        "much work its media cause.",
        False,
        section="media",
        configurable=True,
    ),
    Option(
        "media-body-limit",
        size_kind(1024),
        "Largest request body if a model reads images, videos or audio, which bodies contain in base64; at most "
        "body-memory. body-limit still limits the text of a request.",
        64 << 20,
        section="media",
        configurable=True,
    ),
]
