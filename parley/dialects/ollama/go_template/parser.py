"""Parses a template. As in Go, names of functions and variables are checked here, before anything is written."""

from __future__ import annotations

from collections.abc import Collection
from typing import NoReturn

from parley.dialects.ollama.go_template import constants
from parley.dialects.ollama.go_template.lexer import TemplateToken, split_tokens, template_error
from parley.dialects.ollama.go_template.nodes import (
    Action,
    Branch,
    BranchKeyword,
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

MAX_NESTING = 60  # blocks and parentheses within each other
MAX_VARIABLES = 100
NAMED_CONSTANTS = {"true": True, "false": False, "nil": None}
BRANCHES: dict[str, BranchKeyword] = {"if": "if", "with": "with", "range": "range"}
KEYWORDS = frozenset((*BRANCHES, "else", "end", "define", "block", "template", "break", "continue"))
END_TOKEN = TemplateToken("close", "EOF", 0)


def parse_template(source: str, functions: Collection[str]) -> GoTemplate:
    """Parse a template that may call ``functions``. Raises InvalidValue, which names the line."""
    parser = _Parser(source, functions)
    nodes, _ = parser.read_nodes(ends=())
    return GoTemplate(nodes, parser.definitions)


class _Parser:
    """Reads the tokens of a template. ``variables``: the names in scope."""

    def __init__(self, source: str, functions: Collection[str]):
        self._tokens = list(split_tokens(source))
        self._position = 0
        self._line = 1
        self._functions = functions
        self._variables = ["$"]
        self._nesting = 0
        self._loops = 0
        self.definitions: dict[str, tuple[Node, ...]] = {}

    # -- tokens

    def _peek_token(self) -> TemplateToken:
        return self._tokens[self._position] if self._position < len(self._tokens) else END_TOKEN

    def _next_token(self) -> TemplateToken:
        token = self._peek_token()
        self._position += 1
        self._line = token.line or self._line
        return token

    def _raise_error(self, message: str) -> NoReturn:
        raise template_error(self._line, message)

    def _expect_token(self, kind: str, context: str) -> TemplateToken:
        token = self._next_token()
        if token.kind != kind:
            self._raise_error(f"unexpected {_quote_token(token)} in {context}")
        return token

    def _enter_block(self) -> None:
        self._nesting += 1
        if self._nesting > MAX_NESTING:
            self._raise_error(f"blocks and parentheses may be at most {MAX_NESTING} within each other")

    # -- nodes

    def read_nodes(self, ends: tuple[str, ...]) -> tuple[tuple[Node, ...], str]:
        """Return the nodes up to an action of one of these keywords, and that keyword; without: up to the end."""
        nodes: list[Node] = []
        while self._position < len(self._tokens):
            token = self._next_token()
            if token.kind == "text":
                nodes.append(LiteralText(token.text))
                continue
            keyword = self._peek_token().text if self._peek_token().kind == "name" else ""
            if keyword in ends:
                self._next_token()
                return tuple(nodes), keyword
            node = self._read_keyword(keyword) if keyword in KEYWORDS else self._read_action()
            if node is not None:
                nodes.append(node)
        if ends:
            self._raise_error("unexpected EOF")
        return tuple(nodes), ""

    def _read_action(self) -> Action:
        return Action(self._read_pipeline("command"))

    def _read_keyword(self, keyword: str) -> Node | None:
        """Read the rest of an action that begins with a keyword."""
        self._next_token()
        if keyword in BRANCHES:
            return self._read_branch(BRANCHES[keyword])
        match keyword:
            case "define":
                self._read_definition()
                return None
            case "block":
                return self._read_block()
            case "template":
                return self._read_invocation()
            case "break" | "continue":
                if not self._loops:
                    self._raise_error(f"{{{{{keyword}}}}} outside {{{{range}}}}")
                self._expect_token("close", f"{{{{{keyword}}}}}")
                return LoopExit(keyword)
        self._raise_error(f"unexpected {{{{{keyword}}}}}")

    def _read_branch(self, keyword: BranchKeyword) -> Branch:
        """Read a branch up to its end. Its variables end there, too."""
        self._enter_block()
        scope = len(self._variables)
        pipeline = self._read_pipeline(keyword)
        self._loops += keyword == "range"
        body, ending = self.read_nodes(("else", "end"))
        self._loops -= keyword == "range"
        otherwise: tuple[Node, ...] = ()
        if ending == "else":
            otherwise = self._read_else(keyword)
        else:
            self._expect_token("close", "end")
        del self._variables[scope:]
        self._nesting -= 1
        return Branch(keyword, pipeline, body, otherwise)

    def _read_else(self, keyword: BranchKeyword) -> tuple[Node, ...]:
        """Read the rest of a branch after ``else``: nodes, or another branch of the same keyword."""
        token = self._peek_token()
        if token.kind == "name" and token.text == keyword and keyword != "range":
            self._next_token()
            return (self._read_branch(keyword),)
        self._expect_token("close", "else")
        nodes, _ = self.read_nodes(("end",))
        self._expect_token("close", "end")
        return nodes

    def _read_definition(self) -> None:
        if self._nesting:
            self._raise_error("unexpected {{define}}")
        self._add_definition(self._read_name("define clause"))

    def _read_block(self) -> Invocation:
        name = self._read_name("block clause", closes=False)
        invocation = Invocation(name, self._line, self._read_pipeline("block clause"))
        self._add_definition(name)
        return invocation

    def _add_definition(self, name: str) -> None:
        """Read the nodes of a named template, which knows no variable of those around it."""
        self._enter_block()
        outer, self._variables, loops, self._loops = self._variables, ["$"], self._loops, 0
        nodes, _ = self.read_nodes(("end",))
        self._expect_token("close", "end")
        self._variables, self._loops = outer, loops
        self._nesting -= 1
        if nodes or name not in self.definitions:
            self.definitions[name] = nodes

    def _read_invocation(self) -> Invocation:
        name, line = self._read_name("template clause", closes=False), self._line
        if self._peek_token().kind == "close":
            self._next_token()
            return Invocation(name, line)
        return Invocation(name, line, self._read_pipeline("template clause"))

    def _read_name(self, context: str, closes: bool = True) -> str:
        """Read the name of a template, a constant text; then the action's end if it ``closes``."""
        name = self._read_constant(self._next_token())
        if not isinstance(name, str):
            self._raise_error(f"the name in a {context} must be a text in quotes")
        if closes:
            self._expect_token("close", context)
        return name

    # -- pipelines

    def _read_pipeline(self, context: str, end: str = "close") -> Pipeline:
        """Read a pipeline up to the action's end, or to a closing parenthesis."""
        line, (variables, assigns) = self._line, self._read_variables(context)
        commands: list[Command] = []
        while True:
            operands = self._read_operands(context, end)
            if commands and not isinstance(operands[0], FunctionName):
                self._raise_error(f"non executable command in pipeline stage {len(commands) + 1}")
            commands.append(Command(operands))
            if self._next_token().text != "|":
                break
        if not assigns:
            self._variables += variables
            if len(self._variables) > MAX_VARIABLES:
                self._raise_error(f"at most {MAX_VARIABLES} variables may be in scope")
        return Pipeline(tuple(commands), line, variables, assigns)

    def _read_variables(self, context: str) -> tuple[tuple[str, ...], bool]:
        """Return the variables that a pipeline sets, and whether they exist already."""
        start = self._position
        names: list[str] = []
        while self._peek_token().kind == "variable" and len(names) < (2 if context == "range" else 1):
            names.append(self._next_token().text)
            sign = self._next_token().text
            if sign in (":=", "="):
                if sign == "=" and (unknown := [name for name in names if name not in self._variables]):
                    self._raise_error(f'undefined variable "{unknown[0]}"')
                return tuple(names), sign == "="
            if sign != ",":
                break
        self._position = start
        return (), False

    def _read_operands(self, context: str, end: str) -> tuple[Operand, ...]:
        """Return the operands of a command."""
        operands: list[Operand] = []
        while True:
            token = self._peek_token()
            if token.text == "|" or token.kind == end or (token.kind == "sign" and token.text == end):
                break
            if operands and not token.spaced:
                self._next_token()
                self._raise_error(f"unexpected {_quote_token(token)} in operand")
            operands.append(self._read_operand(context))
        if not operands:
            self._next_token()
            self._raise_error(f"missing value for {context}")
        return tuple(operands)

    def _read_operand(self, context: str) -> Operand:
        """Return one operand with the members that are read from it."""
        token = self._next_token()
        operand = self._read_term(token, context)
        names = []
        while self._peek_token().kind == "field" and not self._peek_token().spaced:
            names.append(self._next_token().text[1:])
        if not names:
            return operand
        match operand:
            case FieldPath(names=first):
                return FieldPath((*first, *names))
            case Variable(name):
                return Variable(name, tuple(names))
            case Pipeline():
                return Chain(operand, tuple(names))
        self._raise_error(f"unexpected . after term {_quote_token(token)}")

    def _read_term(self, token: TemplateToken, context: str) -> Operand:
        match token.kind:
            case "dot":
                return Dot()
            case "field":
                return FieldPath((token.text[1:],))
            case "variable":
                if token.text not in self._variables:
                    self._raise_error(f'undefined variable "{token.text}"')
                return Variable(token.text)
            case "name":
                return self._read_named_term(token.text, context)
            case "sign" if token.text == "(":
                self._enter_block()
                pipeline = self._read_pipeline("parenthesized pipeline", end=")")
                self._nesting -= 1
                return pipeline
        return Constant(self._read_constant(token))

    def _read_named_term(self, name: str, context: str) -> Operand:
        if name in NAMED_CONSTANTS:
            return Constant(NAMED_CONSTANTS[name])
        if name in KEYWORDS:
            self._raise_error(f"unexpected <{name}> in {context}")
        if name not in self._functions:
            self._raise_error(f'function "{name}" not defined')
        return FunctionName(name)

    def _read_constant(self, token: TemplateToken) -> str | int | float:
        try:
            match token.kind:
                case "string":
                    return constants.read_string(token.text)
                case "raw":
                    return token.text[1:-1]
                case "character":
                    return constants.read_character(token.text)
                case "number":
                    return constants.read_go_number(token.text)
        except (ValueError, OverflowError):
            self._raise_error(f"bad constant {token.text[:40]}")
        self._raise_error(f"unexpected {_quote_token(token)} in operand")


def _quote_token(token: TemplateToken) -> str:
    return "EOF" if token is END_TOKEN else f'"{token.text[:40]}"'
