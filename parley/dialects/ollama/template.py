"""``template`` of ``/api/generate``: the client's own template in place of the model's.

A template that mentions ``.Messages`` gets the conversation. Another one is executed once for each of its turns, with
``.System``, ``.Prompt`` and ``.Response``; of the last turn, only the text before the answer is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from parley.dialects.ollama.go_template.execution import execute_template
from parley.dialects.ollama.go_template.functions import FUNCTION_NAMES
from parley.dialects.ollama.go_template.nodes import (
    Action,
    Branch,
    Command,
    FieldPath,
    GoTemplate,
    Invocation,
    Node,
    Pipeline,
    Variable,
)
from parley.dialects.ollama.go_template.parser import parse_template
from parley.dialects.ollama.go_template.values import GoStruct
from parley.types import PlacedMedia

RESPONSE = Action(Pipeline((Command((FieldPath(("Response",)),)),), line=1))
MESSAGE_JSON = {"Role": "role", "Content": "content"}
CONVERSATION_VARIABLES = ("messages", "document")
OPENING_BRACKETS = re.compile(r"(?<!\[)(\[+)img-")


@dataclass(frozen=True, slots=True)
class TemplateInput:
    """The members of a request that its template may write. ``think`` None: the request leaves it out."""

    prompt: str
    system: str = ""
    suffix: str = ""
    think: bool | None = None
    think_level: str = ""
    images: Sequence[PlacedMedia] = ()


def render_prompt(source: str, request: TemplateInput) -> tuple[str, list[PlacedMedia]]:
    """Return the prompt that a template writes, and the images at their places in it. Raises InvalidValue.

    As in Ollama, images stand before the prompt's text, and an image is left out if the template leaves out the prompt.
    """
    template = read_template(source)
    marks = _image_marks(source, request)
    values = {"Response": "", "Think": bool(request.think), "ThinkLevel": request.think_level}
    values["IsThinkSet"] = request.think is not None
    prompt = "".join(marks) + request.prompt
    if request.prompt and request.suffix:
        values |= {"Prompt": request.prompt, "Suffix": request.suffix}
    elif variable_names(template).intersection(CONVERSATION_VARIABLES):
        messages = [_message_struct("system", request.system)] if request.system else []
        values |= {"System": request.system, "Messages": [*messages, _message_struct("user", prompt)], "Tools": []}
        values |= {"Query": "", "Document": "", "Instruction": ""}
    else:
        template = GoTemplate(_cut_after_response(template.nodes)[0], template.definitions)
        values |= {"System": request.system, "Prompt": prompt}
    size = len(prompt) + len(request.system) + len(request.suffix)
    return _place_images(execute_template(template, values, size), marks, request.images)


def read_template(source: str) -> GoTemplate:
    """Parse a template; one that mentions neither the conversation nor the answer ends with the answer."""
    template = parse_template(source, FUNCTION_NAMES)
    if variable_names(template).isdisjoint(("messages", "response")):
        return GoTemplate((*template.nodes, RESPONSE), template.definitions)
    return template


def _message_struct(role: str, content: str) -> GoStruct:
    members: dict[str, Any] = {"Role": role, "Content": content, "Thinking": "", "Images": [], "ToolCalls": []}
    return GoStruct("*api.Message", members | {"ToolName": "", "ToolCallID": ""}, MESSAGE_JSON)


# -- the variables of a template


def variable_names(template: GoTemplate) -> set[str]:
    """Return the names of members and variables that a template mentions, in small letters."""
    return {
        name.lower()
        for nodes in (template.nodes, *template.definitions.values())
        for pipeline in _find_pipelines(nodes)
        for name in _pipeline_names(pipeline)
    }


def _find_pipelines(nodes: Sequence[Node]) -> Iterator[Pipeline]:
    for node in nodes:
        match node:
            case Action(pipeline) | Invocation(pipeline=Pipeline() as pipeline):
                yield pipeline
            case Branch(pipeline=pipeline, body=body, otherwise=otherwise):
                yield pipeline
                yield from _find_pipelines(body)
                yield from _find_pipelines(otherwise)


def _pipeline_names(pipeline: Pipeline) -> Iterator[str]:
    for command in pipeline.commands:
        for operand in command.operands:
            match operand:
                case FieldPath(names):
                    yield from names
                case Variable(name, names):
                    yield from (name, *names)
                case Pipeline():
                    yield from _pipeline_names(operand)


def _cut_after_response(nodes: Sequence[Node]) -> tuple[tuple[Node, ...], bool]:
    """Return the nodes up to the one that writes the answer, and whether there is one."""
    kept_nodes: list[Node] = []
    for node in nodes:
        match node:
            case Action(pipeline):
                cut = "Response" in _pipeline_names(pipeline)
            case Branch(keyword, pipeline, body, otherwise):
                body, cut = _cut_after_response(body)
                otherwise, cut = ((), True) if cut else _cut_after_response(otherwise)
                node = Branch(keyword, pipeline, body, otherwise)
            case _:
                cut = False
        kept_nodes.append(node)
        if cut:
            return tuple(kept_nodes), True
    return tuple(kept_nodes), False


# -- images


def _image_marks(source: str, request: TemplateInput) -> list[str]:
    """Return a text for each image, which occurs nowhere else in the request."""
    if not request.images:
        return []
    texts = (source, request.prompt, request.system, request.suffix)
    openings = [len(brackets) for text in texts for brackets in OPENING_BRACKETS.findall(text)]
    brackets = "[" * (1 + max(openings, default=0))
    return [f"{brackets}img-{number}]" for number in range(len(request.images))]


def _place_images(text: str, marks: Sequence[str], images: Sequence[PlacedMedia]) -> tuple[str, list[PlacedMedia]]:
    """Return a text without the marks of images, and each image at the first place of its mark."""
    if not marks:
        return text, []
    pieces: list[str] = []
    placed: dict[str, PlacedMedia] = {}
    length = 0
    for index, piece in enumerate(re.split(f"({'|'.join(map(re.escape, marks))})", text)):
        if index % 2 == 0:
            pieces.append(piece)
            length += len(piece)
        elif piece not in placed:
            placed[piece] = msgspec.structs.replace(images[marks.index(piece)], position=length)
    return "".join(pieces), list(placed.values())
