"""Runs the model's processor (Transformers) for one item alone, and describes the result.

Each item is processed without others, because a batch would be padded, and its tensors would depend on its neighbours.
The processor also writes the text that stands for the item in a prompt.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from PIL import Image

import parley.model.load  # noqa: F401  (lets Transformers import torchvision)
from parley.model.media_input.blip2 import Blip2Processor
from parley.model.media_input.client_embeddings import read_client_embeddings
from parley.model.media_input.client_options import SAMPLING_OPTIONS, check_options, equal_distances, processor_refusal
from parley.model.media_input.digest import processor_fingerprint
from parley.model.media_input.granite_speech import GraniteSpeechProcessor
from parley.model.media_input.jobs import MediaJobs
from parley.model.media_input.unusable import UnusableMedia, is_out_of_memory
from parley.model.media_input.video import DecodedVideo, VideoClock
from parley.model.media_input.voxtral import VoxtralProcessor
from parley.text.media_family import read_media_family
from parley.text.tokens.json_files import read_json_object
from parley.types import MediaKind, ProcessedMedia

FRAME_SECONDS = ("second_per_grid_ts", "video_second_per_grid")  # processors' names for the time between frames
PATCH_POSITIONS = ("image_position_ids", "video_position_ids")  # [items, patches, 2], -1: no patch
POSITION_COUNTS = ("position_embedding_size", "mm_posemb_size")  # configs' names for the positions on each axis
# Attributes of processors that write marks only: those for embeddings, and those around and between items
MARK_NAMES = (
    "fake_image_token",
    "image_token",
    "image_start_token",
    "image_end_token",
    "audio_token",
    "audio_start_token",
    "audio_end_token",
)
# One number, or several, for each token
TEXT_TENSORS = {"token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids", "labels", "cross_attention_mask"}
GUESSED_LAYOUT_TYPES = {"video_llava"}  # whose processors take the height of some small images for colours
SINGLE_VIDEO_TYPES = {"nemotron_h_omni"}  # whose processors read the metadata of one video, not of several
# For models whose processors in Transformers need a package that is not installed here, or accept no mark of an item
OWN_PROCESSORS: dict[str, Callable[[Path, int], Any]] = {
    "voxtral": VoxtralProcessor,
    "blip-2": Blip2Processor,
    "granite_speech": GraniteSpeechProcessor,
    "granite_speech_plus": GraniteSpeechProcessor,
}
DEFAULT_RATE = 16_000  # samples per second, for a processor that does not say


def load_jobs(folder: Path) -> MediaJobs[ProcessedTensors]:
    """Return the jobs for the model in a folder. Raises OSError, ValueError or ImportError if its processor cannot be
    loaded."""
    return MediaJobs(ItemProcessor(folder), processor_fingerprint(folder))


@dataclass
class ProcessedTensors:
    """The processor's result for an item: the encoder's arguments, and the text that stands for the item."""

    tensors: dict[str, torch.Tensor]
    replacement: str
    seconds: float = 0.0


class ItemProcessor:
    """The processor of the model in a folder. Raises OSError, ValueError or ImportError if it cannot be loaded."""

    def __init__(self, folder: Path):
        from transformers import AutoConfig, AutoProcessor
        from transformers.utils.logging import set_verbosity_error

        set_verbosity_error()  # its warnings are about clients' options and sizes

        family = read_media_family(read_json_object(folder / "config.json"))
        if family is None:
            raise ValueError("the model's family is not one of those whose media can be read")
        self._family = family
        self._processor: Any = (
            OWN_PROCESSORS[family.model_type](folder, next(iter(family.placeholder_ids.values())))
            if family.model_type in OWN_PROCESSORS
            else AutoProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        )
        whole_config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        config = getattr(whole_config, "thinker_config", whole_config)
        self._vision_config: Any = getattr(config, "vision_config", None)
        self._deep_layers = len(getattr(self._vision_config, "deepstack_visual_indexes", None) or ())
        self._patch_positions = next(
            (getattr(self._vision_config, name) for name in POSITION_COUNTS if hasattr(self._vision_config, name)), inf
        )
        self._positions_per_second: float | None = getattr(config, "position_id_per_seconds", None) or getattr(
            self._vision_config, "tokens_per_second", None
        )
        self._hidden: int = config.get_text_config().hidden_size

    @property
    def audio_rate(self) -> int:
        """Samples per second of the audio that the processor reads."""
        return int(getattr(self._sound_extractor, "sampling_rate", DEFAULT_RATE))

    @property
    def _sound_extractor(self) -> Any:
        """The part of the processor that reads audio, which has another name in Phi-4-multimodal's; None without it."""
        names = ("feature_extractor", "audio_processor")
        return next((getattr(self._processor, name) for name in names if hasattr(self._processor, name)), None)

    def process_image(self, image: Image.Image, options: dict[str, Any]) -> ProcessedTensors:
        """Process an image. Raises UnusableMedia."""
        layout = {"input_data_format": "channels_last"} if self._family.model_type in GUESSED_LAYOUT_TYPES else {}
        processed = self._process("image", {"images": [image], **layout, **check_options("image", options)})
        self._check_patches(processed.tensors)
        return processed

    def process_audio(self, samples: NDArray[np.float32], options: dict[str, Any]) -> ProcessedTensors:
        """Process a clip, with ``audio_rate`` samples per second. Raises UnusableMedia."""
        arguments = {"audio": [samples], "sampling_rate": self.audio_rate, **check_options("audio", options)}
        processed = self._process("audio", arguments, len(samples) / self.audio_rate)
        self._check_complete(processed)
        return processed

    def process_video(self, video: DecodedVideo, options: dict[str, Any]) -> ProcessedTensors:
        """Process the frames of a video. Raises UnusableMedia."""
        from transformers.video_utils import VideoMetadata

        _, height, width, _ = video.frames.shape
        metadata = VideoMetadata(
            total_num_frames=len(video.clock.times),
            fps=video.clock.rate,
            width=width,
            height=height,
            duration=video.clock.seconds,
            frames_indices=list(video.indices),
        )
        arguments: dict[str, Any] = {
            "videos": [torch.from_numpy(video.frames).permute(0, 3, 1, 2).contiguous()],
            "video_metadata": metadata if self._family.model_type in SINGLE_VIDEO_TYPES else [metadata],
            "do_sample_frames": False,
            "return_metadata": True,  # for Muse Glimmer's processor, which writes the time before each frame
        }
        if self._family.text_follows_time:
            arguments["fps"] = metadata.sampled_fps  # these processors do not read it from the metadata
        if self._family.model_type in SINGLE_VIDEO_TYPES:
            arguments["add_special_tokens"] = False  # whose text is read from the tokens
        options = {
            name: value for name, value in check_options("video", options).items() if name not in SAMPLING_OPTIONS
        }
        processed = self._process("video", arguments | options, video.clock.seconds)
        self._check_patches(processed.tensors)
        return processed

    def process_embeddings(self, kind: MediaKind, data: bytes) -> ProcessedTensors:
        """Return embeddings that the client computed, with the text that stands for them. Raises UnusableMedia."""
        if self._family.canvas_marks is not None:
            raise UnusableMedia("cannot be given as embeddings: their positions depend on the image", "bad_embeddings")
        grid_name = f"{kind}_grid_thw" if self._has_grids(kind) else None
        deep_layers = self._deep_layers if kind != "audio" else 0
        tensors = read_client_embeddings(data, self._hidden, deep_layers, grid_name)
        sample = self._process_sample(kind).replacement
        placeholder = self._placeholder(kind)
        if len(_find_runs(sample, placeholder)) != 1 or self._other_placeholders(kind):
            raise UnusableMedia("cannot be given as embeddings: this model reads text between them", "bad_embeddings")
        before, after = sample[: sample.index(placeholder)], sample[sample.rindex(placeholder) + len(placeholder) :]
        return ProcessedTensors(tensors, before + placeholder * len(tensors["embeddings"]) + after)

    def _process_sample(self, kind: MediaKind) -> ProcessedTensors:
        """Process an item without content, for the marks around its embeddings."""
        if kind == "image":
            return self.process_image(Image.new("RGB", (64, 64)), {})
        if kind == "audio":
            return self.process_audio(np.zeros(self.audio_rate, np.float32), {})
        frames = np.zeros((2, 64, 64, 3), np.uint8)
        return self.process_video(DecodedVideo(frames, [0, 1], VideoClock([0.0, 1.0], 1.0)), {})

    def choose_frames(self, clock: VideoClock, width: int, height: int, options: dict[str, Any]) -> list[int]:
        """Return the numbers of the frames to read: chosen by the request's options, else by the processor's sampling,
        else DEFAULT_FRAMES of them at equal distances. Raises UnusableMedia."""
        from transformers.video_utils import VideoMetadata

        total = len(clock.times)
        sampling = {name: value for name, value in options.items() if name in SAMPLING_OPTIONS}
        if (count := sampling.get("num_frames")) is not None and (count == -1 or count >= total):
            return list(range(total))
        video_processor = self._processor.video_processor
        if not sampling and not video_processor.do_sample_frames:
            return equal_distances(total)
        defaults = {name: getattr(video_processor, name, None) for name in SAMPLING_OPTIONS}
        if "num_frames" in sampling or "fps" in sampling:
            defaults |= {"num_frames": None, "fps": None}  # the request's choice replaces the processor's
        names = video_processor.valid_kwargs.__annotations__.keys()
        arguments = {name: value for name, value in (defaults | sampling).items() if name in names}
        if "temporal_patch_size" in names:  # frames that the encoder reads as one
            arguments["temporal_patch_size"] = video_processor.temporal_patch_size
        metadata = VideoMetadata(total, clock.rate, width, height, clock.seconds)
        try:
            indices = video_processor.sample_frames(metadata=metadata, **arguments)
        except (NotImplementedError, TypeError, ValueError):
            if sampling:
                raise processor_refusal() from None
            return equal_distances(total)
        return [int(index) for index in indices]

    def describe_item(self, kind: MediaKind, digest: bytes, processed: ProcessedTensors) -> ProcessedMedia:
        """Return the item as the API process knows it. Raises UnusableMedia if its parts do not fit each other."""
        placeholder = self._placeholder(kind)
        others = self._other_placeholders(kind)
        runs = [len(run) for run in _find_runs(processed.replacement, placeholder, *others)]
        if self._family.leads_prompt:
            runs = [self._count_tile_rows(processed.tensors)]
        if sum(runs) < self._family.min_embeddings:
            raise processor_refusal()
        grids, steps = self._read_grids(kind, processed.tensors, runs) if self._has_grids(kind) else ([], [])
        return ProcessedMedia(
            kind=kind,
            digest=digest,
            replacement=processed.replacement,
            placeholder=placeholder,
            embedding_count=sum(runs),
            grids=grids,
            frame_steps=steps,
            text_follows_time=self._family.text_follows_time,
            sees_both_ways=self._family.sees_both_ways and kind != "audio",
            seconds=processed.seconds,
            other_placeholders=others,
            number=self._number_of(processed.replacement),
            shared_edge=self._processor.fake_image_token if self._family.shares_edges else "",
            prompt_sees_both_ways=self._family.is_prefix_lm,
            has_numbered_grid=self._family.numbers_grids,
            text_edges=self._text_edges(),
            leads_prompt=self._family.leads_prompt,
            canvas_marks=self._family.canvas_marks,
        )

    def write_features(self, processed: ProcessedTensors, digest: bytes) -> bytes:
        """Return the tensors as safetensors, with the digest among its metadata."""
        return safetensors.torch.save(processed.tensors, {"digest": digest.hex()})

    def _check_patches(self, tensors: dict[str, torch.Tensor]) -> None:
        """Raise UnusableMedia for an image that is too narrow for the encoder.

        LFM2-VL's processor makes more patches of it than its mask has, and Gemma 4's gives patches positions for which
        the encoder has no embedding.
        """
        shapes, mask = tensors.get("spatial_shapes"), tensors.get("pixel_attention_mask")
        if shapes is not None and mask is not None and int(shapes.prod(-1).max()) > mask.shape[-1]:
            raise processor_refusal()
        positions = [tensors[name] for name in PATCH_POSITIONS if name in tensors]
        if any(int(grid.max()) >= self._patch_positions for grid in positions):
            raise processor_refusal()

    def _check_complete(self, processed: ProcessedTensors) -> None:
        """Raise UnusableMedia for a clip if the processor reads only its beginning."""
        hop = getattr(self._sound_extractor, "hop_length", 0)  # samples per frame of features
        # [windows, mel bins, frames] or [windows, frames, mel bins]. Of the last two sizes the larger one is that of
        # time, unless the clip is so short that it is complete.
        features = [tensor for tensor in processed.tensors.values() if tensor.is_floating_point()]
        frames = max((len(tensor) * max(tensor.shape[1:]) for tensor in features), default=0)
        extractor = self._sound_extractor
        # Gemma 3n does not pad: if fewer samples are left than a frame has, there is no frame
        is_unfilled = self._family.model_type == "gemma3n"
        seconds = (frames * hop + (extractor.frame_length if is_unfilled else 0)) / self.audio_rate
        # Samples beyond these, of which the last ones fill no frame
        window = hop if is_unfilled else max(hop, getattr(extractor, "win_length", 0))
        if hop and processed.seconds > seconds + window / self.audio_rate:
            predicate = f"has {round(processed.seconds, 2)} seconds, and this model reads at most {seconds:g}"
            raise UnusableMedia(predicate, "too_long", limit=seconds, size=processed.seconds)

    def _has_grids(self, kind: MediaKind) -> bool:
        """Whether runs of embeddings of this kind have grids of positions. Those of audio continue as in text."""
        return (self._family.has_rope_grids or self._family.canvas_marks is not None) and kind != "audio"

    def _count_tile_rows(self, tensors: dict[str, torch.Tensor]) -> int:
        """Return the number of embeddings of an image of Llama 3.2 Vision: its tiles, without those that pad it, have
        one for each patch and one more."""
        config = self._vision_config
        patches = int(config.image_size // config.patch_size) ** 2
        return int(tensors["aspect_ratio_mask"].sum()) * (patches + 1)

    def _text_edges(self) -> tuple[str, str]:
        """The texts after the last item and at the end of the prompt."""
        if not self._family.begins_text_after_items:
            return "", ""
        return self._processor.tokenizer.bos_token, "\n" if self._family.is_prefix_lm else ""

    def _placeholder(self, kind: MediaKind) -> str:
        """The mark that each embedding replaces. Raises UnusableMedia."""
        if kind not in self._family.kinds:
            raise UnusableMedia("cannot be read by this model", "refused_by_model")
        return str(self._processor.tokenizer.convert_ids_to_tokens(self._family.placeholder_ids[kind]))

    def _other_placeholders(self, kind: MediaKind) -> list[str]:
        """The further marks that embeddings of an image replace."""
        ids = self._family.other_placeholder_ids if kind == "image" else ()
        return [str(self._processor.tokenizer.convert_ids_to_tokens(token_id)) for token_id in ids]

    def _number_of(self, replacement: str) -> str:
        """The number at the beginning of an item's replacement, with the marks around it; empty if it has none."""
        names = ("image_id_start_token", "image_id_end_token")
        opening, closing = (getattr(self._processor, name, None) for name in names)
        number = f"{opening}0{closing}"
        return number if replacement.startswith(number) else ""

    def _mark_of(self, kind: MediaKind) -> str | None:
        """The mark that a template writes for an item, with the tokens around it: HunyuanOCR's processor needs them."""
        mark = self._family.prompt_marks.get(kind) or getattr(self._processor, f"{kind}_token", None)
        return None if mark is None else mark.join(self._family.edges[kind])

    def _process(self, kind: MediaKind, arguments: dict[str, Any], seconds: float = 0.0) -> ProcessedTensors:
        mark = self._mark_of(kind)
        if kind not in self._family.kinds or mark is None:
            raise UnusableMedia("cannot be read by this model", "refused_by_model")
        try:
            with warnings.catch_warnings(action="ignore"):  # of clients' options
                output = self._processor(
                    text=[mark], return_text_replacement_offsets=True, return_tensors="pt", **arguments
                )
            replacement = self._replacement_in(output, kind)
        except MemoryError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise MemoryError from None
            raise processor_refusal() from None
        text_names = TEXT_TENSORS.union(self._processor.tokenizer.model_input_names)
        tensors = {
            name: torch.as_tensor(value).contiguous()
            for name, value in output.items()
            if name not in text_names and _is_numeric(value)
        }
        if others := self._other_placeholders(kind):
            tensors["placeholder_numbers"] = _number_placeholders(replacement, [self._placeholder(kind), *others])
        return ProcessedTensors(tensors, replacement, seconds)

    def _replacement_in(self, output: Any, kind: MediaKind) -> str:
        """Return the text that a processor has written for the mark.

        Those of Idefics2 and Nemotron-H Omni do not return its position. All of its tokens are marks, but a video has
        texts between them, and is all that the prompt has.
        """
        if "text_replacement_offsets" in output:
            (replaced,) = output["text_replacement_offsets"][0]
            return str(replaced["replacement"])
        if kind == "video":
            return str(self._processor.tokenizer.decode(output["input_ids"][0], clean_up_tokenization_spaces=False))
        marks = {getattr(self._processor, name, None) for name in MARK_NAMES}
        tokens = self._processor.tokenizer.convert_ids_to_tokens(output["input_ids"][0])
        return "".join(token for token in tokens if token in marks)

    def _read_grids(
        self, kind: MediaKind, tensors: dict[str, torch.Tensor], runs: list[int]
    ) -> tuple[list[tuple[int, int, int]], list[float]]:
        """Return the grid of each run of embeddings, and the steps between their frames."""
        if self._family.canvas_marks is not None:
            return self._read_canvas_grids(kind, tensors, runs), []
        frames, rows, columns = tensors[f"{kind}_grid_thw"][0].tolist()
        merge_size = self._vision_config.spatial_merge_size  # patches per embedding, on both axes
        rows, columns = rows // merge_size, columns // merge_size
        if self._family.numbers_grids:  # with a mark after each row, and one at both ends
            grid = (1, rows, columns + 1)
            if runs != [math.prod(grid) + 2]:
                raise processor_refusal()
            return [grid], [1.0]
        grids = [(frames, rows, columns)] if len(runs) == 1 else [(1, rows, columns)] * frames
        if [math.prod(grid) for grid in grids] != runs:
            raise processor_refusal()
        seconds = next((tensors[name][0] for name in FRAME_SECONDS if name in tensors), None)
        step = 1.0
        if kind == "video" and self._positions_per_second is not None and seconds is not None:
            step = float(self._positions_per_second * seconds)
        return grids, [step] * len(grids)

    def _read_canvas_grids(
        self, kind: MediaKind, tensors: dict[str, torch.Tensor], runs: list[int]
    ) -> list[tuple[int, int, int]]:
        """Return the grid of each slice of an image or a video of MiniCPM-V 4.7."""
        divisor = self._processor.image_token_divisor if kind == "image" else self._processor.video_token_divisor
        sizes = tensors["target_sizes" if kind == "image" else "target_sizes_videos"] // math.isqrt(divisor)
        grids = [(1, int(rows), int(columns)) for rows, columns in sizes.tolist()]
        if [math.prod(grid) for grid in grids] != runs:
            raise processor_refusal()
        return grids


def _find_runs(text: str, *marks: str) -> list[list[str]]:
    """Return the marks of each part of a text that consists of them."""
    pattern = "|".join(map(re.escape, marks))
    return [re.findall(pattern, run[0]) for run in re.finditer(f"(?:{pattern})+", text)]


def _number_placeholders(text: str, marks: list[str]) -> torch.Tensor:
    """Return the numbers of the marks in a text among ``marks``, int64 [embeddings]."""
    return torch.tensor([marks.index(mark) for run in _find_runs(text, *marks) for mark in run])


def _is_numeric(value: Any) -> bool:
    if isinstance(value, torch.Tensor | np.ndarray):
        return True
    return isinstance(value, Sequence) and bool(value) and all(isinstance(number, int | float) for number in value)
