"""Executes a template. Steps, characters and depth are limited, so that no template can hang a server or fill it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from parley.dialects.ollama.go_template.functions import FUNCTIONS, SHORT_CIRCUITS
from parley.dialects.ollama.go_template.lexer import template_error
from parley.dialects.ollama.go_template.nodes import (
    Action,
    Branch,
    Chain,
    Command,
    Constant,
    Dot,
    FieldPath,
    FunctionName,
    GoTemplate,
    Invocation,
    LiteralText,
    LoopExit,
    Node,
    Operand,
    Pipeline,
    Variable,
)
from parley.dialects.ollama.go_template.values import (
    NO_VALUE,
    TemplateFault,
    is_true,
    kind_of,
    read_member,
    write_value,
)

MAX_STEPS = 20_000  # nodes and operands; about as many microseconds
MAX_DEPTH = 100  # templates, blocks and parentheses within each other
BASE_CHARACTERS = 1 << 20
CHARACTERS_PER_INPUT = 4  # characters that may be written or passed to functions for each of the values'


class _Break(Exception):
    """A loop ends."""


class _Continue(Exception):
    """A loop's turn ends."""


LOOP_EXITS = {"break": _Break, "continue": _Continue}


def execute_template(template: GoTemplate, values: Mapping[str, Any], input_characters: int) -> str:
    """Return the text that a template writes about values. Raises InvalidValue, which names the line.

    ``input_characters``: the size of the values, which bounds the text's.
    """
    execution = _Execution(template, BASE_CHARACTERS + CHARACTERS_PER_INPUT * input_characters)
    data = dict(values)
    try:
        execution.walk_nodes(template.nodes, data, [("$", data)])
    except TemplateFault as fault:
        raise template_error(execution.line, f'executing "": {fault}') from None
    return "".join(execution.pieces)


class _Execution:
    """The state of one execution. ``line``: of the pipeline that is evaluated, for errors."""

    def __init__(self, template: GoTemplate, max_characters: int):
        self._template = template
        self._characters_left = max_characters
        self._steps_left = MAX_STEPS
        self._depth = 0
        self.line = 1
        self.pieces: list[str] = []

    # -- limits

    def _count_step(self) -> None:
        self._steps_left -= 1
        if self._steps_left < 0:
            raise TemplateFault(f"the template takes more than {MAX_STEPS} steps")

    def _count_characters(self, count: int) -> None:
        self._characters_left -= count
        if self._characters_left < 0:
            raise TemplateFault("the template writes more text than is allowed for this prompt")

    def _write_output(self, text: str) -> None:
        self._count_characters(len(text))
        self.pieces.append(text)

    # -- nodes

    def walk_nodes(self, nodes: Sequence[Node], dot: Any, variables: list[tuple[str, Any]]) -> None:
        """Write nodes. Variables that they declare end with them."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise TemplateFault(f"exceeded maximum template depth ({MAX_DEPTH})")
        scope = len(variables)
        try:
            for node in nodes:
                self._count_step()
                self._walk_node(node, dot, variables)
        finally:
            self._depth -= 1
            del variables[scope:]

    def _walk_node(self, node: Node, dot: Any, variables: list[tuple[str, Any]]) -> None:
        match node:
            case LiteralText(text):
                self._write_output(text)
            case Action(pipeline):
                value = self._evaluate_pipeline(pipeline, dot, variables)
                if not pipeline.variables:
                    self._write_output(NO_VALUE if value is None else write_value(value))
            case Branch():
                self._walk_branch(node, dot, variables)
            case Invocation():
                self._walk_invocation(node, dot, variables)
            case LoopExit(keyword):
                raise LOOP_EXITS[keyword]

    def _walk_branch(self, branch: Branch, dot: Any, variables: list[tuple[str, Any]]) -> None:
        scope = len(variables)
        value = self._evaluate_pipeline(branch.pipeline, dot, variables, declares=branch.keyword != "range")
        if branch.keyword == "range":
            self._walk_range(branch, value, dot, variables)
        elif is_true(value):
            self.walk_nodes(branch.body, value if branch.keyword == "with" else dot, variables)
        else:
            self.walk_nodes(branch.otherwise, dot, variables)
        del variables[scope:]

    def _walk_range(self, branch: Branch, value: Any, dot: Any, variables: list[tuple[str, Any]]) -> None:
        """Write the body for each item. The variables get the item, or its index or key, and the item."""
        names, scope, empty = branch.pipeline.variables, len(variables), True
        for index, item in _range_items(value):
            empty = False
            self._count_step()
            contents = () if not names else (item,) if len(names) == 1 else (index, item)
            for name, content in zip(names, contents, strict=True):
                _set_variable(variables, name, content, branch.pipeline.assigns)
            try:
                self.walk_nodes(branch.body, item, variables)
            except _Continue:
                pass
            except _Break:
                break
            finally:
                del variables[scope:]
        if empty:
            self.walk_nodes(branch.otherwise, dot, variables)

    def _walk_invocation(self, invocation: Invocation, dot: Any, variables: list[tuple[str, Any]]) -> None:
        pipeline = invocation.pipeline
        value = None if pipeline is None else self._evaluate_pipeline(pipeline, dot, variables)
        self.line = invocation.line
        if invocation.name not in self._template.definitions:
            raise TemplateFault(f'template "{invocation.name[:80]}" not defined')
        self.walk_nodes(self._template.definitions[invocation.name], value, [("$", value)])

    # -- pipelines

    def _evaluate_pipeline(
        self, pipeline: Pipeline, dot: Any, variables: list[tuple[str, Any]], declares: bool = True
    ) -> Any:
        """Return the value of the last command; with ``declares`` the pipeline's variables get it."""
        self.line = pipeline.line
        value: Any = None
        for number, command in enumerate(pipeline.commands):
            value = self._evaluate_command(command, dot, variables, (value,) if number else ())
        if declares:
            for name in pipeline.variables:
                _set_variable(variables, name, value, pipeline.assigns)
        return value

    def _evaluate_command(
        self, command: Command, dot: Any, variables: list[tuple[str, Any]], piped: tuple[Any, ...]
    ) -> Any:
        first, *others = command.operands
        if isinstance(first, FunctionName):
            if first.name in SHORT_CIRCUITS:
                return self._evaluate_short_circuit(first.name, others, dot, variables, piped)
            arguments = [self._evaluate_operand(operand, dot, variables) for operand in others]
            return self._call_function(first.name, (*arguments, *piped))
        if others:
            raise TemplateFault("can't give argument to a value that is not a function")
        if first == Constant(None):
            raise TemplateFault("nil is not a command")
        return self._evaluate_operand(first, dot, variables)

    def _evaluate_short_circuit(
        self, name: str, operands: list[Operand], dot: Any, variables: list[tuple[str, Any]], piped: tuple[Any, ...]
    ) -> Any:
        """Return the first value that decides ``and`` or ``or``; later operands are not evaluated."""
        value: Any = None
        if not operands and not piped:
            raise TemplateFault(f"wrong number of args for {name}: want at least 1 got 0")
        for operand in operands:
            value = self._evaluate_operand(operand, dot, variables)
            if is_true(value) == (name == "or"):
                return value
        return piped[0] if piped else value

    def _call_function(self, name: str, arguments: tuple[Any, ...]) -> Any:
        self._count_characters(sum(len(argument) for argument in arguments if isinstance(argument, str)))
        function = FUNCTIONS[name]
        min_arguments, max_arguments = _argument_counts(function)
        if not min_arguments <= len(arguments) <= max_arguments:
            expected = f"{min_arguments}" if min_arguments == max_arguments else f"at least {min_arguments}"
            raise TemplateFault(f"wrong number of args for {name}: want {expected} got {len(arguments)}")
        try:
            value = function(*arguments)
        except TemplateFault as fault:
            raise TemplateFault(f"error calling {name}: {fault}") from None
        self._count_characters(len(value) if isinstance(value, str) else 0)
        return value

    def _evaluate_operand(self, operand: Operand, dot: Any, variables: list[tuple[str, Any]]) -> Any:
        self._count_step()
        match operand:
            case Dot():
                return dot
            case Constant(value):
                return value
            case FieldPath(names):
                return None if dot is None else _read_path(dot, names)
            case Variable(name, names):
                return _read_path(_find_variable(variables, name), names)
            case FunctionName():
                return self._evaluate_command(Command((operand,)), dot, variables, ())
            case Chain(inner, names):
                return _read_path(self._evaluate_operand(inner, dot, variables), names)
            case Pipeline():
                return self._evaluate_pipeline(operand, dot, variables)


@cache
def _argument_counts(function: Callable[..., Any]) -> tuple[int, float]:
    """Return the least and the greatest number of arguments of a function."""
    parameters = inspect.signature(function).parameters.values()
    min_arguments = sum(parameter.kind != parameter.VAR_POSITIONAL for parameter in parameters)
    return min_arguments, min_arguments if min_arguments == len(parameters) else float("inf")


def _range_items(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return the items that a loop visits, each with its index or key. Raises TemplateFault."""
    match value:
        case None:
            return ()
        case list():
            return enumerate(value)
        case dict():
            return ((key, value[key]) for key in sorted(value))
        case int() if not isinstance(value, bool):
            return ((number, number) for number in range(value))
    raise TemplateFault(f"range can't iterate over {kind_of(value)}")


def _read_path(value: Any, names: tuple[str, ...]) -> Any:
    for name in names:
        value = read_member(value, name)
    return value


def _find_variable(variables: list[tuple[str, Any]], name: str) -> Any:
    return next(value for variable, value in reversed(variables) if variable == name)


def _set_variable(variables: list[tuple[str, Any]], name: str, value: Any, assigns: bool) -> None:
    """Declare a variable, or change the latest of its name."""
    if not assigns:
        variables.append((name, value))
        return
    index = next(index for index in reversed(range(len(variables))) if variables[index][0] == name)
    variables[index] = (name, value)
