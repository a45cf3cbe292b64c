"""vLLM's processor of a multimodal model, for one item alone.

It gets the mark that a chat template writes for an item, and puts the item's tokens in its place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import vllm
from numpy.typing import NDArray
from PIL import Image
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.processing.context import TimingContext
from vllm.multimodal.processing.inputs import ProcessorInputs
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.serial_utils import MsgpackEncoder

from parley.model.media_input.client_options import SAMPLING_OPTIONS, check_options, equal_distances, processor_refusal
from parley.model.media_input.unusable import UnusableMedia, is_out_of_memory
from parley.types import MediaKind, ProcessedMedia, VLLMSettings
from parley.worker.vllm.media.item_features import ItemFeatures, describe_features
from parley.worker.vllm.vllm_client import parse_arguments

if TYPE_CHECKING:  # these modules need PyAV, which may be missing
    from parley.model.media_input.video import DecodedVideo, VideoClock

DEFAULT_RATE = 16_000  # samples per second, for a processor that does not say
INLINE_BYTES = 1 << 62  # tensors up to this size are part of the encoded item


class VLLMItemProcessor:
    """vLLM's processor of the model. Raises any exception of vLLM if it cannot be loaded."""

    def __init__(self, settings: VLLMSettings):
        model_config = parse_arguments(settings).create_model_config()
        self._marks = settings.media_marks
        self._tokenizer = cached_tokenizer_from_config(model_config)
        self._processor = MULTIMODAL_REGISTRY.create_processor(model_config, tokenizer=self._tokenizer)
        self._encoder = MsgpackEncoder(size_threshold=INLINE_BYTES)
        extractor = getattr(self._processor.info.get_hf_processor(), "feature_extractor", None)
        self.audio_rate = int(getattr(extractor, "sampling_rate", DEFAULT_RATE))

    def process_image(self, image: Image.Image, options: dict[str, Any]) -> ItemFeatures:
        """Process an image. Raises UnusableMedia."""
        return self._process("image", image, check_options("image", options))

    def process_audio(self, samples: NDArray[np.float32], options: dict[str, Any]) -> ItemFeatures:
        """Process a clip, with ``audio_rate`` samples per second. Raises UnusableMedia."""
        return self._process("audio", (samples, self.audio_rate), check_options("audio", options))

    def process_video(self, video: DecodedVideo, options: dict[str, Any]) -> ItemFeatures:
        """Process the frames of a video. Raises UnusableMedia."""
        metadata = {
            "total_num_frames": len(video.clock.times),
            "fps": video.clock.rate,
            "duration": video.clock.seconds,
            "video_backend": "parley",
            "frames_indices": list(video.indices),
            "do_sample_frames": False,
        }
        options = check_options("video", options)
        other_options = {name: value for name, value in options.items() if name not in SAMPLING_OPTIONS}
        return self._process("video", (video.frames, metadata), other_options)

    def process_embeddings(self, kind: MediaKind, data: bytes) -> ItemFeatures:
        """Refuse embeddings: they skip the processor, and vLLM's forms of them depend on the model."""
        raise UnusableMedia("cannot be given as embeddings with this engine", "bad_embeddings")

    def choose_frames(self, clock: VideoClock, width: int, height: int, options: dict[str, Any]) -> Sequence[int]:
        """Return the numbers of the frames to read: as many as the request says, else 32, at equal distances."""
        total = len(clock.times)
        if (count := options.get("num_frames")) == -1:
            return range(total)
        if count is None and (rate := options.get("fps")) is not None:
            count = max(1, round(clock.seconds * rate))
        return equal_distances(total) if count is None else equal_distances(total, count)

    def describe_item(self, kind: MediaKind, digest: bytes, processed: ItemFeatures) -> ProcessedMedia:
        """Return the item as the API process knows it. Raises UnusableMedia."""
        features = msgspec.structs.replace(processed, digest=digest)
        spellings = {token_id: self._tokenizer.convert_ids_to_tokens(token_id) for token_id in set(processed.token_ids)}
        replacement = self._tokenizer.decode(
            processed.token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        if (item := describe_features(kind, features, spellings, replacement)) is None:
            raise processor_refusal()
        return item

    def write_features(self, processed: ItemFeatures, digest: bytes) -> bytes:
        """Return the features of an item as the host reads them, with the item's digest."""
        return msgspec.msgpack.encode(msgspec.structs.replace(processed, digest=digest))

    def _process(self, kind: MediaKind, content: Any, options: Mapping[str, Any]) -> ItemFeatures:
        if kind not in self._marks:
            raise UnusableMedia("cannot be read by this model", "refused_by_model")
        try:
            items = self._processor.info.parse_mm_data({kind: content})
            inputs = ProcessorInputs(self._mark_ids(kind), items, hf_processor_mm_kwargs=options)
            processed = self._processor.apply(inputs, TimingContext(enabled=False))
            (placeholder,) = processed["mm_placeholders"][kind]
            (item,) = processed["mm_kwargs"][kind]
            (encoded,) = self._encoder.encode(item)
        except MemoryError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise MemoryError from None
            raise processor_refusal() from None
        embedded = [True] * placeholder.length if placeholder.is_embed is None else placeholder.is_embed.tolist()
        return ItemFeatures(
            b"",
            list(processed["prompt_token_ids"]),
            placeholder.offset,
            placeholder.length,
            embedded,
            bytes(encoded),
        )

    def _mark_ids(self, kind: MediaKind) -> list[int]:
        mark = self._marks[kind]
        return [mark] if isinstance(mark, int) else list(self._tokenizer.encode(mark, add_special_tokens=False))


def settings_fingerprint(settings: VLLMSettings) -> bytes:
    """Return a hash of vLLM's version and of all settings that may change its processor's results."""
    parts = [vllm.__version__, settings.dtype, str(settings.max_model_len), *settings.arguments]
    return hashlib.sha256(msgspec.json.encode(parts)).digest()
