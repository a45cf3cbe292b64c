"""``parley show``: describes a model on this machine from its files, without loading it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from parley.settings.option_kinds import switch_kind, text_kind
from parley.settings.options import Option, ResolvedOptions

USAGE = """\
usage: parley show [MODEL] [options]

Describes a model on this machine: its architecture, parameters, number types, context length and files."""

OPTIONS = [
    Option(
        "model", text_kind("MODEL"), "Folder, GGUF file or name on the hub.", unset_text="the built-in model",
        positional=True,
    ),
    Option("json", switch_kind(), "Print JSON.", False),
]  # fmt: skip


def run_command(config: ResolvedOptions) -> int:
    """Print the description. Return 1 if the model is not on this machine."""
    from parley import hub

    name = config["model"] or hub.BUILT_IN
    try:
        folder = hub.find_model(config["model"])
        if folder is None:
            raise hub.ModelMissing(f"{name} is not on this machine; `parley pull {name}` downloads it.")
        hub.check_model_folder(folder, name)
    except hub.ModelMissing as error:
        print(f"parley: {error}", file=sys.stderr)
        return 1
    facts = describe_folder(name, folder)
    if config["json"]:
        print(json.dumps(facts))
        return 0
    for key, value in facts.items():
        if value not in (None, "", []):
            print(f"{key:<14}{', '.join(map(str, value)) if isinstance(value, list) else value}")
    return 0


def describe_folder(name: str, folder: Path) -> dict[str, Any]:
    """Return the facts about a model's folder, by their names."""
    from parley.hub.cached_models import count_parameters, weight_files
    from parley.hub.transfer import format_bytes

    content = json.loads((folder / "config.json").read_text("utf-8"))
    text = content.get("text_config") or content
    quantization = content.get("quantization_config") or {}
    counts = count_parameters(folder)
    files = weight_files(folder)
    heads = [f"{key[:-7]} ({value['model_type']})" for key, value in content.items() if _is_encoder(key, value)]
    return {
        "name": name,
        "folder": str(folder),
        "architecture": (content.get("architectures") or [content.get("model_type")])[0],
        "parameters": _format_count(sum(counts.values())) if counts else None,
        "numbers": [f"{_format_count(count)} {kind}" for kind, count in sorted(counts.items())],
        "quantized": quantization.get("quant_method"),
        "context": text.get("max_position_embeddings"),
        "vocabulary": text.get("vocab_size"),
        "layers": text.get("num_hidden_layers"),
        "reads": ["text", *heads],
        "chat template": "yes" if _has_template(folder) else "no",
        "files": f"{len(files)} with weights, {format_bytes(sum(file.stat().st_size for file in files))}",
    }


def _is_encoder(key: str, value: object) -> bool:
    """Whether a member of config.json describes an image or audio encoder."""
    return key in ("vision_config", "audio_config") and isinstance(value, dict) and "model_type" in value


def _has_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    try:
        return bool(json.loads((folder / "tokenizer_config.json").read_text("utf-8")).get("chat_template"))
    except (OSError, ValueError, AttributeError):
        return False


def _format_count(count: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)
