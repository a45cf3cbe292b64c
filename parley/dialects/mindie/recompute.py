"""MindIE's recompute: bodies of requests that another instance resumes, written by the first and read by the second.

Such a body is the client's, except that its prompt is a text of numbers: the length of the prompt, then the token ids
of the prompt and of the output so far. parley adds ``parley_origin``, the original request and the engine's outputs,
so that another parley can resume exactly; other servers ignore it. Knows the interfaces by path and members, and not
how a request is answered.
"""

from __future__ import annotations

import re
from binascii import Error, a2b_base64, b2a_base64
from collections.abc import Sequence
from typing import Any

import msgspec

from parley.dialects.instance_plane import IDENTITY, Origin, ResumedBody
from parley.dialects.mindie import tgi, vllm
from parley.dialects.mindie.shared import encode
from parley.errors import OrderRefused
from parley.types import Batch, Output

IDS = re.compile(r"[0-9]{1,10}(,[0-9]{1,10})*")
ORIGIN = "parley_origin"
MESSAGES = "Messages MUST be a string for recompute"
CALLING = "Messages must be a string for recompute"  # for requests with tools
UNREAD = "Failed to get token from input: {}"
FIRST = "Failed to get parameter firstTokenCost in json body"
TIMES = "Parameter decodeTime length is invalid."
ANY = "a"  # replaces a prompt whose text is not known


_ORIGIN = msgspec.msgpack.Decoder(Origin)

# The member that holds an interface's prompt; for tensors it is in ``inputs[0]``.
MEMBERS = {
    "chat": "messages",
    "completions": "prompt",
    "vllm": "prompt",
    "tgi": "inputs",
    "native": "inputs",
    "triton": "text_input",
}


# -- reading


def read(path: str, body: bytes) -> ResumedBody:
    """Read a body sent with ``is-recompute: true``; return it as it is if it is no JSON object. Raises OrderRefused."""
    try:
        given = msgspec.json.decode(body)
    except (ValueError, RecursionError):
        return ResumedBody(body, None, [])
    if not isinstance(given, dict):
        return ResumedBody(body, None, [])
    if ORIGIN in given:
        return _original(given[ORIGIN])
    interface = _interface(path, given)
    text = _text(interface, given)
    prompt, drawn = _tokens(text) if isinstance(text, str) else _split(text)
    if interface == "tensors":
        _fill(given["inputs"][0], prompt)
    elif interface == "native":
        del given["inputs"]
        given["input_id"] = prompt
    else:
        given[MEMBERS[interface]] = _stand_in(interface, given, prompt)
    if interface == "triton":
        _times(given, len(drawn))
    past: list[Batch] = [[(0, Output("", 0, drawn))]] if drawn else []
    return ResumedBody(encode(given), prompt, past)


def _original(coded: Any) -> ResumedBody:
    try:
        origin = _ORIGIN.decode(a2b_base64(coded, strict_mode=True))
    except (Error, TypeError, ValueError) as error:
        raise OrderRefused(422, UNREAD.format(f"{ORIGIN} cannot be read ({type(error).__name__})")) from None
    if not IDENTITY.fullmatch(origin.unique):
        raise OrderRefused(422, UNREAD.format(f"{ORIGIN} has no identity"))
    return ResumedBody(origin.body, origin.prompt, origin.past, origin.unique, origin.created)


def _interface(path: str, given: dict[str, Any]) -> str:
    """Return the name of the interface that a path and a body belong to."""
    if "messages" in given:
        return "chat"
    if isinstance(given.get("inputs"), list) and path.endswith("/infer"):
        return "tensors"
    if "text_input" in given:
        return "triton"
    if "prompt" in given:
        return "vllm" if path.endswith("/generate") else "completions"
    return "native" if path.endswith(("/infer", "/infer_token")) else "tgi"


def _text(interface: str, given: dict[str, Any]) -> str | list[int]:
    """Return the numbers in a body, as text or as a list. Raises OrderRefused."""
    if interface == "tensors":
        return _data(given["inputs"])
    member = MEMBERS[interface]
    text = given.get(member)
    if isinstance(text, str):
        return text
    if interface == "chat":
        raise OrderRefused(422, CALLING if given.get("tools") else MESSAGES)
    raise OrderRefused(422, UNREAD.format(f"{member} is not a string"))


def _data(tensors: list[Any]) -> list[int]:
    data = tensors[0].get("data") if tensors and isinstance(tensors[0], dict) else None
    while isinstance(data, list) and len(data) == 1 and isinstance(data[0], list):
        data = data[0]
    if not isinstance(data, list) or not all(type(id) is int and id >= 0 for id in data):
        raise OrderRefused(422, UNREAD.format("data is not a list of token ids"))
    return data


def _stand_in(interface: str, given: dict[str, Any], prompt: list[int]) -> Any:
    """Return the value that replaces the numbers in the prompt's member. Raises OrderRefused."""
    if interface == "chat":
        return [{"role": "user", "content": ANY}]
    if interface == "completions":
        return prompt
    if interface == "triton":
        return ANY
    origin = given.pop("origin_inputs", None)
    if not isinstance(origin, str):
        raise OrderRefused(422, vllm.NO_ORIGIN if interface == "vllm" else tgi.NO_ORIGIN)
    return origin or ANY


def _tokens(text: str) -> tuple[list[int], list[int]]:
    if not IDS.fullmatch(text):
        raise OrderRefused(422, UNREAD.format("it is not a list of numbers separated by commas"))
    return _split([int(id) for id in text.split(",")])


def _split(numbers: list[int]) -> tuple[list[int], list[int]]:
    """Split the numbers into the ids of the prompt and of the output. Raises OrderRefused."""
    length, *ids = numbers or [0]
    if not 0 < length <= len(ids):
        raise OrderRefused(422, UNREAD.format(f"the prompt cannot have {length} of {len(ids)} tokens"))
    return ids[:length], ids[length:]


def _fill(tensor: dict[str, Any], ids: list[int]) -> None:
    """Replace the elements of a tensor with one row."""
    tensor["data"] = ids
    if isinstance(shape := tensor.get("shape"), list) and shape:
        tensor["shape"] = [*(1 for _ in shape[1:]), len(ids)]


def _times(given: dict[str, Any], drawn: int) -> None:
    """Remove the timings that the original's servers measured. Raises OrderRefused if they are missing."""
    parameters = given.get("parameters")
    if not isinstance(parameters, dict) or not _unsigned(parameters.pop("firstTokenCost", None)):
        raise OrderRefused(422, FIRST)
    times = parameters.pop("decodeTime", None)
    if not isinstance(times, list) or not all(map(_unsigned, times)) or len(times) != max(0, drawn - 1):
        raise OrderRefused(422, TIMES)


def _unsigned(value: Any) -> bool:
    return type(value) is int and value >= 0


# -- writing


def write(path: str, origin: Origin, prompt: Sequence[int], seed: int) -> bytes:
    """Return the body that resumes a request elsewhere: ``retry:`` from an instance that cannot finish it.

    ``prompt``: token ids of its first prompt. ``origin`` holds the tokens drawn so far; only those of that prompt's
    first choice are written as numbers, because MindIE's requests have no others. ``seed``: that choice's seed.
    """
    try:
        given = msgspec.json.decode(origin.body)
    except (ValueError, RecursionError):
        given = None
    body: dict[str, Any] = given if isinstance(given, dict) else {}
    drawn = [id for batch in origin.past for number, output in batch if number == output.index == 0
             for id in output.token_ids]  # fmt: skip
    numbers = [len(prompt), *prompt, *drawn]
    text, interface = ",".join(map(str, numbers)), _interface(path, body)
    if interface in ("vllm", "tgi"):
        before = body.get(MEMBERS[interface])
        body["origin_inputs"] = before if isinstance(before, str) else ""
    if interface == "tensors":
        _fill(body["inputs"][0], numbers)
    else:
        body.pop("input_id", None)  # the native interface has either of two members
        body[MEMBERS[interface]] = text
    nested = interface in ("tgi", "native", "triton", "tensors")
    place = body["inputs"][0] if interface == "tensors" else body
    values = place.setdefault("parameters", {}) if nested else body
    if isinstance(values, dict):
        if values.get("seed") is None:
            values["seed"] = seed
        if interface == "triton":
            values |= {"firstTokenCost": 0, "decodeTime": [0] * max(0, len(drawn) - 1)}
    body[ORIGIN] = b2a_base64(msgspec.msgpack.encode(origin), newline=False).decode()
    return encode(body)
