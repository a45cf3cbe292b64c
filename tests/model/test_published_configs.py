"""Configs as their makers published them mean the same as in Transformers' present form.

``test_model_zoo.py`` compares models with such configs with Transformers, at night.
"""

from __future__ import annotations

import pytest

from parley.model.networks.config_reader import read_decoder_config
from parley.model.networks.families.table import FAMILIES
from parley.model.networks.rope import Unfusable

SCALING = {"long_factor": [2.0] * 48, "short_factor": [1.5] * 48}
PHI3 = {"model_type": "phi3", "max_position_embeddings": 131072}
GEMMA2 = {"model_type": "gemma2", "hidden_activation": "gelu_pytorch_tanh"}


def scaled_phi3(kind: str) -> dict:
    return PHI3 | {"rope_scaling": {"type": kind, **SCALING}}


@pytest.mark.parametrize(
    ("published", "present"),
    [
        (scaled_phi3("su"), scaled_phi3("longrope")),
        (scaled_phi3("yarn"), scaled_phi3("longrope")),
        ({"model_type": "gemma", "hidden_act": "gelu"}, {"model_type": "gemma"}),
        ({"model_type": "gemma", "hidden_act": "gelu", "hidden_activation": None}, {"model_type": "gemma"}),
        (GEMMA2 | {"hidden_act": "gelu"}, GEMMA2),
        ({"hidden_act": "gelu"} | GEMMA2, GEMMA2),
        ({"model_type": "flint", "mlp_only_layers": None}, {"model_type": "flint", "mlp_only_layers": [0, 1]}),
        ({"model_type": "flint"}, {"model_type": "flint", "mlp_only_layers": [0, 1]}),
        ({"model_type": "llama", "partial_rotary_factor": 0.5}, {"model_type": "llama"}),
        ({"model_type": "llama", "rope_parameters": {"partial_rotary_factor": 0.5}}, {"model_type": "llama"}),
    ],
)
def test_a_published_config_is_read_as_its_present_form(published, present):
    assert read_decoder_config(published).layers == read_decoder_config(present).layers
    assert read_decoder_config(published) == read_decoder_config(present)


def test_layers_whose_rotary_embedding_is_not_given_are_refused():
    full = {"rope_type": "default", "rope_theta": 1e6}
    config = {"model_type": "laguna", "num_hidden_layers": 2, "rope_parameters": {"full_attention": full}}
    with pytest.raises(Unfusable, match="rotary embedding for each type of its layers"):
        read_decoder_config(config | {"layer_types": ["full_attention", "sliding_attention"]})
    assert read_decoder_config(config | {"layer_types": ["full_attention", "full_attention"]})


@pytest.mark.parametrize("model_type", FAMILIES)
def test_field_of_a_wrong_type_does_not_crash(model_type):
    """The model then runs through Transformers, or is refused in a sentence."""
    family = FAMILIES[model_type]
    for name in sorted({*family.fields, *family.renamed}):
        for value in (None, "x", 0, -1, float("inf"), [], {"a": 1}):
            try:
                read_decoder_config({"model_type": model_type, name: value})
            except Unfusable as reason:
                assert str(reason)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_huge_values_are_cut_in_the_reason(model_type):
    family = FAMILIES[model_type]
    for name in sorted({*family.fields, *family.renamed}):
        for value in ("x" * 50_000, [0, "x"] * 25_000, {str(i): i for i in range(5000)}):
            try:
                read_decoder_config({"model_type": model_type, name: value})
            except Unfusable as reason:
                assert len(str(reason)) < 300, name
