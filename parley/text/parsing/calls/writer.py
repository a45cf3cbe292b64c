"""Writes calls as a model does, such that a reader of the same form reads them back. Knows forms and values only."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from parley.text.parsing.calls.form import ITEM, Form
from parley.text.parsing.calls.tools import kind

WORDS = {True: "True", False: "False", None: "None"}


def written(form: Form, calls: Iterable[tuple[str, str, dict[str, Any]]]) -> str:
    """Return the text of calls, each given as (id, name, arguments), with all marks of the form around them."""
    each = ["".join(form.each) + _call(form, number, *call) + "".join(form.after) for number, call in enumerate(calls)]
    return "".join(form.open) + form.between.join(each) + "".join(form.close)


def _call(form: Form, number: int, id: str, name: str, arguments: dict[str, Any]) -> str:
    text, head = _json(arguments), "".join(form.head)
    match form.shape:
        case "object":
            return f'{{"{form.keys[0]}": {_json(name)}, "{form.keys[1]}": {text}}}'
        case "keyed":
            return f"{{{_json(name)}: {text}}}"
        case "named" if form.numbered:
            return f"functions.{name}:{number}{head}{text}"
        case "named":
            return f"{id}{form.first}{name}{head}{text}" if form.first else f"{name}{head}{text}"
        case "tags":
            counted = f"{number + 1}{form.count}" if form.count else ""
            return name + head + counted + "".join(_tag(form, key, value) for key, value in arguments.items())
        case "elements":
            return name + head + "".join(_element(form, key, value) for key, value in arguments.items())
        case "python":
            return f"{name}({', '.join(f'{key}={_python(value)}' for key, value in arguments.items())})"
        case "loose":
            return name + _loose(form, arguments)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _type(value: Any) -> str:
    found = kind(value)
    return "number" if found == "integer" else found


def _tag(form: Form, key: str, value: Any) -> str:
    said = f' string="{_json(isinstance(value, str))}">' if form.typed else ""
    if form.stated:
        said = form.kind[0] + _type(value) + form.kind[1]
    return f"{form.key[0]}{key}{form.key[1]}{said}{form.value[0]}{_text(value)}{form.value[1]}"


def _element(form: Form, key: str, value: Any) -> str:
    if isinstance(value, dict):
        inner = "".join(_element(form, *member) for member in value.items())
    elif isinstance(value, list):
        inner = "".join(_element(form, ITEM, each) for each in value)
    else:
        inner = _text(value)
    return f"{form.key[0]}{key}{form.key[1]}{inner}{form.value[1]}{key}{form.key[1]}"


def _python(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_json(key)}: {_python(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(_python, value))}]"
    return WORDS[value] if value is None or isinstance(value, bool) else _json(value)


def _loose(form: Form, value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_loose(form, each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return f"[{','.join(_loose(form, each) for each in value)}]"
    return f"{form.quote}{value}{form.quote}" if isinstance(value, str) else _json(value)
