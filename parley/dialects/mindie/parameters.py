"""The parameters of MindIE's interfaces as one table: members, order of checks, ranges, and refusals.

An interface is a row of data. ``read_mindie_parameters`` returns the values of its parameters, None for absent ones,
and raises the first fault in the interface's order. ``mindie_sampling`` combines the sampling parameters. The file
knows neither where an interface's parameters are in a body nor the form of its answers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from parley.dialects.fields import Fields
from parley.dialects.mindie.rules import Rules
from parley.dialects.mindie.shared import F32, I32, U64, mistaken, size
from parley.types import Sampling

DRAWING = ("temperature", "top_k", "top_p", "typical_p", "do_sample", "seed", "repetition_penalty", "watermark")
ENDING = ("ignore_eos", "stop", "stop_token_ids", "include_stop_str_in_output")
OPENAI = (
    "temperature", "top_k", "top_p", "seed", "repetition_penalty", "frequency_penalty", "presence_penalty",
    "skip_special_tokens", "best_of", "n",
)  # fmt: skip
STOPS = 32_768  # characters of all stop strings together; with ``long_stop_string``, also of a single one
STOP = 1024  # characters of each listed stop string; also their number, without ``long_stop_string``
MAX_N, MAX_BEST = 8192, 128
MAX_TIMEOUT = 65_535
LEVELS = 5  # of priority: 1 is the most urgent, the last is the default
MAX_TOP, MAX_LOGPROBS = 20, 5
ADAPTER = re.compile(r"[a-zA-Z0-9_./-]{1,256}")
BASE = "None"  # the adapter name that stands for the base model


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """The parameters of an interface, in the order of their checks, and where its rules differ.

    ``min_top_k``: the least top_k; -1 turns it off, and then 0 is refused. ``zero_temperature``, ``full_top_p``: allow
    temperature 0 and top_p 1. ``max_temperature``, ``max_penalty``: limits of temperature and
    repetition_penalty. ``long_stop_string``: a single stop string may be as long as a whole list. ``error_style``: the
    wording of errors in n and best_of. ``zeros_allowed``: zeros that mean "off" are allowed.
    """

    order: tuple[str, ...]
    low_k: Literal[-1, 0, 1] = 1
    cold: bool = False
    whole: bool = True
    hottest: float = F32
    max_penalty: float = F32
    long_stop: bool = False
    voice: Literal["vllm", "chat", "completions"] = "vllm"
    lax: bool = False

    def under(self, rules: Rules) -> Interface:
        """Return the interface under these rules."""
        return self if rules.strict else replace(self, cold=True, whole=True, low_k=min(self.low_k, 0), lax=True)


TGI = Interface(
    order=("stop", *DRAWING, "adapter_id", "max_new_tokens", "details", "decoder_input_details", "return_full_text",
           "truncate"),
    whole=False,
)  # fmt: skip
NATIVE = Interface(order=(*DRAWING, "priority", "max_new_tokens", "timeout", "details"), whole=False)
TRITON_TEXT = Interface(order=(*DRAWING, "priority", "max_new_tokens", "details", "batch_size", "timeout"), low_k=0)
TRITON_TOKEN = Interface(
    order=(*(name for name in DRAWING if name != "typical_p"), "priority", "max_new_tokens", "timeout", "details",
           "batch_size"),
    low_k=0,
)  # fmt: skip
VLLM = Interface(order=(*ENDING, *OPENAI, "model", "max_tokens", "stream"), low_k=-1, cold=True, long_stop=True)
CHAT = Interface(
    order=(*ENDING, *OPENAI, "use_beam_search", "logprobs", "top_logprobs", "max_tokens", "stream"),
    low_k=-1,
    cold=True,
    max_penalty=2,
    long_stop=True,
    voice="chat",
)
NATIVE_CHAT = replace(CHAT, low_k=0, hottest=2, long_stop=False)  # openAiSupport is not "vllm"
COMPLETIONS = replace(
    CHAT,
    order=("ignore_eos", "stop", "include_stop_str_in_output", "stop_token_ids", *OPENAI, "use_beam_search", "logprobs",
           "max_tokens", "stream"),
    voice="completions",
)  # fmt: skip

Values = dict[str, Any]


def read(given: Fields, interface: Interface) -> Values:
    """Return the values of all parameters, by name. Raises BadRequest."""
    return {name: CHECKS[name](given, name, interface) for name in interface.order}


def sampling(values: Values, rules: Rules) -> Sampling:
    """Return the sampling settings: greedy, unless a temperature, top_k or top_p is given.

    Under strict rules typical_p and watermark have no effect, because the original only checks them.
    """
    temperature, top_k, top_p = values["temperature"], values["top_k"], values["top_p"]
    draws = values.get("do_sample")
    if draws is None:
        draws = any(value is not None for value in (temperature, top_k, top_p))
    typical = values.get("typical_p") if not rules.strict else None
    return Sampling(
        temperature=(1.0 if temperature is None else temperature) if draws else 0.0,
        top_k=max(0, top_k or 0),
        top_p=1.0 if top_p is None else top_p,
        typical_p=1.0 if typical is None else typical,
        seed=values["seed"],
        repetition_penalty=_or(values["repetition_penalty"], 1.0),
        presence_penalty=_or(values.get("presence_penalty"), 0.0),
        frequency_penalty=_or(values.get("frequency_penalty"), 0.0),
        watermark=bool(values.get("watermark")) and not rules.strict,
    )


def priority(values: Values) -> int:
    """Return the priority relative to the default level, which is 0."""
    return _or(values["priority"], LEVELS) - LEVELS


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


# -- one parameter each


def _integer(given: Fields, name: str, low: int, high: int) -> Any:
    """Like ``Fields.integer``, but refuses 5.0."""
    if isinstance(given.raw(name), float):
        raise given.mistyped(name, "an integer")
    return given.integer(name, None, low, high)


def _ranged(low: int, high: int) -> Callable[[Fields, str, Interface], Any]:
    return lambda given, name, interface: _integer(given, name, low, high)


def _boolean(given: Fields, name: str, interface: Interface) -> Any:
    return given.boolean(name, None)


def _temperature(given: Fields, name: str, interface: Interface) -> Any:
    return given.number(name, None, 0, interface.hottest, open=not interface.cold)


def _top_k(given: Fields, name: str, interface: Interface) -> Any:
    value = _integer(given, name, interface.low_k, I32)
    if value == 0 and interface.low_k == -1 and not interface.lax:
        raise mistaken(name, value)
    return value


def _top_p(given: Fields, name: str, interface: Interface) -> Any:
    value = given.number(name, None, 0, 1, open=True)
    if value == 1 and not interface.whole:
        raise mistaken(name, given.raw(name))
    return value


def _typical_p(given: Fields, name: str, interface: Interface) -> Any:
    return given.number(name, None, 0, 1, open=True)


def _repetition(given: Fields, name: str, interface: Interface) -> Any:
    return given.number(name, None, 0, interface.max_penalty, open=True)


def _penalty(given: Fields, name: str, interface: Interface) -> Any:
    return given.number(name, None, -2, 2)


def _truncate(given: Fields, name: str, interface: Interface) -> Any:
    return _integer(given, name, 0 if interface.lax else 1, I32) or None


def _adapter(given: Fields, name: str, interface: Interface) -> Any:
    adapter = given.string(name, BASE)
    if not ADAPTER.fullmatch(adapter):
        raise given.fail(name, "The format of adapter_id is invalid.")
    return adapter if adapter != BASE else None


def _model(given: Fields, name: str, interface: Interface) -> Any:
    """Read the adapter's name in vLLM's /generate. The other interfaces read ``model`` elsewhere."""
    value = given.raw(name)
    if value is None:
        return None
    if not isinstance(value, str):
        raise given.fail(name, "Model must be string type.")
    if not 1 <= size(value) <= 256:
        text = f"Input validation error: length of `model` must be in [1, 256], but got {size(value)}"
        raise given.fail(name, text)
    return value


def _stop(given: Fields, name: str, interface: Interface) -> list[str]:
    value, longest = given.raw(name), STOPS if interface.long_stop else STOP
    if value is None:
        return []
    if isinstance(value, str):
        if not 1 <= size(value) <= longest:
            text = f"Input validation error: length of `stop` must be in [1, {longest}], but got {size(value)}"
            raise given.fail(name, text)
        return [value]
    if not isinstance(value, list):
        raise given.fail(name, "Input validation error: param stop must be string or list[string]")
    sound = interface.long_stop or len(value) <= STOP
    sound = sound and all(isinstance(each, str) and 1 <= size(each) <= STOP for each in value)
    if not sound or sum(map(size, value)) > STOPS:
        text = (
            "Input validation error: `stop` must be list[string] if list, "
            f"and item length in [1, {STOP}] with total <= {STOPS}"
        )
        raise given.fail(name, text)
    return value


def _stop_ids(given: Fields, name: str, interface: Interface) -> list[int]:
    value = given.raw(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise given.fail(name, "Parameter stop_token_ids not array")
    if any(type(each) is not int for each in value):
        raise given.fail(name, "Parameter stop_token_ids not list[int]")
    return list(dict.fromkeys(each for each in value if 0 <= each <= I32))


def _include(given: Fields, name: str, interface: Interface) -> Any:
    """Read the flag only if there are stop strings or stop ids, like the original."""
    return given.boolean(name, None) if given.has("stop") or given.has("stop_token_ids") else None


def _logprobs(given: Fields, name: str, interface: Interface) -> Any:
    if interface.voice == "completions":
        return _integer(given, name, 0, MAX_LOGPROBS)
    return given.boolean(name, None)


def _top_logprobs(given: Fields, name: str, interface: Interface) -> Any:
    value = _integer(given, name, 0, MAX_TOP)
    if value is not None and given.raw("logprobs") is False:
        told = "Value error, when using top_logprobs, logprobs must be true or null in chat completions"
        raise given.fail(name, told)
    return value


CHECKS: dict[str, Callable[[Fields, str, Interface], Any]] = {
    "temperature": _temperature,
    "top_k": _top_k,
    "top_p": _top_p,
    "typical_p": _typical_p,
    "do_sample": _boolean,
    "seed": _ranged(0, U64),
    "repetition_penalty": _repetition,
    "frequency_penalty": _penalty,
    "presence_penalty": _penalty,
    "watermark": _boolean,
    "max_new_tokens": _ranged(1, I32),
    "max_tokens": _ranged(1, I32),
    "batch_size": _ranged(1, I32),
    "priority": _ranged(1, LEVELS),
    "timeout": _ranged(1, MAX_TIMEOUT),
    "truncate": _truncate,
    "details": _boolean,
    "decoder_input_details": _boolean,
    "return_full_text": _boolean,
    "stream": _boolean,
    "adapter_id": _adapter,
    "model": _model,
    "stop": _stop,
    "stop_token_ids": _stop_ids,
    "include_stop_str_in_output": _include,
    "skip_special_tokens": _boolean,
    "ignore_eos": _boolean,
    "best_of": _ranged(1, MAX_BEST),
    "n": _ranged(1, MAX_N),
    "use_beam_search": _boolean,
    "logprobs": _logprobs,
    "top_logprobs": _top_logprobs,
}
