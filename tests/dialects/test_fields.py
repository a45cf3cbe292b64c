"""Reading members of a JSON body: the rules that every dialect relies on."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parley.dialects.fields import MAX_DEPTH, Fields, decode_fields
from parley.dialects.json_body import LAZY_SIZE
from parley.errors import BadRequest, InvalidValue, MalformedBody, MissingField, WrongType


def refusal(read) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        read()
    return caught.value


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"7",
        b'"text"',
        b"{",
        b'{"a":}',
        b'{"a":1} {}',
        b'{"a":NaN}',
        b'{"a":1e999}',
        b'{"a":-1e999}',
        b'{"a":' + b"9" * 5000 + b"}",
        b'{"a":"\\ud800"}',
        b'{"a":"\\udc00"}',
        b'{"\\ud800":1}',
        b'{"a":"\xed\xa0\x80"}',
        b"\xef\xbb\xbf{}",
        '{"a":1}'.encode("utf-16"),
        '{"a":1}'.encode("utf-16-be"),
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"\x00",
        b"{'a':1}",
    ],
    ids=lambda body: repr(body[:16]),
)
def test_decode_refuses_body_that_is_not_a_utf8_json_object(body):
    assert isinstance(refusal(lambda: decode_fields(body)), MalformedBody)


@pytest.mark.parametrize("length", [0, LAZY_SIZE])
def test_decode_error_names_the_position_of_bytes_that_are_not_utf8(length):
    start = b'{"a":"' + b"b" * length + b'","c":"\xc3\xa9'
    with pytest.raises(MalformedBody, match=rf"not UTF-8 \(at byte {len(start)}\)"):
        decode_fields(start + b'\xff"}').string("c", "")


@pytest.mark.parametrize("value", [10**400, -(10**400)])
def test_number_without_limits_refuses_integers_beyond_all_floats(value):
    assert isinstance(refusal(lambda: Fields({"a": value}).number("a", 0.0)), InvalidValue)


def test_decode_keeps_last_of_duplicate_members():
    assert decode_fields(b'{"a":1,"a":2}').integer("a", 0) == 2


def test_fields_return_default_for_null_and_absence():
    fields = Fields({"x": None})
    for name in ("x", "y"):
        assert fields.integer(name, 7) == 7
        assert fields.number(name, 0.5) == 0.5
        assert fields.boolean(name, True) is True
        assert fields.string(name, "s") == "s"
        assert fields.strings(name, cap=1, total=1) == []
        assert fields.integers(name, cap=1, low=0, high=1) == []
        assert fields.object(name) is None
        assert fields.free_object(name) == {}
        assert fields.token_weights(name, cap=1, low=0, high=1) == {}
        assert list(fields.objects(name, cap=1)) == []


VALUES_BY_TYPE = {"boolean": True, "integer": 3, "number": 2.5, "string": "s", "array": ["a"], "object": {"a": 1}}
READERS_BY_TYPE = {
    "boolean": lambda f: f.boolean("x", None),
    "integer": lambda f: f.integer("x", None),
    "number": lambda f: f.number("x", None),
    "string": lambda f: f.string("x", None),
    "array": lambda f: f.array("x", cap=9),
    "object": lambda f: f.object("x"),
}


@pytest.mark.parametrize("expected_type", READERS_BY_TYPE)
@pytest.mark.parametrize("value", VALUES_BY_TYPE)
def test_fields_do_not_convert_types(expected_type, value):
    """The only exception is an integer where a number is expected."""
    fields = Fields({"x": VALUES_BY_TYPE[value]}, "messages[0]")
    if expected_type == value or (expected_type, value) == ("number", "integer"):
        READERS_BY_TYPE[expected_type](fields)
        return
    error = refusal(lambda: READERS_BY_TYPE[expected_type](fields))
    assert isinstance(error, WrongType)
    assert error.field == "messages[0].x"
    assert error.code == "invalid_type"


def test_fields_accept_only_whole_floats_as_integers():
    assert Fields({"x": 5.0}).integer("x", None) == 5
    assert isinstance(refusal(lambda: Fields({"x": 5.5}).integer("x", None)), WrongType)


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (-1, "integer_below_min_value"),
        (129, "integer_above_max_value"),
        (2**31, "integer_above_max_value"),
        (2**63, "integer_above_max_value"),
        (2**64, "integer_above_max_value"),
        (1e30, "integer_above_max_value"),
        (-1e300, "integer_below_min_value"),
        (10**400, "integer_above_max_value"),
    ],
)
def test_fields_refuse_integers_out_of_range(value, code):
    error = refusal(lambda: Fields({"n": value}).integer("n", 1, 1, 128))
    assert isinstance(error, InvalidValue)
    assert (error.field, error.code) == ("n", code)
    assert "at least 1 and at most 128" in error.message
    assert len(error.message) < 200


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (-0.001, "decimal_below_min_value"),
        (2.1, "decimal_above_max_value"),
        (-1, "decimal_below_min_value"),
        (3, "decimal_above_max_value"),
        (1e308, "decimal_above_max_value"),
        (10**400, "decimal_above_max_value"),
    ],
)
def test_fields_refuse_numbers_out_of_range(value, code):
    error = refusal(lambda: Fields({"t": value}).number("t", 1, 0, 2))
    assert (error.field, error.code) == ("t", code)


def test_fields_open_bound_excludes_the_bound():
    assert Fields({"p": 1e-300}).number("p", 1, 0, 2, low_excluded=True) == 1e-300
    assert "greater than 0" in refusal(lambda: Fields({"p": 0}).number("p", 1, 0, 2, low_excluded=True)).message


def test_fields_cap_strings_and_name_wrong_element():
    def strings(value):
        return Fields({"stop": value}).strings("stop", cap=3, total=5)

    assert strings("a") == ["a"]
    assert strings(["a", "bcde"]) == ["a", "bcde"]
    assert refusal(lambda: strings(["a"] * 4)).code == "array_above_max_length"
    assert refusal(lambda: strings(["a", 1])).field == "stop[1]"
    assert refusal(lambda: strings(["a", ""])).code == "empty_string"
    assert refusal(lambda: strings("")).code == "empty_string"
    assert refusal(lambda: strings("abcdef")).code == "string_above_max_length"
    several = refusal(lambda: strings(["ab", "cd", "ef"]))
    assert several.field == "stop" and "at most 5 characters are allowed in all strings together" in str(several)


def test_fields_name_wrong_element_of_integers():
    def integers(value):
        return Fields({"ids": value}).integers("ids", cap=5, low=0, high=9)

    assert integers([0, 9]) == [0, 9]
    assert integers([1.0]) == [1]
    assert refusal(lambda: integers([1, 10])).field == "ids[1]"
    assert refusal(lambda: integers([True])).field == "ids[0]"
    assert refusal(lambda: integers([1, -1])).code == "integer_below_min_value"
    assert refusal(lambda: integers([1] * 6)).code == "array_above_max_length"


def test_fields_read_weights_by_token_id():
    def weights(value):
        return Fields({"b": value}).token_weights("b", cap=2, low=-100, high=100)

    assert weights({"12": -100, "0": 5.5}) == {12: -100.0, 0: 5.5}
    for wrong in ({"x": 1}, {"-1": 1}, {"1.0": 1}, {"²": 1}, {"9" * 30: 1}, {"": 1}):
        assert isinstance(refusal(lambda wrong=wrong: weights(wrong)), InvalidValue)
    assert refusal(lambda: weights({"1": 101})).field == "b.1"
    assert refusal(lambda: weights({"1": "x"})).code == "invalid_type"
    assert refusal(lambda: weights({str(i): 1 for i in range(3)})).code == "object_above_max_length"


def nest_arrays(depth: int) -> dict:
    value: dict = {}
    for _ in range(depth):
        value = {"a": [value]}
    return value


def test_fields_refuse_deeply_nested_values():
    assert Fields({"s": nest_arrays(MAX_DEPTH // 2 - 1)}).free_object("s")
    assert refusal(lambda: Fields({"s": nest_arrays(400)}).free_object("s")).field == "s"


def test_fields_error_lists_allowed_values():
    error = refusal(lambda: Fields({"role": "wizard"}, "messages[2]").string("role", "", allowed=("user", "tool")))
    assert error.field == "messages[2].role"
    assert "'user', 'tool'" in error.message


def test_fields_missing_error_names_full_path():
    assert isinstance(Fields({}).missing_member("messages"), MissingField)
    assert Fields({}, "a[1]").missing_member("b").field == "a[1].b"


@given(st.dictionaries(st.text(max_size=3), st.floats() | st.integers() | st.text() | st.none() | st.booleans()))
def test_fields_return_value_in_range_or_short_error(data):
    """Guards against NaN and against error messages that repeat a large input."""
    for name in [*data, "absent"]:
        for read in (
            lambda name=name: Fields(data).number(name, 0.5, 0, 1),
            lambda name=name: Fields(data).integer(name, 0, 0, 1),
        ):
            try:
                value = read()
            except BadRequest as error:
                assert len(error.message) < 300
                assert msgspec.json.encode(error.message)
            else:
                assert 0 <= value <= 1
                assert not math.isnan(value)
