"""The members that steer an answer: ``options``, ``format``, ``think``, ``keep_alive`` and log-probabilities.

Options that a request leaves out follow the model's own recommendation, and then Ollama's defaults.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from parley.dialects.fields import Fields
from parley.dialects.ollama.api_rules import OllamaRules
from parley.dialects.ollama.refusal_wording import OptionWording, incapable_model_error, invalid_member_error
from parley.dialects.output_constraints import ANY_OBJECT_SCHEMA
from parley.dialects.request_context import RequestContext
from parley.dialects.sampling_members import MAX_ALTERNATIVES, MAX_STOP_CHARACTERS, MAX_STOPS, MAX_TOKEN_ID
from parley.errors import Unsupported
from parley.types import Grammar, SamplingOptions, StopConditions

MAX_TOKENS = 2**31 - 1
MAX_TEMPERATURE = 100
MAX_REPEAT_PENALTY = 100
MAX_PENALTY = 2  # of the presence or frequency of a token
PENALTY_WINDOW = 64  # tokens that penalties look back at
THINK_LEVELS = ("low", "medium", "high", "max")
GO_DURATION = re.compile(r"[+-]?(?:0|(?:(?:\d+\.?\d*|\.\d+)(?:ns|us|µs|μs|ms|s|m|h))+)")
GO_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)")
# Settings of the original's engine, and options that it no longer has: they have no effect, as there.
INERT_INTEGERS = ("num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "draft_num_predict")
INERT_FLAGS = ("use_mmap",)


@dataclass(frozen=True, slots=True)
class OllamaOptions:
    """The options of a request. ``context_limit``: tokens of its prompt and answer together; None: the model's."""

    sampling: SamplingOptions
    stop_conditions: StopConditions
    context_limit: int | None = None


def read_options(body: Fields, rules: OllamaRules, context: RequestContext) -> OllamaOptions:
    """Read ``options``. Raises BadRequest."""
    sent_options = Fields(body.free_object("options"), "options", OptionWording(rules))
    options = sent_options.with_defaults(_model_defaults(context.generation_defaults))
    limit = options.integer("num_predict", -1, -2, MAX_TOKENS)
    window = options.integer("num_ctx", 0, 0, MAX_TOKENS)
    for name in INERT_INTEGERS:
        options.integer(name, None)
    for name in INERT_FLAGS:
        options.boolean(name, None)
    stop_conditions = StopConditions(
        strings=_read_stop(options, rules), max_tokens=limit if limit > 0 else None, reserved_tokens=1
    )
    penalties = _read_penalties(options, context)
    sampling = msgspec.structs.replace(_read_sampling(options), **penalties)
    return OllamaOptions(sampling, stop_conditions, window or None)


def _model_defaults(recommended: Mapping[str, float]) -> dict[str, float]:
    """Return the values that the model's makers recommend under Ollama's names."""
    names = {"repetition_penalty": "repeat_penalty"}
    own_names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    return {names.get(name, name): recommended[name] for name in own_names if name in recommended}


def _read_sampling(options: Fields) -> SamplingOptions:
    seed = options.integer("seed", -1)
    return SamplingOptions(
        temperature=options.number("temperature", 0.8, 0, MAX_TEMPERATURE),
        top_k=max(0, options.integer("top_k", 40, -1, MAX_TOKEN_ID)),
        top_p=options.number("top_p", 0.9, 0, 1),
        min_p=options.number("min_p", 0.0, 0, 1),
        typical_p=options.number("typical_p", 1.0, 0, 1, low_excluded=True),
        seed=seed if seed >= 0 else None,
    )


def _read_penalties(options: Fields, context: RequestContext) -> dict[str, Any]:
    """Return the penalties and their window by their neutral names; none if they look back at no token.

    An engine without windows penalizes by its own rule, unless the request asks for a part of the text: then the server
    refuses the window.
    """
    has_windows = "penalty_window" in context.engine_features
    penalties: dict[str, Any] = {
        "repetition_penalty": options.number("repeat_penalty", 1.0, 0, MAX_REPEAT_PENALTY, low_excluded=True),
        "presence_penalty": options.number("presence_penalty", 0.0, -MAX_PENALTY, MAX_PENALTY),
        "frequency_penalty": options.number("frequency_penalty", 0.0, -MAX_PENALTY, MAX_PENALTY),
    }
    window = options.integer("repeat_last_n", PENALTY_WINDOW if has_windows else -1, -1, MAX_TOKENS)
    if window == 0 or tuple(penalties.values()) == (1.0, 0.0, 0.0):
        return {}
    if window > 0:
        return penalties | {"penalty_window": window}
    return penalties | {"penalty_window": MAX_TOKENS} if has_windows else penalties


def _read_stop(options: Fields, rules: OllamaRules) -> list[str]:
    if rules.strict and isinstance(options.raw_value("stop"), str):
        raise options.mistyped_member("stop", "a string or an array of strings")
    return options.strings("stop", cap=MAX_STOPS, total=MAX_STOP_CHARACTERS)


def read_format(body: Fields) -> Grammar | None:
    """Return the form of the answer: any JSON object, or one that follows a schema. Raises InvalidValue."""
    value = body.raw_value("format")
    if value is None or value == "":
        return None
    if value == "json":
        return Grammar("json", ANY_OBJECT_SCHEMA, field="format")
    if not isinstance(value, dict):
        expected = 'expected "json" or a valid JSON Schema object'
        raise invalid_member_error("format", f'invalid format: "{str(value)[:40]}"; {expected}')
    return Grammar("json", body.free_object("format"), field="format")


@dataclass(frozen=True, slots=True)
class ThinkMember:
    """Whether the model reasons, how much, and whether the answer shows it. ``thinking`` None: it cannot reason."""

    thinking: bool | None
    effort: str | None = None
    shown: bool = True


def read_think(body: Fields, name: str, context: RequestContext) -> ThinkMember:
    """Return the member ``think``: by default, models that can reason do. Raises InvalidValue, UnsuitableModel."""
    value, able = body.raw_value("think"), "thinking" in context.abilities
    if value is not None and not isinstance(value, bool) and value not in THINK_LEVELS:
        allowed = 'must be "high", "medium", "low", "max", true, or false'
        raise invalid_member_error("think", f'invalid think value: "{str(value)[:40]}" ({allowed})')
    if value is False:
        return ThinkMember(False if able else None, shown=False)
    if value is not None and not able:
        raise incapable_model_error(name, "thinking")
    return ThinkMember(True if able else None, value if isinstance(value, str) else None)


def check_keep_alive(body: Fields, rules: OllamaRules) -> bool:
    """Check how long the model should be kept. Return False to unload it now. Raises BadRequest.

    It stays loaded in any case, because it is not this client's alone.
    """
    value = body.raw_value("keep_alive")
    if not isinstance(value, str):
        return body.number("keep_alive", -1.0) != 0
    if GO_NUMBER.fullmatch(value) and float(value) != 0:
        if rules.strict:
            raise invalid_member_error("keep_alive", f'time: missing unit in duration "{value[:40]}"')
        return True
    if not GO_DURATION.fullmatch(value):
        raise invalid_member_error("keep_alive", f'time: invalid duration "{value[:40]}"')
    return any(digit in "123456789" for digit in value)


def read_ollama_logprobs(body: Fields) -> int | None:
    """Return the number of alternatives per token, None for no log-probabilities. Raises InvalidValue."""
    top = body.integer("top_logprobs", 0)
    if not 0 <= top <= MAX_ALTERNATIVES:
        raise invalid_member_error("top_logprobs", f"top_logprobs must be between 0 and {MAX_ALTERNATIVES}")
    return top if body.boolean("logprobs", False) else None


def logprob_members(token: Any) -> dict[str, Any]:
    """Return one token with its log-probability; JSON has no infinity, so impossible tokens get -9999."""
    logprob = token.logprob if token.logprob is not None and math.isfinite(token.logprob) else -9999.0
    members: dict[str, Any] = {"token": token.text, "logprob": logprob}
    return members | {"bytes": list(token.raw_bytes)} if token.raw_bytes else members


def refuse_unavailable(body: Fields) -> None:
    """Refuse the members whose features parley does not have. Raises Unsupported."""
    if body.boolean("_debug_render_only", False):
        raise Unsupported("'_debug_render_only' is not available on this server.", field="_debug_render_only")
    body.boolean("shift", True)  # an answer always ends where the window is full
