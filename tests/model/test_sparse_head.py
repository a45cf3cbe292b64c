"""Sparse vectors of encoders are the logits of Transformers' masked language models, pooled by their definition."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import tiny_models
from support.run_model import load_test_runner, serve_requests
from test_encoder import make_texts, normalized, write_encoder
from test_pooling import unpack_vectors

from parley.model.checkpoint.files import LoadError
from parley.model.load.check import check_model
from parley.model.networks import sparse_head
from parley.types import EngineRequest, ParleySettings, PoolingOptions

HEAD = "AutoModelForMaskedLM"
SPARSE = PoolingOptions(task="embed_sparse")


def write_sparse_model(folder, kind="bert", first="MLMTransformer", pooling=None, **members):
    """Write a masked language model whose vectors are sparse: its bias keeps a part of the logits below 0."""
    write_encoder(folder, kind, HEAD, **members)
    tensors = load_file(folder / "model.safetensors")
    for tensor in tensors.values():
        if tensor.shape == (tiny_models.VOCAB,):
            tensor -= 4
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    modules = [{"idx": 0, "name": "0", "path": "", "type": f"sentence_transformers.sparse_encoder.models.{first}"},
               {"idx": 1, "name": "1", "path": "1_SpladePooling",
                "type": "sentence_transformers.sparse_encoder.models.SpladePooling"}]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_SpladePooling").mkdir()
    (folder / "1_SpladePooling" / "config.json").write_text(json.dumps(pooling or {}))


def requests(pooling):
    return [EngineRequest(str(i), ids, 0, pooling=pooling) for i, ids in enumerate(make_texts())]


def answers_of(runner, pooling, step=4096):
    answers, _ = serve_requests(runner, requests(pooling), step=step)
    return {name: answer.vector for (name, _), answer in answers.items()}


@torch.inference_mode()
def logits_of(folder):
    from transformers import AutoModelForMaskedLM

    model = AutoModelForMaskedLM.from_pretrained(folder).eval()
    return [model(torch.tensor([ids])).logits[0] for ids in make_texts()]


# One for each set of names, and one whose head has no norm of layer_norm_eps
@pytest.mark.parametrize("kind", ["bert", "roberta", "mpnet", "distilbert", "modernbert", "gte"])
def test_sparse_vectors_match_transformers(tmp_path, monkeypatch, kind):
    write_sparse_model(tmp_path, kind, **{"n_layers" if kind == "distilbert" else "num_hidden_layers": 1})
    assert check_model(ParleySettings(model=str(tmp_path))).load_caveat == ""
    runner, info = load_test_runner(tmp_path)
    assert (info.pooling, info.dimensions, info.pooling_tasks) == (
        "splade", info.vocab_size, {"embed", "embed_sparse"})  # fmt: skip
    expected = [torch.log1p(torch.relu(logits)).amax(0) for logits in logits_of(tmp_path)]
    for rows in (7, 4096):  # texts that share a product, and texts of several products
        monkeypatch.setattr(sparse_head, "MAX_LOGITS_AT_ONCE", rows * info.vocab_size)
        counts = []
        for name, values in answers_of(runner, SPARSE).items():
            pairs = np.frombuffer(values, sparse_head.SPARSE_PAIR)
            weights = torch.zeros(info.vocab_size)
            weights[torch.from_numpy(pairs["token"].astype(int))] = torch.from_numpy(pairs["weight"].copy())
            counts.append(len(pairs))
            assert (pairs["weight"] > 0).all()
            assert (np.diff(pairs["token"].astype(int)) > 0).all()
            torch.testing.assert_close(weights, expected[int(name)], atol=1e-4, rtol=1e-4)
        assert 0 < min(counts) < info.vocab_size


def test_sparse_models_also_make_dense_vectors(tmp_path):
    write_sparse_model(tmp_path, num_hidden_layers=1)
    runner, _ = load_test_runner(tmp_path)
    expected = [torch.log1p(torch.relu(logits)).amax(0) for logits in logits_of(tmp_path)]
    for pooling, change in (
        (PoolingOptions(), lambda vector: vector),
        (PoolingOptions(normalize=True), normalized),
        (PoolingOptions(dimensions=9), lambda vector: vector[:9]),
    ):
        actual = unpack_vectors(serve_requests(runner, requests(pooling))[0])
        for i, vector in enumerate(expected):
            torch.testing.assert_close(torch.tensor(actual[str(i)]), change(vector), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("strategy", ["max", "sum"])
@pytest.mark.parametrize(("activation", "logarithms"), [("relu", 1), ("log1p_relu", 2)])
def test_sparse_pooling_follows_the_folder(tmp_path, strategy, activation, logarithms):
    pooling = {"pooling_strategy": strategy, "activation_function": activation}
    write_sparse_model(tmp_path, first="Transformer", pooling=pooling, num_hidden_layers=1)
    actual = unpack_vectors(serve_requests(load_test_runner(tmp_path)[0], requests(PoolingOptions()))[0])
    for i, logits in enumerate(logits_of(tmp_path)):
        weights = torch.relu(logits)
        for _ in range(logarithms):
            weights = torch.log1p(weights)
        expected = weights.amax(0) if strategy == "max" else weights.sum(0)
        torch.testing.assert_close(torch.tensor(actual[str(i)]), expected, atol=1e-4, rtol=1e-4)


def test_an_architecture_makes_a_masked_language_model_sparse(tmp_path):
    write_encoder(tmp_path, "bert", HEAD, num_hidden_layers=1)
    assert load_test_runner(tmp_path)[1].pooling == "mean"
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["BertSpladeSparseEmbeddingModel"]}))
    assert load_test_runner(tmp_path)[1].pooling == "splade"


def test_infinite_weights_are_an_error_of_their_text(tmp_path):
    assert sparse_head.encode_sparse_vector(np.array([0.0, np.nan], np.float32)) is None
    assert sparse_head.encode_sparse_vector(np.zeros(3, np.float32)) == b""


@pytest.mark.parametrize(
    ("kind", "head", "pooling", "members", "sentence"),
    [
        ("bert", HEAD, {"pooling_strategy": "mean"}, {}, "the strategy mean"),
        ("bert", HEAD, {"activation_function": ["relu"]}, {}, "the activation"),
        ("bert", HEAD, {}, {"hidden_act": "gelu_10"}, "the activation gelu_10"),
        ("bert", "AutoModel", {}, {}, "no tensor cls.predictions"),
        ("electra", HEAD, {}, {}, "Sparse vectors of electra models are not supported"),
    ],
)
def test_load_refuses_unsupported_sparse_models(tmp_path, kind, head, pooling, members, sentence):
    write_sparse_model(tmp_path, kind, pooling=pooling, num_hidden_layers=1)
    if head != HEAD:
        write_encoder(tmp_path, kind, head, num_hidden_layers=1)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | members))
    for load in (lambda: load_test_runner(tmp_path), lambda: check_model(ParleySettings(model=str(tmp_path)))):
        with pytest.raises(LoadError, match=sentence):
            load()
