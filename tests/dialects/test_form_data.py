"""Forms: what their parts become, whatever their order, and which forms are refused before they cost much."""

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.sound_forms import BOUNDARY, FORM_TYPE, Part, encode_form

from parley.dialects.fields import Fields
from parley.dialects.form_data import (
    MAX_HEADER_SIZE,
    MAX_HEADERS,
    MAX_PARTS,
    MAX_TEXT_SIZE,
    UploadedFile,
    decode_form,
    model_in_form,
    read_boundary,
    with_arrays,
)
from parley.errors import BadRequest, MalformedBody

NAMES = st.text("abcdefghijklmnopqrstuvwxyz_0123456789", min_size=1, max_size=12).filter(lambda name: name != "file")
TEXTS = st.text(min_size=1, max_size=40).filter(lambda text: BOUNDARY not in text)


def decode(*parts: Part) -> Fields:
    return decode_form(encode_form(parts), FORM_TYPE, ("file",))


def members(form: Fields) -> dict[str, Any]:
    return {name: form.raw_value(name) for name in form.member_names}


@given(st.dictionaries(NAMES, TEXTS, max_size=8), st.binary(max_size=300), st.randoms(use_true_random=False))
def test_form_has_the_same_members_in_any_order_of_its_parts(texts, content, rng):
    parts: list[Part] = [*((name, text, None) for name, text in texts.items()), ("file", content, "a.wav")]
    rng.shuffle(parts)
    assert members(decode(*parts)) == {**texts, "file": UploadedFile(content, "a.wav", "audio/x-wav")}


@given(st.binary(max_size=2000))
def test_any_body_is_a_form_or_malformed(tail):
    for body in (tail, f"--{BOUNDARY}\r\n".encode() + tail, encode_form([("a", "b", None)])[:-40] + tail):
        with contextlib.suppress(MalformedBody):
            decode_form(body, FORM_TYPE, ("file",))
        assert isinstance(model_in_form(body), str)


@given(st.binary(max_size=300))
def test_any_content_type_has_a_boundary_or_is_malformed(content_type):
    for header in (content_type, b"multipart/form-data; boundary=" + content_type):
        with contextlib.suppress(MalformedBody):
            assert read_boundary(header)


def test_names_with_brackets_are_arrays_and_objects():
    form = decode(
        ("include[]", "logprobs", None),
        ("word", "a", None),
        ("word", "b", None),
        ("word", "c", None),
        ("chunking_strategy[type]", "server_vad", None),
        ("chunking_strategy[threshold]", "0.5", None),
        ("single", "x", None),
    )
    assert members(form) == {
        "include": ["logprobs"],
        "word": ["a", "b", "c"],
        "chunking_strategy": {"type": "server_vad", "threshold": "0.5"},
        "single": "x",
    }
    assert members(with_arrays(form, ("single", "include", "absent")))["single"] == ["x"]


def test_file_may_have_no_name_and_empty_texts_are_absent():
    form = decode(("file", b"\xff\x00", None), ("language", "", None), ("other", b"\xff", "o.bin"))
    assert members(form) == {"file": UploadedFile(b"\xff\x00"), "other": UploadedFile(b"\xff", "o.bin", "audio/x-wav")}


@pytest.mark.parametrize(
    ("text", "method", "value"),
    [
        ("true", "boolean", True), ("False", "boolean", False), ("1", "boolean", True), (" 0 ", "boolean", False),
        ("7", "integer", 7), ("-3", "integer", -3), ("0.5", "number", 0.5), ("1e-3", "number", 0.001),
        (".5", "number", 0.5),
    ],
)  # fmt: skip
def test_texts_are_read_as_the_type_of_the_member(text, method, value):
    assert getattr(decode(("a", text, None)), method)("a", None) == value


@pytest.mark.parametrize(
    ("text", "method"),
    [
        ("yes", "boolean"),
        ("1.5", "integer"),
        ("", "integer"),
        ("nan", "number"),
        ("0x1", "number"),
        ("9" * 5000, "number"),
    ],
)
def test_text_of_another_type_is_refused_by_name(text, method):
    if not text:
        assert getattr(decode(("a", text, None)), method)("a", None) is None
        return
    with pytest.raises(BadRequest) as caught:
        getattr(decode(("a", text, None)), method)("a", None)
    assert caught.value.field == "a" and len(caught.value.message) < 200


@pytest.mark.parametrize(
    ("content_type", "sentence"),
    [
        (b"", "must be multipart/form-data"),
        (b"application/json", "must be multipart/form-data"),
        (b"application/x-www-form-urlencoded", "must be multipart/form-data"),
        (b"multipart/mixed; boundary=a", "must be multipart/form-data"),
        (b"multipart/form-data", "needs a boundary"),
        (b"multipart/form-data; boundary=" + b"a" * 201, "needs a boundary"),
        (b"multipart/form-data; boundary=another", "must begin with the boundary"),
    ],
)
def test_refuses_other_content_types(content_type, sentence):
    with pytest.raises(MalformedBody, match=sentence):
        decode_form(encode_form([("a", "b", None)]), content_type, ("file",))


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"", "must begin"),
        (b'{"model":"m"}', "must begin"),
        (encode_form([("a", "b", None)])[:-8], "ends before"),
        (encode_form([("a b", "c", None)]), "no valid name"),
        (encode_form([("", "c", None)]), "no valid name"),
        (encode_form([("a[b][c]", "d", None)]), "no valid name"),
        (encode_form([("a", b"\xff", None)]), "part 'a' is not UTF-8"),
        (encode_form([("a[b]", "c", None), ("a", "d", None)]), "both as an object"),
        (encode_form([("a", "c", None), ("a[b]", "d", None)]), "both as an object"),
        (encode_form([("a", "b", None)] * (MAX_PARTS + 1)), f"more than {MAX_PARTS} parts"),
        (encode_form([("a", "b" * MAX_TEXT_SIZE, None), ("c", "d", None)]), "together"),
        (encode_form([("a", "b", "x" * MAX_HEADER_SIZE)]), "could not be parsed"),
        (
            f"--{BOUNDARY}\r\n".encode() + b"X: y\r\n" * (MAX_HEADERS + 1) + f"\r\n\r\n--{BOUNDARY}--".encode(),
            "could not be parsed",
        ),
        (f"--{BOUNDARY}x\r\n\r\n--{BOUNDARY}--".encode(), "could not be parsed"),
    ],
)
def test_refuses_broken_forms_and_bombs(body, sentence):
    with pytest.raises(MalformedBody, match=sentence):
        decode_form(body, FORM_TYPE, ("file",))
    assert isinstance(model_in_form(body), str)


@pytest.mark.parametrize("filling", [b"\r", b"\r\n--", f"\r\n--{BOUNDARY[:-1]}".encode(), b"-", b"\0"])
def test_large_files_are_read_whatever_their_content(filling):
    content = filling * ((8 << 20) // len(filling))
    form = decode_form(encode_form([("file", content, "a"), ("model", "m", None)]), FORM_TYPE, ("file",))
    assert members(form) == {"file": UploadedFile(content, "a", "audio/x-wav"), "model": "m"}


def test_model_is_found_at_any_place_in_the_body():
    file: Part = ("file", b'\r\nContent-Disposition: form-data; name="model"\r\n\r\nfalse', "a.wav")
    assert model_in_form(encode_form([("model", "m", None), file])) == "m"
    assert model_in_form(encode_form([file, ("model", "m", None)], "other")) == "m"
    assert model_in_form(encode_form([("model", "m", None), ("model", "n", None)])) == ""
    assert model_in_form(b"\x0a\x04tiny") == model_in_form(b"--") == model_in_form(b"--\r\n") == ""
