"""The parts of a parsed template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

BranchKeyword = Literal["if", "with", "range"]


@dataclass(frozen=True, slots=True)
class Dot:
    """``.``: the current value."""


@dataclass(frozen=True, slots=True)
class Constant:
    """A text, a number, a boolean, or nil (None)."""

    value: str | bool | int | float | None


@dataclass(frozen=True, slots=True)
class FieldPath:
    """``.A.B``: members of the current value."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Variable:
    """``$x.A``: a variable, or members of its value."""

    name: str
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FunctionName:
    """The name of a function."""

    name: str


@dataclass(frozen=True, slots=True)
class Chain:
    """``(…).A.B``: members of the value of an operand."""

    operand: Operand
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Command:
    """An operand, or a function and its arguments."""

    operands: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Commands. Each gets the value of the one before as its last argument.

    ``variables`` get the value; they are new ones unless ``assigns``.
    """

    commands: tuple[Command, ...]
    line: int
    variables: tuple[str, ...] = ()
    assigns: bool = False


Operand = Dot | Constant | FieldPath | Variable | FunctionName | Chain | Pipeline


@dataclass(frozen=True, slots=True)
class LiteralText:
    """Text that is written as it is."""

    text: str


@dataclass(frozen=True, slots=True)
class Action:
    """A pipeline whose value is written, unless variables get it."""

    pipeline: Pipeline


@dataclass(frozen=True, slots=True)
class Branch:
    """``if``, ``with`` or ``range``, with its body and the nodes after ``else``."""

    keyword: BranchKeyword
    pipeline: Pipeline
    body: tuple[Node, ...]
    otherwise: tuple[Node, ...] = ()


@dataclass(frozen=True, slots=True)
class Invocation:
    """``template``: another template, with the value that it starts from."""

    name: str
    line: int
    pipeline: Pipeline | None = None


@dataclass(frozen=True, slots=True)
class LoopExit:
    """``break`` or ``continue``."""

    keyword: str


Node = LiteralText | Action | Branch | Invocation | LoopExit


@dataclass(frozen=True, slots=True)
class GoTemplate:
    """A template, and those that it defines by name."""

    nodes: tuple[Node, ...]
    definitions: Mapping[str, tuple[Node, ...]]
