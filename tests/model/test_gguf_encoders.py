"""Embedding models as GGUF files, laid out as llama.cpp does it, against the folders that they were made from."""

from __future__ import annotations

import json

import pytest
import torch
from support import tiny_models
from support.gguf_conversion import convert_folder
from support.gguf_encoders import convert_encoder
from support.run_model import load_test_runner, serve_requests
from test_encoder import embedding_requests, write_encoder
from test_pooling import unpack_vectors, write_pooling_config
from test_whole_text_decoder import write_decoder, write_dense_module

from parley.gguf.folder import unpack_gguf
from parley.gguf.header import GgufError, read_model
from parley.gguf.model_config import model_config
from parley.gguf.pooling_files import pooling_files
from parley.model.load.check import check_model
from parley.types import ParleySettings, PoolingOptions

MEAN, CLS, LAST, RANK = 1, 2, 3, 4
LAYERS = {"num_hidden_layers": 6, "sliding_window_pattern": 6}  # every sixth has no window, as in all models
FULL_TOKENS = ["▁a", "b", "[UNK]", "[CLS]", "[SEP]"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def tokenizer_metadata(model):
    """Return the metadata of a tokenizer of a kind, of as many tokens as the tiny models have."""
    tokens = [*FULL_TOKENS, *(f"▁t{number}" for number in range(tiny_models.VOCAB - len(FULL_TOKENS)))]
    values = {
        "model": model,
        "tokens": tokens,
        "token_type": [1, 1, 2, 3, 3, *[1] * (len(tokens) - 5)],
        "scores": [-1.0] * len(tokens),
        "unknown_token_id": 2,
        "bos_token_id": 3,
        "eos_token_id": 4,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def vectors(folder):
    """Return the vectors of texts, and what describes the model."""
    runner, info = load_test_runner(folder, dtype="float32")
    assert not info.generates
    return unpack_vectors(serve_requests(runner, embedding_requests())[0]), info


def assert_same_vectors(unpacked, folder):
    (actual, info), (expected, original) = vectors(unpacked), vectors(folder)
    assert actual == expected
    assert (info.dimensions, info.pooling, info.max_model_len) == (
        original.dimensions,
        original.pooling,
        original.max_model_len,
    )


@pytest.mark.parametrize(
    ("kind", "tokenizer"),
    [
        ("bert", "bert"),
        ("roberta", None),
        ("xlm-roberta", "t5"),
        ("nomic_bert", "bert"),
        ("jina_embeddings_v3", "t5"),
        ("modernbert", None),
    ],
)
def test_vectors_of_encoders_are_the_folders(kind, tokenizer, tmp_path):
    folder = tmp_path / "folder"
    write_encoder(folder, kind)
    write_pooling_config(folder, pooling_mode="cls")
    metadata = None if tokenizer is None else tokenizer_metadata(tokenizer)
    file = convert_encoder(tmp_path / "x.gguf", folder, tokenizer=metadata, pooling_type=CLS)
    unpacked = unpack_gguf(file)
    assert check_model(ParleySettings(model=str(unpacked))).load_caveat == ""
    assert_same_vectors(unpacked, folder)


def write_embedding_gemma(folder):
    """Write a folder as EmbeddingGemma's, and as tensors of the converter its linear layers after the pooling."""
    write_decoder(folder, "gemma3_text", head_dim=32, query_pre_attn_scalar=32, sliding_window=24, **LAYERS)
    write_pooling_config(folder, pooling_mode="mean")
    modules = json.loads((folder / "modules.json").read_text())
    inner = [{"idx": i, "name": str(i), "path": f"{i}_Dense", "type": "sentence_transformers.models.Dense"}
             for i in (2, 3)]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps([*modules[:2], *inner, *modules[2:]]))
    identity = "torch.nn.modules.linear.Identity"
    up = write_dense_module(folder, "2_Dense", 96, 64, bias=False, activation=identity)
    down = write_dense_module(folder, "3_Dense", 64, 96, bias=False, activation=identity)
    return {"dense_2_out.weight": up["linear.weight"], "dense_3_out.weight": down["linear.weight"]}


def test_vectors_of_embedding_gemma_are_the_folders(tmp_path):
    folder = tmp_path / "folder"
    layers = write_embedding_gemma(folder)
    file = convert_encoder(tmp_path / "x.gguf", folder, pooling_type=MEAN, more_tensors=layers)
    (actual, info), (expected, _) = vectors(unpack_gguf(file)), vectors(folder)
    assert info.dimensions == 64 and info.pooling == "mean"
    for name, vector in expected.items():  # 1 is added to norms and subtracted again
        torch.testing.assert_close(torch.tensor(actual[name]), torch.tensor(vector), atol=1e-5, rtol=0)


def test_vectors_of_eurobert_are_the_folders(tmp_path):
    folder = tmp_path / "folder"
    write_decoder(folder, "eurobert")
    write_pooling_config(folder, pooling_mode="mean")
    assert_same_vectors(unpack_gguf(convert_encoder(tmp_path / "x.gguf", folder, pooling_type=MEAN)), folder)


def test_vectors_of_llamas_that_read_both_ways_are_the_folders(tmp_path):
    write_decoder(tmp_path / "folder", "llama", is_causal=False, sliding_window=None)
    file = convert_folder(tmp_path / "x.gguf", tmp_path / "folder", arch="llama-embed", turns_heads=True)
    assert_same_vectors(unpack_gguf(file), tmp_path / "folder")


def test_qwens_embedding_model_gives_the_last_tokens_vector(tmp_path):
    folder = tiny_models.write_model(tmp_path / "folder", "qwen3", dtype="float32", tie_word_embeddings=True)
    file = read_model(convert_folder(tmp_path / "x.gguf", folder))
    file.metadata["qwen3.pooling_type"] = LAST
    files = pooling_files(file, model_config(file))
    assert files["1_Pooling/config.json"] == {"pooling_mode": "lasttoken"}
    assert [module["type"].rpartition(".")[2] for module in files["modules.json"]] == [
        "Transformer", "Pooling", "Normalize",
    ]  # fmt: skip
    file.metadata["qwen3.normalize_embeddings"] = False  # as Ollama's converter says it
    assert len(pooling_files(file, model_config(file))["modules.json"]) == 2
    file.metadata["qwen3.attention.causal"] = False
    assert model_config(file)["is_causal"] is False


def test_blocks_of_an_encoder_become_numbers(tmp_path):
    folder = tmp_path / "folder"
    write_encoder(folder, "bert", hidden_size=64, intermediate_size=128)
    write_pooling_config(folder, pooling_mode="mean")
    metadata = tokenizer_metadata("bert")
    file = convert_encoder(tmp_path / "x.gguf", folder, kind="Q8_0", tokenizer=metadata, pooling_type=MEAN)
    assert {tensor.blocks.name for tensor in read_model(file).tensors.values()} == {"F32", "Q8_0"}
    (actual, info), (expected, _) = vectors(unpack_gguf(file)), vectors(folder)
    assert info.dtype == "float32"
    for name, vector in expected.items():
        similarity = torch.tensor(actual[name]) @ torch.tensor(vector)
        assert 0.99 < similarity < 1.001


def test_scores_of_a_reranker_are_the_folders(tmp_path):
    folder = tmp_path / "folder"
    write_encoder(folder, "xlm-roberta", "AutoModelForSequenceClassification", num_labels=1)
    file = convert_encoder(tmp_path / "x.gguf", folder, tokenizer=tokenizer_metadata("t5"), pooling_type=RANK)
    scores = []
    for model in (unpack_gguf(file), folder):
        runner, info = load_test_runner(model)
        requests = embedding_requests(PoolingOptions(task="classify", normalize=None))
        scores.append(unpack_vectors(serve_requests(runner, requests)[0]))
        assert info.labels == ["LABEL_0"]
    assert scores[0] == scores[1] and len(set(scores[0].values())) > 5


@pytest.fixture(scope="module")
def bert_file(tmp_path_factory):
    home = tmp_path_factory.mktemp("bert")
    write_encoder(home / "folder", "bert", num_hidden_layers=1)
    return convert_encoder(home / "x.gguf", home / "folder", tokenizer=tokenizer_metadata("bert"), pooling_type=CLS)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("pooling_type", 5, r"^x\.gguf gives pooling_type as 5; 0 to 4 are known$"),
        ("pooling_type", [1] * 99999, r"^x\.gguf gives pooling_type as \[1, 1, "),
        ("pooling_type", RANK, r"^x\.gguf is a reranker of the type bert, which is not read from GGUF$"),
        ("block_count", 0, r"gives bert\.block_count as 0, so the model's shape is unknown$"),
        ("attention.head_count", "x" * 99999, r"gives bert\.attention\.head_count as 'xxx"),
        ("attention.layer_norm_epsilon", -1.0, r"gives bert\.attention\.layer_norm_epsilon as -1\.0"),
    ],
)
def test_encoders_with_impossible_metadata_are_refused(key, value, reason, bert_file):
    file = read_model(bert_file)
    file.metadata[f"bert.{key}"] = value
    with pytest.raises(GgufError, match=reason) as refusal:
        pooling_files(file, model_config(file))
    assert len(str(refusal.value)) < 250


@pytest.mark.parametrize(
    ("missing", "added", "reason"),
    [
        ("position_embd.weight", None, r"^x\.gguf has no tensor position_embd\.weight$"),
        (None, "dense_2.weight", r"^x\.gguf has a layer for vectors of tokens, which is not read from GGUF$"),
        (None, "cls.weight", r"^x\.gguf is a classifier of the kind BERT, which is not read from GGUF$"),
    ],
)
def test_encoders_of_other_tensors_are_refused(missing, added, reason, bert_file):
    file = read_model(bert_file)
    file.metadata["bert.pooling_type"] = 0
    if added:
        file.tensors[added] = file.tensors["token_types.weight"]._replace(name=added)
    file.tensors.pop(missing, None)
    with pytest.raises(GgufError, match=reason):
        pooling_files(file, model_config(file))


@pytest.mark.parametrize("labels", [["a", "b"], "ab", [1], []])
def test_names_of_classes_that_do_not_fit_are_refused(labels, bert_file):
    file = read_model(bert_file)
    file.metadata.update({"tokenizer.ggml.model": "t5", "bert.classifier.output_labels": labels})
    file.tensors["cls.output.weight"] = file.tensors["token_types.weight"]._replace(shape=(3, 48))
    if not labels:
        assert model_config(file)["id2label"] == {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"}
        return
    with pytest.raises(GgufError, match=r"^x\.gguf gives classifier\.output_labels as .*, for 3 classes$"):
        model_config(file)


@pytest.mark.parametrize("pattern", [0, "3", 2.5])
def test_modernbert_with_an_impossible_pattern_is_refused(pattern, bert_file):
    file = read_model(bert_file)
    metadata = {key.replace("bert.", "modern-bert."): value for key, value in file.metadata.items()}
    file.metadata.update(metadata | {"general.architecture": "modern-bert"})
    file.metadata["modern-bert.attention.sliding_window_pattern"] = pattern
    with pytest.raises(GgufError, match=r"^x\.gguf gives attention\.sliding_window_pattern as .*; it is 1 or more$"):
        model_config(file)
