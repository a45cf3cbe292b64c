"""llama.cpp's projector files (``mmproj-*.gguf``): the encoder of pictures of a language model in another GGUF file.

A row of ``PROJECTORS`` makes one readable. It gives the config.json of the whole model, that of its processor, and the
names of the encoder's tensors in Hugging Face format. Metadata and tensors are those of llama.cpp's converter (its
class MmprojModel). What they leave out has the values of the published models.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from parley.gguf.architecture import shortest_number
from parley.gguf.header import GgufError, GgufModel, GgufTensor
from parley.gguf.vocabulary import CONTROL

BLOCK_TENSOR = re.compile(r"v\.blk\.(\d{1,5})\.([a-z_0-9]+)\.(weight|bias)")
DEEP_TENSOR = re.compile(r"v\.deepstack\.(\d{1,5})\.(norm|fc1|fc2)\.(weight|bias)")
PATCH_PARTS = ("v.patch_embd.weight", "v.patch_embd.weight.1")  # of a picture's patch, and of the frame that follows
UNUSED_TOKEN = re.compile(r"<unused\d+>")
WINDOW_SIZE = 112  # pixels in rows and columns, in Qwen2.5-VL
MERGE_SIZE = 2  # patches per embedding in rows and columns
GEMMA_SCALE = 4  # likewise, in Gemma 3
HEAD_PARTS = 4  # of heads in Qwen's encoders: pairs of numbers that rotate by row, and by column
GEMMA_MARKS = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
QWEN_MARKS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}
# The fewest and the most pixels of a picture, as published
QWEN2_PIXELS, QWEN3_PIXELS = (3136, 12845056), (65536, 16777216)
QWEN3_VIDEO_PIXELS = (4096, 25165824)


class WholeModel(NamedTuple):
    """The type and the class of a model in config.json, and the type of the language model within it."""

    model_type: str
    class_name: str
    text_type: str


@dataclass(frozen=True)
class Projector:
    """A kind of projector file. ``wholes``: the models that it completes, by the language model's type.

    ``names``: of tensors, without their endings or whole; ``blocks`` and ``block_names``: of those in the encoder's
    blocks. ``marks``: the texts of special tokens, by the attribute of Transformers' tokenizer. ``ids``: the members of
    config.json with their ids. ``read_vision``: returns further members of config.json. ``read_processor``: returns the
    processor_config.json. ``norms``: tensors that llama.cpp's converter adds 1 to.
    """

    wholes: dict[str, WholeModel]
    names: dict[str, str]
    blocks: str
    block_names: dict[str, str]
    marks: dict[str, str]
    ids: dict[str, str]
    read_vision: Callable[[ProjectorFile], dict[str, Any]]
    read_processor: Callable[[ProjectorFile], dict[str, Any]]
    norms: tuple[str, ...] = ()


class ProjectorTensor(NamedTuple):
    """A tensor in Hugging Face format. ``parts``: those in the file that it consists of: one, or the two halves of
    patches (``is_patch``), or queries, keys and values. ``offset``: what was added to its numbers."""

    parts: tuple[GgufTensor, ...]
    is_patch: bool = False
    offset: float = 0.0


@dataclass(frozen=True)
class ProjectorFile:
    """A file's header, and checked readers of its metadata. They raise GgufError."""

    model: GgufModel

    @property
    def name(self) -> str:
        """The file's name."""
        return self.model.paths[0].name

    def field(self, key: str) -> Any:
        """Return what the metadata say of the encoder of pictures, None if nothing."""
        return self.model.metadata.get("clip.vision." + key)

    def count(self, key: str, default: int | None = None) -> int:
        """Return a positive number of things."""
        value = self.field(key)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            raise GgufError(
                f"{self.name} gives clip.vision.{key} as {reprlib.repr(value)}, so the encoder's shape is unknown"
            )
        return value

    def positive_number(self, key: str, default: float) -> float:
        """Return a number above 0, such as an eps."""
        value = self.field(key)
        value = default if value is None else value
        if not isinstance(value, float) or not 0 < value < math.inf:
            raise GgufError(f"{self.name} gives clip.vision.{key} as {reprlib.repr(value)}; it is a positive number")
        return float(shortest_number(value))

    def colours(self, key: str, *, is_divisor: bool = False) -> list[float]:
        """Return a number for each of the three colours."""
        value = self.field(key)
        if (
            not isinstance(value, list)
            or len(value) != 3
            or not all(isinstance(each, float) and math.isfinite(each) for each in value)
            or (is_divisor and min(value) <= 0)
        ):
            kind = "positive numbers" if is_divisor else "numbers"
            raise GgufError(f"{self.name} gives clip.vision.{key} as {reprlib.repr(value)}; it is three {kind}")
        return [shortest_number(each) for each in value]

    def block_count(self) -> int:
        """Return the number of the encoder's blocks, of which the file has the tensors."""
        stated = self.count("block_count")
        found = len({match[1] for name in self.model.tensors if (match := BLOCK_TENSOR.fullmatch(name))})
        if stated != found:
            raise GgufError(f"{self.name} gives clip.vision.block_count as {stated}, but has the tensors of {found}")
        return stated

    def head_count(self, unit: int = 1) -> int:
        """Return the number of heads, each of a multiple of ``unit`` numbers."""
        heads, width = self.count("attention.head_count"), self.count("embedding_length")
        if width % (heads * unit):
            raise GgufError(
                f"{self.name} gives clip.vision.attention.head_count as {heads}; {width} numbers are not so many heads"
                + (f" of a multiple of {unit}" if unit > 1 else "")
            )
        return heads

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        if name not in self.model.tensors:
            raise GgufError(f"{self.name} has no tensor {name}")
        return self.model.tensors[name].shape

    def pixels(self, default: tuple[int, int]) -> dict[str, int]:
        """Return the fewest and the most pixels of a picture, as processors name them."""
        fewest, most = self.count("image_min_pixels", default[0]), self.count("image_max_pixels", default[1])
        if fewest > most:
            raise GgufError(
                f"{self.name} gives clip.vision.image_min_pixels as {fewest}; image_max_pixels is {most} only"
            )
        return {"shortest_edge": fewest, "longest_edge": most}

    def colour_scale(self) -> dict[str, list[float]]:
        """Return what a processor subtracts from colours and divides them by."""
        return {"image_mean": self.colours("image_mean"), "image_std": self.colours("image_std", is_divisor=True)}


def _gemma_side(file: ProjectorFile) -> int:
    """Return how many embeddings are in a row of a picture. Raises GgufError."""
    patches = file.count("image_size") // file.count("patch_size")
    scale = file.count("projector.scale_factor", GEMMA_SCALE)
    if not patches or patches % scale:
        raise GgufError(f"{file.name} makes an embedding of {scale} patches in a row, but has {patches}")
    return patches // scale


def _gemma_3_vision(file: ProjectorFile) -> dict[str, Any]:
    return {
        "mm_tokens_per_image": _gemma_side(file) ** 2,
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": file.count("embedding_length"),
            "intermediate_size": file.count("feed_forward_length"),
            "num_hidden_layers": file.block_count(),
            "num_attention_heads": file.head_count(),
            "image_size": file.count("image_size"),
            "patch_size": file.count("patch_size"),
            "layer_norm_eps": file.positive_number("attention.layer_norm_epsilon", 1e-6),
            "vision_use_head": False,
        },
    }


def _gemma_3_processor(file: ProjectorFile) -> dict[str, Any]:
    size = file.count("image_size")
    image = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": size, "width": size}}
    return {
        "processor_class": "Gemma3Processor",
        "image_seq_length": _gemma_side(file) ** 2,
        "image_processor": image | file.colour_scale(),
    }


def _qwen_vision(file: ProjectorFile, **members: Any) -> dict[str, Any]:
    """Return the config of an encoder of Qwen's with members that the generations share."""
    merge = file.count("spatial_merge_size", MERGE_SIZE)
    config = {
        "depth": file.block_count(),
        "num_heads": file.head_count(HEAD_PARTS),
        "patch_size": file.count("patch_size"),
        "spatial_merge_size": merge,
        "temporal_patch_size": len(PATCH_PARTS),
    }
    return {"vision_config": config | members}


def _qwen_2_vision(file: ProjectorFile) -> dict[str, Any]:
    size = file.count("embedding_length")
    # Files give a wrong feed_forward_length, or 0, and the early ones give the two layers each other's names
    ratio, rest = divmod(max(file.shape("v.blk.0.ffn_up.weight")), size)
    if rest:
        raise GgufError(f"{file.name} has MLPs that are no multiple of {size} wide")
    return _qwen_vision(file, embed_dim=size, hidden_size=file.shape("mm.2.weight")[0], mlp_ratio=ratio)


def _qwen_2_5_vision(file: ProjectorFile) -> dict[str, Any]:
    depth, pattern = file.block_count(), file.count("n_wa_pattern")
    window = file.count("window_size", WINDOW_SIZE)
    cell = file.count("patch_size") * file.count("spatial_merge_size", MERGE_SIZE)
    if window < cell:
        raise GgufError(f"{file.name} gives clip.vision.window_size as {window}; it is {cell} pixels or more")
    return _qwen_vision(
        file,
        hidden_size=file.count("embedding_length"),
        intermediate_size=file.count("feed_forward_length"),
        out_hidden_size=file.shape("mm.2.weight")[0],
        window_size=window,
        fullatt_block_indexes=list(range(pattern - 1, depth, pattern)),
        tokens_per_second=2,
    )


def _qwen_3_vision(file: ProjectorFile) -> dict[str, Any]:
    positions = file.shape("v.position_embd.weight")[0]
    if math.isqrt(positions) ** 2 != positions:
        raise GgufError(f"{file.name} has {positions} positions in v.position_embd.weight, which make no square")
    return _qwen_vision(
        file,
        hidden_size=file.count("embedding_length"),
        intermediate_size=file.count("feed_forward_length"),
        out_hidden_size=file.shape("mm.2.weight")[0],
        num_position_embeddings=positions,
        deepstack_visual_indexes=_deep_layers(file),
    )


def _deep_layers(file: ProjectorFile) -> list[int]:
    """Return the blocks whose output the language model gets besides the last one's. Raises GgufError."""
    marked = file.field("is_deepstack_layers")
    if marked is None:
        return []
    blocks = file.count("block_count")
    if not isinstance(marked, list) or len(marked) != blocks or not all(isinstance(each, bool) for each in marked):
        raise GgufError(
            f"{file.name} gives clip.vision.is_deepstack_layers as {reprlib.repr(marked)}; it is true or false "
            f"for each of {blocks} blocks"
        )
    return [layer for layer, is_deep in enumerate(marked) if is_deep]


def _qwen_processor(name: str, file: ProjectorFile) -> dict[str, Any]:
    is_third = name == "Qwen3VL"
    sizes = {
        "patch_size": file.count("patch_size"),
        "merge_size": file.count("spatial_merge_size", MERGE_SIZE),
        "temporal_patch_size": len(PATCH_PARTS),
        **file.colour_scale(),
    }
    pixels = file.pixels(QWEN3_PIXELS if is_third else QWEN2_PIXELS)
    fewest, most = QWEN3_VIDEO_PIXELS
    return {
        "processor_class": f"{name}Processor",
        "image_processor": {"image_processor_type": "Qwen2VLImageProcessor", "size": pixels, **sizes},
        "video_processor": {
            "video_processor_type": "Qwen3VLVideoProcessor" if is_third else "Qwen2VLVideoProcessor",
            "size": {"shortest_edge": fewest, "longest_edge": most} if is_third else pixels,
            **sizes,
        },
    }


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
QWEN_BLOCK_NAMES = {
    "ln1": "norm1",
    "ln2": "norm2",
    "attn_q": "attn.qkv",
    "attn_k": "attn.qkv",
    "attn_v": "attn.qkv",
    "attn_out": "attn.proj",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
GEMMA_3 = Projector(
    {"gemma3_text": WholeModel("gemma3", "Gemma3ForConditionalGeneration", "gemma3_text")},
    {
        "v.patch_embd": "vision_tower.embeddings.patch_embedding",
        "v.position_embd": "vision_tower.embeddings.position_embedding",
        "v.post_ln": "vision_tower.post_layernorm",
        "mm.input_projection.weight": "multi_modal_projector.mm_input_projection_weight",
        "mm.soft_emb_norm": "multi_modal_projector.mm_soft_emb_norm",
    },
    "vision_tower.encoder.layers.",
    SIGLIP_BLOCK_NAMES,
    GEMMA_MARKS,
    {"image_token_index": "image_token", "boi_token_index": "boi_token", "eoi_token_index": "eoi_token"},
    _gemma_3_vision,
    _gemma_3_processor,
    norms=("mm.soft_emb_norm.weight",),
)
QWEN_2_VL = Projector(
    {"qwen2_vl_text": WholeModel("qwen2_vl", "Qwen2VLForConditionalGeneration", "qwen2_vl_text")},
    {
        "v.patch_embd": "model.visual.patch_embed.proj",
        "v.post_ln": "model.visual.merger.ln_q",
        "mm.0": "model.visual.merger.mlp.0",
        "mm.2": "model.visual.merger.mlp.2",
    },
    "model.visual.blocks.",
    QWEN_BLOCK_NAMES,
    QWEN_MARKS,
    {f"{mark}_id": mark for mark in QWEN_MARKS},
    _qwen_2_vision,
    partial(_qwen_processor, "Qwen2VL"),
)
QWEN_2_5_VL = replace(
    QWEN_2_VL,
    wholes={"qwen2_vl_text": WholeModel("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl_text")},
    block_names=QWEN_BLOCK_NAMES | {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"},
    read_vision=_qwen_2_5_vision,
    read_processor=partial(_qwen_processor, "Qwen2_5_VL"),
)
QWEN_3_VL = replace(
    QWEN_2_VL,
    wholes={
        "qwen3_vl_text": WholeModel("qwen3_vl", "Qwen3VLForConditionalGeneration", "qwen3_vl_text"),
        "qwen3_vl_moe_text": WholeModel("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe_text"),
        "qwen3_5_text": WholeModel("qwen3_5", "Qwen3_5ForConditionalGeneration", "qwen3_5_text"),
        "qwen3_5_moe_text": WholeModel("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text"),
    },
    names={
        "v.patch_embd": "model.visual.patch_embed.proj",
        "v.position_embd": "model.visual.pos_embed",
        "v.post_ln": "model.visual.merger.norm",
        "mm.0": "model.visual.merger.linear_fc1",
        "mm.2": "model.visual.merger.linear_fc2",
    },
    block_names=QWEN_BLOCK_NAMES | {"attn_qkv": "attn.qkv", "ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2"},
    read_vision=_qwen_3_vision,
    read_processor=partial(_qwen_processor, "Qwen3VL"),
)
# By the type in the metadata
PROJECTORS = {
    "gemma3": GEMMA_3,
    "qwen2vl_merger": QWEN_2_VL,
    "qwen2.5vl_merger": QWEN_2_5_VL,
    "qwen3vl_merger": QWEN_3_VL,
}


def check_pair(model: GgufModel, config: dict[str, Any]) -> WholeModel:
    """Return what a projector file and a language model with this config.json are together.

    Raises GgufError if they do not belong together.
    """
    file, projector = ProjectorFile(model), find_projector(model)
    if len(model.paths) > 1:
        raise GgufError(f"{file.name} is one of {len(model.paths)} parts; an encoder of pictures is read from one file")
    whole = projector.wholes.get(config["model_type"])
    if whole is None:
        known = " or ".join(projector.wholes)
        raise GgufError(f"{file.name} is the encoder of a model of the type {known}, and not of {config['model_type']}")
    if (size := file.count("projection_dim", config["hidden_size"])) != config["hidden_size"]:
        raise GgufError(f"{file.name} makes embeddings of {size} numbers, but the model's have {config['hidden_size']}")
    return whole


def whole_config(model: GgufModel, config: dict[str, Any], tokens: list[str]) -> dict[str, Any]:
    """Return the config.json of a language model with the projector of a file. ``config``: the language model's.
    ``tokens``: the vocabulary, with the marks. Raises GgufError if they do not belong together."""
    whole, projector = check_pair(model, config), find_projector(model)
    shared = {name: config[name] for name in ("dtype", "quantization_config", "tie_word_embeddings")}
    return {
        "architectures": [whole.class_name],
        "model_type": whole.model_type,
        "text_config": config | {"model_type": whole.text_type},
        **shared,
        **{member: tokens.index(projector.marks[mark]) for member, mark in projector.ids.items()},
        **projector.read_vision(ProjectorFile(model)),
    }


def processor_config(model: GgufModel) -> dict[str, Any]:
    """Return the processor_config.json of a projector file. Raises GgufError."""
    return find_projector(model).read_processor(ProjectorFile(model))


def add_marks(model: GgufModel, metadata: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a language model's metadata with the special tokens that stand for pictures. ``name``: of its file.

    llama.cpp needs no token where embeddings go, so Gemma's files lack the one that their model has for it, after the
    last row of the embedding. One of the tokens that are not used gets its text. Raises GgufError.
    """
    tokens, kinds = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if not isinstance(tokens, list) or not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise GgufError(f"{name} has no kinds of tokens, so those of pictures are not known")
    tokens, kinds = list(tokens), list(kinds)
    for mark in find_projector(model).marks.values():
        if mark not in tokens:
            free = [number for number, token in enumerate(tokens) if UNUSED_TOKEN.fullmatch(str(token))]
            if not free:
                raise GgufError(f"{name} has no token {mark}, which stands for a picture")
            tokens[free[-1]] = mark
        kinds[tokens.index(mark)] = CONTROL
    return metadata | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}


def find_projector(model: GgufModel) -> Projector:
    """Return the kind of a projector file. Raises GgufError if it is none that is read."""
    name = model.paths[0].name
    if "mmproj" not in (model.metadata.get("general.type"), model.metadata.get("general.architecture")) and (
        model.metadata.get("general.architecture") != "clip"
    ):
        raise GgufError(f"{name} is no encoder of pictures")
    kind = model.metadata.get("clip.vision.projector_type") or model.metadata.get("clip.projector_type")
    if not isinstance(kind, str) or kind not in PROJECTORS:
        known = ", ".join(PROJECTORS)
        raise GgufError(f"{name} is an encoder of the kind {str(kind)[:100]}, which is not read; {known} are")
    return PROJECTORS[kind]


def projector_tensors(model: GgufModel) -> dict[str, ProjectorTensor]:
    """Return the tensors of a projector file by their names in Hugging Face format.

    Raises GgufError if the file has a type or a tensor that is not known here.
    """
    projector, deep = find_projector(model), _deep_layers(ProjectorFile(model))
    names = projector.block_names
    if _has_swapped_layers(model):
        names = names | {"ffn_up": names["ffn_down"], "ffn_down": names["ffn_up"]}
    parts: dict[str, dict[str, GgufTensor]] = {}
    for tensor in model.tensors.values():
        target = _tensor_name(projector, names, tensor.name, deep)
        if target is None:
            raise GgufError(
                f"{model.paths[0].name} has the tensor {tensor.name[:100]}, which its kind does not have here"
            )
        parts.setdefault(target, {})[tensor.name] = tensor
    result = {}
    for target, tensors in parts.items():
        order = sorted(tensors, key=lambda name: ("qkv".find(name.partition(".attn_")[2][:1]), name))
        is_patch = len(tensors) > 1 and PATCH_PARTS[0] in tensors
        offset = float(next(iter(tensors)) in projector.norms)
        result[target] = ProjectorTensor(tuple(tensors[name] for name in order), is_patch, offset)
    return result


def _has_swapped_layers(model: GgufModel) -> bool:
    """Whether the two layers of MLPs have each other's names, as in files of early converters."""
    size = model.metadata.get("clip.vision.embedding_length")
    up, down = (model.tensors.get(f"v.blk.0.ffn_{name}.weight") for name in ("up", "down"))
    return up is not None and down is not None and up.shape[0] == size == down.shape[-1] != up.shape[-1]


def _tensor_name(projector: Projector, block_names: dict[str, str], name: str, deep: list[int]) -> str | None:
    """Return the name in Hugging Face format, None for an unknown one. ``deep``: the blocks with mergers."""
    stem, _, ending = name.rpartition(".")
    if name in projector.names:
        return projector.names[name]
    if name in PATCH_PARTS:
        return projector.names["v.patch_embd"] + ".weight"
    if stem in projector.names:
        return f"{projector.names[stem]}.{ending}"
    if (match := BLOCK_TENSOR.fullmatch(name)) and match[2] in block_names:
        return f"{projector.blocks}{int(match[1])}.{block_names[match[2]]}.{match[3]}"
    if (match := DEEP_TENSOR.fullmatch(name)) and int(match[1]) in deep:
        part = match[2].replace("fc", "linear_fc")
        return f"model.visual.deepstack_merger_list.{deep.index(int(match[1]))}.{part}.{match[3]}"
    return None
