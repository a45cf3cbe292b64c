"""Late-interaction models (ColBERT) make vectors of tokens by a linear layer, in both of its published forms."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.run_model import load_test_runner, serve_requests
from test_encoder import hidden_states, make_texts, write_encoder
from test_pooling import unpack_vectors

from parley.model.checkpoint.files import LoadError
from parley.model.load.check import check_model
from parley.model.networks.pooling import read_pooling_recipe
from parley.types import EngineRequest, ParleySettings, PoolingOptions

WEIGHT = torch.linspace(-1, 1, 9 * 48).reshape(9, 48).cos()


def edit_config(folder, **members):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | members))


def add_authors_layer(folder, name, architecture, weight=WEIGHT):
    """Write the layer as ColBERT's authors do: beside the encoder's weights."""
    edit_config(folder, architectures=[architecture])
    tensors = load_file(folder / "model.safetensors") | {name: weight}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def add_module(folder, later=(), **settings):
    """Write the layer as PyLate does: a module of its own, without a pooling. ``later``: the modules that follow."""
    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
               {"idx": 1, "name": "1", "path": "1_Dense", "type": "pylate.models.Dense.Dense"}]  # fmt: skip
    modules += [{"idx": i, "name": str(i), "path": str(i), "type": kind} for i, kind in enumerate(later, 2)]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Dense").mkdir()
    identity = {"activation_function": "torch.nn.modules.linear.Identity", "use_residual": False}
    sizes = {"in_features": 48, "out_features": 9, "bias": False}
    (folder / "1_Dense" / "config.json").write_text(json.dumps(sizes | identity | settings))
    save_file({"linear.weight": WEIGHT}, folder / "1_Dense" / "model.safetensors")


MASK_AND_NORM = [
    "sentence_transformers.multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask",
    "sentence_transformers.sentence_transformer.modules.normalize.Normalize",
]
FORMS = {
    "authors": lambda folder: add_authors_layer(folder, "linear.weight", "HF_ColBERT"),
    "vllm": lambda folder: add_authors_layer(folder, "colbert_linear.weight", "ColBERTModel"),
    "pylate": add_module,
    "sentence-transformers": lambda folder: add_module(folder, MASK_AND_NORM, module_input_name="token_embeddings"),
}


@pytest.mark.parametrize(
    ("form", "kind"),
    [("authors", "bert"), ("vllm", "bert"), ("pylate", "modernbert"), ("sentence-transformers", "bert")],
)
def test_vectors_of_tokens_pass_the_linear_layer(tmp_path, form, kind):
    model = write_encoder(tmp_path, kind, num_hidden_layers=1)
    FORMS[form](tmp_path)
    assert check_model(ParleySettings(model=str(tmp_path))).load_caveat == ""
    runner, info = load_test_runner(tmp_path)
    assert (info.pooling_tasks, info.dimensions, info.token_dimensions) == ({"token_embed"}, 0, 9)
    expected = [rows @ WEIGHT.T for rows in hidden_states(model)]
    for normalize in (False, True):
        pooling = PoolingOptions(task="token_embed", normalize=normalize)
        requests = [EngineRequest(str(i), ids, 0, pooling=pooling) for i, ids in enumerate(make_texts())]
        actual = unpack_vectors(serve_requests(runner, requests)[0])
        for i, rows in enumerate(expected):
            expected_rows = rows / rows.norm(dim=1, keepdim=True) if normalize else rows
            torch.testing.assert_close(torch.tensor(actual[str(i)]).view(-1, 9), expected_rows, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("form", "sentence"),
    [
        (lambda folder: edit_config(folder, architectures=["HF_ColBERT"]), "no tensor linear.weight"),
        (lambda folder: add_authors_layer(folder, "linear.weight", "HF_ColBERT", WEIGHT[0]), "a linear layer has two"),
        (
            lambda folder: add_authors_layer(folder, "linear.weight", "HF_ColBERT", WEIGHT[:, :9].contiguous()),
            "takes 9 numbers, but its input has 48",
        ),
        (lambda folder: add_module(folder, use_residual=True), "use_residual"),
    ],
)
def test_load_refuses_unsupported_late_interaction_models(tmp_path, form, sentence):
    write_encoder(tmp_path, "bert", num_hidden_layers=1)
    form(tmp_path)
    for load in (lambda: load_test_runner(tmp_path), lambda: check_model(ParleySettings(model=str(tmp_path)))):
        with pytest.raises(LoadError, match=sentence):
            load()


@pytest.mark.parametrize(("later", "normalizes"), [((), True), (MASK_AND_NORM[:1], False), (MASK_AND_NORM, True)])
def test_the_folder_says_whether_vectors_of_tokens_have_length_1(tmp_path, later, normalizes):
    write_encoder(tmp_path, "bert", num_hidden_layers=1)
    add_module(tmp_path, later)
    assert read_pooling_recipe(tmp_path).normalize == normalizes
