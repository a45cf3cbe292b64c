"""The audio encoder of Granite Speech in projector files: a conformer, and a Q-Former that makes its embeddings.

llama.cpp's converter has computed the batch norms of convolutions, whose means and variances files leave out.
"""

from __future__ import annotations

import re
import reprlib
from dataclasses import replace
from typing import Any

from parley.gguf.header import GgufError
from parley.gguf.projectors.projector import Filled, Projector, TensorLayout, WholeModel
from parley.gguf.projectors.projector_file import ProjectorFile

BLOCKS = "encoder.layers."
FRAMES = 2  # of the spectrogram, which one row of the encoder's input has
BATCH_NORM_EPS = 1e-5  # torch's default
WINDOW, DOWNSAMPLE_RATE = 15, 5  # rows that are projected together, and rows for each embedding, as published
QUERY_BLOCK = re.compile(r"a\.proj_blk\.(\d{1,5})\.ffn_up\.weight")
FIRST_CROSS_KEYS = "a.proj_blk.0.cross_attn_k.weight"


def _ratio(file: ProjectorFile, name: str) -> int:
    """Return how many times as wide as the encoder's states the rows of a tensor are. Raises GgufError."""
    rows, width = file.tensor_shape(name)[0], file.read_count("embedding_length")
    if not rows or rows % width:
        raise GgufError(f"{file.name} has {rows} rows in {name}, which are no multiple of {width}")
    return rows // width


def _joined_layers(file: ProjectorFile) -> list[int]:
    """Return the blocks whose output the Q-Former gets besides the last one's; 0 stands for the first one's input.
    Raises GgufError."""
    layers, blocks = file.read_field("feature_layer"), file.block_count()
    layers = [] if layers is None else layers
    if not isinstance(layers, list) or not all(type(layer) is int and 0 <= layer < blocks for layer in layers):
        raise GgufError(
            f"{file.name} gives {file.prefix}feature_layer as {reprlib.repr(layers)}; it is numbers of {blocks} blocks"
        )
    return layers


def _encoder_config(file: ProjectorFile) -> dict[str, Any]:
    heads = file.head_count()
    sizes = {
        "input_dim": file.read_count("num_mel_bins"),
        "num_layers": file.block_count(),
        "hidden_dim": file.read_count("embedding_length"),
        "feedforward_mult": _ratio(file, "a.blk.0.ffn_up.weight"),
        "num_heads": heads,
        "dim_head": file.tensor_shape("a.blk.0.attn_q.weight")[0] // heads,
        "output_dim": file.tensor_shape("a.enc_ctc_out.weight")[0],
        "context_size": file.read_count("chunk_size"),
        "max_pos_emb": file.read_count("max_pos_emb"),
        "conv_kernel_size": file.read_count("conv_kernel_size"),
        "conv_expansion_factor": _ratio(file, "a.blk.0.conv_norm.weight"),
    }
    if sizes["context_size"] > sizes["max_pos_emb"]:
        raise GgufError(
            f"{file.name} gives {file.prefix}chunk_size as {sizes['context_size']}; max_pos_emb is "
            f"{sizes['max_pos_emb']} only"
        )
    return sizes


def _projector_config(file: ProjectorFile) -> dict[str, Any]:
    width, heads = file.tensor_shape("a.proj_query")[-1], file.read_count("projector.head_count")
    if width % heads:
        raise GgufError(
            f"{file.name} gives {file.prefix}projector.head_count as {heads}; {width} numbers are not so many heads"
        )
    return {
        "model_type": "blip_2_qformer",
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_hidden_layers": sum(QUERY_BLOCK.fullmatch(name) is not None for name in file.model.tensors),
        "intermediate_size": file.tensor_shape("a.proj_blk.0.ffn_up.weight")[0],
        "encoder_hidden_size": file.tensor_shape(FIRST_CROSS_KEYS)[-1],
        "cross_attention_frequency": 1,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "use_qformer_text_input": False,
    }


def _window(file: ProjectorFile) -> dict[str, int]:
    """Return how many rows are projected together, and how many of them each embedding stands for. Raises
    GgufError."""
    rows = file.read_count("projector.window_size", WINDOW)
    rate = file.read_count("projector.downsample_rate", DOWNSAMPLE_RATE)
    if rows % rate:
        raise GgufError(
            f"{file.name} gives {file.prefix}projector.window_size as {rows}, no multiple of downsample_rate, {rate}"
        )
    return {"window_size": rows, "downsample_rate": rate}


def _granite_encoder(file: ProjectorFile) -> dict[str, Any]:
    layers = _joined_layers(file)
    return {
        "encoder_config": _encoder_config(file) | ({"cat_hidden_layers": layers} if layers else {}),
        "projector_config": _projector_config(file),
        "has_lora_adapter": False,  # adapters are files of their own
        **_window(file),
    }


def _granite_processor(file: ProjectorFile) -> dict[str, Any]:
    window = _window(file)
    return {
        "processor_class": "GraniteSpeechProcessor",
        "audio_processor": {
            "feature_extractor_type": "GraniteSpeechFeatureExtractor",
            "sampling_rate": 16_000,
            "n_mels": file.read_count("num_mel_bins") // FRAMES,
            "projector_window_size": window["window_size"],
            "projector_downsample_rate": window["downsample_rate"],
        },
    }


def _batch_norms(file: ProjectorFile) -> dict[str, Filled]:
    """Return means and variances that change nothing."""
    shape = file.tensor_shape("a.blk.0.conv_norm.weight")
    filled: dict[str, Filled] = {}
    for layer in range(file.block_count()):
        norm = f"{BLOCKS}{layer}.conv.batch_norm."
        filled |= {f"{norm}running_mean": Filled(shape), f"{norm}running_var": Filled(shape, 1 - BATCH_NORM_EPS)}
    return filled


def granite_variant(file: ProjectorFile) -> Projector | None:
    """Return the row of Granite Speech Plus for files whose Q-Former reads the output of further blocks."""
    return GRANITE_SPEECH_PLUS if file.read_field("feature_layer") else None


QUERY_BLOCK_NAMES = {
    **{
        f"{kind}_attn_{letter}": f"{module}.attention.{name}"
        for kind, module in (("self", "attention"), ("cross", "crossattention"))
        for letter, name in (("q", "query"), ("k", "key"), ("v", "value"))
    },
    "self_attn_out": "attention.output.dense",
    "self_attn_norm": "attention.output.LayerNorm",
    "cross_attn_out": "crossattention.output.dense",
    "cross_attn_norm": "crossattention.output.LayerNorm",
    "ffn_up": "intermediate_query.dense",
    "ffn_down": "output_query.dense",
    "ffn_norm": "output_query.LayerNorm",
}
GRANITE_SPEECH = Projector(
    {"granite": WholeModel("granite_speech", "GraniteSpeechForConditionalGeneration", "granite")},
    {
        "a.input_projection": "encoder.input_linear",
        "a.enc_ctc_out": "encoder.out",
        "a.enc_ctc_out_mid": "encoder.out_mid",
        "a.proj_query": "projector.query",
        "a.proj_norm": "projector.qformer.layernorm",
        "a.proj_linear": "projector.linear",
    },
    BLOCKS,
    {
        "ffn_norm": "ff1.pre_norm",
        "ffn_up": "ff1.up_proj",
        "ffn_down": "ff1.down_proj",
        "ln1": "attn.pre_norm",
        "attn_q": "attn.to_q",
        "attn_k": "attn.to_kv",
        "attn_v": "attn.to_kv",
        "attn_out": "attn.to_out",
        "attn_rel_pos_emb": "attn.rel_pos_emb.weight",
        "norm_conv": "conv.norm",
        "conv_pw1": "conv.up_conv",
        "conv_dw": "conv.depth_conv.conv",
        "conv_norm": "conv.batch_norm",
        "conv_pw2": "conv.down_conv",
        "ffn_norm_1": "ff2.pre_norm",
        "ffn_up_1": "ff2.up_proj",
        "ffn_down_1": "ff2.down_proj",
        "ln2": "post_norm",
    },
    {"audio_token": "<|audio|>"},
    {"audio_token_index": "audio_token"},
    _granite_encoder,
    _granite_processor,
    modality="audio",
    layouts={
        "conv_pw1.weight": TensorLayout(3, (0, 1, None)),
        "conv_pw2.weight": TensorLayout(3, (0, 1, None)),
        "conv_dw.weight": TensorLayout(3, (0, None, 1)),
        "a.proj_query": TensorLayout(3),
    },
    filled=_batch_norms,
    query_blocks="projector.qformer.encoder.layer.",
    query_block_names=QUERY_BLOCK_NAMES,
    variant=granite_variant,
)
GRANITE_SPEECH_PLUS = replace(
    GRANITE_SPEECH,
    whole_models={"granite": WholeModel("granite_speech_plus", "GraniteSpeechPlusForConditionalGeneration", "granite")},
    variant=lambda file: None,
)
