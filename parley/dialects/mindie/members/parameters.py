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

from parley.dialects.fields import MAX_F32, MAX_I32, MAX_U64, Fields
from parley.dialects.mindie.api_rules import MindieRules
from parley.dialects.mindie.members.text_length import utf16_length
from parley.dialects.mindie.refusal_wording import parameter_value_error
from parley.types import SamplingOptions

SAMPLING_NAMES = ("temperature", "top_k", "top_p", "typical_p", "do_sample", "seed", "repetition_penalty", "watermark")
STOP_NAMES = ("ignore_eos", "stop", "stop_token_ids", "include_stop_str_in_output")
OPENAI_NAMES = (
    "temperature", "top_k", "top_p", "seed", "repetition_penalty", "frequency_penalty", "presence_penalty",
    "skip_special_tokens", "best_of", "n",
)  # fmt: skip
MAX_STOP_TOTAL = 32_768  # characters of all stop strings together; with ``long_stop_string``, also of a single one
MAX_STOP_ITEM = 1024  # characters of each listed stop string; also their number, without ``long_stop_string``
MAX_N, MAX_BEST = 8192, 128
MAX_TIMEOUT = 65_535
PRIORITY_LEVELS = 5  # of priority: 1 is the most urgent, the last is the default
MAX_TOP, MAX_LOGPROBS = 20, 5
ADAPTER_NAME = re.compile(r"[a-zA-Z0-9_./-]{1,256}")
NO_ADAPTER = "None"  # the adapter name that stands for the base model
INSEPARABLE_NAMES = ("best_of", "n", "use_beam_search", "logprobs", "top_logprobs")
# Refusals by the original's instances where prefill and decode are separated. {} is the value.
SEPARATION_MESSAGES = {
    "best_of": "Paramter [best_of] can only be set to 1 in pd disaggregation mode, got {}.",  # misspelled like this
    "n": "Parameter [n] can only be set to 1 in pd disaggregation mode, got {}.",
    "use_beam_search": "Request param use_beam_search can not be true in pd disaggregation mode.",
    "logprobs": "logprobs is not supported in dmi mode",
    "top_logprobs": "logprobs is not supported in dmi mode",
    "stop": "stop is not supported in dmi mode",
    "stop_token_ids": "stop_token_ids is not supported in dmi mode",
    "include_stop_str_in_output": "include_stop_str_in_output is not supported in dmi mode",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterTable:
    """The parameters of an interface, in the order of their checks, and where its rules differ.

    * ``min_top_k``: the least valid top_k. If it is -1, that value means "off", and 0 is refused.
    * ``zero_temperature``, ``full_top_p``: allow temperature 0 and top_p 1.
    * ``max_temperature``, ``max_penalty``: limits of temperature and repetition_penalty.
    * ``long_stop_string``: a single stop string may be as long as a whole list.
    * ``error_style``: the wording of errors in n and best_of.
    * ``zeros_allowed``: zeros that mean "off" are allowed.
    * ``skips_odd_stop_ids``: elements of stop_token_ids that are no 32-bit integers are ignored.
    * ``separable_stops``: stop strings and ids may be used where prefill and decode are separated.
    * ``banned``: parameters that may only have values without effect.
    """

    check_order: tuple[str, ...]
    min_top_k: Literal[-1, 0, 1] = 1
    zero_temperature: bool = False
    full_top_p: bool = True
    max_temperature: float = MAX_F32
    max_penalty: float = MAX_F32
    long_stop_string: bool = False
    error_style: Literal["vllm", "chat", "completions"] = "vllm"
    zeros_allowed: bool = False
    skips_odd_stop_ids: bool = False
    separable_stops: bool = False
    banned: tuple[str, ...] = ()

    def under_rules(self, rules: MindieRules) -> ParameterTable:
        """Return the interface under these rules."""
        if not rules.strict:
            return replace(
                self,
                zero_temperature=True,
                full_top_p=True,
                min_top_k=min(self.min_top_k, 0),
                zeros_allowed=True,
                skips_odd_stop_ids=True,
            )
        keeps_stops = self.separable_stops and not rules.old
        inseparable = () if not rules.is_separated else INSEPARABLE_NAMES if keeps_stops else tuple(SEPARATION_MESSAGES)
        return replace(self, skips_odd_stop_ids=rules.old, banned=inseparable)


TGI_TABLE = ParameterTable(
    check_order=(
        "stop",
        *SAMPLING_NAMES,
        "adapter_id",
        "max_new_tokens",
        "details",
        "decoder_input_details",
        "return_full_text",
        "truncate",
    ),
    full_top_p=False,
)
NATIVE_TABLE = ParameterTable(
    check_order=(*SAMPLING_NAMES, "priority", "max_new_tokens", "timeout", "details"), full_top_p=False
)
TRITON_TEXT_TABLE = ParameterTable(
    check_order=(*SAMPLING_NAMES, "priority", "max_new_tokens", "details", "batch_size", "timeout"), min_top_k=0
)
TRITON_TOKEN_TABLE = ParameterTable(
    check_order=(
        *(name for name in SAMPLING_NAMES if name != "typical_p"),
        "priority",
        "max_new_tokens",
        "timeout",
        "details",
        "batch_size",
    ),
    min_top_k=0,
)
VLLM_TABLE = ParameterTable(
    check_order=(*STOP_NAMES, *OPENAI_NAMES, "model", "max_tokens", "stream"),
    min_top_k=-1,
    zero_temperature=True,
    long_stop_string=True,
)
CHAT_TABLE = ParameterTable(
    check_order=(*STOP_NAMES, *OPENAI_NAMES, "use_beam_search", "logprobs", "top_logprobs", "max_tokens", "stream"),
    min_top_k=-1,
    zero_temperature=True,
    max_penalty=2,
    long_stop_string=True,
    error_style="chat",
    separable_stops=True,
)
# For servers whose openAiSupport is not "vllm".
NATIVE_CHAT_TABLE = replace(CHAT_TABLE, min_top_k=0, max_temperature=2, long_stop_string=False)
COMPLETIONS_TABLE = replace(
    CHAT_TABLE,
    check_order=(
        "ignore_eos",
        "stop",
        "include_stop_str_in_output",
        "stop_token_ids",
        *OPENAI_NAMES,
        "use_beam_search",
        "logprobs",
        "max_tokens",
        "stream",
    ),
    error_style="completions",
)

ParameterValues = dict[str, Any]


def read_mindie_parameters(members: Fields, interface: ParameterTable) -> ParameterValues:
    """Return the values of all parameters, by name. Raises BadRequest."""
    return {name: _read_parameter(members, name, interface) for name in interface.check_order}


def mindie_sampling(values: ParameterValues, rules: MindieRules) -> SamplingOptions:
    """Return the sampling settings: greedy, unless a temperature, top_k or top_p is given.

    Under strict rules typical_p and watermark have no effect, because the original only checks them.
    """
    temperature, top_k, top_p = values["temperature"], values["top_k"], values["top_p"]
    draws = values.get("do_sample")
    if draws is None:
        draws = any(value is not None for value in (temperature, top_k, top_p))
    typical_p = values.get("typical_p") if not rules.strict else None
    return SamplingOptions(
        temperature=(1.0 if temperature is None else temperature) if draws else 0.0,
        top_k=max(0, top_k or 0),
        top_p=1.0 if top_p is None else top_p,
        typical_p=1.0 if typical_p is None else typical_p,
        seed=values["seed"],
        repetition_penalty=_value_or(values["repetition_penalty"], 1.0),
        presence_penalty=_value_or(values.get("presence_penalty"), 0.0),
        frequency_penalty=_value_or(values.get("frequency_penalty"), 0.0),
        watermark=bool(values.get("watermark")) and not rules.strict,
    )


def relative_priority(values: ParameterValues) -> int:
    """Return the priority relative to the default level, which is 0."""
    result: int = _value_or(values["priority"], PRIORITY_LEVELS) - PRIORITY_LEVELS
    return result


def _value_or(value: Any, default: Any) -> Any:
    return default if value is None else value


# -- one parameter each


def _read_parameter(members: Fields, name: str, interface: ParameterTable) -> Any:
    value = MEMBER_READERS[name](members, name, interface)
    if name in interface.banned and _has_effect(name, value):
        raise members.member_error(name, SEPARATION_MESSAGES[name].format(value))
    return value


def _has_effect(name: str, value: Any) -> bool:
    """Return whether a parameter asks for something. A number of log-probabilities does so even if it is 0."""
    if name in ("n", "best_of"):
        return value not in (None, 1)
    return value is not None and value is not False and value != []


def _integer_reader(low: int, high: int) -> Callable[[Fields, str, ParameterTable], Any]:
    return lambda value, name, interface: value.integer(name, None, low, high)


def _read_boolean(members: Fields, name: str, interface: ParameterTable) -> Any:
    return members.boolean(name, None)


def _read_temperature(members: Fields, name: str, interface: ParameterTable) -> Any:
    return members.number(name, None, 0, interface.max_temperature, low_excluded=not interface.zero_temperature)


def _read_top_k(members: Fields, name: str, interface: ParameterTable) -> Any:
    value = members.integer(name, None, interface.min_top_k, MAX_I32)
    if value == 0 and interface.min_top_k == -1 and not interface.zeros_allowed:
        raise parameter_value_error(name, value)
    return value


def _read_top_p(members: Fields, name: str, interface: ParameterTable) -> Any:
    value = members.number(name, None, 0, 1, low_excluded=True)
    if value == 1 and not interface.full_top_p:
        raise parameter_value_error(name, members.raw_value(name))
    return value


def _read_typical_p(members: Fields, name: str, interface: ParameterTable) -> Any:
    return members.number(name, None, 0, 1, low_excluded=True)


def _read_repetition_penalty(members: Fields, name: str, interface: ParameterTable) -> Any:
    return members.number(name, None, 0, interface.max_penalty, low_excluded=True)


def _read_penalty(members: Fields, name: str, interface: ParameterTable) -> Any:
    return members.number(name, None, -2, 2)


def _read_truncate(members: Fields, name: str, interface: ParameterTable) -> Any:
    return members.integer(name, None, 0 if interface.zeros_allowed else 1, MAX_I32) or None


def _read_adapter_id(members: Fields, name: str, interface: ParameterTable) -> Any:
    adapter = members.string(name, NO_ADAPTER)
    if not ADAPTER_NAME.fullmatch(adapter):
        raise members.member_error(name, "The format of adapter_id is invalid.")
    return adapter if adapter != NO_ADAPTER else None


def _read_vllm_adapter(members: Fields, name: str, interface: ParameterTable) -> Any:
    """Read the adapter's name in vLLM's /generate. The other interfaces read ``model`` elsewhere."""
    value = members.raw_value(name)
    if value is None:
        return None
    if not isinstance(value, str):
        raise members.member_error(name, "Model must be string type.")
    if not 1 <= utf16_length(value) <= 256:
        text = f"Input validation error: length of `model` must be in [1, 256], but got {utf16_length(value)}"
        raise members.member_error(name, text)
    return value


def _read_stop_strings(members: Fields, name: str, interface: ParameterTable) -> list[str]:
    value, longest = members.raw_value(name), MAX_STOP_TOTAL if interface.long_stop_string else MAX_STOP_ITEM
    if value is None:
        return []
    if isinstance(value, str):
        if not 1 <= utf16_length(value) <= longest:
            text = f"Input validation error: length of `stop` must be in [1, {longest}], but got {utf16_length(value)}"
            raise members.member_error(name, text)
        return [value]
    if not isinstance(value, list):
        raise members.member_error(name, "Input validation error: param stop must be string or list[string]")
    is_valid = interface.long_stop_string or len(value) <= MAX_STOP_ITEM
    is_valid = is_valid and all(isinstance(item, str) and 1 <= utf16_length(item) <= MAX_STOP_ITEM for item in value)
    if not is_valid or sum(map(utf16_length, value)) > MAX_STOP_TOTAL:
        text = (
            "Input validation error: `stop` must be list[string] if list, "
            f"and item length in [1, {MAX_STOP_ITEM}] with total <= {MAX_STOP_TOTAL}"
        )
        raise members.member_error(name, text)
    return value


def _read_stop_ids(members: Fields, name: str, interface: ParameterTable) -> list[int]:
    value = members.raw_value(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise members.member_error(name, "Parameter stop_token_ids not array")
    integers = [item for item in value if type(item) is int]
    if len(integers) < len(value) and not interface.skips_odd_stop_ids:
        raise members.member_error(name, "Parameter stop_token_ids not list[int]")
    return list(dict.fromkeys(integer for integer in integers if 0 <= integer <= MAX_I32))


def _read_include_stop(members: Fields, name: str, interface: ParameterTable) -> Any:
    """Read the flag only if there are stop strings or stop ids, like the original."""
    return members.boolean(name, None) if members.has_value("stop") or members.has_value("stop_token_ids") else None


def _read_mindie_logprobs(members: Fields, name: str, interface: ParameterTable) -> Any:
    if interface.error_style == "completions":
        return members.integer(name, None, 0, MAX_LOGPROBS)
    return members.boolean(name, None)


def _read_top_logprobs(members: Fields, name: str, interface: ParameterTable) -> Any:
    value = members.integer(name, None, 0, MAX_TOP)
    if value is not None and members.raw_value("logprobs") is False:
        message = "Value error, when using top_logprobs, logprobs must be true or null in chat completions"
        raise members.member_error(name, message)
    return value


MEMBER_READERS: dict[str, Callable[[Fields, str, ParameterTable], Any]] = {
    "temperature": _read_temperature,
    "top_k": _read_top_k,
    "top_p": _read_top_p,
    "typical_p": _read_typical_p,
    "do_sample": _read_boolean,
    "seed": _integer_reader(0, MAX_U64),
    "repetition_penalty": _read_repetition_penalty,
    "frequency_penalty": _read_penalty,
    "presence_penalty": _read_penalty,
    "watermark": _read_boolean,
    "max_new_tokens": _integer_reader(1, MAX_I32),
    "max_tokens": _integer_reader(1, MAX_I32),
    "batch_size": _integer_reader(1, MAX_I32),
    "priority": _integer_reader(1, PRIORITY_LEVELS),
    "timeout": _integer_reader(1, MAX_TIMEOUT),
    "truncate": _read_truncate,
    "details": _read_boolean,
    "decoder_input_details": _read_boolean,
    "return_full_text": _read_boolean,
    "stream": _read_boolean,
    "adapter_id": _read_adapter_id,
    "model": _read_vllm_adapter,
    "stop": _read_stop_strings,
    "stop_token_ids": _read_stop_ids,
    "include_stop_str_in_output": _read_include_stop,
    "skip_special_tokens": _read_boolean,
    "ignore_eos": _read_boolean,
    "best_of": _integer_reader(1, MAX_BEST),
    "n": _integer_reader(1, MAX_N),
    "use_beam_search": _read_boolean,
    "logprobs": _read_mindie_logprobs,
    "top_logprobs": _read_top_logprobs,
}
