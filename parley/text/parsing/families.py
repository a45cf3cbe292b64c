"""Model families: how each writes tool calls and reasoning, and how its chat template is recognized. Data only.

A model has one row of ``CALLS`` and one of ``THOUGHTS``, chosen independently: the first row with a sign that matches
the model's template. Other servers' names for the same row are listed as its aliases.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from parley.text.parsing.calls import Form

Signs = tuple[tuple[str, ...], ...]  # each sign is a set of texts; it matches a template that contains all of them


@dataclass(frozen=True)
class Calls:
    """A way of writing calls. Of its forms with the same trigger the first that fits is read; grammars use the first.

    ``short_call_ids``: ids have nine letters and digits. ``uses_channels``: every part of an answer is in a channel.
    """

    name: str
    forms: tuple[Form, ...]
    signs: Signs
    aliases: tuple[str, ...] = ()
    short: bool = False
    channels: bool = False


@dataclass(frozen=True)
class Thoughts:
    """A way of marking reasoning.

    ``answer_wrapper``: marks that some models put around the text after the reasoning. ``may_reopen``: reasoning may
    start again after content. ``always_reasons``: an answer starts with reasoning even without the opening mark, which
    may still follow. ``dropped_marks``: marks that are never part of content. ``lead_marks``: the marks allowed before
    calls, and those allowed before content, at the start of an answer or after its reasoning (used in grammars).
    """

    name: str
    marks: tuple[str, str]
    signs: Signs
    aliases: tuple[str, ...] = ()
    around: tuple[str, str] | None = None
    again: bool = False
    begun: bool = False
    silent: tuple[str, ...] = ()
    leads: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())


def _list(before: str, after: str = "", keys: tuple[str, str] = ("name", "arguments"), bare: bool = False) -> Form:
    """Build the form of a JSON list of objects."""
    begin, end = tuple(filter(None, (before, "["))), tuple(filter(None, ("]", after)))
    return Form(open=begin, between=", ", close=end, keys=keys, bare=bare)


def _deepseek(each: str, head: str, after: tuple[str, ...], between: str) -> Form:
    """Build the form of DeepSeek V3: a block of calls, each a name and JSON arguments."""
    return Form(
        "named",
        open=("<｜tool▁calls▁begin｜>",),
        each=(f"<｜tool▁call▁begin｜>{each}",),
        head=(head,),
        after=(*after, "<｜tool▁call▁end｜>"),
        between=between,
        close=("<｜tool▁calls▁end｜>",),
    )


def _invokes(
    begin: str,
    end: str,
    mark: str = "",
    each: tuple[str, ...] = (),
    after: tuple[str, ...] = ("\n",),
    typed: bool = False,
    between: str = "",
) -> Form:
    """Build the form ``<invoke name="…">`` with ``<parameter name="…">``; ``mark`` precedes each tag name."""
    return Form(
        "tags",
        open=(begin,) if begin else (),
        each=(*each, f'<{mark}invoke name="'),
        after=(f"</{mark}invoke>", *after),
        head=('">\n',),
        key=(f'<{mark}parameter name="', '"' if typed else '">'),
        value=("", f"</{mark}parameter>\n"),
        typed=typed,
        between=between,
        close=(end,),
    )


def _functions(before: tuple[str, ...], after: tuple[str, ...], line: str) -> Form:
    """Build the form ``<function=…>`` with ``<parameter=…>``."""
    return Form(
        "tags",
        each=(*before, "<function="),
        head=(">\n",),
        key=("<parameter=", ">"),
        value=(line, f"{line}</parameter>\n"),
        unclosed=True,
        after=("</function>", *after),
        between="\n",
    )


def _pairs(begin: str, end: str) -> Form:
    """Build the form with a name, and marks around each argument's name and value."""
    return Form(
        "tags",
        each=(begin,),
        head=("\n",),
        key=("<arg_key>", "</arg_key>\n"),
        value=("<arg_value>", "</arg_value>\n"),
        after=(end,),
        between="\n",
    )


def _kimi(begin: tuple[str, ...], end: tuple[str, ...]) -> Form:
    """Build Kimi's form: a numbered name and JSON arguments."""
    return Form(
        "named",
        open=begin,
        each=("<|tool_call_begin|>",),
        head=("<|tool_call_argument_begin|>",),
        after=("<|tool_call_end|>",),
        close=end,
        numbered=True,
    )


def _hunyuan(suffix: str) -> Form:
    """Build the form of Hunyuan 3. Some of its models end each mark with a suffix."""
    return Form(
        "tags",
        open=(f"<tool_calls{suffix}>\n",),
        each=(f"<tool_call{suffix}>",),
        head=(f"<tool_sep{suffix}>\n",),
        key=(f"<arg_key{suffix}>", f"</arg_key{suffix}>\n"),
        value=(f"<arg_value{suffix}>", f"</arg_value{suffix}>\n"),
        after=(f"</tool_call{suffix}>",),
        between="\n",
        close=(f"\n</tool_calls{suffix}>",),
    )


HERMES = Form(each=("<tool_call>\n",), after=("\n</tool_call>",), between="\n")
HERMES_LIST = _list("<tool_call>\n", "\n</tool_call>")
LLAMA = Form(keys=("name", "parameters"), between="; ", bare=True)
PYTHON_TAG = "<|python_tag|>"
PYTHON_LIST = Form("python", open=("[",), between=", ", close=("]",), bare=True)
LLAMA4 = (PYTHON_LIST, Form("python", open=("<|python_start|>", "["), between=", ", close=("]", "<|python_end|>")))
MISTRAL_ARGS = Form("named", each=("[TOOL_CALLS]",), id="[CALL_ID]", head=("[ARGS]",))
MISTRAL_LIST = (_list("[TOOL_CALLS]"), Form(each=("[TOOL_CALLS]",)))
MINIMAX = "]<]minimax[>["  # a token before every tag
DEEPSEEK_V3 = _deepseek("function<｜tool▁sep｜>", "\n```json\n", ("\n```",), "\n")
DEEPSEEK_V31 = _deepseek("", "<｜tool▁sep｜>", (), "")
DSML_FUNCTIONS = _invokes("<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>", "｜DSML｜", typed=True)
DSML_TOOLS = _invokes("<｜DSML｜tool_calls>\n", "</｜DSML｜tool_calls>", "｜DSML｜", typed=True)
DSML_BARE = _invokes("", "</｜DSML｜tool_calls>", "｜DSML｜", typed=True)
GIGACHAT31 = Form(open=("<|function_call|>",), alone=True)
XLAM = (("```json\n", "\n```"), ("<tool_call>", "</tool_call>"), ("[TOOL_CALLS]", ""))  # its occasional wrappers
TOOL_CALLS = _list("<tool_calls>", "</tool_calls>")

CALLS = (
    Calls(
        "openai",
        (
            Form(
                "named",
                each=("<|start|>assistant<|channel|>commentary to=functions.",),
                head=(" <|constrain|>json<|message|>",),
                alone=True,
            ),
        ),
        (("<|channel|>", "<|message|>"),),
        aliases=("gpt-oss", "gptoss", "harmony"),
        channels=True,
    ),
    Calls(
        "kimi_k2",
        (
            _kimi(("<|tool_calls_section_begin|>",), ("<|tool_calls_section_end|>",)),
            _kimi((), ()),
        ),
        (("<|tool_call_begin|>",),),
        aliases=("kimi",),
    ),
    Calls(
        "kimi_k3",
        (
            Form(
                "tags",
                open=("<|open|>tools<|sep|>",),
                each=('<|open|>call tool="',),
                head=('" index="',),
                count='"<|sep|>',
                key=('<|open|>argument key="', '"'),
                kind=(' type="', '"<|sep|>'),
                stated=True,
                value=("", "<|close|>argument<|sep|>"),
                after=("<|close|>call<|sep|>",),
                close=("<|close|>tools<|sep|>",),
            ),
        ),
        (("<|open|>", "<|close|>", "<|sep|>"),),
    ),
    Calls(
        "deepseek_v41",
        (_invokes("<｜DSML｜ calls>\n", "</｜DSML｜ calls>", "｜DSML｜ ", typed=True),),
        (("<｜DSML｜ calls>",), ("dsml_token", "' calls'")),
        aliases=("deepseekv41",),
    ),
    Calls(
        "gigachat35",
        (_invokes("<｜GCML｜tool_calls>\n", "</｜GCML｜tool_calls>", "｜GCML｜", typed=True),),
        (("｜GCML｜",),),
    ),
    Calls(
        "deepseek_v4",
        (DSML_TOOLS, DSML_FUNCTIONS, DSML_BARE),
        (("<｜DSML｜tool_calls>",), ("dsml_token", "'tool_calls>")),
        aliases=("deepseekv4",),
    ),
    Calls(
        "deepseek_v32",
        (DSML_FUNCTIONS, DSML_TOOLS, DSML_BARE),
        (("｜DSML｜",), ("dsml_token",)),
        aliases=("deepseekv32",),
    ),
    Calls(
        "deepseek_v3",
        (DEEPSEEK_V3, DEEPSEEK_V31),
        (("<｜tool▁calls▁begin｜>", "```json"),),
        aliases=("deepseekv3", "deepseek_r1"),
    ),
    Calls("deepseek_v31", (DEEPSEEK_V31, DEEPSEEK_V3), (("<｜tool▁calls▁begin｜>",),), aliases=("deepseekv31",)),
    Calls("mistral", (MISTRAL_ARGS, *MISTRAL_LIST), (("[TOOL_CALLS]", "[ARGS]"),), short=True),
    Calls("mistral_v3", (*MISTRAL_LIST, MISTRAL_ARGS), (("[TOOL_CALLS]",),), aliases=("mistral_old",), short=True),
    Calls(
        "gemma4",
        (
            Form("loose", each=("<|tool_call>", "call:"), quote='<|"|>', after=("<tool_call|>",)),
            Form("loose", each=("<|tool_call>", ":call:"), quote='<|"|>', after=("<tool_call|>",)),
            Form("loose", each=("<|tool_call>", ":"), quote='<|"|>', after=("<tool_call|>",)),
            Form("loose", each=("<call>",), quote='<|"|>', known=True),
            Form("loose", each=("call:",), quote='<|"|>', bare=True, alone=True),
        ),
        (("<|tool_call>call:",), ("<tool_call|>",)),
    ),
    Calls(
        "functiongemma",
        (Form("loose", each=("<start_function_call>", "call:"), quote="<escape>", after=("<end_function_call>",)),),
        (("<start_function_call>",),),
    ),
    Calls(
        "seed_oss",
        (_functions(("<seed:tool_call>\n",), ("\n</seed:tool_call>",), ""),),
        (("<seed:tool_call>",),),
    ),
    Calls(
        "minimax_m2",
        (_invokes("<minimax:tool_call>\n", "</minimax:tool_call>"),),
        (("<minimax:tool_call>",),),
    ),
    Calls(
        "dots",
        (
            _invokes("<dots_function_call>\n", "</dots_function_call>"),
            Form(open=("<dots_function_call>\n",), close=("\n</dots_function_call>",)),
        ),
        (("<dots_function_call>",),),
    ),
    Calls(
        "minimax_m3",
        (
            Form(
                "elements",
                open=(f"{MINIMAX}<tool_call>\n",),
                each=(f'{MINIMAX}<invoke name="',),
                head=('">',),
                key=(f"{MINIMAX}<", ">"),
                value=("", f"{MINIMAX}</"),
                after=(f"{MINIMAX}</invoke>", "\n"),
                close=(f"{MINIMAX}</tool_call>",),
            ),
        ),
        ((MINIMAX,),),
    ),
    Calls(
        "minicpm5",
        (
            Form(
                "tags",
                each=('<function name="',),
                head=('">',),
                key=('<param name="', '">'),
                value=("", "</param>"),
                verbatim=("<![CDATA[", "]]>"),
                after=("</function>",),
            ),
        ),
        (('<function name="', '<param name="'),),
    ),
    Calls(
        "step3",
        (
            _invokes(
                "<｜tool_calls_begin｜>\n",
                "<｜tool_calls_end｜>",
                "steptml:",
                each=("<｜tool_call_begin｜>", "function", "<｜tool_sep｜>"),
                after=("<｜tool_call_end｜>\n",),
            ),
            _invokes(
                "<｜tool_calls_begin｜>\n",
                "<｜tool_calls_end｜>",
                "steptml:",
                each=("<｜tool_call_begin｜>",),
                after=("<｜tool_call_end｜>",),
                between="<｜tool_sep｜>",
            ),
        ),
        (("steptml:invoke",),),
    ),
    Calls(
        "hy_v3_opensource",
        (_hunyuan(":opensource"), _hunyuan("")),
        (("<tool_sep:opensource>",), ("<tool_sep{}>", ":opensource")),
    ),
    Calls("hy_v3", (_hunyuan(""), _hunyuan(":opensource")), (("<tool_sep>",), ("<tool_sep{}>",)), aliases=("hy_v4",)),
    Calls(
        "solar_open2",
        (
            Form(
                "tags",
                each=("<|tool_call:start|>",),
                head=("\n",),
                key=("<|tool_arg:start|>", "<|tool_arg:value|>"),
                value=("", "<|tool_arg:end|>\n"),
                after=("<|tool_call:end|>",),
            ),
        ),
        (("<|tool_call:start|>",),),
    ),
    Calls(
        "k2_horizon",
        (
            Form(
                "tags",
                open=("<ifm|tool_calls>",),
                each=("<ifm|tool_call>",),
                key=("<ifm|arg_key>", "</ifm|arg_key>"),
                kind=("<ifm|arg_type>", "</ifm|arg_type>"),
                value=("<ifm|arg_value>", "</ifm|arg_value>"),
                after=("</ifm|tool_call>",),
                between="\n",
                close=("</ifm|tool_calls>",),
            ),
            Form(
                open=("<ifm|tool_calls>",),
                each=("<ifm|tool_call>",),
                after=("</ifm|tool_call>",),
                between="\n",
                close=("</ifm|tool_calls>",),
            ),
        ),
        (("<ifm|tool_calls>",),),
    ),
    Calls(
        "plamo3",
        (
            Form(
                "named",
                open=("<|plamo:begin_tool_requests:plamo|>",),
                each=("<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>",),
                head=(
                    "<|plamo:end_tool_name:plamo|>"
                    "<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>",
                ),
                after=("<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>",),
                close=("<|plamo:end_tool_requests:plamo|>",),
            ),
        ),
        (("<|plamo:begin_tool_requests:plamo|>",), ("begin_tool_requests", "plamo")),
    ),
    Calls(
        "solar_open",
        (
            Form(
                "named",
                open=("<|tool_calls|>",),
                each=("<|tool_call:begin|>",),
                first="<|tool_call:name|>",
                head=("<|tool_call:args|>",),
                after=("<|tool_call:end|>",),
                close=("<|calls|>",),
            ),
        ),
        (("<|tool_call:args|>",),),
    ),
    Calls("iquest_q1", (_pairs("<iquest_tool_call>", "</iquest_tool_call>"),), (("<iquest_tool_call>",),)),
    Calls(
        "glm45",
        (_pairs("<tool_call>", "</tool_call>"), HERMES),
        (("<arg_key>",),),
        aliases=("glm", "glm4", "glm47", "ling3", "poolside_v1", "spark25"),
    ),
    Calls(
        "qwen3_coder",
        (_functions(("<tool_call>\n",), ("\n</tool_call>",), "\n"), _functions((), ("</tool_call>",), "\n"), HERMES),
        (("<function=", "<parameter="),),
        aliases=("qwen3_xml", "qwen35", "mimo", "mimo_v2", "nanbeige", "nemotron_v3", "step3p5", "step5"),
    ),
    Calls(
        "internlm",
        (Form(each=("<|action_start|>", "<|plugin|>\n"), keys=("name", "parameters"), after=("<|action_end|>",)),),
        (("<|action_start|>",), ("<|plugin|>",)),
        aliases=("internlm2", "interns1"),
    ),
    Calls(
        "cohere_command3",
        (
            _list("<|START_ACTION|>", "<|END_ACTION|>", keys=("tool_name", "parameters")),
            Form(
                open=("Action:", " ```json\n", "["),
                keys=("tool_name", "parameters"),
                between=", ",
                close=("]", "\n```"),
            ),
        ),
        (("<|START_ACTION|>",), ("Action:", "tool_name")),
        aliases=("cohere", "cohere_command4", "command_r", "command_a"),
    ),
    Calls("granite-20b-fc", (Form(each=("<function_call> ",)),), (("<function_call>",),), aliases=("granite_20b_fc",)),
    Calls(
        "granite",
        (_list("<|tool_call|>"), _list("<tool_call>"), HERMES),
        (("<|start_of_role|>", "<|tool_call|>"),),
    ),
    Calls(
        "phi4_mini_json",
        (_list("<|tool_call|>", "<|/tool_call|>"), _list("functools")),
        (("<|tool_call|>",), ("functools",), ("<|/tool|>",)),
        aliases=("phi4", "phi4_mini"),
    ),
    Calls(
        "lfm2",
        (
            Form(
                "python",
                open=("<|tool_call_start|>", "["),
                between=", ",
                close=("]", "<|tool_call_end|>"),
            ),
        ),
        (("<|tool_call_start|>",), ("<|tool_list_start|>",), ("List of tools: [", "<|im_start|>")),
    ),
    Calls(
        "olmo3",
        (Form("python", open=("<function_calls>\n",), between="\n", close=("\n</function_calls>",)),),
        (("<function_calls>",),),
    ),
    Calls(
        "minimax",
        (Form(open=("<tool_calls>\n",), between="\n", close=("\n</tool_calls>",)), TOOL_CALLS),
        (("<tool_calls>\n{",), ("<tool_calls>\\n", "<beginning_of_sentence>")),
    ),
    Calls("jamba", (TOOL_CALLS,), (("<tool_calls>",),), aliases=("hunyuan_a13b", "hunyuan")),
    Calls("nemotron_json", (_list("<TOOLCALL>", "</TOOLCALL>"),), (("<TOOLCALL>",),), aliases=("nemotron",)),
    Calls(
        "longcat",
        (Form(each=("<longcat_tool_call>\n",), after=("\n</longcat_tool_call>",), between="\n"),),
        (("<longcat_tool_call>",),),
    ),
    Calls(
        "apertus",
        (Form("keyed", open=("<|tools_prefix|>", "["), between=", ", close=("]", "<|tools_suffix|>")),),
        (("<|tools_prefix|>",),),
        aliases=("apertus2509",),
    ),
    Calls(
        "gigachat3",
        (
            Form(open=("<|message_sep|>\n\nfunction call<|role_sep|>\n",), alone=True),
            Form(open=("function call<|role_sep|>\n",), alone=True),
            GIGACHAT31,
        ),
        (("function call<|role_sep|>",), ("'function call'", "<|role_sep|>")),
    ),
    Calls("gigachat31", (GIGACHAT31,), (("<|function_call|>", "<|role_sep|>"),)),
    Calls(
        "llama4_json",
        (LLAMA, *LLAMA4),
        (("<|header_start|>", '"parameters"'),),
    ),
    Calls(
        "llama4_pythonic",
        (*LLAMA4, LLAMA),
        (("<|header_start|>", "tool"), ("func_name1(",)),
        aliases=("llama4",),
    ),
    Calls(
        "pythonic",
        (
            PYTHON_LIST,
            Form("python", open=("```tool_code\n",), between="\n", close=("\n```",)),
        ),
        (("tool_code",), ("[func_name",)),
        aliases=("gemma3", "toolace"),
    ),
    Calls(
        "functionary_v3.1",
        (Form("named", each=("<function=",), head=(">",), after=("</function>",)),),
        (("<function=example_function_name>",),),
        aliases=("functionary",),
    ),
    Calls(
        "llama3_json",
        (
            LLAMA,
            Form(open=(PYTHON_TAG,), keys=("name", "parameters"), between="; "),
            Form("python", each=(PYTHON_TAG,), known=True),
        ),
        ((PYTHON_TAG, "<|start_header_id|>"), ("<|start_header_id|>", '"parameters"', "ipython")),
        aliases=("llama3", "llama3.1", "llama3.2", "llama3.3"),
    ),
    Calls(
        "xlam",
        (_list("", bare=True), *(replace(_list(*marks), known=True) for marks in XLAM)),
        (("xLAM",), ("calls in a single JSON array",)),
    ),
    Calls(
        "hermes",
        (HERMES, HERMES_LIST),
        (("<tool_call>",),),
        aliases=("qwen", "qwen25", "qwen3", "qwen3_json", "granite4", "ernie45", "trinity"),
    ),
)

RESPONSE = ("<|open|>response<|sep|>", "<|close|>response<|sep|>")
THINK = ("<think>", "</think>")

THOUGHTS = (
    Thoughts("openai_gptoss", ("<|channel|>analysis<|message|>", "<|end|>"), (("<|channel|>", "<|message|>"),),
             aliases=("gpt-oss", "gptoss", "harmony")),
    Thoughts("mistral", ("[THINK]", "[/THINK]"), (("[THINK]",),), again=True),
    Thoughts("seed_oss", ("<seed:think>", "</seed:think>"), (("<seed:think>",),)),
    Thoughts("gemma4", ("<|channel>thought", "<channel|>"), (("<|channel>",),), again=True, silent=("<channel|>",)),
    Thoughts(
        "cohere_command3",
        ("<|START_THINKING|>", "<|END_THINKING|>"),
        (("<|START_THINKING|>",),),
        aliases=("cohere", "cohere_command4"),
        silent=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        leads=((), ("<|START_RESPONSE|>", "<|START_TEXT|>")),
    ),
    Thoughts("granite", ("Here is my thought process:", "Here is my response:"), (("Here is my thought process",),)),
    Thoughts("apertus", ("<|inner_prefix|>", "<|inner_suffix|>"), (("<|inner_prefix|>",),), aliases=("apertus2509",),
             again=True),
    Thoughts(
        "kimi_k3",
        ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
        (("<|open|>", "<|close|>", "<|sep|>"),),
        silent=(RESPONSE[0], RESPONSE[1], "<|close|>message<|sep|>", "<|end_of_msg|>"),
        leads=(("".join(RESPONSE), RESPONSE[1]), (RESPONSE[0],)),
    ),
    Thoughts(
        "solar_open",
        ("<|think|>", "<|end|>"),
        (("<|think|>", "<|begin|>assistant"),),
        silent=("<|content|>", "<|end|>", "<|begin|>assistant", "<|calls|>"),
        leads=(("<|begin|>assistant",), ("<|begin|>assistant<|content|>", "<|content|>")),
    ),
    Thoughts("kimi_vl", ("◁think▷", "◁/think▷"), (("◁think▷",),), aliases=("kimi",)),
    Thoughts("solar_open2", ("<|think:start|>", "<|think:end|>"), (("<|think:start|>",),)),
    Thoughts("hy_v3_opensource", ("<think:opensource>", "</think:opensource>"),
             (("<think:opensource>",), ("<think{}>", ":opensource"))),
    Thoughts("minimax_m3", ("<mm:think>", "</mm:think>"), (("<mm:think>",), ("</mm:think>",))),
    Thoughts("deepseek_r1", THINK, (), aliases=("gigachat35", "step5"), begun=True),
    Thoughts("apriel", ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"), (("[BEGIN FINAL RESPONSE]",),)),
    Thoughts("k2_horizon", ("<ifm|think>", "</ifm|think>"), (("<ifm|think>",),)),
    Thoughts("plamo3", ("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>"),
             (("<|plamo:begin_think:plamo|>",), ("begin_think", "plamo"))),
    Thoughts("exaone_deep", ("<thought>", "</thought>"), (("<thought>",),)),
    Thoughts("hunyuan_a13b", THINK, (("<think>", "<answer>"),), around=("<answer>", "</answer>")),
    Thoughts("ernie45", THINK, (("<think>", "<response>\\n"), ("<think>", "<response></response>")),
             aliases=("granite33",), around=("<response>", "</response>")),
    Thoughts(
        "qwen3",
        THINK,
        (("<think>",), ("</think>",)),
        aliases=(
            "deepseek_v3", "deepseek_v31", "deepseek_v4", "deepseek_v41", "dots", "glm45", "glm47",
            "granite_thinking_parser", "holo2", "hy_v3", "hy_v4", "interns1", "iquest_q1", "kimi_k2", "ling3", "mimo",
            "minicpm5", "minicpmv", "minimax", "minimax_m2", "nanbeige", "nemotron_3", "nemotron_v3", "olmo3",
            "poolside_v1", "qwen3_thinking", "step3", "step3p5", "think",
        ),
    ),
)  # fmt: skip
