"""Headers of a coordinator's requests: the order of the checks and the error texts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parley.dialects.mounts import INSTANCE_PLANE
from parley.disagg.wire.headers import MAX_REQUEST_ID_LENGTH, PrefillCommand, parse_prefill_command, shows_secret
from parley.disagg.wire.role import InstanceAddress, InstanceRole
from parley.errors import CommandRefused

OWN_ADDRESS = InstanceAddress("10.0.0.1", 1121)
MINDIE_HEADERS = {"req-id": "12345", "req-type": "prefill", "d-target": "10.0.0.2"}
NATIVE_HEADERS = MINDIE_HEADERS | {"parley-results": "c1"}
WRONG_ROLE = "DMI inference requests can be sent only to the prefill node or p_percentage of the flex node == 0"
MISSING_HEADERS = "DMI request must have req-type, req-id, d-target headers"
INVALID_TARGET = "Parameter d-target must be an IPv4 address"
UNKNOWN_STATUS = "The server cannot process the inference request due to an unknown status. "
INVALID_RECOMPUTE = "Parameter is-recompute is an optional parameter. When it is set, it must be true or false."


def make_role(name: Any, share: int = 50) -> InstanceRole:
    async def link(address: InstanceAddress) -> str:
        return "ok"

    return InstanceRole(name, share, link_peer=link, is_busy=lambda: False)


def parse_headers(headers: dict[str, str], name: str = "prefill", share: int = 50, secret: str = "") -> PrefillCommand:
    raw_headers = {key.encode(): value.encode("latin-1") for key, value in headers.items()}
    from_member = not secret or shows_secret(raw_headers, secret)
    return parse_prefill_command(raw_headers, make_role(name, share), OWN_ADDRESS, from_member=from_member)


def header_error(headers: dict[str, str], name: str = "prefill", share: int = 50, secret: str = "") -> tuple[int, dict]:
    with pytest.raises(CommandRefused) as raised:
        parse_headers(headers, name, share, secret)
    answer = INSTANCE_PLANE.render_command_refusal(raised.value)
    assert answer.content_type == b"application/json"
    return answer.status, json.loads(answer.body)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"req-id": None}, MISSING_HEADERS),
        ({"req-type": None}, MISSING_HEADERS),
        ({"d-target": None}, MISSING_HEADERS),
        ({"req-id": "12g"}, "Invalid req-id, the character of req-id should be hex char [0-9, a-f, A-F], but got 12g"),
        ({"req-id": "a" * (MAX_REQUEST_ID_LENGTH + 1)}, "The length of req-id cannot exceed 1024"),
        ({"req-type": "decode"}, "Parameter req-type must be prefill but got decode"),
        ({"d-target": "0.0.0.0"}, INVALID_TARGET),
        ({"d-target": "10.0.0"}, INVALID_TARGET),
        ({"d-target": "host.example"}, INVALID_TARGET),
        ({"d-target": "[::1]"}, INVALID_TARGET),
        ({"d-target": "10.0.0.2;"}, INVALID_TARGET),
        ({"d-target": "10.0.0.2;0"}, INVALID_TARGET),
        ({"d-target": "10.0.0.2;65536"}, INVALID_TARGET),
        ({"d-target": "10.0.0.2;1;1"}, INVALID_TARGET),
        ({"d-target": "10.0.0.02"}, INVALID_TARGET),
        ({"d-target": "10.0.0.1"}, "d-target should not be itself"),
        ({"is-recompute": "yes"}, INVALID_RECOMPUTE),
        ({"is-recompute": ""}, INVALID_RECOMPUTE),
        ({"is-recompute": "True"}, INVALID_RECOMPUTE),
    ],
)
def test_rejects_invalid_pd_headers(change: dict[str, str | None], text: str) -> None:
    headers = {name: value for name, value in (MINDIE_HEADERS | change).items() if value is not None}
    assert header_error(headers) == (400, {"error": text, "error_type": "Bad Request"})


def test_checks_pd_headers_in_mindies_order() -> None:
    """All headers are wrong at first; each correction exposes the next check."""
    headers = {"req-type": "x", "req-id": "g" * 2000, "is-recompute": "x"}
    unknown = {"error": UNKNOWN_STATUS, "error_type": "Service Unavailable"}
    assert header_error(headers, "none") == (503, unknown)
    assert header_error(headers, "decode")[1]["error"] == WRONG_ROLE
    assert header_error(headers)[1]["error"] == MISSING_HEADERS
    headers["d-target"] = "x"
    assert header_error(headers)[1]["error"].endswith("but got " + "g" * 2000)
    headers["req-id"] = "a" * 2000
    assert header_error(headers)[1]["error"] == "The length of req-id cannot exceed 1024"
    headers["req-id"] = "Ab9"
    assert header_error(headers)[1]["error"] == "Parameter req-type must be prefill but got x"
    headers["req-type"] = "prefill"
    assert header_error(headers)[1]["error"] == INVALID_TARGET
    headers["d-target"] = "10.0.0.2"
    assert header_error(headers)[1]["error"] == INVALID_RECOMPUTE
    headers["is-recompute"] = "true"
    assert parse_headers(headers) == PrefillCommand("Ab9", InstanceAddress("10.0.0.2", 1121), False, True)


@pytest.mark.parametrize(("name", "share", "good"), [("prefill", 0, True), ("flex", 1, True), ("flex", 0, False),
                                                     ("decode", 50, False), ("mixed", 50, False)])  # fmt: skip
def test_only_prefill_and_flex_roles_take_prefill_requests(name: str, share: int, good: bool) -> None:
    if good:
        assert parse_headers(MINDIE_HEADERS, name, share).target == InstanceAddress("10.0.0.2", 1121)
    else:
        assert header_error(MINDIE_HEADERS, name, share)[1]["error"] == WRONG_ROLE


def test_flex_instance_may_decode_its_own_prefill() -> None:
    assert parse_headers(MINDIE_HEADERS | {"d-target": "10.0.0.1;1121"}, "flex").continues_here
    assert not parse_headers(MINDIE_HEADERS | {"d-target": "10.0.0.1;1122"}, "flex").continues_here


@pytest.mark.parametrize("name", ["prefill", "decode", "flex", "mixed"])
def test_parleys_coordinator_may_send_whole_requests_to_any_role(name: str) -> None:
    for target in ("10.0.0.1", "10.0.0.1;1121", "self"):
        command = parse_headers(NATIVE_HEADERS | {"d-target": target, "req-id": "A_b-z"}, name, 0)
        assert command.continues_here and command.coordinator_name == "c1" and command.request_id == "A_b-z"


def test_parses_the_headers_of_parleys_coordinator() -> None:
    headers = NATIVE_HEADERS | {"parley-id": "0" * 32, "parley-created": "1700000000", "parley-given": "17"}
    headers["d-target"] = "[fd00::2];7"
    expected = PrefillCommand("12345", InstanceAddress("fd00::2", 7), False, False, "c1", "0" * 32, 1700000000, 17)
    assert parse_headers(headers) == expected
    assert str(expected.target) == "[fd00::2];7" and str(OWN_ADDRESS) == "10.0.0.1;1121"
    for bad in (
        {"parley-id": "A" * 32},
        {"parley-created": "-1"},
        {"parley-given": "x"},
        {"parley-spent": "-1"},
        {"parley-results": "a b"},
    ):
        status, body = header_error(headers | bad)
        assert status == 400 and next(iter(bad)) in body["error"]
    assert header_error(headers, secret="s")[0] == header_error(headers | {"parley-secret": "t"}, secret="s")[0] == 401
    assert parse_headers(headers | {"parley-secret": "s"}, secret="s") == expected
    assert (
        header_error(MINDIE_HEADERS, secret="s")[0] == 401
        and parse_headers(MINDIE_HEADERS | {"parley-secret": "s"}, secret="s").coordinator_name == ""
    )


@given(st.dictionaries(st.sampled_from([*NATIVE_HEADERS, "is-recompute", "parley-id", "parley-created", "parley-given",
                                        "parley-spent"]),
                       st.text(st.characters(max_codepoint=255), max_size=20)))  # fmt: skip
def test_arbitrary_pd_headers_are_parsed_or_refused(headers: dict[str, str]) -> None:
    for name in ("none", "prefill", "decode", "flex", "mixed"):
        try:
            assert parse_headers(headers, name).request_id
        except CommandRefused as refused:
            assert refused.status in (400, 503)
