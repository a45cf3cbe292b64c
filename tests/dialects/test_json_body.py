"""JSON bodies are decoded only if they have few enough values, and only as far as they are read."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.json_bombs import BOMB_KINDS, write_bomb
from support.member_strategies import json_values

from parley.dialects import json_body
from parley.dialects.fields import decode_fields
from parley.dialects.json_body import OverfullJson, check_json_size, decode_json
from parley.errors import MalformedBody


def count_kinds(value) -> tuple[int, int, int]:
    """Return the numbers of arrays and objects, of members, and of commas that a value takes."""
    if isinstance(value, list | dict):
        inner = [count_kinds(item) for item in (value.values() if isinstance(value, dict) else value)]
        members = len(value) if isinstance(value, dict) else 0
        arrays, inner_members, commas = map(sum, zip((0, 0, 0), *inner, strict=True))
        return 1 + arrays, members + inner_members, commas + max(0, len(value) - 1)
    return 0, 0, 0


@given(value=json_values, slice_size=st.integers(1, 9), escaped=st.booleans())
def test_counts_values_outside_of_strings_whatever_the_slices(value, slice_size, escaped):
    text = json.dumps([value, 'a[{:,\\"', "\\\\", '"'], ensure_ascii=escaped).encode("utf-8", "replace")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_body, "SLICE_SIZE", slice_size)
        marks = b"".join(json_body.marks_outside_strings(text))
    arrays, members, commas = count_kinds(json.loads(text))
    assert (marks.count(b"[") + marks.count(b"{"), marks.count(b":"), marks.count(b",")) == (arrays, members, commas)


@pytest.mark.parametrize("kind", BOMB_KINDS)
def test_refuses_a_body_of_too_many_values_before_it_decodes_it(kind, monkeypatch):
    decoded = []
    monkeypatch.setattr(json_body.msgspec.json, "decode", decoded.append)
    body = write_bomb(kind)
    if kind == "one string":
        decode_json(body)
        assert decoded == [body]
    else:
        with pytest.raises(OverfullJson, match=r"more than [0-9]+"):
            decode_json(body)
        assert not decoded


def test_accepts_a_long_prompt_of_token_ids_and_a_long_text():
    check_json_size(json.dumps({"prompt": list(range(1 << 20))}).encode())
    check_json_size(json.dumps({"prompt": '{"a": [1, 2]}, ' * (1 << 20)}).encode())


def test_names_the_limit_in_the_error_of_an_overfull_body():
    with pytest.raises(MalformedBody, match="more than 131072 arrays and objects"):
        decode_fields(b'{"a":[' + b"[]," * (1 << 17) + b"0]}")


FILLER = b'"filler":"' + b"x" * json_body.LAZY_SIZE + b'"'


def test_large_body_decodes_only_the_members_that_are_read():
    fields = decode_fields(b'{"a":1,"bad":"\xff","huge":1e999,"b":null,' + FILLER + b"}")
    assert (fields.integer("a", 0), fields.integer("b", 7), fields.has_value("c")) == (1, 7, False)
    changed = fields.with_defaults({"b": 5, "a": 6}).without_members({"bad"})
    assert (changed.integer("a", 0), changed.integer("b", 0), "bad" in changed.member_names) == (1, 5, False)
    for name, reason in (("bad", "not UTF-8"), ("huge", "could not be parsed")):
        with pytest.raises(MalformedBody, match=reason):
            fields.raw_value(name)


@pytest.mark.parametrize("end", [b"", b"]", b',"b"}', b"} {}", b',"b":01}', b',"b":nul}'], ids=repr)
def test_large_body_must_be_one_json_object(end):
    with pytest.raises(MalformedBody):
        decode_fields(b'{"a":1,' + FILLER + end)
    with pytest.raises(MalformedBody):
        decode_fields(b"[" + FILLER.partition(b":")[2] + b"]")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (rb'{"a":"\ud800"}', "half of a surrogate pair (byte 6)"),
        (rb'{"a":"\\\uDBFFx"}', "half of a surrogate pair (byte 8)"),
        (b'{"a":"' + b"x" * json_body.LAZY_SIZE + rb'\ud800"}', f"(byte {6 + json_body.LAZY_SIZE})"),
        (b'{"b":"' + b"x" * json_body.LAZY_SIZE + rb'","a":"\ud800"}', f"(byte {13 + json_body.LAZY_SIZE})"),
        (rb'{"a":"\ud800', "Input data was truncated"),
        (rb'{"a":"\\ud800"', "Input data was truncated"),
    ],
)
def test_says_that_half_a_surrogate_pair_is_the_fault_of_a_complete_body(body, reason):
    with pytest.raises(MalformedBody) as refused:
        decode_fields(body).string("a", "")
    assert reason in str(refused.value)
