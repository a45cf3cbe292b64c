"""Decoders that read whole texts have the vectors and classes of Transformers and of sentence-transformers' modules."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import tiny_models
from support.run_model import load_test_runner, serve_requests
from test_encoder import embedding_requests, hidden_states, make_texts, normalized
from test_pooling import unpack_vectors, write_pooling_config

from parley.model.checkpoint.files import LoadError, read_config
from parley.model.load.check import check_model
from parley.model.load.text_encoders.whole_text import plan_whole_text
from parley.types import EngineRequest, ParleySettings, PoolingOptions

SIZES = {"vocab_size": tiny_models.VOCAB, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
         "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}  # fmt: skip
WINDOW = {"sliding_window": 20}
CONFIGS = {
    "gemma3_text": WINDOW | {"use_bidirectional_attention": True, "sliding_window_pattern": 2},
    "qwen3": {"is_causal": False},
    "mistral": WINDOW | {"is_causal": False},
    "eurobert": {"mask_token_id": 4},
    "embedding_gemma2_text": WINDOW
    | {
        "sliding_window_pattern": 2,
        "global_head_dim": 32,
        "embedding_dim": 40,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 24,
    },
}
RAW_SCORES = PoolingOptions(task="classify", normalize=False)


def write_decoder(folder, kind, head="AutoModel", **overrides):
    """Write a random model of Transformers and return it; every weight influences the result."""
    import transformers

    config = transformers.AutoConfig.for_model(kind, **(SIZES | CONFIGS.get(kind, {}) | overrides))
    torch.manual_seed(3)
    model = getattr(transformers, head).from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.dim() == 1 else 0.25))
    model.save_pretrained(folder)
    tiny_models.write_tokenizer(folder)
    return model


def edit_config(folder, **members):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | members))


def check_vectors(folder, expected, **settings):
    runner, info = load_test_runner(folder, dtype="float32", **settings)
    assert (info.generates, info.dimensions, info.kv_bytes) == (False, len(expected[0]), 0)
    for step in (1, 4096):
        actual = unpack_vectors(serve_requests(runner, embedding_requests(), step=step)[0])
        for i, vector in enumerate(expected):
            torch.testing.assert_close(torch.tensor(actual[str(i)]), vector, atol=2e-5, rtol=0)
    return runner, info


@pytest.mark.parametrize("kind", CONFIGS)
def test_decoders_that_read_both_ways_match_transformers(tmp_path, kind):
    model = write_decoder(tmp_path, kind)
    assert check_model(ParleySettings(model=str(tmp_path))).load_caveat == ""
    runner, info = check_vectors(tmp_path, [normalized(rows.mean(0)) for rows in hidden_states(model)])
    assert info.max_model_len == 256 and info.pooling == "mean"
    together = unpack_vectors(serve_requests(runner, embedding_requests())[0])
    for request in embedding_requests():
        (alone,) = unpack_vectors(serve_requests(runner, [request])[0]).values()
        np.testing.assert_allclose(alone, together[request.id], atol=1e-6)


def test_texts_of_a_multimodal_embedding_model(tmp_path):
    """EmbeddingGemma 2 as it is published: below a prefix, in a config of its own, beside encoders of media."""
    import transformers

    text_config = SIZES | CONFIGS["embedding_gemma2_text"]
    config = transformers.AutoConfig.for_model(
        "embedding_gemma2", text_config=text_config, vision_config=None, audio_config=None
    )
    torch.manual_seed(3)
    model = transformers.AutoModel.from_config(config).float().eval()
    model.save_pretrained(tmp_path)
    tiny_models.write_tokenizer(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors") | {"vision_tower.patch.weight": torch.ones(2, 2)}
    assert any(name.startswith("language_model.") for name in tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert check_model(ParleySettings(model=str(tmp_path))).load_caveat == ""
    rows = hidden_states(model.language_model)
    runner, info = check_vectors(tmp_path, [normalized(row.mean(0)) for row in rows])
    assert info.token_dimensions == 40
    pooling = PoolingOptions(task="token_embed", normalize=False)
    actual = unpack_vectors(serve_requests(runner, embedding_requests(pooling))[0])
    torch.testing.assert_close(torch.tensor(actual["4"]).view(-1, 40), rows[4], atol=2e-5, rtol=1e-4)
    text_config = json.loads((tmp_path / "config.json").read_text())["text_config"]
    edit_config(tmp_path, text_config=text_config | {"embedding_dim": 0})
    with pytest.raises(LoadError, match="no valid embedding_dim"):
        load_test_runner(tmp_path)
    # Only the whole config need say how the weights are stored
    stored = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    edit_config(tmp_path, dtype="float32", text_config=text_config | {"dtype": None}, quantization_config=stored)
    decoder_plan = plan_whole_text(
        ParleySettings(model=str(tmp_path), dtype="auto"), tmp_path, read_config(tmp_path)
    ).decoder
    assert (decoder_plan.dtype, decoder_plan.quantization.method) == (torch.float32, "fp8")


def test_a_head_of_a_language_model_is_left_out(tmp_path):
    model = write_decoder(tmp_path, "qwen3", "AutoModelForCausalLM", tie_word_embeddings=False)
    _, info = check_vectors(tmp_path, [normalized(rows.mean(0)) for rows in hidden_states(model.model)])
    without_head = info.weights_bytes
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    _, info = load_test_runner(tmp_path, dtype="float32")
    assert info.weights_bytes == without_head


def write_dense_module(folder, name, out_features, in_features, *, bias, activation):
    (folder / name).mkdir()
    weights = {"linear.weight": torch.randn(out_features, in_features)} | (
        {"linear.bias": torch.randn(out_features)} if bias else {}
    )
    save_file(weights, folder / name / "model.safetensors")
    settings = {
        "in_features": in_features,
        "out_features": out_features,
        "bias": bias,
        "activation_function": activation,
    }
    (folder / name / "config.json").write_text(json.dumps(settings))
    return weights


def write_sentence_modules(folder):
    """Write pooling by the mean, two linear layers and a normalization, as EmbeddingGemma's folder has them."""
    write_pooling_config(folder, pooling_mode_mean_tokens=True)
    modules = json.loads((folder / "modules.json").read_text())
    dense = [{"idx": i, "name": str(i), "path": f"{i}_Dense", "type": "sentence_transformers.models.Dense"}
             for i in (2, 3)]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps([*modules[:2], *dense, *modules[2:]]))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 140, "do_lower_case": False}))
    identity, tanh = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Tanh"
    up = write_dense_module(folder, "2_Dense", 96, 64, bias=False, activation=identity)
    down = write_dense_module(folder, "3_Dense", 32, 96, bias=True, activation=tanh)
    return lambda row: torch.tanh(down["linear.weight"] @ (up["linear.weight"] @ row) + down["linear.bias"])


@pytest.mark.parametrize("kind", ["gemma3_text", "llama"])
def test_linear_layers_after_the_pooling(tmp_path, kind):
    """Also of a decoder that reads forward."""
    model = write_decoder(tmp_path, kind)
    apply_dense = write_sentence_modules(tmp_path)
    expected = [normalized(apply_dense(rows.mean(0))) for rows in hidden_states(model)]
    runner, info = check_vectors(tmp_path, expected)
    assert info.max_model_len == 140
    assert check_model(ParleySettings(model=str(tmp_path))).load_caveat == ""
    shorter = PoolingOptions(dimensions=8)
    actual = unpack_vectors(serve_requests(runner, embedding_requests(shorter))[0])
    torch.testing.assert_close(torch.tensor(actual["4"]), normalized(expected[4][:8]), atol=2e-5, rtol=0)


def test_embedding_models_whose_head_was_not_saved(tmp_path):
    """As of e5-mistral: the vector is the last token's state, and the config ties no head to the embedding."""
    model = write_decoder(tmp_path, "mistral", tie_word_embeddings=False)
    edit_config(tmp_path, is_causal=None)
    with pytest.raises(LoadError, match=r"lm_head\.weight"):
        check_model(ParleySettings(model=str(tmp_path)))
    write_pooling_config(tmp_path, pooling_mode_lasttoken=True)
    assert check_model(ParleySettings(model=str(tmp_path))).load_caveat == ""
    for layer in model.layers:
        layer.self_attn.is_causal = True
    model.config.is_causal = True
    check_vectors(tmp_path, [normalized(rows[-1]) for rows in hidden_states(model)])


def test_linear_layers_after_an_encoder(tmp_path):
    from test_encoder import write_encoder

    model = write_encoder(tmp_path, "bert", num_hidden_layers=1, hidden_size=64)
    apply_dense = write_sentence_modules(tmp_path)
    (tmp_path / "sentence_bert_config.json").unlink()
    check_vectors(tmp_path, [normalized(apply_dense(rows.mean(0))) for rows in hidden_states(model)])


@pytest.mark.parametrize(
    ("members", "sentence"),
    [
        ({"in_features": 48}, "shape"),
        ({"activation_function": "os.system"}, "os.system"),
        ({"out_features": 0}, "out_features"),
        ({"module_input_name": "token_embeddings"}, "token_embeddings"),
    ],
)
def test_linear_layers_that_do_not_fit_are_refused(tmp_path, members, sentence):
    write_decoder(tmp_path, "gemma3_text")
    write_sentence_modules(tmp_path)
    edit_config(tmp_path / "2_Dense", **members)
    for load in (lambda: load_test_runner(tmp_path), lambda: check_model(ParleySettings(model=str(tmp_path)))):
        with pytest.raises(LoadError, match=sentence):
            load()


def test_linear_layers_of_another_width_are_refused(tmp_path):
    write_decoder(tmp_path, "gemma3_text", hidden_size=32)
    write_sentence_modules(tmp_path)
    for load in (lambda: load_test_runner(tmp_path), lambda: check_model(ParleySettings(model=str(tmp_path)))):
        with pytest.raises(LoadError, match="takes 64 numbers, but its input has 32"):
            load()


def score_requests():
    return [EngineRequest(str(i), ids, 0, pooling=RAW_SCORES) for i, ids in enumerate(make_texts())]


@pytest.mark.parametrize(
    ("kind", "members"),
    [
        ("qwen3", {"is_causal": True}),
        ("qwen3", {}),
        ("eurobert", {}),
        ("eurobert", {"classifier_pooling": "mean"}),
        ("eurobert", {"classifier_pooling": "bos"}),
    ],
)
@torch.inference_mode()
def test_classes_match_transformers(tmp_path, kind, members):
    model = write_decoder(tmp_path, kind, "AutoModelForSequenceClassification", num_labels=3, **members)
    assert check_model(ParleySettings(model=str(tmp_path))).load_caveat == ""
    runner, info = load_test_runner(tmp_path, dtype="float32")
    assert (info.labels, info.dimensions, info.generates) == (["LABEL_0", "LABEL_1", "LABEL_2"], 0, False)
    actual = unpack_vectors(serve_requests(runner, score_requests())[0])
    for i, ids in enumerate(make_texts()):
        expected = model(torch.tensor([ids])).logits[0]
        torch.testing.assert_close(torch.tensor(actual[str(i)]), expected, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_classes_come_from_the_last_token_before_padding(tmp_path):
    """Tokenizers of embedding models and rerankers may end a text with it."""
    model = write_decoder(tmp_path, "qwen3", "AutoModelForSequenceClassification", num_labels=3, is_causal=True)
    texts = [[7, 9, 1], [1], [8, 1, 1, 6], [5, 1, 1, 1], [1, 1], [9, 4]]
    runner, _ = load_test_runner(tmp_path, dtype="float32")
    requests = [EngineRequest(str(i), ids, 0, pooling=RAW_SCORES) for i, ids in enumerate(texts)]
    actual = unpack_vectors(serve_requests(runner, requests)[0])
    for i, ids in enumerate(texts):
        expected = model(torch.tensor([ids])).logits[0]
        torch.testing.assert_close(torch.tensor(actual[str(i)]), expected, atol=1e-4, rtol=1e-4)


POOLINGS = {None: lambda rows: rows.mean(0), "avg": lambda rows: rows.mean(0), "last": lambda rows: rows[-1]}


@pytest.mark.parametrize("pooling", POOLINGS)
def test_llamas_of_both_directions_pool_as_their_config_says(tmp_path, pooling):
    """Their vectors, and the logits of a reranker, whose head has no other layer."""
    model = write_decoder(tmp_path, "llama", is_causal=False)
    edit_config(tmp_path, model_type="llama_bidirec", is_causal=None, pooling=pooling)
    rows, pool = hidden_states(model), POOLINGS[pooling]
    check_vectors(tmp_path, [normalized(pool(row)) for row in rows])
    tensors = {f"model.{name}": tensor for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    score = torch.randn(1, 64)
    save_file(tensors | {"score.weight": score}, tmp_path / "model.safetensors", {"format": "pt"})
    edit_config(tmp_path, architectures=["LlamaBidirectionalForSequenceClassification"], id2label={"0": "fits"})
    runner, info = load_test_runner(tmp_path, dtype="float32")
    assert info.labels == ["fits"]
    actual = unpack_vectors(serve_requests(runner, score_requests())[0])
    for i, row in enumerate(rows):
        torch.testing.assert_close(torch.tensor(actual[str(i)]), score @ pool(row), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("members", "sentence"), [({"pooling": "dreams"}, "pooling dreams"), ({"temperature": 0.2}, "temperature 0.2")]
)
def test_llamas_of_both_directions_are_refused_by_member(tmp_path, members, sentence):
    write_decoder(tmp_path, "llama", "AutoModelForSequenceClassification", num_labels=1)
    edit_config(tmp_path, model_type="llama_bidirec", **members)
    for load in (lambda: load_test_runner(tmp_path), lambda: check_model(ParleySettings(model=str(tmp_path)))):
        with pytest.raises(LoadError, match=sentence):
            load()


@pytest.mark.parametrize("pooling", ["dreams", ["mean"], {}, 5])
def test_classifiers_with_an_unknown_pooling_are_refused(tmp_path, pooling):
    write_decoder(tmp_path, "eurobert", "AutoModelForSequenceClassification", num_labels=2)
    edit_config(tmp_path, classifier_pooling=pooling)
    with pytest.raises(LoadError, match=r"A classifier with classifier_pooling .* is not supported"):
        check_model(ParleySettings(model=str(tmp_path)))


TOKENS = {"classifier_from_token": ["a", "b"]}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("method", [{"is_original_qwen3_reranker": True}, {"method": "no_post_processing"}])
@torch.inference_mode()
def test_scores_of_tokens_are_their_probabilities(tmp_path, tied, method):
    from parley.text.tokens.tokenizer import Tokenizer

    members = {"is_causal": True, "tie_word_embeddings": tied}
    model = write_decoder(tmp_path, "qwen3", "AutoModelForCausalLM", **members)
    edit_config(tmp_path, architectures=["Qwen3ForSequenceClassification"], **TOKENS, **method)
    assert check_model(ParleySettings(model=str(tmp_path))).load_caveat == ""
    runner, info = load_test_runner(tmp_path, dtype="float32")
    assert info.labels == (["b"] if "method" not in method else ["a", "b"])
    pooling = PoolingOptions(task="classify")
    requests = [EngineRequest(str(i), ids, 0, pooling=pooling) for i, ids in enumerate(make_texts())]
    actual = unpack_vectors(serve_requests(runner, requests)[0])
    backend = Tokenizer.from_folder(tmp_path).backend
    ids = [backend.token_to_id(token) for token in ("a", "b")]
    for i, text in enumerate(make_texts()):
        probabilities = model(torch.tensor([text])).logits[0, -1, ids].softmax(-1)
        expected = probabilities if "method" in method else probabilities[1:]
        torch.testing.assert_close(torch.tensor(actual[str(i)]), expected, atol=1e-5, rtol=1e-4)


def test_scores_of_tokens_need_no_architecture(tmp_path):
    write_decoder(tmp_path, "qwen3", "AutoModelForCausalLM", is_causal=True)
    edit_config(tmp_path, architectures=["Qwen3ForCausalLM"], is_original_qwen3_reranker=True, **TOKENS)
    _, info = load_test_runner(tmp_path)
    assert info.labels == ["b"] and not info.generates


@pytest.mark.parametrize("architectures", [5, True, "Qwen3ForCausalLM", {}, None])
def test_architectures_of_a_wrong_type_name_no_classifier(tmp_path, architectures):
    write_decoder(tmp_path, "qwen3", "AutoModelForCausalLM", is_causal=True)
    edit_config(tmp_path, architectures=architectures)
    _, info = load_test_runner(tmp_path)
    assert info.generates


@pytest.mark.parametrize(
    ("members", "sentence"),
    [
        ({"classifier_from_token": ["a"], "method": "from_2_way_softmax"}, "compares 2 tokens"),
        (TOKENS, "method must be"),
        ({"is_original_qwen3_reranker": True}, "classifier_from_token must be"),
        ({"classifier_from_token": "a", "method": "no_post_processing"}, "list of 1 to"),
        ({"classifier_from_token": ["no such token"], "method": "no_post_processing"}, "no such token"),
    ],
)
def test_scores_of_tokens_are_refused_where_they_are_not_told_apart(tmp_path, members, sentence):
    write_decoder(tmp_path, "qwen3", "AutoModelForCausalLM", is_causal=True)
    edit_config(tmp_path, architectures=["Qwen3ForSequenceClassification"], **members)
    for load in (lambda: load_test_runner(tmp_path), lambda: check_model(ParleySettings(model=str(tmp_path)))):
        with pytest.raises(LoadError, match=sentence):
            load()


def test_only_the_fused_decoder_reads_whole_texts(tmp_path):
    write_decoder(tmp_path, "qwen3")
    edit_config(tmp_path, hidden_act="mish")
    with pytest.raises(LoadError, match="fused decoder only, and its activation is mish"):
        load_test_runner(tmp_path)
