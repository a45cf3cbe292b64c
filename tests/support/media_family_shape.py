"""What a tiny multimodal model of the tests is made of, and the parts that several families have."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from support.tiny_models import BASE_CONFIG

TEXT: dict[str, Any] = BASE_CONFIG | {"intermediate_size": 96, "num_hidden_layers": 3}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
}
CLIP = VISION | {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 7}
SIGLIP = VISION | {"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 7}
GRID_PINPOINTS = [[28, 56], [56, 28], [56, 56]]
LLAVA_SIZES = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}


@dataclass(frozen=True)
class Family:
    """A model type and the smallest config, marks and processor that its published models have.

    ``marks``: special tokens by the tokenizer's attribute. ``tiles``: special tokens without one. ``ids``: fields of
    the config that hold the id of a mark, by the mark's attribute. ``parts``: what the chat template writes for each
    kind of media, which is also the list of kinds. ``processor``: the class and arguments of the processor.
    ``renames``: beginnings of names of tensors that Transformers writes, to those that it reads and publishers write.
    ``seed``: of weights that pass the numeric check in bfloat16 as well, and, for sound, answer with visible text.
    """

    config: dict[str, Any]
    marks: dict[str, str]
    parts: dict[str, str]
    processor: Callable[[Any], Any]
    ids: dict[str, str] = field(default_factory=lambda: {"image_token_id": "image_token"})
    tiles: list[str] = field(default_factory=list)
    renames: dict[str, str] = field(default_factory=dict)
    seed: int = 1
