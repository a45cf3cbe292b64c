"""Headers of a coordinator's requests: the order of the checks and the error texts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parley.dialects.mounts import INSTANCE_PLANE
from parley.disagg.wire.headers import LONGEST, Order, read
from parley.disagg.wire.role import Address, Role
from parley.errors import OrderRefused

OWN = Address("10.0.0.1", 1121)
GOOD = {"req-id": "12345", "req-type": "prefill", "d-target": "10.0.0.2"}
OURS = GOOD | {"parley-results": "c1"}
ROLE = "DMI inference requests can be sent only to the prefill node or p_percentage of the flex node == 0"
NEEDED = "DMI request must have req-type, req-id, d-target headers"
TARGET = "Parameter d-target must be an IPv4 address"
UNKNOWN = "The server cannot process the inference request due to an unknown status. "
RECOMPUTE = "Parameter is-recompute is an optional parameter. When it is set, it must be true or false."


def role(name: Any, share: int = 50) -> Role:
    async def link(address: Address) -> str:
        return "ok"

    return Role(name, share, link=link, busy=lambda: False)


def order(said: dict[str, str], name: str = "prefill", share: int = 50, secret: str = "") -> Order:
    return read({key.encode(): value.encode("latin-1") for key, value in said.items()}, role(name, share), OWN, secret)


def refusal(said: dict[str, str], name: str = "prefill", share: int = 50, secret: str = "") -> tuple[int, dict]:
    with pytest.raises(OrderRefused) as raised:
        order(said, name, share, secret)
    answer = INSTANCE_PLANE.refusal(raised.value)
    assert answer.type == b"application/json"
    return answer.status, json.loads(answer.body)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"req-id": None}, NEEDED),
        ({"req-type": None}, NEEDED),
        ({"d-target": None}, NEEDED),
        ({"req-id": "12g"}, "Invalid req-id, the character of req-id should be hex char [0-9, a-f, A-F], but got 12g"),
        ({"req-id": "a" * (LONGEST + 1)}, "The length of req-id cannot exceed 1024"),
        ({"req-type": "decode"}, "Parameter req-type must be prefill but got decode"),
        ({"d-target": "0.0.0.0"}, TARGET),
        ({"d-target": "10.0.0"}, TARGET),
        ({"d-target": "host.example"}, TARGET),
        ({"d-target": "[::1]"}, TARGET),
        ({"d-target": "10.0.0.2;"}, TARGET),
        ({"d-target": "10.0.0.2;0"}, TARGET),
        ({"d-target": "10.0.0.2;65536"}, TARGET),
        ({"d-target": "10.0.0.2;1;1"}, TARGET),
        ({"d-target": "10.0.0.02"}, TARGET),
        ({"d-target": "10.0.0.1"}, "d-target should not be itself"),
        ({"is-recompute": "yes"}, RECOMPUTE),
        ({"is-recompute": ""}, RECOMPUTE),
        ({"is-recompute": "True"}, RECOMPUTE),
    ],
)
def test_rejects_invalid_pd_headers(change: dict[str, str | None], text: str) -> None:
    said = {name: value for name, value in (GOOD | change).items() if value is not None}
    assert refusal(said) == (400, {"error": text, "error_type": "Bad Request"})


def test_checks_pd_headers_in_mindies_order() -> None:
    """All headers are wrong at first; each correction exposes the next check."""
    said = {"req-type": "x", "req-id": "g" * 2000, "is-recompute": "x"}
    unknown = {"error": UNKNOWN, "error_type": "Service Unavailable"}
    assert refusal(said, "none") == (503, unknown)
    assert refusal(said, "decode")[1]["error"] == ROLE
    assert refusal(said)[1]["error"] == NEEDED
    said["d-target"] = "x"
    assert refusal(said)[1]["error"].endswith("but got " + "g" * 2000)
    said["req-id"] = "a" * 2000
    assert refusal(said)[1]["error"] == "The length of req-id cannot exceed 1024"
    said["req-id"] = "Ab9"
    assert refusal(said)[1]["error"] == "Parameter req-type must be prefill but got x"
    said["req-type"] = "prefill"
    assert refusal(said)[1]["error"] == TARGET
    said["d-target"] = "10.0.0.2"
    assert refusal(said)[1]["error"] == RECOMPUTE
    said["is-recompute"] = "true"
    assert order(said) == Order("Ab9", Address("10.0.0.2", 1121), False, True)


@pytest.mark.parametrize(("name", "share", "good"), [("prefill", 0, True), ("flex", 1, True), ("flex", 0, False),
                                                     ("decode", 50, False), ("mixed", 50, False)])  # fmt: skip
def test_only_prefill_and_flex_roles_take_prefill_requests(name: str, share: int, good: bool) -> None:
    if good:
        assert order(GOOD, name, share).target == Address("10.0.0.2", 1121)
    else:
        assert refusal(GOOD, name, share)[1]["error"] == ROLE


def test_flex_instance_may_decode_its_own_prefill() -> None:
    assert order(GOOD | {"d-target": "10.0.0.1;1121"}, "flex").here
    assert not order(GOOD | {"d-target": "10.0.0.1;1122"}, "flex").here


@pytest.mark.parametrize("name", ["prefill", "decode", "flex", "mixed"])
def test_parleys_coordinator_may_send_whole_requests_to_any_role(name: str) -> None:
    for target in ("10.0.0.1", "10.0.0.1;1121", "self"):
        made = order(OURS | {"d-target": target, "req-id": "A_b-z"}, name, 0)
        assert made.here and made.client == "c1" and made.id == "A_b-z"


def test_parses_the_headers_of_parleys_coordinator() -> None:
    said = OURS | {"parley-id": "0" * 32, "parley-created": "1700000000", "parley-given": "17"}
    said["d-target"] = "[fd00::2];7"
    wanted = Order("12345", Address("fd00::2", 7), False, False, "c1", "0" * 32, 1700000000, 17)
    assert order(said) == wanted
    assert str(wanted.target) == "[fd00::2];7" and str(OWN) == "10.0.0.1;1121"
    for bad in (
        {"parley-id": "A" * 32},
        {"parley-created": "-1"},
        {"parley-given": "x"},
        {"parley-spent": "-1"},
        {"parley-results": "a b"},
    ):
        status, body = refusal(said | bad)
        assert status == 400 and next(iter(bad)) in body["error"]
    assert refusal(said, secret="s")[0] == refusal(said | {"parley-secret": "t"}, secret="s")[0] == 401
    assert order(said | {"parley-secret": "s"}, secret="s") == wanted
    assert refusal(GOOD, secret="s")[0] == 401 and order(GOOD | {"parley-secret": "s"}, secret="s").client == ""


@given(st.dictionaries(st.sampled_from([*OURS, "is-recompute", "parley-id", "parley-created", "parley-given",
                                        "parley-spent"]),
                       st.text(st.characters(max_codepoint=255), max_size=20)))  # fmt: skip
def test_arbitrary_pd_headers_are_parsed_or_refused(said: dict[str, str]) -> None:
    for name in ("none", "prefill", "decode", "flex", "mixed"):
        try:
            assert order(said, name).id
        except OrderRefused as refused:
            assert refused.status in (400, 503)
