"""Writes calls as a model does, such that a reader of the same form reads them back. Knows forms and values only."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from parley.text.parsing.calls.form import LIST_ITEM, CallForm
from parley.text.parsing.calls.tools import json_value_type

PYTHON_WORDS = {True: "True", False: "False", None: "None"}


def write_calls(form: CallForm, calls: Iterable[tuple[str, str, dict[str, Any]]]) -> str:
    """Return the text of calls, each given as (id, name, arguments), with all marks of the form around them."""
    texts = [
        "".join(form.call_open) + _write_call(form, number, *call) + "".join(form.call_close)
        for number, call in enumerate(calls)
    ]
    return "".join(form.block_open) + form.separator.join(texts) + "".join(form.block_close)


def _write_call(form: CallForm, number: int, call_id: str, name: str, arguments: dict[str, Any]) -> str:
    text, head = _to_json(arguments), "".join(form.after_name)
    match form.shape:
        case "object":
            return f'{{"{form.member_names[0]}": {_to_json(name)}, "{form.member_names[1]}": {text}}}'
        case "keyed":
            return f"{{{_to_json(name)}: {text}}}"
        case "named" if form.numbered_names:
            return f"functions.{name}:{number}{head}{text}"
        case "named":
            return f"{call_id}{form.name_mark}{name}{head}{text}" if form.name_mark else f"{name}{head}{text}"
        case "tags":
            number_text = f"{number + 1}{form.number_end}" if form.number_end else ""
            return name + head + number_text + "".join(_write_tag(form, key, value) for key, value in arguments.items())
        case "elements":
            return name + head + "".join(_write_element(form, key, value) for key, value in arguments.items())
        case "python":
            return f"{name}({', '.join(f'{key}={_write_python(value)}' for key, value in arguments.items())})"
        case "loose":
            return name + _write_loose(form, arguments)


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _text_or_json(value: Any) -> str:
    return value if isinstance(value, str) else _to_json(value)


def _type_name(value: Any) -> str:
    type_name = json_value_type(value)
    return "number" if type_name == "integer" else type_name


def _write_tag(form: CallForm, key: str, value: Any) -> str:
    type_text = f' string="{_to_json(isinstance(value, str))}">' if form.marks_strings else ""
    if form.type_required:
        type_text = form.type_marks[0] + _type_name(value) + form.type_marks[1]
    opening = f"{form.key_marks[0]}{key}{form.key_marks[1]}"
    return f"{opening}{type_text}{form.value_marks[0]}{_text_or_json(value)}{form.value_marks[1]}"


def _write_element(form: CallForm, key: str, value: Any) -> str:
    if isinstance(value, dict):
        inner = "".join(_write_element(form, *member) for member in value.items())
    elif isinstance(value, list):
        inner = "".join(_write_element(form, LIST_ITEM, element) for element in value)
    else:
        inner = _text_or_json(value)
    return f"{form.key_marks[0]}{key}{form.key_marks[1]}{inner}{form.value_marks[1]}{key}{form.key_marks[1]}"


def _write_python(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_to_json(key)}: {_write_python(member)}" for key, member in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(_write_python, value))}]"
    return PYTHON_WORDS[value] if value is None or isinstance(value, bool) else _to_json(value)


def _write_loose(form: CallForm, value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_write_loose(form, member)}" for key, member in value.items()) + "}"
    if isinstance(value, list):
        return f"[{','.join(_write_loose(form, element) for element in value)}]"
    return f"{form.quote_mark}{value}{form.quote_mark}" if isinstance(value, str) else _to_json(value)
