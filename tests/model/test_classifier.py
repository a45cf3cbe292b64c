"""Classifiers and cross-encoders give the logits of Transformers; their scores are those that their configs ask for."""

import json

import pytest
import torch
from support.run_model import load_test_runner, serve_requests
from test_encoder import make_texts, write_encoder
from test_pooling import unpack_vectors

from parley.model.checkpoint.files import LoadError
from parley.model.load.check import check_model
from parley.types import EngineRequest, ParleySettings, PoolingOptions

HEAD = "AutoModelForSequenceClassification"
RAW_SCORES = PoolingOptions(task="classify", normalize=False)


def load_reference(folder):
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(folder).eval()


def pair_requests(pooling=RAW_SCORES):
    """Return requests of which every second one has a second text."""
    return [
        EngineRequest(str(i), ids, 0, pooling=pooling, second_text_start=len(ids) // 2 if i % 2 else 0)
        for i, ids in enumerate(make_texts())
    ]


@torch.inference_mode()
def reference_logits(model):
    rows, has_types = [], getattr(model.config, "type_vocab_size", 0) > 1
    for request in pair_requests():
        start = request.second_text_start or len(request.token_ids)
        types = [[int(i >= start) for i in range(len(request.token_ids))]]
        members = {"token_type_ids": torch.tensor(types)} if has_types else {}
        rows.append(model(torch.tensor([request.token_ids]), **members).logits[0])
    return rows


# One for each kind of head, and one of an encoder that adds token types in another way
@pytest.mark.parametrize(
    "kind", ["bert", "roberta", "distilbert", "modernbert", "gte", "deberta-v2", "electra", "jina_embeddings_v3"]
)
def test_classifier_logits_match_transformers(tmp_path, kind):
    write_encoder(
        tmp_path, kind, HEAD, num_labels=3, **{"n_layers" if kind == "distilbert" else "num_hidden_layers": 1}
    )
    assert check_model(ParleySettings(model=str(tmp_path))).load_caveat == ""
    runner, info = load_test_runner(tmp_path)
    assert (info.labels, info.dimensions, info.generates) == (["LABEL_0", "LABEL_1", "LABEL_2"], 0, False)
    expected = reference_logits(load_reference(tmp_path))
    actual = unpack_vectors(serve_requests(runner, pair_requests(), step=60)[0])
    for i, logits in enumerate(expected):
        torch.testing.assert_close(torch.tensor(actual[str(i)]), logits, atol=1e-4, rtol=1e-4)


# Heads of one linear layer, and the only one with a layer before it
@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "modernbert", "electra", "deberta-v2"])
@torch.inference_mode()
def test_scores_of_tokens_match_transformers(tmp_path, kind):
    from transformers import AutoModelForTokenClassification

    layers = {"n_layers" if kind == "distilbert" else "num_hidden_layers": 1}
    write_encoder(tmp_path, kind, "AutoModelForTokenClassification", num_labels=3, **layers)
    assert check_model(ParleySettings(model=str(tmp_path))).load_caveat == ""
    runner, info = load_test_runner(tmp_path)
    assert (info.labels, info.pooling_tasks) == (["LABEL_0", "LABEL_1", "LABEL_2"], {"token_classify"})
    assert info.tasks == {"token_classify"}
    model = AutoModelForTokenClassification.from_pretrained(tmp_path).eval()
    pooling = [PoolingOptions(task="token_classify", normalize=False), PoolingOptions(task="token_classify")]
    texts = make_texts()
    actual = unpack_vectors(
        serve_requests(
            runner, [EngineRequest(str(i), ids, 0, pooling=pooling[i % 2]) for i, ids in enumerate(texts)], step=60
        )[0]
    )
    for i, ids in enumerate(texts):
        logits = model(torch.tensor([ids])).logits[0]
        expected = logits.softmax(-1) if i % 2 else logits
        torch.testing.assert_close(torch.tensor(actual[str(i)]).view(-1, 3), expected, atol=1e-4, rtol=1e-4)


def test_load_refuses_scores_of_tokens_of_other_families(tmp_path):
    write_encoder(tmp_path, "gte", HEAD, num_labels=3, num_hidden_layers=1)
    edit_config(tmp_path, architectures=["GteForTokenClassification"])
    for load in (lambda: load_test_runner(tmp_path), lambda: check_model(ParleySettings(model=str(tmp_path)))):
        with pytest.raises(LoadError, match="Classes of single tokens are not supported for gte models"):
            load()


@pytest.mark.parametrize(
    ("labels", "members", "function"),
    [
        (1, {}, torch.sigmoid),
        (1, {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, lambda logits: logits),
        (1, {"sbert_ce_default_activation_function": "torch.nn.modules.activation.Tanh"}, torch.tanh),
        (3, {}, lambda logits: logits.softmax(-1)),
        (3, {"problem_type": "multi_label_classification"}, torch.sigmoid),
        (3, {"problem_type": "regression"}, lambda logits: logits),
    ],
)
def test_scores_follow_the_config(tmp_path, labels, members, function):
    write_encoder(tmp_path, "bert", HEAD, num_labels=labels, num_hidden_layers=1)
    edit_config(tmp_path, **members)
    runner, _ = load_test_runner(tmp_path)
    raw = unpack_vectors(serve_requests(runner, pair_requests())[0])
    scores = unpack_vectors(serve_requests(runner, pair_requests(PoolingOptions(task="classify")))[0])
    for name, logits in raw.items():
        torch.testing.assert_close(torch.tensor(scores[name]), function(torch.tensor(logits)), atol=1e-6, rtol=1e-5)


def edit_config(folder, **members):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | members))


@pytest.mark.parametrize(
    ("members", "sentence"),
    [
        ({"num_labels": 0, "id2label": None}, "shape"),
        ({"num_labels": -1, "id2label": None}, "num_labels"),
        ({"id2label": {"0": "a"}}, "shape"),
        ({"sentence_transformers": {"activation_fn": "os.system"}}, "os.system"),
        ({"architectures": ["BertForQuestionAnswering"]}, "no classifier of whole texts"),
    ],
)
def test_load_refuses_unsupported_classifiers(tmp_path, members, sentence):
    write_encoder(tmp_path, "bert", HEAD, num_labels=3, num_hidden_layers=1)
    edit_config(tmp_path, **members)
    for load in (lambda: load_test_runner(tmp_path), lambda: check_model(ParleySettings(model=str(tmp_path)))):
        with pytest.raises(LoadError, match=sentence):
            load()


def test_modernbert_classifier_may_pool_the_mean(tmp_path):
    members = {"classifier_pooling": "mean", "classifier_bias": True, "norm_bias": True, "num_hidden_layers": 2}
    write_encoder(tmp_path, "modernbert", HEAD, num_labels=2, **members)
    runner, _ = load_test_runner(tmp_path)
    actual = unpack_vectors(serve_requests(runner, pair_requests())[0])
    for i, logits in enumerate(reference_logits(load_reference(tmp_path))):
        torch.testing.assert_close(torch.tensor(actual[str(i)]), logits, atol=1e-4, rtol=1e-4)


def test_classifier_without_labels_in_its_config_has_numbered_ones(tmp_path):
    write_encoder(tmp_path, "roberta", HEAD, num_labels=2, num_hidden_layers=1)
    edit_config(tmp_path, id2label=None)
    assert load_test_runner(tmp_path)[1].labels == ["LABEL_0", "LABEL_1"]
    edit_config(tmp_path, id2label={"0": "bad", "1": "good"})
    assert load_test_runner(tmp_path)[1].labels == ["bad", "good"]


def test_vectors_of_tokens_are_the_hidden_states(tmp_path):
    model = write_encoder(tmp_path, "bert", num_hidden_layers=1)
    runner, info = load_test_runner(tmp_path)
    assert info.pooling_tasks == {"embed", "token_embed"}
    pooling = PoolingOptions(task="token_embed", normalize=False)
    requests = [EngineRequest(str(i), ids, 0, pooling=pooling) for i, ids in enumerate(make_texts())]
    actual = unpack_vectors(serve_requests(runner, requests)[0])
    with torch.inference_mode():
        for i, ids in enumerate(make_texts()):
            rows = torch.tensor(actual[str(i)]).view(len(ids), info.dimensions)
            expected = model(torch.tensor([ids])).last_hidden_state[0]
            torch.testing.assert_close(rows, expected, atol=2e-5, rtol=1e-5)
