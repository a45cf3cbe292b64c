"""A question to a grammar worker, as text: which answers may follow this prompt?

It has the parts of a prompt that the grammar of its answer depends on, and the grammar that the request asks for. The
text is JSON, because only Python's JSON carries integers of any size and halves of surrogate pairs, as schemas may
contain them. Structs are written with their names, and objects of clients (schemas) apart from them, so that no client
can write a struct. The messages between the API process and a worker carry such questions.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from parley.errors import Invalid
from parley.text.grammar.limits import MAX_QUESTION_CHARS, TOO_DEEP
from parley.text.parsing.markup import Markup
from parley.types import (
    Chat,
    Grammar,
    Prompt,
    SeparatedTags,
    StructuralChoice,
    StructuralRepeat,
    StructuralSequence,
    StructuralTag,
    StructuralText,
    StructuralToken,
    TriggeredTags,
)


class CompilerSetup(msgspec.Struct):
    """What a worker must know of a model: the parts of its ``GrammarVocabulary``, and how its answers are marked."""

    marks: dict[str, int]
    vocab_size: int
    decodes_by_token: bool
    markup: Markup


class CompileAnswer(msgspec.Struct, tag=True):
    """To a worker: compile the grammar that answers ``question``. ``setup``: an encoded CompilerSetup."""

    setup: bytes
    question: str


class TokenFound(msgspec.Struct, tag=True):
    """To a worker: the id of the token that it asked for; None if there is no such token."""

    token_id: int | None


class WorkerReady(msgspec.Struct, tag=True):
    """From a worker: it has started."""


class FindToken(msgspec.Struct, tag=True):
    """From a worker that compiles: which id has this token, given by its id or as the vocabulary writes it?"""

    token: int | str


class AnswerCompiled(msgspec.Struct, tag=True):
    """From a worker: the grammar as the engine reads it; "" if the answer may be any text."""

    grammar: str


class AnswerRefused(msgspec.Struct, tag=True):
    """From a worker: the grammar cannot be followed. ``field``: the request's member that ``reason``, a sentence, is
    about; None: ``reason`` is only the end of a sentence about the whole grammar. ``is_lasting``: it will be refused
    again; False: the worker was killed or silent, for which the machine may be the reason as well."""

    reason: str
    field: str | None = None
    is_lasting: bool = True


ToWorker = CompileAnswer | TokenFound
FromWorker = WorkerReady | FindToken | AnswerCompiled | AnswerRefused

STRUCTS: dict[str, type[msgspec.Struct]] = {
    struct.__name__: struct
    for struct in (
        Chat,
        Grammar,
        SeparatedTags,
        StructuralChoice,
        StructuralRepeat,
        StructuralSequence,
        StructuralTag,
        StructuralText,
        StructuralToken,
        TriggeredTags,
    )
}


def encode_question(prompt: Prompt, grammar: Grammar | None) -> str:
    """Return the question for a prompt and the grammar that its request asks for. Raises Invalid if it is too large."""
    chat = msgspec.structs.replace(prompt, messages=[], options={}) if isinstance(prompt, Chat) else None
    field = grammar.field if grammar is not None else "tools"
    try:
        question = json.dumps([_pack(chat), _pack(grammar)])
    except RecursionError:
        raise Invalid(f"{field} cannot be followed: {TOO_DEEP}.", field=field) from None
    if len(question) > MAX_QUESTION_CHARS:
        raise Invalid(
            f"{field} cannot be followed: it has {len(question)} characters, and at most {MAX_QUESTION_CHARS} are "
            "allowed.",
            field=field,
        )
    return question


def decode_question(question: str) -> tuple[Chat | None, Grammar | None]:
    """Return the chat, None for other prompts, and the grammar of a question."""
    chat, grammar = json.loads(question)
    return _unpack(chat), _unpack(grammar)


def _pack(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        fields = {name: _pack(getattr(value, name)) for name in value.__struct_fields__}
        return {"struct": type(value).__name__, "fields": fields}
    if isinstance(value, list | tuple):
        return [_pack(each) for each in value]
    return {"object": value} if isinstance(value, dict) else value


def _unpack(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpack(each) for each in value]
    if not isinstance(value, dict):
        return value
    if "object" in value:
        return value["object"]
    return STRUCTS[value["struct"]](**{name: _unpack(each) for name, each in value["fields"].items()})
