"""The embeddings that a model's encoder makes of an image or a clip, and what the model says of an image."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from support.media_answers import make_image
from support.media_items import encoder_features, media_item

from parley.llm import LLM
from parley.model.checkpoint.files import read_config
from parley.model.load.towers import check_towers, load_towers, plan_towers
from parley.model.media.encoder import TransformersEncoder
from parley.model.media_input.processor import ItemProcessor, load_jobs
from parley.serving.model_facts import describe_name
from parley.types import MediaKind


def encode_media(folder: Path, kind: MediaKind, media: Any) -> tuple[str, list[torch.Tensor]]:
    """Return the text that stands for an image or sound, and its embeddings in float32 with those for further layers.

    ``media``: an image of Pillow, or samples, float32.
    """
    processor = ItemProcessor(folder)
    processed = processor.process_image(media, {}) if kind == "image" else processor.process_audio(media, {})
    towers = plan_towers(folder, read_config(folder), torch.float32, torch.device("cpu"))
    assert towers is not None
    check_towers(towers)
    encoder = TransformersEncoder(lambda: load_towers(towers), torch.float32, torch.device("cpu"))
    described = processor.describe_item(kind, b"", processed)
    with media_item(kind, encoder_features(processed.tensors), described.embedding_count) as item:
        encoded = encoder.encode_item(item, lambda: None)
    return processed.replacement, [encoded.rows, *encoded.deepstack]


def answer_about_image(model: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what a model says of an image, with the log-probabilities. ``model``: a folder or a GGUF file.

    The job of a media process is done here, because the start of one takes seconds of processor time.
    """
    with LLM(str(model), dtype="float32", kv_memory=1 << 26) as llm:
        count = torch.get_num_threads()
        jobs = load_jobs(Path(llm.model.settings.model))
        torch.set_num_threads(count)  # which jobs set to 1, in a process of their own

        async def process_here(source: Any, target: Any, job: Any, tenant: Any) -> Any:
            return await asyncio.to_thread(jobs.process_media, job)

        monkeypatch.setattr(llm.model.media_workers, "process_media", process_here)
        expected_format = "gguf" if model.suffix == ".gguf" else "safetensors"
        assert describe_name(llm.model, llm.model.name).weight_format == expected_format
        message = {"role": "user", "content": "what is this"}
        return llm.chat([message], images=make_image(1), temperature=0, max_tokens=8, logprobs=True).completions
