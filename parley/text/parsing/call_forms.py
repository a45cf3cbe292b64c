"""Forms of tool calls that several families of models write, and the type of a family's row."""

from __future__ import annotations

from dataclasses import dataclass

from parley.text.parsing.calls import CallForm

# Each sign is a set of texts; it matches a template that contains all of them.
TemplateSigns = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class CallFamily:
    """A way of writing calls. Of its forms with the same trigger the first that fits is read; grammars use the first.

    ``short_call_ids``: ids have nine letters and digits. ``uses_channels``: every part of an answer is in a channel.
    """

    name: str
    forms: tuple[CallForm, ...]
    signs: TemplateSigns
    aliases: tuple[str, ...] = ()
    short_call_ids: bool = False
    uses_channels: bool = False


def json_list_form(
    before: str, after: str = "", keys: tuple[str, str] = ("name", "arguments"), unmarked: bool = False
) -> CallForm:
    """Build the form of a JSON list of objects."""
    begin, end = tuple(filter(None, (before, "["))), tuple(filter(None, ("]", after)))
    return CallForm(block_open=begin, separator=", ", block_close=end, member_names=keys, unmarked=unmarked)


def deepseek_form(call_prefix: str, head: str, after: tuple[str, ...], between: str) -> CallForm:
    """Build the form of DeepSeek V3: a block of calls, each a name and JSON arguments."""
    return CallForm(
        "named",
        block_open=("<｜tool▁calls▁begin｜>",),
        call_open=(f"<｜tool▁call▁begin｜>{call_prefix}",),
        after_name=(head,),
        call_close=(*after, "<｜tool▁call▁end｜>"),
        separator=between,
        block_close=("<｜tool▁calls▁end｜>",),
    )


def invoke_form(
    begin: str,
    end: str,
    mark: str = "",
    call_prefix: tuple[str, ...] = (),
    after: tuple[str, ...] = ("\n",),
    typed: bool = False,
    between: str = "",
) -> CallForm:
    """Build the form ``<invoke name="…">`` with ``<parameter name="…">``; ``mark`` precedes each tag name."""
    return CallForm(
        "tags",
        block_open=(begin,) if begin else (),
        call_open=(*call_prefix, f'<{mark}invoke name="'),
        call_close=(f"</{mark}invoke>", *after),
        after_name=('">\n',),
        key_marks=(f'<{mark}parameter name="', '"' if typed else '">'),
        value_marks=("", f"</{mark}parameter>\n"),
        marks_strings=typed,
        separator=between,
        block_close=(end,),
    )


def function_form(before: tuple[str, ...], after: tuple[str, ...], line: str) -> CallForm:
    """Build the form ``<function=…>`` with ``<parameter=…>``."""
    return CallForm(
        "tags",
        call_open=(*before, "<function="),
        after_name=(">\n",),
        key_marks=("<parameter=", ">"),
        value_marks=(line, f"{line}</parameter>\n"),
        end_optional=True,
        call_close=("</function>", *after),
        separator="\n",
    )


def key_value_form(begin: str, end: str) -> CallForm:
    """Build the form with a name, and marks around each argument's name and value."""
    return CallForm(
        "tags",
        call_open=(begin,),
        after_name=("\n",),
        key_marks=("<arg_key>", "</arg_key>\n"),
        value_marks=("<arg_value>", "</arg_value>\n"),
        call_close=(end,),
        separator="\n",
    )


def kimi_form(begin: tuple[str, ...], end: tuple[str, ...]) -> CallForm:
    """Build Kimi's form: a numbered name and JSON arguments."""
    return CallForm(
        "named",
        block_open=begin,
        call_open=("<|tool_call_begin|>",),
        after_name=("<|tool_call_argument_begin|>",),
        call_close=("<|tool_call_end|>",),
        block_close=end,
        numbered_names=True,
    )


def hunyuan_form(suffix: str) -> CallForm:
    """Build the form of Hunyuan 3. Some of its models end each mark with a suffix."""
    return CallForm(
        "tags",
        block_open=(f"<tool_calls{suffix}>\n",),
        call_open=(f"<tool_call{suffix}>",),
        after_name=(f"<tool_sep{suffix}>\n",),
        key_marks=(f"<arg_key{suffix}>", f"</arg_key{suffix}>\n"),
        value_marks=(f"<arg_value{suffix}>", f"</arg_value{suffix}>\n"),
        call_close=(f"</tool_call{suffix}>",),
        separator="\n",
        block_close=(f"\n</tool_calls{suffix}>",),
    )


HERMES = CallForm(call_open=("<tool_call>\n",), call_close=("\n</tool_call>",), separator="\n")
HERMES_LIST = json_list_form("<tool_call>\n", "\n</tool_call>")
LLAMA_JSON = CallForm(member_names=("name", "parameters"), separator="; ", unmarked=True)
PYTHON_TAG = "<|python_tag|>"
PYTHON_LIST = CallForm("python", block_open=("[",), separator=", ", block_close=("]",), unmarked=True)
LLAMA4 = (
    PYTHON_LIST,
    CallForm("python", block_open=("<|python_start|>", "["), separator=", ", block_close=("]", "<|python_end|>")),
)
MISTRAL_ARGS = CallForm("named", call_open=("[TOOL_CALLS]",), id_mark="[CALL_ID]", after_name=("[ARGS]",))
MISTRAL_LIST = (json_list_form("[TOOL_CALLS]"), CallForm(call_open=("[TOOL_CALLS]",)))
MINIMAX_MARK = "]<]minimax[>["  # a token before every tag
DEEPSEEK_V3 = deepseek_form("function<｜tool▁sep｜>", "\n```json\n", ("\n```",), "\n")
DEEPSEEK_V31 = deepseek_form("", "<｜tool▁sep｜>", (), "")
DSML_FUNCTIONS = invoke_form("<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>", "｜DSML｜", typed=True)
DSML_TOOLS = invoke_form("<｜DSML｜tool_calls>\n", "</｜DSML｜tool_calls>", "｜DSML｜", typed=True)
DSML_BARE = invoke_form("", "</｜DSML｜tool_calls>", "｜DSML｜", typed=True)
GIGACHAT31 = CallForm(block_open=("<|function_call|>",), single_call=True)
# Wrappers that xLAM models sometimes write around calls.
XLAM_WRAPPERS = (
    ("```json\n", "\n```"),
    ("<tool_call>", "</tool_call>"),
    ("[TOOL_CALLS]", ""),
)
TOOL_CALLS = json_list_form("<tool_calls>", "</tool_calls>")
