"""The description of a kind of projector file as data.

A row gives the config.json of the whole model, that of its processor, and the names of the encoder's tensors in Hugging
Face format. Metadata and tensors have the names that llama.cpp's converter gives them (its class MmprojModel and its
subclasses). Values that files leave out are taken from the published models.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from parley.gguf.projectors.projector_file import ProjectorFile


class WholeModel(NamedTuple):
    """The type and the class of a model in config.json, and the type of the language model within it."""

    model_type: str
    class_name: str
    text_type: str


class TensorLayout(NamedTuple):
    """How a tensor's numbers lie in Hugging Face format. ``axes``: the file's axes in their order there, and None for
    an axis of size 1 that the file lacks; none: as in the file. ``rank``: the number of axes there. If the file has
    more axes, the last ones are merged; if it has fewer, axes of size 1 are put in front.
    """

    rank: int
    axes: tuple[int | None, ...] = ()

    @property
    def stored_axes(self) -> tuple[int, ...]:
        """The file's axes in their order in Hugging Face format."""
        return tuple(axis for axis in self.axes if axis is not None)

    def shape_of(self, stored: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the shape in Hugging Face format, None for a stored shape that cannot have it."""
        if self.axes and len(self.stored_axes) != len(stored):
            return None
        shape = tuple(1 if axis is None else stored[axis] for axis in self.axes) or stored
        if self.rank == 0:
            return () if math.prod(shape) == 1 else None
        if len(shape) < self.rank:
            return (1,) * (self.rank - len(shape)) + shape
        dimensions = self.rank - 1
        return (*shape[:dimensions], math.prod(shape[dimensions:]))


class Filled(NamedTuple):
    """A tensor that files leave out, all of whose numbers are ``value``."""

    shape: tuple[int, ...]
    value: float = 0.0


@dataclass(frozen=True)
class Projector:
    """A kind of projector file.

    * ``whole_models``: the models that it completes, by the language model's type.
    * ``names``: Hugging Face names of tensors, by their names in the file, without their endings or whole. ``blocks``,
      ``block_names``: those of tensors in the encoder's blocks.
    * ``marks``: the texts of special tokens, by the attribute of Transformers' tokenizer. ``ids``: the members of
      config.json with their ids. ``stand_ins``: attributes of marks that a vocabulary may lack, and the attributes
      whose marks replace them.
    * ``read_encoder(file)``: returns further members of config.json. ``read_processor(file)``: returns the
      processor_config.json. ``complete_text(config)``: returns further members of the language model's config.
    * ``norms``: tensors that llama.cpp's converter adds 1 to.
    * ``softened``: tensors that it applies softplus to, named as in ``layouts``.
    * ``ordered``: tensors whose last axis is in another order in files, named likewise, and the function that returns
      that order: for each number in Hugging Face format, its place in the file.
    * ``modality``: the encoder's input, "vision" or "audio", as in keys of the metadata.
    * ``variant(file)``: returns another row for a file, or None.
    * ``layouts``: of tensors whose layout differs in files, by their names; those in blocks without their number.
    * ``has_permuted_heads``: the rows of queries and keys are in llama.cpp's order.
    * ``has_split_axes``: of the numbers of a head, the pairs that rotate by column come first, then those by row;
      Hugging Face format alternates them.
    * ``unread``: beginnings of the names of tensors that are not needed.
    * ``filled(file)``: returns the tensors of Hugging Face format that files leave out, because nothing reads them or
      because they change nothing.
    * ``query_blocks``, ``query_block_names``: as ``blocks`` and ``block_names``, of a Q-Former after the encoder.
    * ``audio_encoder``: the row of the audio encoder, in files that also have one of images; only its tensors are
      used.
    * ``deep_names``: names of the mergers of further blocks, where {} is their number; by their names in the file.
    * ``plain_ids``: members of config.json with the ids of tokens of text, by their spelling in the vocabulary.
    * ``last_tensor``: the weight that computes the embeddings, in files whose metadata do not give their width.
    """

    whole_models: dict[str, WholeModel]
    names: dict[str, str]
    blocks: str
    block_names: dict[str, str]
    marks: dict[str, str]
    ids: dict[str, str]
    read_encoder: Callable[[ProjectorFile], dict[str, Any]]
    read_processor: Callable[[ProjectorFile], dict[str, Any]]
    norms: tuple[str, ...] = ()
    softened: tuple[str, ...] = ()
    ordered: dict[str, Callable[[ProjectorFile], list[int]]] = field(default_factory=dict)
    modality: Literal["vision", "audio"] = "vision"
    variant: Callable[[ProjectorFile], Projector | None] = lambda file: None
    layouts: dict[str, TensorLayout] = field(default_factory=dict)
    has_permuted_heads: bool = False
    unread: tuple[str, ...] = ()
    stand_ins: dict[str, str] = field(default_factory=dict)
    complete_text: Callable[[dict[str, Any]], dict[str, Any]] = lambda config: {}
    has_split_axes: bool = False
    filled: Callable[[ProjectorFile], dict[str, Filled]] = lambda file: {}
    query_blocks: str = ""
    query_block_names: dict[str, str] = field(default_factory=dict)
    audio_encoder: Projector | None = None
    deep_names: dict[str, str] = field(default_factory=dict)
    plain_ids: dict[str, str] = field(default_factory=dict)
    last_tensor: str = ""


def same_text(model_type: str, class_name: str, *text_types: str) -> dict[str, WholeModel]:
    """Return the whole models of a type whose language models keep their own types."""
    return {text_type: WholeModel(model_type, class_name, text_type) for text_type in text_types}


# SigLIP's blocks, which many image encoders have
SIGLIP_BLOCK_NAMES = {
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
