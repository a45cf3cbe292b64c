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

from parley.dialects.instance_plane import REQUEST_UUID, OriginalRequest, ResumedBody
from parley.dialects.json_answer import encode_json
from parley.dialects.json_body import decode_json
from parley.dialects.mindie.interfaces import tgi, vllm
from parley.errors import CommandRefused
from parley.types import EngineOutput, OutputBatch

NUMBER_LIST = re.compile(r"[0-9]{1,10}(,[0-9]{1,10})*")
ORIGIN_MEMBER = "parley_origin"
MESSAGES_NOT_TEXT = "Messages MUST be a string for recompute"
TOOL_MESSAGES_NOT_TEXT = "Messages must be a string for recompute"  # for requests with tools
UNREADABLE_TOKENS = "Failed to get token from input: {}"
NO_FIRST_TOKEN_COST = "Failed to get parameter firstTokenCost in json body"
WRONG_DECODE_TIMES = "Parameter decodeTime length is invalid."
PLACEHOLDER_TEXT = "a"  # replaces a prompt whose text is not known


_ORIGIN_DECODER = msgspec.msgpack.Decoder(OriginalRequest)

# The member that holds an interface's prompt; for tensors it is in ``inputs[0]``.
PROMPT_MEMBER_OF = {
    "chat": "messages",
    "completions": "prompt",
    "vllm": "prompt",
    "tgi": "inputs",
    "native": "inputs",
    "triton": "text_input",
}


# -- reading


def read_recompute_body(path: str, body: bytes) -> ResumedBody:
    """Read a body sent with ``is-recompute: true``; one that is no JSON object is returned as it is.

    Raises CommandRefused.
    """
    try:
        members = decode_json(body)
    except (ValueError, RecursionError):
        return ResumedBody(body, None, [])
    if not isinstance(members, dict):
        return ResumedBody(body, None, [])
    if ORIGIN_MEMBER in members:
        return _decode_origin(members[ORIGIN_MEMBER])
    interface = _interface_of(path, members)
    text = _numbers_in_body(interface, members)
    prompt, generated = _parse_numbers(text) if isinstance(text, str) else _split_numbers(text)
    if interface == "tensors":
        _replace_tensor_data(members["inputs"][0], prompt)
    elif interface == "native":
        del members["inputs"]
        members["input_id"] = prompt
    else:
        members[PROMPT_MEMBER_OF[interface]] = _placeholder_prompt(interface, members, prompt)
    if interface == "triton":
        _remove_timings(members, len(generated))
    past: list[OutputBatch] = [[(0, EngineOutput("", 0, generated))]] if generated else []
    return ResumedBody(encode_json(members), prompt, past)


def _decode_origin(encoded: Any) -> ResumedBody:
    try:
        origin = _ORIGIN_DECODER.decode(a2b_base64(encoded, strict_mode=True))
    except (Error, TypeError, ValueError) as error:
        raise CommandRefused(
            422, UNREADABLE_TOKENS.format(f"{ORIGIN_MEMBER} cannot be read ({type(error).__name__})")
        ) from None
    if not REQUEST_UUID.fullmatch(origin.request_uuid):
        raise CommandRefused(422, UNREADABLE_TOKENS.format(f"{ORIGIN_MEMBER} has no identity"))
    return ResumedBody(origin.body, origin.prompt_ids, origin.prior_outputs, origin.request_uuid, origin.created)


def _interface_of(path: str, members: dict[str, Any]) -> str:
    """Return the name of the interface that a path and a body belong to."""
    if "messages" in members:
        return "chat"
    if isinstance(members.get("inputs"), list) and path.endswith("/infer"):
        return "tensors"
    if "text_input" in members:
        return "triton"
    if "prompt" in members:
        return "vllm" if path.endswith("/generate") else "completions"
    return "native" if path.endswith(("/infer", "/infer_token")) else "tgi"


def _numbers_in_body(interface: str, members: dict[str, Any]) -> str | list[int]:
    """Return the numbers in a body, as text or as a list. Raises CommandRefused."""
    if interface == "tensors":
        return _tensor_numbers(members["inputs"])
    member = PROMPT_MEMBER_OF[interface]
    text = members.get(member)
    if isinstance(text, str):
        return text
    if interface == "chat":
        raise CommandRefused(422, TOOL_MESSAGES_NOT_TEXT if members.get("tools") else MESSAGES_NOT_TEXT)
    raise CommandRefused(422, UNREADABLE_TOKENS.format(f"{member} is not a string"))


def _tensor_numbers(tensors: list[Any]) -> list[int]:
    data = tensors[0].get("data") if tensors and isinstance(tensors[0], dict) else None
    while isinstance(data, list) and len(data) == 1 and isinstance(data[0], list):
        data = data[0]
    if not isinstance(data, list) or not all(type(token_id) is int and token_id >= 0 for token_id in data):
        raise CommandRefused(422, UNREADABLE_TOKENS.format("data is not a list of token ids"))
    return data


def _placeholder_prompt(interface: str, members: dict[str, Any], prompt: list[int]) -> Any:
    """Return the value that replaces the numbers in the prompt's member. Raises CommandRefused."""
    if interface == "chat":
        return [{"role": "user", "content": PLACEHOLDER_TEXT}]
    if interface == "completions":
        return prompt
    if interface == "triton":
        return PLACEHOLDER_TEXT
    origin = members.pop("origin_inputs", None)
    if not isinstance(origin, str):
        raise CommandRefused(422, vllm.NO_ORIGIN_INPUTS if interface == "vllm" else tgi.NO_ORIGIN_INPUTS)
    return origin or PLACEHOLDER_TEXT


def _parse_numbers(text: str) -> tuple[list[int], list[int]]:
    if not NUMBER_LIST.fullmatch(text):
        raise CommandRefused(422, UNREADABLE_TOKENS.format("it is not a list of numbers separated by commas"))
    return _split_numbers([int(number) for number in text.split(",")])


def _split_numbers(numbers: list[int]) -> tuple[list[int], list[int]]:
    """Split the numbers into the ids of the prompt and of the output. Raises CommandRefused."""
    length, *ids = numbers or [0]
    if not 0 < length <= len(ids):
        raise CommandRefused(422, UNREADABLE_TOKENS.format(f"the prompt cannot have {length} of {len(ids)} tokens"))
    return ids[:length], ids[length:]


def _replace_tensor_data(tensor: dict[str, Any], ids: list[int]) -> None:
    """Replace the elements of a tensor with one row."""
    tensor["data"] = ids
    if isinstance(shape := tensor.get("shape"), list) and shape:
        tensor["shape"] = [*(1 for _ in shape[1:]), len(ids)]


def _remove_timings(members: dict[str, Any], generated_count: int) -> None:
    """Remove the timings that the original's servers measured. Raises CommandRefused if they are missing."""
    parameters = members.get("parameters")
    if not isinstance(parameters, dict) or not _is_unsigned(parameters.pop("firstTokenCost", None)):
        raise CommandRefused(422, NO_FIRST_TOKEN_COST)
    times = parameters.pop("decodeTime", None)
    if not isinstance(times, list) or not all(map(_is_unsigned, times)) or len(times) != max(0, generated_count - 1):
        raise CommandRefused(422, WRONG_DECODE_TIMES)


def _is_unsigned(value: Any) -> bool:
    return type(value) is int and value >= 0


# -- writing


def write_recompute_body(path: str, origin: OriginalRequest, prompt: Sequence[int], seed: int) -> bytes:
    """Return the body that resumes a request elsewhere: ``retry:`` from an instance that cannot finish it.

    ``prompt``: token ids of its first prompt. ``origin`` holds the tokens drawn so far; only those of that prompt's
    first choice are written as numbers, because MindIE's requests have no others. ``seed``: that choice's seed.
    """
    try:
        original = decode_json(origin.body)
    except (ValueError, RecursionError):
        original = None
    body: dict[str, Any] = original if isinstance(original, dict) else {}
    generated = [token_id for batch in origin.prior_outputs for number, output in batch if number == output.index == 0
             for token_id in output.token_ids]  # fmt: skip
    numbers = [len(prompt), *prompt, *generated]
    text, interface = ",".join(map(str, numbers)), _interface_of(path, body)
    if interface in ("vllm", "tgi"):
        original_prompt = body.get(PROMPT_MEMBER_OF[interface])
        body["origin_inputs"] = original_prompt if isinstance(original_prompt, str) else ""
    if interface == "tensors":
        _replace_tensor_data(body["inputs"][0], numbers)
    else:
        body.pop("input_id", None)  # the native interface has either of two members
        body[PROMPT_MEMBER_OF[interface]] = text
    nested = interface in ("tgi", "native", "triton", "tensors")
    parameters_owner = body["inputs"][0] if interface == "tensors" else body
    parameters = parameters_owner.setdefault("parameters", {}) if nested else body
    if isinstance(parameters, dict):
        if parameters.get("seed") is None:
            parameters["seed"] = seed
        if interface == "triton":
            parameters |= {"firstTokenCost": 0, "decodeTime": [0] * max(0, len(generated) - 1)}
    body[ORIGIN_MEMBER] = b2a_base64(msgspec.msgpack.encode(origin), newline=False).decode()
    return encode_json(body)
