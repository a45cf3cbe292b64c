"""One folder of the zoo: a small random checkpoint as somebody publishes it, and what happens when it is served."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.tiny_models import BASE_CONFIG, make_decoder, write_random_model, write_tokenizer


@dataclass(frozen=True)
class ZooFolder:
    """A checkpoint of the zoo.

    ``model_type``: of its config.json, or what it is instead of a model. ``files``: the form of its files, for the
    docs. ``write(home)`` writes it below an empty folder and returns what is named to serve it and, unless it is
    refused, the folder from which Transformers computes what must come out.

    ``refusal``: a part of the sentence that refuses it; empty if it is served. ``fused``: it runs on parley's own
    decoder; None: that is not part of what is tested. ``is_quantized``: the weights have fewer bits than 16.
    ``has_rounded_activations``: the form asks for them, so numbers are not those of Transformers with these weights.
    """

    name: str
    model_type: str
    files: str
    write: Callable[[Path], tuple[Path, Path]]
    refusal: str = ""
    fused: bool | None = True
    is_quantized: bool = False
    has_rounded_activations: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)


def write_plain(
    folder: Path,
    model_type: str,
    fields: Mapping[str, Any],
    *,
    dtype: str = "bfloat16",
    is_published: bool = True,
    **save: Any,
) -> Path:
    """Write a model in Hugging Face format.

    ``is_published``: with the names of tensors that its makers published, not with those of the newest Transformers.
    ``save``: further options of save_pretrained.
    """
    from transformers import AutoConfig

    config = AutoConfig.for_model(model_type, **(BASE_CONFIG | dict(fields)))
    write_random_model(folder, make_decoder(config), seed=0, dtype=dtype, save_original_format=is_published, **save)
    write_tokenizer(folder)
    return folder


def plain_folder(name: str, model_type: str, fields: Mapping[str, Any], **options: Any) -> ZooFolder:
    """Return a checkpoint of plain numbers. ``options``: of ``write_plain``, and fields of the result."""
    own_names = ZooFolder.__dataclass_fields__
    own = {key: options.pop(key) for key in list(options) if key in own_names}

    def write(home: Path) -> tuple[Path, Path]:
        folder = write_plain(home / "model", model_type, fields, **options)
        return folder, folder

    return ZooFolder(name, model_type, own.pop("files", options.get("dtype", "bfloat16")), write, **own)
