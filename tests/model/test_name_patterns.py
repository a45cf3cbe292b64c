"""Patterns of quantization configs: they match as ``re`` says, and none of them takes long."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parley.model.checkpoint import quantization
from parley.model.checkpoint.files import LoadError
from parley.model.checkpoint.name_patterns import BadPattern, NamePattern, PatternRules

NAMES = st.text("aabbc.1_", max_size=9)
# Parts of which patterns are made; the last ones make ``re`` slow
PARTS = ("a", "b*", "[^a-c]+", r"\d", ".*?", "(a|b)", "a{2,3}", r"\b", "(?!ab)", "(?<=a)", "^", "$", r"[\w.]")
SLOW = ("((a|b)*)*", "(a|a)*", "(a?b?){0,70}", "(?:(a+)+b?)+")


@given(st.lists(st.sampled_from(PARTS), max_size=4), st.sampled_from(SLOW), st.sampled_from(PARTS), NAMES)
def test_pattern_matches_like_re(parts, slow, last, name):
    text = "".join([*parts, slow, last])
    pattern, plain = NamePattern(text), re.compile(text)
    assert pattern._quick is None
    assert pattern.matches_start(name) == (plain.match(name) is not None)
    assert pattern.is_found(name) == (plain.search(name) is not None)


@given(
    st.lists(st.lists(st.sampled_from(["a", "b", ".", r"\.", "1", "b?"]), max_size=4).map("".join), max_size=8), NAMES
)
def test_first_of_several_matching_patterns_applies(texts, name):
    first = next((text for text in texts if re.match(text, name)), None)
    assert PatternRules((text, text) for text in texts).find_value(name, None) == first


@pytest.mark.parametrize(
    "text",
    [r"(a+)+$", "(a|aa)+$", "(a|a)" * 40 + "x", "a?" * 60 + "a" * 60, ".*" * 20 + "x", "((a{1000}){1000}){1000}",
     "(((a{0,9999}){0,9999}){0,9999}){0,9999}x"],
)  # fmt: skip
def test_every_pattern_is_matched_quickly(text):
    """With ``re`` alone, most of these patterns would take years."""
    assert not NamePattern(text).matches_start("a" * 50 + "b")


def test_patterns_that_are_slow_in_re_are_not_given_to_re():
    for text in ("(.|.)" * 24 + "x", ".?" * 24 + "x", "(.?.?.?){7}x"):
        assert NamePattern(text)._quick is None


def test_usual_patterns_are_given_to_re():
    for text in (r".*mlp\.gate$", r"^(?!.*(self_attn|mlp)).*$", r"model\.layers\.(1[0-9]|2[0-3])\..*", "(?i)LM_HEAD"):
        assert NamePattern(text)._quick is not None


@pytest.mark.parametrize("text", ["(", "a{99999999999}", "(" * 5000, "a" * 5000, "(" * 50 + ")" * 50, r"(a|a)*\1"])
def test_refuses_broken_and_unsupported_patterns(text):
    with pytest.raises(BadPattern):
        NamePattern(text)


def test_config_with_a_slow_pattern_is_read():
    slow = "(.*a|.*)*$"
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {f"-:{slow}": {}}}
    find = quantization.read_quantization({"quantization_config": gptq}, "none").find_format
    assert find("model.layers.10.block_sparse_moe.experts.101.gate_proj") is None
    group = {"targets": ["re:" + slow], "weights": {"num_bits": 8, "type": "int"}}
    config = {"quant_method": "compressed-tensors", "config_groups": {"a": group}, "ignore": [f"re:{slow}x"]}
    find = quantization.read_quantization({"quantization_config": config}, "none").find_format
    assert find("model.layers.10.block_sparse_moe.experts.101.gate_proj") is not None
    config["ignore"] = [r"re:(a|a)*\1"]
    with pytest.raises(LoadError, match="ignore has a broken or unsupported pattern"):
        quantization.read_quantization({"quantization_config": config}, "none")
