"""A question to a grammar worker, as text: it asks for the grammar that the answer to a prompt must follow.

It has the parts of the prompt that this grammar depends on, and the grammar that the request asks for. The
text is JSON, because only Python's JSON carries integers of any size and halves of surrogate pairs, as schemas may
contain them. Structs are written with their names, and objects of clients (schemas) apart from them, so that no client
can write a struct. The messages between the API process and a worker carry such questions.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from parley.errors import InvalidValue
from parley.text.grammar.limits import MAX_QUESTION_CHARS, TOO_DEEP
from parley.text.parsing.markup import Markup
from parley.types import (
    ChatPrompt,
    Grammar,
    Prompt,
    SeparatedTags,
    StructuralChoice,
    StructuralRepeat,
    StructuralSequence,
    StructuralTag,
    StructuralText,
    StructuralToken,
    TokensPrompt,
    TriggeredTags,
)


class CompilerSetup(msgspec.Struct):
    """The facts about a model that a worker needs: its ``GrammarVocabulary``, and how its answers are marked."""

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
    """From a worker that compiles: send the id of a token, which is given by its id or as the vocabulary writes it."""

    token: int | str


class AnswerCompiled(msgspec.Struct, tag=True):
    """From a worker: the grammar as the engine reads it; "" if the answer may be any text."""

    grammar: str


class AnswerRefused(msgspec.Struct, tag=True):
    """From a worker: the grammar cannot be enforced.

    ``field``: the member of the request that is at fault, and ``reason`` is a sentence; None: the whole grammar is, and
    ``reason`` is the end of a sentence. ``is_lasting``: it would be refused again; False: the worker was killed or
    silent, which may be the machine's fault.
    """

    reason: str
    field: str | None = None
    is_lasting: bool = True


ToWorker = CompileAnswer | TokenFound
FromWorker = WorkerReady | FindToken | AnswerCompiled | AnswerRefused

STRUCTS: dict[str, type[msgspec.Struct]] = {
    struct.__name__: struct
    for struct in (
        ChatPrompt,
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


def find_answered_chat(prompt: Prompt | None) -> ChatPrompt | None:
    """Return the conversation of a prompt, None for a plain text. Of a conversation in tokens only the end is known, so
    an empty one stands for it."""
    if isinstance(prompt, TokensPrompt) and not prompt.reasoning_ended:
        return ChatPrompt([])
    return prompt if isinstance(prompt, ChatPrompt) else None


def encode_question(prompt: Prompt, grammar: Grammar | None) -> str:
    """Return the question for a prompt and the grammar that its request asks for. Raises InvalidValue if it is too
    large."""
    chat = find_answered_chat(prompt)
    if chat is not None:
        chat = msgspec.structs.replace(chat, messages=[], options={}, edits=[])
    field = grammar.field if grammar is not None else "tools"
    try:
        question = json.dumps([_pack_value(chat), _pack_value(grammar)])
    except RecursionError:
        raise InvalidValue(f"{field} cannot be enforced: {TOO_DEEP}.", field=field) from None
    if len(question) > MAX_QUESTION_CHARS:
        raise InvalidValue(
            f"{field} cannot be enforced: it has {len(question)} characters, and at most {MAX_QUESTION_CHARS} are "
            "allowed.",
            field=field,
        )
    return question


def decode_question(question: str) -> tuple[ChatPrompt | None, Grammar | None]:
    """Return the chat, None for other prompts, and the grammar of a question."""
    chat, grammar = json.loads(question)
    return _unpack_value(chat), _unpack_value(grammar)


def _pack_value(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        fields = {name: _pack_value(getattr(value, name)) for name in value.__struct_fields__}
        return {"struct": type(value).__name__, "fields": fields}
    if isinstance(value, list | tuple):
        return [_pack_value(element) for element in value]
    return {"object": value} if isinstance(value, dict) else value


def _unpack_value(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpack_value(element) for element in value]
    if not isinstance(value, dict):
        return value
    if "object" in value:
        return value["object"]
    return STRUCTS[value["struct"]](**{name: _unpack_value(member) for name, member in value["fields"].items()})
