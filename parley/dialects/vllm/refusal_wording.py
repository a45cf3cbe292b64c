"""The wording of vLLM's refusals, which has two layers that clients can distinguish.

In the original, pydantic checks the *shape* of a body: its errors are a counted list of Python dicts, and are
MalformedBody, MissingField or WrongType here. Errors of vLLM's own checks are sentences, some with the parameter and
its value appended; they are InvalidValue here. Types are as lenient as pydantic's: "5" is an integer, "yes" is true.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from parley.dialects import error_wording
from parley.dialects.json_body import check_json_size
from parley.errors import BadRequest, InvalidValue, MalformedBody, MissingField, WrongType, excerpt

PYDANTIC_TYPES = {
    "a boolean": ("bool_type", "Input should be a valid boolean"),
    "an integer": ("int_type", "Input should be a valid integer"),
    "a number": ("float_type", "Input should be a valid number"),
    "a string": ("string_type", "Input should be a valid string"),
    "an array": ("list_type", "Input should be a valid list"),
    "an object": ("dict_type", "Input should be a valid dictionary"),
}
PARSED_TYPES = {
    "a boolean": ("bool_parsing", "Input should be a valid boolean, unable to interpret input"),
    "an integer": ("int_parsing", "Input should be a valid integer, unable to parse string as an integer"),
    "a number": ("float_parsing", "Input should be a valid number, unable to parse string as a number"),
}
UNION_TYPES = {
    "a string or an array of strings": ("a string", "an array"),
    "a string or an array of items": ("a string", "an array"),
}
TRUE_TEXTS = {"1", "true", "t", "yes", "y", "on"}
FALSE_TEXTS = {"0", "false", "f", "no", "n", "off"}
INTEGER_TEXT = re.compile(r"\s*[+-]?\d{1,300}(\.0*)?\s*", re.ASCII)
DECIMAL_TEXT = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?\s*", re.ASCII | re.IGNORECASE)
MAX_NUMBER_CHARACTERS = 300  # characters of a number given as text
MAX_INPUT_CHARACTERS, MAX_ERROR_CHARACTERS = 200, 1000  # characters of a quoted value, and of one error

# The original's sentences for a number below and above its range, and whether the parameter is appended.
RANGE_SENTENCES: dict[str, tuple[str, str, bool]] = {
    "temperature": ("must be non-negative", "must be in [0, 2]", True),
    "top_p": ("must be in (0, 1]", "must be in (0, 1]", True),
    "top_k": ("must be 0 (disable), or at least 1", "must be 0 (disable), or at least 1", False),
    "min_p": ("must be in [0, 1]", "must be in [0, 1]", False),
    "n": ("must be at least 1", "must be at most {high}", False),
    "presence_penalty": ("must be in [-2, 2]", "must be in [-2, 2]", False),
    "frequency_penalty": ("must be in [-2, 2]", "must be in [-2, 2]", False),
    "repetition_penalty": ("must be greater than zero", "must be at most {high}", False),
    "max_tokens": ("must be at least 1", "must be at most {high}", True),
    "max_completion_tokens": ("must be at least 1", "must be at most {high}", True),
    "min_tokens": ("must be greater than or equal to 0", "must be at most {high}", False),
}
LOGPROB_MEMBERS = {"logprobs": "sample", "top_logprobs": "sample", "prompt_logprobs": "prompt"}
LOGPROB_PARAMETERS = {"sample": "logprobs", "prompt": "prompt_logprobs"}  # as the original's engine names them

# Sentences for a number below its range that do not name the number, with the parameter appended.
LOW_SENTENCES = {name: f"`{name}` must be a positive value or -1." for name in LOGPROB_MEMBERS} | {
    "thinking_token_budget": "`thinking_token_budget` must be a non-negative integer or -1 for unlimited.",
}
COUNT_MEMBERS = ("max_tokens_per_query", "max_tokens_per_doc")  # the original checks their sign itself

ONE_CONSTRAINT = "You can only use one kind of constraints for structured outputs ('json', 'regex' or 'choice')."
UNKNOWN_TOOL = "The tool specified in `tool_choice` does not match any of the specified `tools`"
UNKNOWN_RESPONSE_TOOL = "Tool choice 'function' not found in 'tools' parameter."  # of the Responses API
# The original's sentences for other broken rules, and whether the parameter is appended.
RULE_SENTENCES: dict[str, tuple[str, bool]] = {
    "stream_options": ("Stream options can only be defined when `stream=True`.", True),
    "top_logprobs": ("when using `top_logprobs`, `logprobs` must be set to true.", True),
    "logprob_token_ids": ("when using `logprob_token_ids`, `logprobs` must be set.", True),
    "structured_outputs": (ONE_CONSTRAINT, True),
    "continue_final_message": (
        "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
        False,
    ),
    "tool_choice": ("When using `tool_choice`, `tools` must be set.", True),
    "kv_transfer_params.prompt_token_ids": (
        "`kv_transfer_params['prompt_token_ids']` must be a non-empty list of non-negative integers.",
        True,
    ),
    "cache_salt": (
        "Parameter 'cache_salt' must be at most 128 characters and must not contain '@', '/', '\\\\', or NUL.",
        True,
    ),
}
# The same where a conversation's differ.
CHAT_RULE_SENTENCES: dict[str, tuple[str, bool]] = {
    "logprob_token_ids": ("when using `logprob_token_ids`, `logprobs` must be set to true.", True),
    "structured_outputs": (ONE_CONSTRAINT, False),
}
EMPTY_SENTENCES: dict[str, str] = {
    "messages": "Cannot apply chat template to an empty conversation. Provide at least one message.",
    "prompt": "You must pass at least one prompt",
    "input": "You must pass at least one prompt",
    "stop": "stop cannot contain an empty string.",
    "bad_words": "bad_words cannot contain an empty string. Got bad_words=['']",
}
TEXT_MEMBERS = {
    "prompt",
    "input",
    "texts",
    "query",
    "queries",
    "documents",
    "items",
    "data_1",
    "data_2",
    "text_1",
    "text_2",
}
PART_TYPE = re.compile(r"\.content\[\d+\]\.type$")
CONVERSATION_PLACE = re.compile(r"((?:messages|input)\[\d+\])(?:\[\d+\]|$)")  # of one of several conversations
ARRAY_INDEX = re.compile(r"\[(\d+)\]")


class VllmWording(error_wording.ErrorWording):
    """The wording for one ``body``, which refusals may quote."""

    def __init__(self, body: Mapping[str, Any] | None = None):
        self._body = body if body is not None else {}

    def for_body(self, body: Mapping[str, Any]) -> VllmWording:
        """Return the wording for this body, which pydantic's errors quote."""
        return VllmWording(body)

    def unreadable_error(self, body: bytes, reason: str) -> BadRequest:
        """Return the error for broken JSON with its position, in the words of Python's own parser if that fails too."""
        position, fault = 0, reason
        try:
            check_json_size(body)
            json.loads(body)
        except json.JSONDecodeError as error:
            position, fault = error.pos, error.msg
        except (ValueError, RecursionError):
            pass
        entry = _pydantic_error("json_invalid", str(position), "JSON decode error", {}, {"error": fault})
        return MalformedBody(_error_list(entry), field=f"body.{position}")

    def not_object_error(self, value: Any) -> BadRequest:
        """Return pydantic's error for a body that is JSON, but not an object."""
        message = "Input should be a valid dictionary or object to extract fields from"
        return MalformedBody(_error_list(_pydantic_error("model_attributes_type", "", message, value)), field="body")

    def missing_error(self, path: str) -> BadRequest:
        """Return pydantic's error for a missing member. It quotes the object that lacks the member."""
        place = _dotted_path(path)
        return MissingField(
            _error_list(_pydantic_error("missing", place, "Field required", self._parent_of(place))),
            field=f"body.{place}",
        )

    def type_error(self, path: str, expected: str, value: Any) -> BadRequest:
        """Return pydantic's error for a value of a wrong type, with one entry for each type of a union."""
        place = _dotted_path(path)
        if expected in UNION_TYPES:
            entries = [_pydantic_error(PYDANTIC_TYPES[name][0], place, PYDANTIC_TYPES[name][1], value)
                       for name in UNION_TYPES[expected]]  # fmt: skip
            return WrongType(_error_list(*entries), field=f"body.{place}")
        if expected == "an integer" and isinstance(value, float):
            kind, message = "int_from_float", "Input should be a valid integer, got a number with a fractional part"
        elif expected in PARSED_TYPES and isinstance(value, str):
            kind, message = PARSED_TYPES[expected]
        else:
            kind, message = PYDANTIC_TYPES.get(expected, ("value_error", f"Input should be {expected}"))
        return WrongType(_error_list(_pydantic_error(kind, place, message, value)), field=f"body.{place}")

    def convert_value(self, path: str, expected: str, value: Any) -> Any:
        """Convert text and booleans as pydantic does."""
        if expected == "an integer" and path in LOGPROB_MEMBERS and not isinstance(value, int | float):
            raise parameter_error(f"`{path}` must be an integer.", path, value)
        text = value.strip().lower() if isinstance(value, str) and len(value) <= MAX_NUMBER_CHARACTERS else None
        match expected:
            case "a boolean" if text in TRUE_TEXTS or value in (1, 1.0):
                return True
            case "a boolean" if text in FALSE_TEXTS or value in (0, 0.0):
                return False
            case "an integer" if isinstance(value, bool):
                return int(value)
            case "an integer" if text is not None and INTEGER_TEXT.fullmatch(text):
                return int(text.partition(".")[0])
            case "a number" if isinstance(value, bool):
                return float(value)
            case "a number" if text is not None and DECIMAL_TEXT.fullmatch(text):
                return float(text)
        raise self.type_error(path, expected, value)

    def range_error(
        self, path: str, expected: str, value: float, low: float | None, high: float | None, *, low_excluded: bool
    ) -> BadRequest:
        """Return vLLM's sentence for a number out of range, or pydantic's error if vLLM does not check the member."""
        name, place = path.rpartition(".")[2], _dotted_path(path)
        if path.startswith("input["):  # only the original's engine looks at the ids of an embedding
            return InvalidValue(unknown_token_sentence(value))
        above = high is not None and value > high
        if name in LOGPROB_MEMBERS and (above or value == -1):
            kind, requested = LOGPROB_MEMBERS[name], excerpt(value) if above else "the whole vocabulary"
            sentence = f"Requested {kind} logprobs of {requested}, which is greater than max allowed: {high}"
            return parameter_error(sentence, LOGPROB_PARAMETERS[kind], value)
        if name in LOW_SENTENCES and not above:
            return parameter_error(LOW_SENTENCES[name], name, value)
        if name in COUNT_MEMBERS and not above:
            return InvalidValue(f"{name} must be a non-negative integer")
        if name in RANGE_SENTENCES:
            below, beyond, names_parameter = RANGE_SENTENCES[name]
            is_integer = name in ("n", "top_k", "max_tokens", "max_completion_tokens", "min_tokens")
            number = value if is_integer or isinstance(value, float) or abs(value) > 1e300 else float(value)
            sentence = f"{name} {beyond if above else below}, got {excerpt(number)}.".format(high=high)
            return parameter_error(sentence, name, number) if names_parameter else InvalidValue(sentence)
        bound, kind, relation = (
            (high, "less_than_equal", "less than or equal to")
            if above
            else (low, "greater_than", "greater than")
            if low_excluded
            else (low, "greater_than_equal", "greater than or equal to")
        )
        ctx = {"le" if above else "gt" if low_excluded else "ge": bound}
        entry = _pydantic_error(kind, place, f"Input should be {relation} {bound}", value, ctx)
        return WrongType(_error_list(entry), field=f"body.{place}")

    def unlisted_error(self, path: str, value: Any, allowed: Sequence[str]) -> BadRequest:
        """Return pydantic's error for a value that is not one of those allowed; for a type of part, vLLM's sentence."""
        if PART_TYPE.search(path):
            allowed_names = ", ".join(allowed)
            return InvalidValue(
                f"Unsupported chat content part type: {excerpt(value)}. Supported types: {allowed_names}"
                + _conversation_place(path)
            )
        *earlier_names, last = [repr(name) for name in allowed]
        expected = f"{', '.join(earlier_names)} or {last}" if earlier_names else last
        entry = _pydantic_error(
            "literal_error", _dotted_path(path), f"Input should be {expected}", value, {"expected": expected}
        )
        return WrongType(_error_list(entry), field=f"body.{_dotted_path(path)}")

    def empty_error(self, path: str, container: str) -> BadRequest:
        """Return vLLM's sentence for an empty value."""
        name = path.partition("[")[0].rpartition(".")[2]
        if path == "token_ids":
            ctx = {"field_type": "List", "min_length": 1, "actual_length": 0}
            message = "List should have at least 1 item after validation, not 0"
            entry = _pydantic_error("too_short", path, message, self._value_at(path), ctx)
            return WrongType(_error_list(entry), field=f"body.{path}")
        if (name in TEXT_MEMBERS and path != name) or (path == "input" and container == "string"):
            return InvalidValue("The decoder prompt cannot be empty")
        if path == "prompt" and container == "string":
            return parameter_error("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
        if name in EMPTY_SENTENCES:
            return InvalidValue(EMPTY_SENTENCES[name] + _conversation_place(path))
        return InvalidValue(f"{path} must not be empty.")

    def too_long_error(self, path: str, container: str, size: int, cap: int) -> BadRequest:
        """Return pydantic's error for a value that is too long, in characters or items."""
        place, noun = _dotted_path(path), {"string": "characters", "array": "items", "object": "items"}[container]
        kind, type_name = ("string_too_long", "String") if container == "string" else ("too_long", "List")
        tail = "" if container == "string" else f" after validation, not {size}"
        ctx = (
            {"max_length": cap}
            if container == "string"
            else {"field_type": type_name, "max_length": cap, "actual_length": size}
        )
        entry = _pydantic_error(
            kind, place, f"{type_name} should have at most {cap} {noun}{tail}", self._value_at(place), ctx
        )
        return WrongType(_error_list(entry), field=f"body.{place}")

    def invalid_error(self, path: str, reason: str) -> BadRequest:
        """Return vLLM's sentence for any other fault; ``reason`` is used if vLLM has none for this member."""
        if path == "tool_choice.function.name":
            return parameter_error(UNKNOWN_TOOL, "tool_choice")
        if path == "tool_choice.name":
            return parameter_error(UNKNOWN_RESPONSE_TOOL, "tool_choice")
        rules = RULE_SENTENCES | CHAT_RULE_SENTENCES if "messages" in self._body else RULE_SENTENCES
        sentence, names_parameter = rules.get(path, (f"{path}: {reason}", True))
        return parameter_error(sentence, path) if names_parameter else InvalidValue(sentence)

    def _value_at(self, place: str) -> Any:
        """Return the value at a dotted path in the body."""
        value: Any = self._body
        for key in filter(None, place.split(".")):
            if isinstance(value, list):
                value = value[int(key)] if key.isdigit() and int(key) < len(value) else None
            else:
                value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def _parent_of(self, place: str) -> Any:
        return self._value_at(place.rpartition(".")[0])


def _conversation_place(path: str) -> str:
    """Return which of several conversations a path is in, as the end of a sentence; empty for a single one."""
    match = CONVERSATION_PLACE.match(path)
    return f" ({match[1]})" if match else ""


VLLM_WORDING = VllmWording()


def value_error(path: str, sentence: str, value: Any) -> WrongType:
    """Return pydantic's error for a value that one of vLLM's own checks of a shape refuses. ``path``: "" for a body."""
    message, ctx = f"Value error, {sentence}", {"error": ValueError(sentence)}
    place = _dotted_path(path)
    return WrongType(
        _error_list(_pydantic_error("value_error", place, message, value, ctx)),
        field=f"body.{place}" if place else "body",
    )


def unknown_token_sentence(token_id: float) -> str:
    """Return the original's sentence for an id that is not in the vocabulary."""
    return f"Token id {excerpt(token_id)} is out of vocabulary"


def unknown_ids_sentence(field: str, token_ids: Sequence[int], vocabulary: int) -> str:
    """Return the original's sentence for ids in an option that are not in the vocabulary."""
    sentence = f"token_id(s) {excerpt(token_ids)} in {field} contain out-of-vocab token ids."
    if field == "allowed_token_ids":
        sentence = "allowed_token_ids contains out-of-vocab token id!"
    else:
        sentence += f" Vocabulary size: {vocabulary}"
    return parameter_error(sentence, field, token_ids).message


def parameter_error(sentence: str, field: str, value: Any = None) -> InvalidValue:
    """Return a refusal with the parameter appended, and its value unless it is None."""
    value_text = "" if value is None else f", value={value[:60] if isinstance(value, str) else excerpt(value)}"
    return InvalidValue(f"{sentence} (parameter={field}{value_text})", field=field)


def too_many_stops(strings: Sequence[Any], cap: int) -> WrongType:
    """Return the error for more stop strings than the original accepts: neither a string nor a short enough list."""
    message = f"List should have at most {cap} items after validation, not {len(strings)}"
    ctx = {"field_type": "List", "max_length": cap, "actual_length": len(strings)}
    return WrongType(
        _error_list(
            _pydantic_error("string_type", "stop", PYDANTIC_TYPES["a string"][1], strings),
            _pydantic_error("too_long", "stop", message, strings, ctx),
        ),
        field="body.stop",
    )


def wrong_content_type() -> MalformedBody:
    """Return the error for a content type that is not JSON."""
    return MalformedBody("1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed")


def _dotted_path(path: str) -> str:
    return ARRAY_INDEX.sub(r".\1", path)


def _pydantic_error(kind: str, place: str, message: str, value: Any, ctx: dict[str, Any] | None = None) -> str:
    entry: dict[str, Any] = {"type": kind, "loc": f"body.{place}" if place else "body", "msg": message}
    entry["input"] = _input_text(value)
    return _cut_text(repr(entry | {"ctx": ctx} if ctx is not None else entry), MAX_ERROR_CHARACTERS)


def _input_text(value: Any) -> str:
    """Return a value as the original quotes it: as text, but containers by their size."""
    match value:
        case Mapping():
            return f"<dict of {len(value)} items>"
        case list():
            return f"<list of {len(value)} items>"
        case _:
            return _cut_text(str(value), MAX_INPUT_CHARACTERS)


def _cut_text(text: str, cap: int) -> str:
    return text if len(text) <= cap else text[:cap] + "...[truncated]"


def _error_list(*entries: str) -> str:
    several = "s" if len(entries) > 1 else ""
    return "\n".join([f"{len(entries)} validation error{several}:", *(f"  {entry}" for entry in entries)])
