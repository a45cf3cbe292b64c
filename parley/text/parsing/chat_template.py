"""The model's chat template: turns a conversation into the text that the model was trained on.

Templates are Jinja programs that come with the model, so they run in a sandbox and on a budget: no attributes that lead
out of the sandbox, no changes to their inputs, a deadline that is checked in every loop turn and at every call, and a
limit on the output. The budget does not cover a single operation that takes long or much memory (joining, doubling or
padding a string). Such a template can harm the process, but only the provider of the model can write one: a request
cannot bring its own.

Rendering follows Transformers' ``apply_chat_template``. Handles no tokens.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from parley.errors import BadRequest, InvalidValue, excerpt
from parley.interrupt import NotBrief, brief_end, stop_if_not_brief
from parley.text.parsing.content_parts import PromptMarks, text_of_parts
from parley.text.parsing.history import format_history, later_system_as_user
from parley.text.tokens.json_files import BadTokenizer, read_json_object
from parley.text.tokens.tokenizer import Tokenizer
from parley.types import ChatPrompt, Message

MAX_RENDERED_CHARACTERS = 64 << 20  # of rendered text; far more than any context holds
MAX_RENDER_SECONDS = 10.0
MAX_REMEMBERED_ATTRIBUTES = 1024  # a template may compute their names
MAX_REFUSAL_CHARACTERS = 500  # characters of a template's own error message, which may quote the conversation
PROBE_TEXT = "parley-reads-this"  # a turn's text; the output shows how a template reads turns
PROBE_PART = {"type": "text", "text": PROBE_TEXT}
CONTINUATION_MARK = "<|parley-continues-here|> "  # marks the end of the last turn while it is rendered
NESTED_TOO_DEEPLY = "The conversation is nested too deeply for the model's chat template."

HideTokens = Callable[[dict[str, Any]], dict[str, Any]]  # replaces special tokens in the values that a template gets

# The JSON files that may hold templates: the tokenizer's, and those of a multimodal model's processor.
TEMPLATE_FILES = ("tokenizer_config.json", "chat_template.json", "processor_config.json")

# Parameters of the rendering call, which a request must not set through the template's variables.
RESERVED_VARIABLES = {
    "messages", "conversation", "tools", "add_generation_prompt", "continue_final_message", "tokenize",
    "chat_template", "return_tensors", "return_dict", "return_assistant_tokens_mask", "padding", "truncation",
    "max_length", "tokenizer_kwargs", "sanitize_control_tokens", "self", "loop", "caller", "varargs", "kwargs",
}  # fmt: skip


class _TemplateRefusal(jinja2.TemplateError):
    """The template itself called raise_exception."""


class _BudgetExceeded(jinja2.TemplateError):
    pass


class _RenderBudget(threading.local):
    """The deadline of the rendering in this thread (monotonic seconds). ``in_loop``: the event loop renders, which
    stops if that is not brief."""

    deadline, in_loop = float("inf"), False

    def set_deadline(self) -> None:
        """Begin a rendering."""
        loop_end = brief_end()
        self.in_loop = loop_end is not None
        self.deadline = time.monotonic() + MAX_RENDER_SECONDS if loop_end is None else loop_end

    def check_render_time(self) -> None:
        """Raise _BudgetExceeded after the deadline, in the event loop NotBrief."""
        if time.monotonic() > self.deadline:
            if not self.in_loop:
                raise _BudgetExceeded(f"rendering took longer than {MAX_RENDER_SECONDS:g} seconds")
            stop_if_not_brief()


_render_budget = _RenderBudget()


class _TimedItems:
    """The items of a loop, with a check of the deadline in every turn."""

    def __init__(self, items: Iterable[Any]):
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            _render_budget.check_render_time()
            yield item


class _TimedSizedItems(_TimedItems):
    _items: Any

    def __len__(self) -> int:
        return len(self._items)


@jinja2.pass_context  # keeps the compiler from applying it to constants at compile time
def _time_items(_: Any, items: Any) -> _TimedItems:
    return (_TimedSizedItems if isinstance(items, Sized) else _TimedItems)(items)


class _GenerationTag(Extension):
    """``{% generation %}`` marks the text to train on; in a prompt it has no effect."""

    tags = {"generation"}  # noqa: RUF012  # declared so by the base class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _SafeNamespace(Namespace):
    """``namespace()`` that refuses names with a leading underscore."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"the name {name!r} may not be set")
        super().__setitem__(name, value)


class _TemplateEnvironment(ImmutableSandboxedEnvironment):
    """A sandboxed environment that checks the deadline in loops and calls and limits ``*`` and ``**``."""

    intercepted_binops = frozenset(["*", "**"])

    def __init__(self, **options: Any):
        super().__init__(**options)
        self._safe_attributes: dict[tuple[type, str], bool] = {}

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return a member; of a plain dict the same as the base class, which raises and catches an error first."""
        if type(obj) is dict and not hasattr(dict, attribute):
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may read an attribute. Depends on the type of the object alone, so it is remembered."""
        key = type(obj), attr
        is_safe = self._safe_attributes.get(key)
        if is_safe is None:
            is_safe = super().is_safe_attribute(obj, attr, value)
            if len(self._safe_attributes) < MAX_REMEMBERED_ATTRIBUTES:
                self._safe_attributes[key] = is_safe
        return is_safe

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "__pace", [], [], None, None)
        return tree

    def call(self, *args: Any, **kwargs: Any) -> Any:
        _render_budget.check_render_time()
        return super().call(*args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (abs(left) < 2**32 and abs(right) < 64):
            raise _BudgetExceeded("a power is too large")
        if operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(many, Sized) and isinstance(times, int) and len(many) * times > MAX_RENDERED_CHARACTERS:
                    raise _BudgetExceeded("a repeated text is too long")
        return super().call_binop(context, operator, left, right)


def _json_filter(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if indent is not None and not 0 <= int(indent) <= 16:
        raise _BudgetExceeded("the indent is too wide")
    if isinstance(value, Iterator):  # filters turn lists into iterators
        value = list(value)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_refusal(message: Any) -> None:
    raise _TemplateRefusal(str(message))


def _build_environment() -> _TemplateEnvironment:
    environment = _TemplateEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    environment.filters.update({"tojson": _json_filter, "__pace": _time_items})
    del environment.globals["lipsum"]
    environment.globals.update(
        raise_exception=_raise_refusal,
        strftime_now=lambda format: datetime.now().strftime(format),  # noqa: A006 (templates may pass it by name)
        namespace=_SafeNamespace,
        dict=lambda *args, **kwargs: dict(*args, **kwargs),
    )
    return environment


class ChatTemplate:
    """The chat templates of one model: "default", and "tool_use" if there is a separate one for tools. Raises
    BadTokenizer if a template is not valid Jinja.

    * ``names``: the special tokens that templates refer to.
    * ``media_marks``: the texts that stand for images, videos and audio.
    * ``variables``: all names that they read.
    * ``is_slow``: whether one took too long in the event loop once.
    """

    is_slow = False

    def __init__(
        self, sources: dict[str, str], names: dict[str, str] | None = None, media_marks: PromptMarks | None = None
    ):
        self.sources = sources
        self._names = names or {}
        self._media_marks = media_marks or {}
        self._environment = _build_environment()
        try:
            self._templates = {name: self._environment.from_string(source) for name, source in sources.items()}
            for template in self._templates.values():  # a rendering copies them: quickly out of a plain dict
                template.globals = dict(template.globals)
            variable_names = (
                meta.find_undeclared_variables(self._environment.parse(source)) for source in sources.values()
            )
            self.variables = frozenset[str]().union(*variable_names)
        except jinja2.TemplateError as error:
            raise BadTokenizer(f"The model's chat template is not valid: {str(error).rstrip('.')}.") from error

    @classmethod
    def from_folder(
        cls, folder: str | Path, tokenizer: Tokenizer, media_marks: PromptMarks | None = None
    ) -> ChatTemplate:
        """Load the templates of a model folder; there may be none. Raises BadTokenizer."""
        return cls(_read_sources(Path(folder)), tokenizer.names, media_marks)

    def __bool__(self) -> bool:
        """Whether it can render a conversation."""
        return "default" in self._templates

    @property
    def all_sources(self) -> str:
        """Return all sources joined, to search for marks."""
        return "\n".join(self.sources.values())

    def render_conversation(self, chat: ChatPrompt, hide_tokens: HideTokens | None = None) -> str:
        """Return the prompt's text. It includes BOS and other special tokens: encode it with
        ``add_special_tokens=False``.

        ``hide_tokens`` changes the texts of clients before the template sees them. Raises BadRequest if there is no
        template or it refuses the conversation, InvalidValue for a reserved option, NotBrief.
        """
        try:
            return self._render_turns(chat, hide_tokens)
        except NotBrief:
            self.is_slow = True
            raise

    def _render_turns(self, chat: ChatPrompt, hide_tokens: HideTokens | None) -> str:
        options = self._checked_options(chat)
        name = "tool_use" if chat.tools and "tool_use" in self._templates else "default"
        template = self._templates.get(name)
        if template is None:
            raise BadRequest(
                "This model has no chat template, so it cannot chat; send a plain prompt to a completions route.",
                field="messages",
            )
        if not chat.messages:
            raise BadRequest("A conversation needs at least one message.", field="messages")
        values = {
            **options,
            "messages": format_history(self._ordered_turns(chat, name), self.sources[name]),
            "tools": [_template_tool(tool) for tool in chat.tools] or None,
        }
        if hide_tokens is not None:
            values = _hide_in_values(hide_tokens, values)
        final_content = _final_text(values["messages"][-1])
        if chat.continue_final:
            _mark_continuation(values["messages"][-1], self.sources[name])
        generation_prompt = chat.add_generation_prompt and not chat.continue_final
        values = {"documents": None, **self._names, **values, "add_generation_prompt": generation_prompt}
        if self._reads_parts[name]:
            values["messages"] = [_content_as_parts(turn) for turn in values["messages"]]
        elif not _media_kinds(values["messages"]) <= self._kinds_read_as_parts[name]:
            values["messages"] = [self._content_as_text(turn) for turn in values["messages"]]
        text = _render_with_retries(template, values)
        return _cut_at_continuation(text, final_content) if chat.continue_final else text

    def _ordered_turns(self, chat: ChatPrompt, name: str) -> Sequence[Message]:
        """Return the turns as the template takes them: many refuse or drop system messages after the first turn."""
        has_later = any(message.role == "system" for message in chat.messages[1:])
        return (
            later_system_as_user(chat.messages) if has_later and not self._takes_later_system[name] else chat.messages
        )

    @cached_property
    def _takes_later_system(self) -> dict[str, bool]:
        """Whether each template writes a system message that follows a user's turn."""
        turns = [{"role": "user", "content": "a"}, {"role": "system", "content": PROBE_TEXT}]
        return {
            name: self._renders_probe(template, *(map(_content_as_parts, turns) if self._reads_parts[name] else turns))
            for name, template in self._templates.items()
        }

    @cached_property
    def _reads_parts(self) -> dict[str, bool]:
        """Whether each template reads a turn's content only as a list of parts, as those of multimodal models do."""
        turn = {"role": "user", "content": PROBE_TEXT}
        return {
            name: not self._renders_probe(template, turn) and self._renders_probe(template, _content_as_parts(turn))
            for name, template in self._templates.items()
        }

    @cached_property
    def _kinds_read_as_parts(self) -> dict[str, set[str]]:
        """The kinds of media for whose parts each template writes marks."""
        return {
            name: {
                kind
                for kind, mark in self._media_marks.items()
                if self._renders_probe(template, {"role": "user", "content": [{"type": kind}, PROBE_PART]}, mark=mark)
            }
            for name, template in self._templates.items()
        }

    def _renders_probe(self, template: jinja2.Template, *turns: dict[str, Any], mark: str = "") -> bool:
        values = {"documents": None, **self._names, "messages": [*turns], "tools": None, "add_generation_prompt": False}
        try:
            text = _render_within_budget(template, values)
        except BadRequest:
            return False
        return PROBE_TEXT in text and mark in text

    def _content_as_text(self, turn: dict[str, Any]) -> dict[str, Any]:
        """Return a turn whose content is a text with marks, for a template that reads no parts."""
        content = turn.get("content")
        return {**turn, "content": text_of_parts(content, self._media_marks)} if isinstance(content, list) else turn

    def _checked_options(self, chat: ChatPrompt) -> dict[str, Any]:
        for name in chat.options:
            is_taken = name in RESERVED_VARIABLES or name in self._names or name in self._environment.globals
            if is_taken or not name.isidentifier() or name.startswith("_"):
                reason = "that name is reserved" if name.isidentifier() else "that is not the name of a variable"
                raise InvalidValue(
                    f"chat_template_kwargs cannot set {excerpt(name)}: {reason}.", field="chat_template_kwargs"
                )
        return chat.options


def _read_sources(folder: Path) -> dict[str, str]:
    """Return the template sources by name. Files take precedence over tokenizer_config.json, as in Transformers."""
    files = {"default": folder / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    try:
        sources = {name: path.read_text(encoding="utf-8") for name, path in files.items() if path.is_file()}
    except (OSError, ValueError) as error:
        raise BadTokenizer(f"The model's chat template cannot be read: {str(error).rstrip('.')}.") from error
    if sources:
        return sources
    for name in TEMPLATE_FILES:
        configured = read_json_object(folder / name).get("chat_template")
        if isinstance(configured, str):
            return {"default": configured}
        if isinstance(configured, list):
            pairs = [(entry.get("name"), entry.get("template")) for entry in configured if isinstance(entry, dict)]
        elif isinstance(configured, dict):  # of a processor
            pairs = list(configured.items())
        else:
            continue
        return {name: source for name, source in pairs if isinstance(name, str) and isinstance(source, str)}
    return {}


def _content_as_parts(turn: dict[str, Any]) -> dict[str, Any]:
    """Return a turn whose text is a list of one part."""
    content = turn.get("content")
    return {**turn, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else turn


def _media_kinds(turns: list[dict[str, Any]]) -> set[str]:
    """Return the kinds of the media in a conversation."""
    contents = [turn["content"] for turn in turns if isinstance(turn.get("content"), list)]
    return {part["type"] for parts in contents for part in parts if part["type"] != "text"}


def _template_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool as the model should read it: without "strict", which concerns only the server."""
    return {**tool, "function": {name: value for name, value in tool["function"].items() if name != "strict"}}


def _hide_in_values(hide_tokens: HideTokens, values: dict[str, Any]) -> dict[str, Any]:
    try:
        return hide_tokens(values)
    except RecursionError as error:
        raise BadRequest(NESTED_TOO_DEEPLY, field="messages") from error


def _final_text(turn: dict[str, Any]) -> str:
    """Return the last text of a turn's content."""
    content = turn.get("content", "")
    text: str = content[-1].get("text", "") if isinstance(content, list) else content
    return text


def _mark_continuation(message: dict[str, Any], source: str) -> None:
    """Mark the end of the final message's content. Raises BadRequest if it has none or the template ignores it."""
    content = message.get("content")
    if content is None or "content" not in source or (isinstance(content, list) and "text" not in content[-1]):
        raise BadRequest("The final message has no content to continue.", field="continue_final_message")
    if isinstance(content, list):
        message["content"] = [*content[:-1], {**content[-1], "text": content[-1]["text"] + CONTINUATION_MARK}]
    else:
        message["content"] = content + CONTINUATION_MARK


def _cut_at_continuation(text: str, content: str) -> str:
    """Cut the rendered text where the final message's content ends, even if the template strips the content."""
    stripped_mark = CONTINUATION_MARK.strip()
    position = text.rfind(stripped_mark)
    if position < 0 or content.strip() not in text:
        raise BadRequest(
            "The final message cannot be continued: the model's chat template does not keep it as it is.",
            field="continue_final_message",
        )
    return text[:position] if text.startswith(CONTINUATION_MARK, position) else text[:position].rstrip()


def _render_with_retries(template: jinja2.Template, values: dict[str, Any]) -> str:
    """Render, with retries for templates that need more than the turns give.

    If rendering fails, turns without content (they only call tools) get None and then "" as their content. If there are
    no tools, the last retry gives an empty list of tools, for templates that count them.
    """
    turns_without_content = [turn for turn in values["messages"] if "content" not in turn]
    try:
        return _render_within_budget(template, values)
    except BadRequest:
        for content in (None, "") if turns_without_content else ():
            for turn in turns_without_content:
                turn["content"] = content
            with contextlib.suppress(BadRequest):
                return _render_within_budget(template, values)
        if values["tools"] is None:
            with contextlib.suppress(BadRequest):
                return _render_within_budget(template, {**values, "tools": []})
        raise


def _render_within_budget(template: jinja2.Template, values: dict[str, Any]) -> str:
    """Render within the budget. Raises BadRequest for any error of the template."""
    parts: list[str] = []
    size = 0
    _render_budget.set_deadline()
    context = template.new_context(values)
    try:
        for part in template.root_render_func(context):
            parts.append(part)
            size += len(part)
            if size > MAX_RENDERED_CHARACTERS:
                raise _BudgetExceeded(f"the text is longer than {MAX_RENDERED_CHARACTERS} characters")
            _render_budget.check_render_time()
    except _TemplateRefusal as error:
        raise BadRequest(str(error)[:MAX_REFUSAL_CHARACTERS], field="messages") from error
    except RecursionError as error:
        raise BadRequest(NESTED_TOO_DEEPLY, field="messages") from error
    except (
        Exception
    ) as error:  # a template is a program: it can raise anything for a conversation that it does not expect
        raise BadRequest(
            f"The model's chat template cannot render this conversation: {excerpt(str(error), 200)}", field="messages"
        ) from error
    finally:
        _render_budget.deadline = float("inf")
        context.vars.clear()  # a template's macros refer to its context: no cycle is left to the garbage collector
        context.exported_vars.clear()
    return "".join(parts)
