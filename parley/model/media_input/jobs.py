"""The jobs of a media process: they turn a client's data into the engine's input."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from parley.engine.media_messages import MediaJobRequest, MediaJobResult, MediaRefused
from parley.errors import excerpt
from parley.model.media_input.base64_text import decode_base64
from parley.model.media_input.digest import item_digest
from parley.model.media_input.images import decode_image, shrink_image
from parley.model.media_input.unusable import UnusableMedia
from parley.types import FeatureFile, MediaKind, ProcessedMedia

if TYPE_CHECKING:  # these modules need PyAV, which an engine for images may lack
    from parley.model.media_input.video import DecodedVideo, VideoClock

LOADING_OPTIONS = frozenset({"fps", "num_frames"})

ProcessedT = TypeVar("ProcessedT")


class MediaProcessor(Protocol[ProcessedT]):
    """The processor of a model: it turns one decoded item into the engine's input. ``options`` are the client's.

    All methods that process or describe an item raise UnusableMedia if it does not fit the model.
    """

    @property
    def audio_rate(self) -> int:
        """Samples per second of the audio that the processor reads."""

    def process_image(self, image: Image.Image, options: dict[str, Any]) -> ProcessedT:
        """Process an image."""

    def process_audio(self, samples: NDArray[np.float32], options: dict[str, Any]) -> ProcessedT:
        """Process a clip, with ``audio_rate`` samples per second."""

    def process_video(self, video: DecodedVideo, options: dict[str, Any]) -> ProcessedT:
        """Process the frames of a video."""

    def process_embeddings(self, kind: MediaKind, data: bytes) -> ProcessedT:
        """Return embeddings that the client computed."""

    def choose_frames(self, clock: VideoClock, width: int, height: int, options: dict[str, Any]) -> Sequence[int]:
        """Return the numbers of the frames of a video to read."""

    def describe_item(self, kind: MediaKind, digest: bytes, processed: ProcessedT) -> ProcessedMedia:
        """Return the item as the API process knows it."""

    def write_features(self, processed: ProcessedT, digest: bytes) -> bytes:
        """Return the engine's input. It includes the digest, so that the engine knows whose features it reads."""


class MediaJobs(Generic[ProcessedT]):
    """Does jobs with a model's processor. ``fingerprint``: hash of everything but the item that its results depend
    on."""

    def __init__(self, processor: MediaProcessor[ProcessedT], fingerprint: bytes):
        torch.set_num_threads(1)  # the cores belong to the engine
        self._processor = processor
        self._fingerprint = fingerprint

    def process_media(self, job: MediaJobRequest) -> MediaJobResult | MediaRefused:
        """Do a job, and write its features to the target."""
        try:
            return self._process_media(job)
        except UnusableMedia as error:
            return MediaRefused(error.predicate, error.reason, error.detail)
        except MemoryError:
            return MediaRefused("takes too much memory to decode", "too_slow")

    def _process_media(self, job: MediaJobRequest) -> MediaJobResult:
        data = read_job_source(job.source)
        if job.form in ("base64", "base64_embeddings"):
            data = decode_base64(data)
        options = {"small": job.is_small, "loading": job.loading_options, "processor": job.processor_options}
        form = "file" if job.form == "base64" else job.form
        digest = item_digest(job.kind, form, data, options, self._fingerprint)
        processed = self._process_data(job, data)
        item = self._processor.describe_item(job.kind, digest, processed)
        return MediaJobResult(item, write_file(job.target, self._processor.write_features(processed, digest)))

    def _process_data(self, job: MediaJobRequest, data: bytes) -> ProcessedT:
        if job.form == "base64_embeddings":
            return self._processor.process_embeddings(job.kind, data)
        if job.kind == "image":
            check_loading_options(job.loading_options, frozenset())
            image = decode_image(data, job.limits.pixels)
            return self._processor.process_image(shrink_image(image) if job.is_small else image, job.processor_options)
        if job.kind == "audio":
            from parley.model.media_input.audio import decode_audio

            check_loading_options(job.loading_options, frozenset())
            samples = decode_audio(data, self._processor.audio_rate, job.limits.seconds)
            return self._processor.process_audio(samples, job.processor_options)
        check_loading_options(job.loading_options, LOADING_OPTIONS)
        return self._processor.process_video(self._decode_video(job, data), job.processor_options)

    def _decode_video(self, job: MediaJobRequest, data: bytes) -> DecodedVideo:
        from parley.model.media_input.video import decode_frames, decode_video

        if job.form == "base64_frames":
            return decode_frames(data.decode("latin-1"), job.loading_options.get("fps"), job.limits)

        def choose_frames(clock: VideoClock, width: int, height: int) -> Sequence[int]:
            return self._processor.choose_frames(clock, width, height, job.processor_options | job.loading_options)

        return decode_video(data, choose_frames, job.limits)


def check_loading_options(options: dict[str, Any], allowed_names: frozenset[str]) -> None:
    """Raise UnusableMedia for options that do not exist for the kind of media, or are no numbers in range."""
    for name, value in options.items():
        if name not in allowed_names:
            raise UnusableMedia(f"cannot be loaded with the option {excerpt(name)}", "refused_by_model")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if name == "num_frames" and not (type(value) is int and (value == -1 or value >= 1)):
            raise UnusableMedia("cannot be loaded with this num_frames: -1 or a number from 1 on", "refused_by_model")
        if name == "fps" and not (is_number and 0 < value <= 1000):
            raise UnusableMedia("cannot be loaded with this fps: a number above 0 and up to 1000", "refused_by_model")


def read_job_source(file: FeatureFile) -> bytes:
    """Return the content of a file in another process's memory."""
    return Path(f"/proc/{file.pid}/fd/{file.fd}").read_bytes()


def write_file(file: FeatureFile, content: bytes) -> int:
    """Fill a file in another process's memory, and return its size in bytes."""
    return Path(f"/proc/{file.pid}/fd/{file.fd}").write_bytes(content)
