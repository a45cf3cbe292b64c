"""jina-embeddings-v2 in both published forms, as folders and GGUF files, against a plain computation.

Transformers does not have its code (arXiv 2310.19923, section 3).
"""

from __future__ import annotations

import json
import math

import gguf
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from support import gguf_files, tiny_models
from support.run_model import load_test_runner, serve_requests
from test_encoder import embedding_requests, make_texts
from test_gguf_encoders import MEAN, tokenizer_metadata
from test_pooling import unpack_vectors, write_pooling_config

from parley.gguf.folder import unpack_gguf
from parley.gguf.header import GgufError, read_model
from parley.gguf.model_config import model_config
from parley.model.checkpoint.files import LoadError
from parley.model.load.check import check_model
from parley.model.load.text_encoders import jina_bert
from parley.types import ParleySettings

HIDDEN, INNER, HEADS, LAYERS, LENGTH = 48, 112, 6, 2, 600
CONFIG = {
    "architectures": ["JinaBertForMaskedLM"],
    "auto_map": {"AutoModel": "jinaai/jina-bert-implementation--modeling_bert.JinaBertModel"},
    "model_type": "bert",
    "position_embedding_type": "alibi",
    "feed_forward_type": "geglu",
    "vocab_size": tiny_models.VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": LENGTH,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
}
BASE = {"mlp.gated_layers": (2 * INNER, HIDDEN), "mlp.wo": (HIDDEN, INNER), "mlp.layernorm": None}
CODE = {
    "mlp.up_gated_layer": (2 * INNER, HIDDEN),
    "mlp.down_layer": (HIDDEN, INNER),
    "layer_norm_1": None,
    "layer_norm_2": None,
    "attention.self.layer_norm_q": None,
    "attention.self.layer_norm_k": None,
}
FORMS = {"base": BASE, "code": CODE}
SQUARE = ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense")


def write_jina(folder, form):
    """Write a random model in one of the published forms."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    tiny_models.write_tokenizer(folder)
    generator, tensors = torch.Generator().manual_seed(3), {}

    def add(name, *shape, around=0.0):
        tensors[name] = torch.randn(shape, generator=generator) * (0.2 if len(shape) == 1 else 0.3) + around

    add("embeddings.word_embeddings.weight", tiny_models.VOCAB, HIDDEN)
    add("embeddings.token_type_embeddings.weight", 2, HIDDEN)
    parts = dict.fromkeys(SQUARE, (HIDDEN, HIDDEN)) | {"attention.output.LayerNorm": None} | FORMS[form]
    names = {f"encoder.layer.{layer}.{name}": shape for layer in range(LAYERS) for name, shape in parts.items()}
    for name, shape in ({"embeddings.LayerNorm": None} | names).items():
        add(f"{name}.weight", *(shape or (HIDDEN,)), around=1.0 if shape is None else 0.0)
        if "gated" not in name:
            add(f"{name}.bias", HIDDEN)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    write_pooling_config(folder, pooling_mode="mean")
    return folder


def slopes(heads):
    """Return the slopes of heads as the code of ALiBi's authors makes them."""
    if math.log2(heads).is_integer():
        start = 2 ** (-(2 ** -(math.log2(heads) - 3)))
        return [start ** (head + 1) for head in range(heads)]
    power = 2 ** math.floor(math.log2(heads))
    return slopes(power) + slopes(2 * power)[0::2][: heads - power]


@torch.inference_mode()
def hidden_states(folder, token_ids):
    """Return the hidden states of a text."""
    stored = load_file(folder / "model.safetensors")

    def linear(x, name):
        return F.linear(x, stored[f"{name}.weight"], stored.get(f"{name}.bias"))

    def norm(x, name):
        return F.layer_norm(x, (HIDDEN,), stored[f"{name}.weight"], stored[f"{name}.bias"], 1e-12)

    x = stored["embeddings.word_embeddings.weight"][token_ids] + stored["embeddings.token_type_embeddings.weight"][0]
    x = norm(x, "embeddings.LayerNorm")
    places = torch.arange(len(token_ids))
    bias = -torch.tensor(slopes(HEADS))[:, None, None] * (places - places[:, None]).abs()
    for layer in range(LAYERS):
        stem = f"encoder.layer.{layer}."
        q, k, v = (linear(x, f"{stem}attention.self.{name}") for name in ("query", "key", "value"))
        is_code = f"{stem}layer_norm_1.weight" in stored
        if is_code:
            q, k = norm(q, f"{stem}attention.self.layer_norm_q"), norm(k, f"{stem}attention.self.layer_norm_k")
        q, k, v = (part.view(len(x), HEADS, -1).transpose(0, 1) for part in (q, k, v))
        shares = (q @ k.mT / math.sqrt(HIDDEN / HEADS) + bias).softmax(-1)
        attended = (shares @ v).transpose(0, 1).reshape(len(x), HIDDEN)
        attended = norm(linear(attended, f"{stem}attention.output.dense") + x, f"{stem}attention.output.LayerNorm")
        if is_code:
            x = norm(x + attended, f"{stem}layer_norm_1")
            up, gated = linear(x, f"{stem}mlp.up_gated_layer").chunk(2, -1)
            x = norm(x + linear(up * F.gelu(gated), f"{stem}mlp.down_layer"), f"{stem}layer_norm_2")
        else:
            gated, up = linear(attended, f"{stem}mlp.gated_layers").chunk(2, -1)
            x = norm(attended + linear(F.gelu(gated) * up, f"{stem}mlp.wo"), f"{stem}mlp.layernorm")
    return x


def vectors(folder, step=4096):
    """Return the vectors of texts, and what describes the model."""
    runner, info = load_test_runner(folder)
    return unpack_vectors(serve_requests(runner, embedding_requests(), step=step)[0]), info


@pytest.mark.parametrize("form", FORMS)
def test_vectors_are_those_of_a_plain_computation(form, tmp_path):
    folder = write_jina(tmp_path / "jina", form)
    assert check_model(ParleySettings(model=str(folder))).load_caveat == ""
    for step in (60, 4096):
        actual, info = vectors(folder, step)
        assert (info.generates, info.dimensions, info.max_model_len) == (False, HIDDEN, LENGTH)
        for number, token_ids in enumerate(make_texts()):
            expected = F.normalize(hidden_states(folder, token_ids).mean(0), dim=0)
            torch.testing.assert_close(torch.tensor(actual[str(number)]), expected, atol=2e-5, rtol=0)


def test_a_text_longer_than_a_block_of_queries_gives_the_same_vectors(tmp_path):
    folder = write_jina(tmp_path / "jina", "base")
    text = [3 + 7 * place % 600 for place in range(LENGTH)]
    request = embedding_requests()[0]
    request.token_ids = text
    (actual,) = unpack_vectors(serve_requests(load_test_runner(folder)[0], [request], step=LENGTH)[0]).values()
    expected = F.normalize(hidden_states(folder, text).mean(0), dim=0)
    torch.testing.assert_close(torch.tensor(actual), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("feed_forward_type", "reglu", "feed_forward_type reglu is not supported"),
        ("feed_forward_type", None, "feed_forward_type None is not supported"),
        ("num_attention_heads", 0, "no valid num_attention_heads"),
        ("num_attention_heads", 7, "no valid hidden_size"),
        ("max_position_embeddings", 1 << 30, "no valid max_position_embeddings"),
        ("intermediate_size", "x", "no valid intermediate_size"),
    ],
)
def test_other_configs_are_refused(name, value, reason):
    with pytest.raises(LoadError, match=reason):
        jina_bert.read_jina_config(CONFIG | {name: value})


@pytest.mark.parametrize(
    ("form", "missing"), [("base", "mlp.layernorm"), ("base", "mlp.gated_layers"), ("code", "layer_norm_k")]
)
def test_folders_without_a_tensor_are_refused(form, missing, tmp_path):
    folder = write_jina(tmp_path / "jina", form)
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(next(name for name in tensors if name.endswith(f"{missing}.weight")))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(LoadError, match=missing):
        check_model(ParleySettings(model=str(folder)))


def write_file(path, folder, tokenizer, *, splits_halves=False):
    """Write a folder as llama.cpp's converter does. ``splits_halves``: as it did at first."""
    writer = gguf.GGUFWriter(path, "jina-bert-v2")
    writer.add_context_length(LENGTH)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType(MEAN))
    if tokenizer is None:
        gguf_files.add_tokenizer(writer, folder)
    else:
        for key, value in tokenizer_metadata(tokenizer).items():
            kinds = {int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
            kinds[type(value)](key, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.JINA_BERT_V2, LAYERS)
    for name, tensor in load_file(folder / "model.safetensors").items():
        parts = {name: tensor}
        if splits_halves and "gated_layer" in name:
            first, second = tensor.chunk(2)
            marks = ("w", "v") if ".gated_layers" in name else ("v", "w")
            stem = name.rpartition("mlp.")[0]
            parts = {
                f"{stem}mlp.gated_layers_{mark}.weight": half for mark, half in zip(marks, (first, second), strict=True)
            }
        for part, values in parts.items():
            gguf_files.add_tensor(writer, names.get_name(part, (".weight", ".bias")), values.numpy(), "F32")
    gguf_files.close_writer(writer)
    return path


@pytest.mark.parametrize(
    ("form", "tokenizer", "splits_halves"),
    [("base", "bert", False), ("base", "bert", True), ("code", None, False), ("code", None, True)],
)
def test_vectors_of_gguf_files_are_the_folders(form, tokenizer, splits_halves, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = write_jina(tmp_path / "jina", form)
    file = write_file(tmp_path / "x.gguf", folder, tokenizer, splits_halves=splits_halves)
    unpacked = unpack_gguf(file)
    assert check_model(ParleySettings(model=str(unpacked))).load_caveat == ""
    (actual, info), (expected, original) = vectors(unpacked), vectors(folder)
    assert actual == expected
    assert (info.pooling, info.max_model_len) == (original.pooling, LENGTH)


def test_classifiers_in_gguf_files_are_refused(tmp_path):
    model = read_model(write_file(tmp_path / "x.gguf", write_jina(tmp_path / "jina", "base"), "bert"))
    assert model_config(model)["position_embedding_type"] == "alibi"
    model.tensors["cls.weight"] = model.tensors["token_types.weight"]
    with pytest.raises(GgufError, match=r"^x\.gguf is a classifier of the kind JinaBERT, which is not read from GGUF$"):
        model_config(model)
