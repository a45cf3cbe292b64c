"""The LoRA adapters in a model's own folder that its prompts with media need.

Phi-4-multimodal is published with two: one for prompts with images, one for prompts with audio. Granite Speech 3 has
one for audio, next to the model's own files. Their language models alone answer texts, and were not trained to read
media.
"""

from __future__ import annotations

import json
from pathlib import Path

from parley.types import MediaKind

CONFIG_FILE = "adapter_config.json"
MAX_LORA_RANK = 512
# The folders of adapters within that of a model, by its type. "": the model's own.
ADAPTER_FOLDERS: dict[object, dict[MediaKind, str]] = {
    "phi4_multimodal": {"image": "vision-lora", "audio": "speech-lora"},
    "granite_speech": {"audio": ""},
    "granite_speech_plus": {"audio": ""},
}


def find_media_adapters(folder: Path) -> dict[MediaKind, Path]:
    """Return the folders of the adapters that the model in ``folder`` has for its media, by kind."""
    try:
        model_type = json.loads((folder / "config.json").read_bytes())["model_type"]
        places = ADAPTER_FOLDERS.get(model_type, {})
    except (OSError, ValueError, KeyError, TypeError):
        return {}  # loading the model reports the error
    return {kind: folder / name for kind, name in places.items() if (folder / name / CONFIG_FILE).is_file()}


def adapter_rank(folder: Path) -> int:
    """Return the rank that an adapter's config states, at most MAX_LORA_RANK; 0 if it states none."""
    try:
        rank = json.loads((folder / CONFIG_FILE).read_bytes())["r"]
    except (OSError, ValueError, KeyError, TypeError):
        return 0  # loading the adapter reports the error
    return min(rank, MAX_LORA_RANK) if type(rank) is int else 0
