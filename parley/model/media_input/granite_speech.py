"""Turns sound into the features of Granite Speech, whose processor in Transformers needs the package torchaudio.

Two frames of a mel spectrogram stand side by side in one row. The formulas are those of Transformers'
``GraniteSpeechFeatureExtractor`` and of torchaudio's ``MelSpectrogram`` with its defaults.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from parley.text.tokens.json_files import read_json_object

CONFIG_FILES = ("processor_config.json", "preprocessor_config.json")  # the first one has a section for audio
DYNAMIC_RANGE = 8.0  # powers of ten below the loudest number, at which quieter ones are cut


class GraniteSpeechProcessor:
    """The part of a processor of Transformers that ``ItemProcessor`` uses. ``placeholder_id``: of the token that each
    embedding replaces. Raises OSError or ValueError if the folder's files cannot be loaded."""

    def __init__(self, folder: Path, placeholder_id: int):
        from transformers import PreTrainedTokenizerFast
        from transformers.audio_utils import mel_filter_bank

        self.tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
        self.audio_token = str(self.tokenizer.convert_ids_to_tokens(placeholder_id))
        processor_config, extractor_config = (read_json_object(folder / name) for name in CONFIG_FILES)
        fields = processor_config.get("audio_processor") or extractor_config
        self.sampling_rate = int(fields.get("sampling_rate", 16_000))
        self._fft_size = int(fields.get("n_fft", 512))
        self._hop = int(fields.get("hop_length", 160))
        self._window = torch.hann_window(int(fields.get("win_length", 400)))
        # Rows of the encoder that are projected together, and how many of them each embedding stands for
        self._block = int(fields.get("projector_window_size", 15))
        self._downsample_rate = int(fields.get("projector_downsample_rate", 5))
        filters = mel_filter_bank(
            num_frequency_bins=self._fft_size // 2 + 1,
            num_mel_filters=int(fields.get("n_mels") or fields.get("feature_size") or 80),
            min_frequency=0.0,
            max_frequency=self.sampling_rate / 2,
            sampling_rate=self.sampling_rate,
            norm=None,
            mel_scale="htk",
        )
        self._filters = torch.from_numpy(filters).float()  # [frequencies, mel bins]

    @property
    def feature_extractor(self) -> GraniteSpeechProcessor:
        """The part that knows the sampling rate, as a processor of Transformers has it."""
        return self

    def __call__(
        self,
        *,
        text: list[str],
        audio: list[NDArray[np.float32]],
        sampling_rate: int,
        return_tensors: str,
        return_text_replacement_offsets: bool,
    ) -> dict[str, Any]:
        """Return the features [1, rows, 2 x mel bins] of one clip, and the text that stands for it.

        Raises RuntimeError for a clip that is shorter than half a frame.
        """
        features = self._compute_features(torch.from_numpy(audio[0]))
        embedding_count = math.ceil(len(features) / self._block) * (self._block // self._downsample_rate)
        replacement = self.audio_token * embedding_count
        return {"input_features": features[None], "text_replacement_offsets": [[{"replacement": replacement}]]}

    def _compute_features(self, samples: torch.Tensor) -> torch.Tensor:
        """Return the rows of a clip, float32 [frames // 2, 2 x mel bins]."""
        spectrum = torch.stft(
            samples,
            self._fft_size,
            self._hop,
            len(self._window),
            self._window,
            center=True,
            pad_mode="reflect",
            return_complex=True,
        )
        frames = spectrum.abs().square().T @ self._filters
        logarithms = frames.clamp(min=1e-10).log10()
        logarithms = logarithms.maximum(logarithms.max() - DYNAMIC_RANGE) / 4 + 1
        pairs = len(logarithms) // 2
        return logarithms[: 2 * pairs].reshape(pairs, -1)
