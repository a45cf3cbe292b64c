"""Turns sound into the features of Voxtral, whose processor in Transformers reads it with mistral-common only.

A clip is padded to whole windows of 30 seconds (github.com/mistralai/mistral-common, ``AudioConfig``), and each window
has the same number of embeddings. The rest is as in ``VoxtralProcessor._retrieve_input_features``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

WINDOW_EMBEDDINGS = 375  # of 30 seconds; each stands for 80 milliseconds


class VoxtralProcessor:
    """The part of a processor of Transformers that ``ItemProcessor`` uses. ``placeholder_id``: of the token that each
    embedding replaces. Raises OSError or ValueError if the folder's files cannot be loaded."""

    def __init__(self, folder: Path, placeholder_id: int):
        from transformers import AutoFeatureExtractor, PreTrainedTokenizerFast

        self.tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
        self.feature_extractor: Any = AutoFeatureExtractor.from_pretrained(folder, local_files_only=True)
        self.audio_token = str(self.tokenizer.convert_ids_to_tokens(placeholder_id))

    def __call__(
        self,
        *,
        text: list[str],
        audio: list[NDArray[np.float32]],
        sampling_rate: int,
        return_tensors: str,
        return_text_replacement_offsets: bool,
    ) -> dict[str, Any]:
        """Return the features [windows, mel bins, frames] of one clip, and the text that stands for it."""
        extractor = self.feature_extractor
        features = extractor(
            audio,
            sampling_rate=sampling_rate,
            padding=True,
            truncation=False,
            pad_to_multiple_of=extractor.n_samples,
            return_tensors=return_tensors,
        )["input_features"]
        windows = features.reshape(extractor.feature_size, -1, extractor.nb_max_frames).transpose(0, 1)
        replacement = self.audio_token * (WINDOW_EMBEDDINGS * len(windows))
        return {"input_features": windows, "text_replacement_offsets": [[{"replacement": replacement}]]}
