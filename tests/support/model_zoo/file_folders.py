"""The zoo's folders whose files are not the usual ones: dtypes, parts, tokenizers, encoders, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from support.model_zoo.zoo_folder import ZooFolder, plain_folder, write_plain
from support.tiny_models import BASE_CONFIG, VOCAB, write_random_model, write_tokenizer

TOKENIZERS = Path(__file__).parents[2] / "data" / "tokenizers"
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
ENCODER_SIZES = BASE_CONFIG | {"num_hidden_layers": 3, "max_position_embeddings": 130, "pad_token_id": 1}
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": ENCODER_SIZES,
    "roberta": ENCODER_SIZES,
    "xlm-roberta": ENCODER_SIZES,
    "camembert": ENCODER_SIZES,
    "mpnet": ENCODER_SIZES,
    "distilbert": {"dim": 64, "hidden_dim": 112, "n_layers": 3, "n_heads": 4, "vocab_size": VOCAB},
    "modernbert": ENCODER_SIZES | {"max_position_embeddings": 128, "local_attention": 12, "cls_token_id": 0,
                                   "sep_token_id": 2},
    "nomic_bert": ENCODER_SIZES | {"max_position_embeddings": 128},
    "deberta-v2": ENCODER_SIZES | {"relative_attention": True, "position_buckets": 16, "share_att_key": True,
                                   "pos_att_type": ["p2c", "c2p"], "norm_rel_ebd": "layer_norm", "conv_kernel_size": 3,
                                   "position_biased_input": False},
    "gte": ENCODER_SIZES | {"max_position_embeddings": 128},
    "electra": ENCODER_SIZES | {"embedding_size": 32},
    "jina_embeddings_v3": ENCODER_SIZES | {"max_position_embeddings": 128},
    "eurobert": ENCODER_SIZES | {"bos_token_id": 0, "eos_token_id": 2, "mask_token_id": 4},
}  # fmt: skip
# Decoders that read in both directions, by their model types and the members that say so.
BOTH_WAYS_DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "EmbeddingGemma": ("gemma3_text", ENCODER_SIZES | {"use_bidirectional_attention": True, "sliding_window": 20}),
    "gte-Qwen2": ("qwen2", ENCODER_SIZES | {"is_causal": False}),
}
SEQUENCE_TO_SEQUENCE: dict[str, dict[str, Any]] = {
    "t5": {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4},
    "bart": {"d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96},
    "pegasus": {"d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96},
}
STATES = "which keep more than keys and values"
# Forms that are refused by name, and their quant_method
UNREAD_METHODS = {
    "EXL2": "exl2", "EXL3": "exl3", "AQLM": "aqlm", "EETQ": "eetq", "HIGGS": "higgs", "Quanto": "quanto",
    "VPTQ": "vptq", "SpQR": "spqr", "FP-Quant": "fp_quant", "SINQ": "sinq", "Four Over Six": "fouroversix",
    "Metal": "metal",
}  # fmt: skip
# What the config says is enough to refuse these
REFUSED_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "nemotron_h with odd latents of experts": (
        {"model_type": "nemotron_h", "moe_latent_size": 63},
        "only parley's own decoder computes them, but its experts read latents of 63 numbers",
    ),
    "recurrent_gemma": ({"model_type": "recurrent_gemma"}, STATES),
    "zamba": ({"model_type": "zamba", "num_hidden_layers": 4, "attn_layer_period": 4, "attn_layer_offset": 2}, STATES),
    "zamba2": (
        {
            "model_type": "zamba2",
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "hybrid"] * 2,
            "n_mamba_heads": 2,
        },
        STATES,
    ),
    **{kind: ({"model_type": kind}, "layers of kind indexed_attention") for kind in ("mistral_large4",)},
    "dots3_note_text": (
        {"model_type": "dots3_note_text", "num_attention_heads": 4, "num_key_value_heads": 4},
        "layers of kind indexed_attention",
    ),
    **{kind: ({"model_type": kind}, STATES) for kind in ("qwen4_exp_text", "inkling_text", "inkling2_text", "zaya")},
    "code of its own": (
        {"model_type": "made_up", "auto_map": {"AutoModelForCausalLM": "modeling_made_up.MadeUp"}},
        "The model needs code of its own, but code from model folders is never run.",
    ),
    "a model of both directions": ({"model_type": "megatron-bert"}, "reads in both directions and writes nothing."),
    "Gemma 2 of both directions": (
        {"model_type": "gemma2", "use_bidirectional_attention": True},
        "use_bidirectional_attention as true reads in both directions",
    ),
    "DBRX of both directions": (
        {"model_type": "dbrx", "is_causal": False},
        "is_causal as false reads in both directions",
    ),
    "unknown type": ({"model_type": "made_up"}, "does not know the model type made_up."),
    "images": ({"model_type": "vit"}, "has no vit model that generates text"),
    "audio": ({"model_type": "wav2vec2"}, "has no wav2vec2 model that generates text"),
    "no type": ({"model_type": None}, "does not name a model_type"),
    "GPTQ 5 bits": (
        {"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 5, "group_size": 32}},
        "quantization_config.bits is 5; only 2 or 3 or 4 or 8",
    ),
    "bitsandbytes int4": (
        {
            "model_type": "llama",
            "quantization_config": {
                "quant_method": "bitsandbytes",
                "load_in_4bit": True,
                "bnb_4bit_quant_type": "int4",
            },
        },
        "quantization_config.bnb_4bit_quant_type is int4; only nf4 and fp4 are supported",
    ),
    "torchao with embeddings": (
        {
            "model_type": "llama",
            "quantization_config": {"quant_method": "torchao", "include_input_output_embeddings": True},
        },
        "quantization_config.include_input_output_embeddings is true; only false is supported",
    ),
    "AWQ for GEMV fast": (
        {
            "model_type": "llama",
            "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
            | {"version": "gemv_fast"},
        },
        "quantization_config.version is gemv_fast; only gemm or gemv is supported",
    ),
    "ModelOpt AWQ": (
        {"model_type": "llama", "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}},
        "quantization_config.quant_algo is NVFP4_AWQ; only FP8",
    ),
    "Quark MXFP6": (
        {
            "model_type": "llama",
            "quantization_config": {
                "quant_method": "quark",
                "global_quant_config": {"weight": {"dtype": "fp6_e3m2", "qscheme": "per_group", "group_size": 32}},
            },
        },
        "quantization_config.global_quant_config.weight has numbers of fp6_e3m2 per_group; only fp8_e4m3 per_tensor",
    ),
    "BitNet before rounding": (
        {
            "model_type": "llama",
            "quantization_config": {
                "quant_method": "bitnet",
                "linear_class": "autobitlinear",
                "quantization_mode": "online",
            },
        },
        "quantization_config.quantization_mode is online; only offline is supported",
    ),
    "AutoRound FP8": (
        {
            "model_type": "llama",
            "quantization_config": {"quant_method": "auto-round", "bits": 8, "group_size": -1, "data_type": "fp"},
        },
        "quantization_config.data_type is fp; only int is supported",
    ),
    "MLX of an unknown mode": (
        {"model_type": "llama", "quantization": {"group_size": 64, "bits": 4, "mode": "nf4"}},
        "quantization.mode is nf4; only affine, mxfp4, mxfp8, nvfp4 are supported.",
    ),
    "AWQ without zero points": (
        {
            "model_type": "llama",
            "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": False},
        },
        "has AWQ weights without zero points (quantization_config.zero_point is false)",
    ),
    **{
        name: (
            {"model_type": "llama", "quantization_config": {"quant_method": method}},
            f"is quantized ({method}), which is not supported; serve the model that it was made of",
        )
        for name, method in UNREAD_METHODS.items()
    },
}
# Files beside or instead of a model's, and the sentence's part. None: the file of the model is missing
FOREIGN_FILES: dict[str, tuple[dict[str, bytes | None], str]] = {
    "LoRA adapter": (
        {"config.json": None, "model.safetensors": None, "adapter_model.safetensors": b"",
         "adapter_config.json": b'{"base_model_name_or_path": "owner/base"}'},
        "it is a LoRA adapter of owner/base; serve that model with --lora NAME=",
    ),
    "Diffusers": ({"config.json": None, "model_index.json": b"{}"}, "a pipeline of Diffusers"),
    "ONNX": ({"model.safetensors": None, "model.onnx": b""}, "ONNX files, which are not read"),
    "ONNX in a folder": ({"model.safetensors": None, "onnx/model_q4.onnx": b""}, "ONNX files, which are not read"),
    "OpenVINO": ({"model.safetensors": None, "openvino_model.xml": b""}, "files of OpenVINO, which are not read"),
    "pickle": ({"model.safetensors": None, "pytorch_model.bin": b""}, "pickle files, which can run code"),
    "TensorFlow": ({"model.safetensors": None, "tf_model.h5": b""}, "files of TensorFlow or Flax"),
    "Flax": ({"model.safetensors": None, "flax_model.msgpack": b""}, "files of TensorFlow or Flax"),
    "Mistral's files": (
        {"config.json": None, "model.safetensors": None, "consolidated.safetensors": b"", "params.json": b"{}"},
        "in the format of their maker (consolidated files)",
    ),
    "Meta's files": (
        {"config.json": None, "model.safetensors": None, "consolidated.00.pth": b"", "params.json": b"{}"},
        "in the format of their maker (consolidated files)",
    ),
    "LFS pointer of weights": ({"model.safetensors": LFS_POINTER}, "its model.safetensors is a pointer of Git LFS"),
    "LFS pointer of the tokenizer": ({"tokenizer.json": LFS_POINTER}, "its tokenizer.json is a pointer of Git LFS"),
    "LFS pointer of the config": ({"config.json": LFS_POINTER}, "its config.json is a pointer of Git LFS"),
    "no weights": ({"model.safetensors": None}, "its folder has no *.safetensors weights"),
    "no config": ({"config.json": None, "model.safetensors": None}, "its folder has no config.json"),
    "no tokenizer": ({"tokenizer.json": None}, "its folder has no tokenizer.json"),
    "no safetensors file": ({"model.safetensors": b"PK\3\4" * 20}, "model.safetensors is not a safetensors file"),
    "empty weights": ({"model.safetensors": b""}, "model.safetensors is too short to be a safetensors file"),
    "config without an object": ({"config.json": b"[]"}, "its config.json does not hold a JSON object"),
    "config cut off": ({"config.json": b'{"model_type": "lla'}, "its config.json is not valid JSON"),
    "a file that is no GGUF": ({"model.safetensors": None, "model.gguf": b"PK\3\4" * 9}, "is not a GGUF file"),
    "a GGUF pointer": ({"model.safetensors": None, "model.gguf": LFS_POINTER}, "pointer to the file; run git lfs pull"),
    "several GGUF files": (
        {"model.safetensors": None, "a-Q4_0.gguf": b"GGUF", "b-Q8_0.gguf": b"GGUF"},
        "its folder has 2 GGUF models; name one of them",
    ),
}  # fmt: skip


def file_folders() -> list[ZooFolder]:
    """Return all of them."""
    folders = [
        plain_folder("llama in float16", "llama", {}, dtype="float16"),
        plain_folder("llama in float32", "llama", {}, dtype="float32"),
        plain_folder("qwen3 in float16", "qwen3", {"head_dim": 32}, dtype="float16"),
        plain_folder("gemma3 in float32", "gemma3_text", {"head_dim": 32, "sliding_window": 33}, dtype="float32"),
        plain_folder("mixtral in float16", "mixtral", {"num_local_experts": 4}, dtype="float16"),
        plain_folder("llama in parts", "llama", {}, files="several safetensors files", max_shard_size="100KB"),
        plain_folder("qwen3_moe in parts", "qwen3_moe",
                     {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
                     files="several safetensors files", max_shard_size="100KB"),
        plain_folder("beam in parts", "beam", {"mlp_layer_types": ["dense"] * 2}, max_shard_size="100KB",
                     files="several safetensors files", fused=False),
    ]  # fmt: skip
    folders += [
        ZooFolder(name, "llama", files, partial(_write_changed, change=change))
        for name, (files, change) in CHANGES.items()
    ]
    folders.append(
        ZooFolder("llama with a head that its config denies", "llama", "safetensors, more tensors", _write_own_head)
    )
    folders.append(
        ZooFolder(
            "refused: body without a head", "llama", "safetensors", partial(_write_changed, change=untie_head), "head"
        )
    )
    folders.append(
        ZooFolder(
            "refused: tokenizer cut off",
            "llama",
            "other files",
            partial(_write_changed, change=cut_tokenizer),
            "tokenizer.json of the model cannot be read",
        )
    )
    folders.append(
        ZooFolder("llama in parts without an index", "llama", "several safetensors files, no index", _write_parts)
    )
    folders.append(
        ZooFolder(
            "refused: parts without one",
            "llama",
            "other files",
            partial(_write_parts, absent=2),
            "weight files are missing, first model-00002-of-",
        )
    )
    encoders = {kind: (kind, fields) for kind, fields in ENCODERS.items()} | BOTH_WAYS_DECODERS
    folders += [
        ZooFolder(name, kind, "safetensors", partial(_write_encoder, kind=kind, fields=fields))
        for name, (kind, fields) in encoders.items()
    ]
    folders += [
        ZooFolder(f"{kind} for sequences", kind, "encoder-decoder", partial(_write_sequence_model, kind=kind), refusal=
                  f"A {kind} model is an encoder-decoder; only decoders can be served.")
        for kind in SEQUENCE_TO_SEQUENCE
    ]  # fmt: skip
    folders += [
        ZooFolder(f"refused: {name}", str(fields["model_type"]), "config", partial(_write_config, fields=fields), why)
        for name, (fields, why) in REFUSED_CONFIGS.items()
    ]
    folders += [
        ZooFolder(f"refused: {name}", "llama", "other files", partial(_write_files, contents=contents), why)
        for name, (contents, why) in FOREIGN_FILES.items()
    ]
    return folders


def _write_changed(home: Path, *, change: Callable[[Path], None]) -> tuple[Path, Path]:
    """Write a model, and a copy with other files that means the same."""
    plain = write_plain(home / "plain", "llama", {"tie_word_embeddings": True})
    changed = shutil.copytree(plain, home / "changed")
    change(changed)
    return changed, plain


def _write_own_head(home: Path) -> tuple[Path, Path]:
    """Write a model with a head of its own, which is also the reference."""
    changed, _ = _write_changed(home, change=add_own_head)
    return changed, changed


def untie_head(folder: Path) -> None:
    """Let the config say that the model has a head, which it has not."""
    drop_prefix(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))


def _change_tensors(folder: Path, rename: Callable[[str], str], **more: Any) -> None:
    from safetensors.torch import load_file, save_file

    tensors = {rename(name): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors | more, folder / "model.safetensors", {"format": "pt"})


def add_own_head(folder: Path) -> None:
    """Add a head that is not the embedding, though the config says that it is."""
    from safetensors.torch import load_file

    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    _change_tensors(folder, str, **{"lm_head.weight": embedding.flip(0).contiguous()})


def drop_prefix(folder: Path) -> None:
    """Save the body alone, as embedding models are. Its head is the embedding."""
    _change_tensors(folder, lambda name: name.removeprefix("model."))


def add_frequencies(folder: Path) -> None:
    """Add the buffers that old checkpoints have."""
    import torch

    names = [f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(2)]
    _change_tensors(folder, str, **{name: torch.ones(8) for name in names})


def add_other_formats(folder: Path) -> None:
    """Add what big repositories have beside the weights that are read."""
    (folder / "pytorch_model.bin").write_bytes(b"")
    (folder / "consolidated.safetensors").write_bytes(b"")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.onnx").write_bytes(b"")
    (folder / "original").mkdir()
    (folder / "original" / "consolidated.00.pth").write_bytes(b"")


def link_files(folder: Path) -> None:
    """Make links of all files, as in the cache of the hub."""
    blobs = folder.parent / "blobs"
    folder.rename(blobs)
    folder.mkdir()
    for path in blobs.iterdir():
        (folder / path.name).symlink_to(path)


def write_one_index(folder: Path) -> None:
    """Rename the only file to a part of one, with an index."""
    part = "model-00001-of-00001.safetensors"
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        names = list(file.keys())
    (folder / "model.safetensors").rename(folder / part)
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, part)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def use_old_config(folder: Path) -> None:
    """Write the config as Transformers 4 did."""
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters", None) or {}
    config |= {"rope_theta": rope.get("rope_theta", 1e4), "rope_scaling": None, "torch_dtype": config.pop("dtype")}
    (folder / "config.json").write_text(json.dumps(config))


def use_jinja_file(folder: Path) -> None:
    """Move the chat template to a file of its own."""
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "chat_template.jinja").write_text(settings.pop("chat_template"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def use_sentence_piece(folder: Path) -> None:
    """Give the model a tokenizer of SentencePiece instead of its own."""
    (folder / "tokenizer.json").unlink()
    shutil.copy(TOKENIZERS / "llama.model", folder / "tokenizer.model")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')


def cut_tokenizer(folder: Path) -> None:
    """Cut off the end of tokenizer.json."""
    content = (folder / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").write_bytes(content[: len(content) // 2])


def use_vocabulary(folder: Path) -> None:
    """Split the tokenizer into vocab.json and merges.txt."""
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": "GPT2Tokenizer"}))


def use_tekken(folder: Path) -> None:
    """Give the model Mistral's tokenizer instead of its own."""
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    shutil.copy(TOKENIZERS / "tekken.json", folder)


CHANGES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "llama without the prefix of its body": ("safetensors, other names", drop_prefix),
    "llama with frequencies": ("safetensors, more tensors", add_frequencies),
    "llama beside other formats": ("safetensors beside other files", add_other_formats),
    "llama of links": ("links to files", link_files),
    "llama in one part": ("several safetensors files", write_one_index),
    "llama with an old config": ("config of Transformers 4", use_old_config),
    "llama with a template of its own": ("chat_template.jinja", use_jinja_file),
    "llama with SentencePiece": ("tokenizer.model", use_sentence_piece),
    "llama with a vocabulary and merges": ("vocab.json and merges.txt", use_vocabulary),
    "llama with tekken": ("tekken.json", use_tekken),
}


def _write_parts(home: Path, *, absent: int = 0) -> tuple[Path, Path]:
    """Write a model in several files without an index. ``absent``: the number of a file that is left out."""
    plain = write_plain(home / "plain", "llama", {})
    parts = write_plain(home / "parts", "llama", {}, max_shard_size="100KB")
    (parts / "model.safetensors.index.json").unlink()
    for path in parts.glob(f"model-{absent:05}-of-*"):
        path.unlink()
    return parts, plain


def _write_encoder(home: Path, *, kind: str, fields: dict[str, Any]) -> tuple[Path, Path]:
    """Write an encoder, which makes vectors."""
    import torch
    from transformers import AutoConfig, AutoModel

    model = AutoModel.from_config(AutoConfig.for_model(kind, **fields), dtype=torch.float32)
    write_random_model(home / "model", model, seed=0, dtype="float32")
    write_tokenizer(home / "model")
    return home / "model", home / "model"


def _write_sequence_model(home: Path, *, kind: str) -> tuple[Path, Path]:
    """Write an encoder-decoder."""
    import torch
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    config = AutoConfig.for_model(kind, vocab_size=VOCAB, **SEQUENCE_TO_SEQUENCE[kind])
    model = AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float32)
    write_random_model(home / "model", model, seed=0, dtype="float32")
    write_tokenizer(home / "model")
    return home / "model", home / "model"


def _write_config(home: Path, *, fields: dict[str, Any]) -> tuple[Path, Path]:
    """Write a folder whose weights are never looked at."""
    import torch
    from safetensors.torch import save_file

    folder = home / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(BASE_CONFIG | fields))
    save_file({"model.embed_tokens.weight": torch.zeros(VOCAB, 64)}, folder / "model.safetensors", {"format": "pt"})
    write_tokenizer(folder)
    return folder, folder


def _write_files(home: Path, *, contents: dict[str, bytes | None]) -> tuple[Path, Path]:
    """Write a model with some files replaced, or removed."""
    folder, _ = _write_config(home, fields={"model_type": "llama"})
    for name, content in contents.items():
        if content is None:
            (folder / name).unlink()
        else:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
    return folder, folder
