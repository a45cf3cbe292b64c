"""The jobs of a media process: from a client's data to the tensors that the model's encoder reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from parley.engine.media_messages import MediaProcessed, MediaRefused, ProcessMedia
from parley.errors import excerpt
from parley.model.media_input.audio import decode_audio
from parley.model.media_input.digest import item_digest, processor_fingerprint
from parley.model.media_input.images import decode_image, shrink_image
from parley.model.media_input.processor import ItemProcessor, ProcessedTensors
from parley.model.media_input.unusable import UnusableMedia
from parley.model.media_input.video import DecodedVideo, VideoClock, decode_base64, decode_frames, decode_video
from parley.types import FeatureFile

LOADING_OPTIONS = frozenset({"fps", "num_frames"})


class MediaJobs:
    """Does the jobs for the model in a folder. Raises OSError, ValueError or ImportError if its processor cannot be
    loaded."""

    def __init__(self, folder: Path):
        torch.set_num_threads(1)  # the cores belong to the engine
        self._processor = ItemProcessor(folder)
        self._fingerprint = processor_fingerprint(folder)

    def process_media(self, job: ProcessMedia) -> MediaProcessed | MediaRefused:
        """Do a job, and write its tensors to the target."""
        try:
            return self._process_media(job)
        except UnusableMedia as error:
            return MediaRefused(error.predicate, error.reason, error.detail)
        except MemoryError:
            return MediaRefused("takes too much memory to decode", "too_slow")

    def _process_media(self, job: ProcessMedia) -> MediaProcessed:
        data = read_file(job.source)
        if job.form in ("base64", "base64_embeddings"):
            data = decode_base64(data)
        options = {"small": job.is_small, "loading": job.loading_options, "processor": job.processor_options}
        form = "file" if job.form == "base64" else job.form
        digest = item_digest(job.kind, form, data, options, self._fingerprint)
        processed = self._process_data(job, data)
        item = self._processor.describe_item(job.kind, digest, processed)
        return MediaProcessed(item, write_tensors(job.target, processed.tensors, digest))

    def _process_data(self, job: ProcessMedia, data: bytes) -> ProcessedTensors:
        if job.form == "base64_embeddings":
            return self._processor.process_embeddings(job.kind, data)
        if job.kind == "image":
            check_loading_options(job.loading_options, frozenset())
            image = decode_image(data, job.limits.pixels)
            return self._processor.process_image(shrink_image(image) if job.is_small else image, job.processor_options)
        if job.kind == "audio":
            check_loading_options(job.loading_options, frozenset())
            samples = decode_audio(data, self._processor.audio_rate, job.limits.seconds)
            return self._processor.process_audio(samples, job.processor_options)
        check_loading_options(job.loading_options, LOADING_OPTIONS)
        return self._processor.process_video(self._decode_video(job, data), job.processor_options)

    def _decode_video(self, job: ProcessMedia, data: bytes) -> DecodedVideo:
        if job.form == "base64_frames":
            return decode_frames(data.decode("latin-1"), job.loading_options.get("fps"), job.limits)

        def choose_frames(clock: VideoClock, width: int, height: int) -> list[int]:
            return self._processor.choose_frames(clock, width, height, job.processor_options | job.loading_options)

        return decode_video(data, choose_frames, job.limits)


def check_loading_options(options: dict[str, Any], known: frozenset[str]) -> None:
    """Raise UnusableMedia for options that do not exist for the kind of media, or are no numbers in range."""
    for name, value in options.items():
        if name not in known:
            raise UnusableMedia(f"cannot be loaded with the option {excerpt(name)}", "refused_by_model")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if name == "num_frames" and not (type(value) is int and (value == -1 or value >= 1)):
            raise UnusableMedia("cannot be loaded with this num_frames: -1 or a number from 1 on", "refused_by_model")
        if name == "fps" and not (is_number and 0 < value <= 1000):
            raise UnusableMedia("cannot be loaded with this fps: a number above 0 and up to 1000", "refused_by_model")


def read_file(file: FeatureFile) -> bytes:
    """Return the content of a file in another process's memory."""
    return Path(f"/proc/{file.pid}/fd/{file.fd}").read_bytes()


def write_tensors(file: FeatureFile, tensors: dict[str, torch.Tensor], digest: bytes) -> int:
    """Write tensors into a file in another process's memory, as safetensors. Return their size in bytes.

    The digest goes with them, so that the engine knows whether it reads the features of the item that it wants.
    """
    data = safetensors.torch.save(tensors, {"digest": digest.hex()})
    Path(f"/proc/{file.pid}/fd/{file.fd}").write_bytes(data)
    return len(data)
