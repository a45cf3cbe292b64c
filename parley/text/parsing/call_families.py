"""Families of models by how they write tool calls, and how the chat template of each is recognized. Data only.

A model has one row of ``CALLS`` and one of ``THOUGHTS`` (``reasoning_families.py``), chosen independently: the first
row with a sign that matches the model's template. Other servers' names for the same row are listed as its aliases.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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


def _json_list_form(
    before: str, after: str = "", keys: tuple[str, str] = ("name", "arguments"), unmarked: bool = False
) -> CallForm:
    """Build the form of a JSON list of objects."""
    begin, end = tuple(filter(None, (before, "["))), tuple(filter(None, ("]", after)))
    return CallForm(block_open=begin, separator=", ", block_close=end, member_names=keys, unmarked=unmarked)


def _deepseek_form(call_prefix: str, head: str, after: tuple[str, ...], between: str) -> CallForm:
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


def _invoke_form(
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


def _function_form(before: tuple[str, ...], after: tuple[str, ...], line: str) -> CallForm:
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


def _key_value_form(begin: str, end: str) -> CallForm:
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


def _kimi_form(begin: tuple[str, ...], end: tuple[str, ...]) -> CallForm:
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


def _hunyuan_form(suffix: str) -> CallForm:
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
HERMES_LIST = _json_list_form("<tool_call>\n", "\n</tool_call>")
LLAMA_JSON = CallForm(member_names=("name", "parameters"), separator="; ", unmarked=True)
PYTHON_TAG = "<|python_tag|>"
PYTHON_LIST = CallForm("python", block_open=("[",), separator=", ", block_close=("]",), unmarked=True)
LLAMA4 = (
    PYTHON_LIST,
    CallForm("python", block_open=("<|python_start|>", "["), separator=", ", block_close=("]", "<|python_end|>")),
)
MISTRAL_ARGS = CallForm("named", call_open=("[TOOL_CALLS]",), id_mark="[CALL_ID]", after_name=("[ARGS]",))
MISTRAL_LIST = (_json_list_form("[TOOL_CALLS]"), CallForm(call_open=("[TOOL_CALLS]",)))
MINIMAX_MARK = "]<]minimax[>["  # a token before every tag
DEEPSEEK_V3 = _deepseek_form("function<｜tool▁sep｜>", "\n```json\n", ("\n```",), "\n")
DEEPSEEK_V31 = _deepseek_form("", "<｜tool▁sep｜>", (), "")
DSML_FUNCTIONS = _invoke_form("<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>", "｜DSML｜", typed=True)
DSML_TOOLS = _invoke_form("<｜DSML｜tool_calls>\n", "</｜DSML｜tool_calls>", "｜DSML｜", typed=True)
DSML_BARE = _invoke_form("", "</｜DSML｜tool_calls>", "｜DSML｜", typed=True)
GIGACHAT31 = CallForm(block_open=("<|function_call|>",), single_call=True)
# Wrappers that xLAM models sometimes write around calls.
XLAM_WRAPPERS = (
    ("```json\n", "\n```"),
    ("<tool_call>", "</tool_call>"),
    ("[TOOL_CALLS]", ""),
)
TOOL_CALLS = _json_list_form("<tool_calls>", "</tool_calls>")

CALLS = (
    CallFamily(
        "openai",
        (
            CallForm(
                "named",
                call_open=("<|start|>assistant<|channel|>commentary to=functions.",),
                after_name=(" <|constrain|>json<|message|>",),
                single_call=True,
            ),
        ),
        (("<|channel|>", "<|message|>"),),
        aliases=("gpt-oss", "gptoss", "harmony"),
        uses_channels=True,
    ),
    CallFamily(
        "kimi_k2",
        (
            _kimi_form(("<|tool_calls_section_begin|>",), ("<|tool_calls_section_end|>",)),
            _kimi_form((), ()),
        ),
        (("<|tool_call_begin|>",),),
        aliases=("kimi",),
    ),
    CallFamily(
        "kimi_k3",
        (
            CallForm(
                "tags",
                block_open=("<|open|>tools<|sep|>",),
                call_open=('<|open|>call tool="',),
                after_name=('" index="',),
                number_end='"<|sep|>',
                key_marks=('<|open|>argument key="', '"'),
                type_marks=(' type="', '"<|sep|>'),
                type_required=True,
                value_marks=("", "<|close|>argument<|sep|>"),
                call_close=("<|close|>call<|sep|>",),
                block_close=("<|close|>tools<|sep|>",),
            ),
        ),
        (("<|open|>", "<|close|>", "<|sep|>"),),
    ),
    CallFamily(
        "deepseek_v41",
        (_invoke_form("<｜DSML｜ calls>\n", "</｜DSML｜ calls>", "｜DSML｜ ", typed=True),),
        (("<｜DSML｜ calls>",), ("dsml_token", "' calls'")),
        aliases=("deepseekv41",),
    ),
    CallFamily(
        "gigachat35",
        (_invoke_form("<｜GCML｜tool_calls>\n", "</｜GCML｜tool_calls>", "｜GCML｜", typed=True),),
        (("｜GCML｜",),),
    ),
    CallFamily(
        "deepseek_v4",
        (DSML_TOOLS, DSML_FUNCTIONS, DSML_BARE),
        (("<｜DSML｜tool_calls>",), ("dsml_token", "'tool_calls>")),
        aliases=("deepseekv4",),
    ),
    CallFamily(
        "deepseek_v32",
        (DSML_FUNCTIONS, DSML_TOOLS, DSML_BARE),
        (("｜DSML｜",), ("dsml_token",)),
        aliases=("deepseekv32",),
    ),
    CallFamily(
        "deepseek_v3",
        (DEEPSEEK_V3, DEEPSEEK_V31),
        (("<｜tool▁calls▁begin｜>", "```json"),),
        aliases=("deepseekv3", "deepseek_r1"),
    ),
    CallFamily("deepseek_v31", (DEEPSEEK_V31, DEEPSEEK_V3), (("<｜tool▁calls▁begin｜>",),), aliases=("deepseekv31",)),
    CallFamily("mistral", (MISTRAL_ARGS, *MISTRAL_LIST), (("[TOOL_CALLS]", "[ARGS]"),), short_call_ids=True),
    CallFamily(
        "mistral_v3", (*MISTRAL_LIST, MISTRAL_ARGS), (("[TOOL_CALLS]",),), aliases=("mistral_old",), short_call_ids=True
    ),
    CallFamily(
        "gemma4",
        (
            CallForm("loose", call_open=("<|tool_call>", "call:"), quote_mark='<|"|>', call_close=("<tool_call|>",)),
            CallForm("loose", call_open=("<|tool_call>", ":call:"), quote_mark='<|"|>', call_close=("<tool_call|>",)),
            CallForm("loose", call_open=("<|tool_call>", ":"), quote_mark='<|"|>', call_close=("<tool_call|>",)),
            CallForm("loose", call_open=("<call>",), quote_mark='<|"|>', known_tools_only=True),
            CallForm("loose", call_open=("call:",), quote_mark='<|"|>', unmarked=True, single_call=True),
        ),
        (("<|tool_call>call:",), ("<tool_call|>",)),
    ),
    CallFamily(
        "functiongemma",
        (
            CallForm(
                "loose",
                call_open=("<start_function_call>", "call:"),
                quote_mark="<escape>",
                call_close=("<end_function_call>",),
            ),
        ),
        (("<start_function_call>",),),
    ),
    CallFamily(
        "seed_oss",
        (_function_form(("<seed:tool_call>\n",), ("\n</seed:tool_call>",), ""),),
        (("<seed:tool_call>",),),
    ),
    CallFamily(
        "minimax_m2",
        (_invoke_form("<minimax:tool_call>\n", "</minimax:tool_call>"),),
        (("<minimax:tool_call>",),),
    ),
    CallFamily(
        "dots",
        (
            _invoke_form("<dots_function_call>\n", "</dots_function_call>"),
            CallForm(block_open=("<dots_function_call>\n",), block_close=("\n</dots_function_call>",)),
        ),
        (("<dots_function_call>",),),
    ),
    CallFamily(
        "minimax_m3",
        (
            CallForm(
                "elements",
                block_open=(f"{MINIMAX_MARK}<tool_call>\n",),
                call_open=(f'{MINIMAX_MARK}<invoke name="',),
                after_name=('">',),
                key_marks=(f"{MINIMAX_MARK}<", ">"),
                value_marks=("", f"{MINIMAX_MARK}</"),
                call_close=(f"{MINIMAX_MARK}</invoke>", "\n"),
                block_close=(f"{MINIMAX_MARK}</tool_call>",),
            ),
        ),
        ((MINIMAX_MARK,),),
    ),
    CallFamily(
        "minicpm5",
        (
            CallForm(
                "tags",
                call_open=('<function name="',),
                after_name=('">',),
                key_marks=('<param name="', '">'),
                value_marks=("", "</param>"),
                verbatim_marks=("<![CDATA[", "]]>"),
                call_close=("</function>",),
            ),
        ),
        (('<function name="', '<param name="'),),
    ),
    CallFamily(
        "step3",
        (
            _invoke_form(
                "<｜tool_calls_begin｜>\n",
                "<｜tool_calls_end｜>",
                "steptml:",
                call_prefix=("<｜tool_call_begin｜>", "function", "<｜tool_sep｜>"),
                after=("<｜tool_call_end｜>\n",),
            ),
            _invoke_form(
                "<｜tool_calls_begin｜>\n",
                "<｜tool_calls_end｜>",
                "steptml:",
                call_prefix=("<｜tool_call_begin｜>",),
                after=("<｜tool_call_end｜>",),
                between="<｜tool_sep｜>",
            ),
        ),
        (("steptml:invoke",),),
    ),
    CallFamily(
        "hy_v3_opensource",
        (_hunyuan_form(":opensource"), _hunyuan_form("")),
        (("<tool_sep:opensource>",), ("<tool_sep{}>", ":opensource")),
    ),
    CallFamily(
        "hy_v3",
        (_hunyuan_form(""), _hunyuan_form(":opensource")),
        (("<tool_sep>",), ("<tool_sep{}>",)),
        aliases=("hy_v4",),
    ),
    CallFamily(
        "solar_open2",
        (
            CallForm(
                "tags",
                call_open=("<|tool_call:start|>",),
                after_name=("\n",),
                key_marks=("<|tool_arg:start|>", "<|tool_arg:value|>"),
                value_marks=("", "<|tool_arg:end|>\n"),
                call_close=("<|tool_call:end|>",),
            ),
        ),
        (("<|tool_call:start|>",),),
    ),
    CallFamily(
        "k2_horizon",
        (
            CallForm(
                "tags",
                block_open=("<ifm|tool_calls>",),
                call_open=("<ifm|tool_call>",),
                key_marks=("<ifm|arg_key>", "</ifm|arg_key>"),
                type_marks=("<ifm|arg_type>", "</ifm|arg_type>"),
                value_marks=("<ifm|arg_value>", "</ifm|arg_value>"),
                call_close=("</ifm|tool_call>",),
                separator="\n",
                block_close=("</ifm|tool_calls>",),
            ),
            CallForm(
                block_open=("<ifm|tool_calls>",),
                call_open=("<ifm|tool_call>",),
                call_close=("</ifm|tool_call>",),
                separator="\n",
                block_close=("</ifm|tool_calls>",),
            ),
        ),
        (("<ifm|tool_calls>",),),
    ),
    CallFamily(
        "plamo3",
        (
            CallForm(
                "named",
                block_open=("<|plamo:begin_tool_requests:plamo|>",),
                call_open=("<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>",),
                after_name=(
                    "<|plamo:end_tool_name:plamo|>"
                    "<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>",
                ),
                call_close=("<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>",),
                block_close=("<|plamo:end_tool_requests:plamo|>",),
            ),
        ),
        (("<|plamo:begin_tool_requests:plamo|>",), ("begin_tool_requests", "plamo")),
    ),
    CallFamily(
        "solar_open",
        (
            CallForm(
                "named",
                block_open=("<|tool_calls|>",),
                call_open=("<|tool_call:begin|>",),
                name_mark="<|tool_call:name|>",
                after_name=("<|tool_call:args|>",),
                call_close=("<|tool_call:end|>",),
                block_close=("<|calls|>",),
            ),
        ),
        (("<|tool_call:args|>",),),
    ),
    CallFamily(
        "iquest_q1", (_key_value_form("<iquest_tool_call>", "</iquest_tool_call>"),), (("<iquest_tool_call>",),)
    ),
    CallFamily(
        "glm45",
        (_key_value_form("<tool_call>", "</tool_call>"), HERMES),
        (("<arg_key>",),),
        aliases=("glm", "glm4", "glm47", "ling3", "poolside_v1", "spark25"),
    ),
    CallFamily(
        "qwen3_coder",
        (
            _function_form(("<tool_call>\n",), ("\n</tool_call>",), "\n"),
            _function_form((), ("</tool_call>",), "\n"),
            HERMES,
        ),
        (("<function=", "<parameter="),),
        aliases=("qwen3_xml", "qwen35", "mimo", "mimo_v2", "nanbeige", "nemotron_v3", "step3p5", "step5"),
    ),
    CallFamily(
        "internlm",
        (
            CallForm(
                call_open=("<|action_start|>", "<|plugin|>\n"),
                member_names=("name", "parameters"),
                call_close=("<|action_end|>",),
            ),
        ),
        (("<|action_start|>",), ("<|plugin|>",)),
        aliases=("internlm2", "interns1"),
    ),
    CallFamily(
        "cohere_command3",
        (
            _json_list_form("<|START_ACTION|>", "<|END_ACTION|>", keys=("tool_name", "parameters")),
            CallForm(
                block_open=("Action:", " ```json\n", "["),
                member_names=("tool_name", "parameters"),
                separator=", ",
                block_close=("]", "\n```"),
            ),
        ),
        (("<|START_ACTION|>",), ("Action:", "tool_name")),
        aliases=("cohere", "cohere_command4", "command_r", "command_a"),
    ),
    CallFamily(
        "granite-20b-fc",
        (CallForm(call_open=("<function_call> ",)),),
        (("<function_call>",),),
        aliases=("granite_20b_fc",),
    ),
    CallFamily(
        "granite",
        (_json_list_form("<|tool_call|>"), _json_list_form("<tool_call>"), HERMES),
        (("<|start_of_role|>", "<|tool_call|>"),),
    ),
    CallFamily(
        "phi4_mini_json",
        (_json_list_form("<|tool_call|>", "<|/tool_call|>"), _json_list_form("functools")),
        (("<|tool_call|>",), ("functools",), ("<|/tool|>",)),
        aliases=("phi4", "phi4_mini"),
    ),
    CallFamily(
        "lfm2",
        (
            CallForm(
                "python",
                block_open=("<|tool_call_start|>", "["),
                separator=", ",
                block_close=("]", "<|tool_call_end|>"),
            ),
        ),
        (("<|tool_call_start|>",), ("<|tool_list_start|>",), ("List of tools: [", "<|im_start|>")),
    ),
    CallFamily(
        "olmo3",
        (CallForm("python", block_open=("<function_calls>\n",), separator="\n", block_close=("\n</function_calls>",)),),
        (("<function_calls>",),),
    ),
    CallFamily(
        "minimax",
        (CallForm(block_open=("<tool_calls>\n",), separator="\n", block_close=("\n</tool_calls>",)), TOOL_CALLS),
        (("<tool_calls>\n{",), ("<tool_calls>\\n", "<beginning_of_sentence>")),
    ),
    CallFamily("jamba", (TOOL_CALLS,), (("<tool_calls>",),), aliases=("hunyuan_a13b", "hunyuan")),
    CallFamily(
        "nemotron_json", (_json_list_form("<TOOLCALL>", "</TOOLCALL>"),), (("<TOOLCALL>",),), aliases=("nemotron",)
    ),
    CallFamily(
        "longcat",
        (CallForm(call_open=("<longcat_tool_call>\n",), call_close=("\n</longcat_tool_call>",), separator="\n"),),
        (("<longcat_tool_call>",),),
    ),
    CallFamily(
        "apertus",
        (
            CallForm(
                "keyed", block_open=("<|tools_prefix|>", "["), separator=", ", block_close=("]", "<|tools_suffix|>")
            ),
        ),
        (("<|tools_prefix|>",),),
        aliases=("apertus2509",),
    ),
    CallFamily(
        "gigachat3",
        (
            CallForm(block_open=("<|message_sep|>\n\nfunction call<|role_sep|>\n",), single_call=True),
            CallForm(block_open=("function call<|role_sep|>\n",), single_call=True),
            GIGACHAT31,
        ),
        (("function call<|role_sep|>",), ("'function call'", "<|role_sep|>")),
    ),
    CallFamily("gigachat31", (GIGACHAT31,), (("<|function_call|>", "<|role_sep|>"),)),
    CallFamily(
        "llama4_json",
        (LLAMA_JSON, *LLAMA4),
        (("<|header_start|>", '"parameters"'),),
    ),
    CallFamily(
        "llama4_pythonic",
        (*LLAMA4, LLAMA_JSON),
        (("<|header_start|>", "tool"), ("func_name1(",)),
        aliases=("llama4",),
    ),
    CallFamily(
        "pythonic",
        (
            PYTHON_LIST,
            CallForm("python", block_open=("```tool_code\n",), separator="\n", block_close=("\n```",)),
        ),
        (("tool_code",), ("[func_name",)),
        aliases=("gemma3", "toolace"),
    ),
    CallFamily(
        "functionary_v3.1",
        (CallForm("named", call_open=("<function=",), after_name=(">",), call_close=("</function>",)),),
        (("<function=example_function_name>",),),
        aliases=("functionary",),
    ),
    CallFamily(
        "llama3_json",
        (
            LLAMA_JSON,
            CallForm(block_open=(PYTHON_TAG,), member_names=("name", "parameters"), separator="; "),
            CallForm("python", call_open=(PYTHON_TAG,), known_tools_only=True),
        ),
        ((PYTHON_TAG, "<|start_header_id|>"), ("<|start_header_id|>", '"parameters"', "ipython")),
        aliases=("llama3", "llama3.1", "llama3.2", "llama3.3"),
    ),
    CallFamily(
        "xlam",
        (
            _json_list_form("", unmarked=True),
            *(replace(_json_list_form(*marks), known_tools_only=True) for marks in XLAM_WRAPPERS),
        ),
        (("xLAM",), ("calls in a single JSON array",)),
    ),
    CallFamily(
        "hermes",
        (HERMES, HERMES_LIST),
        (("<tool_call>",),),
        aliases=("qwen", "qwen25", "qwen3", "qwen3_json", "granite4", "ernie45", "trinity"),
    ),
)
