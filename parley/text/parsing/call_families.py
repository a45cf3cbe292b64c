"""Families of models by how they write tool calls, and how the chat template of each is recognized. Data only.

A model has one row of ``CALLS`` and one of ``THOUGHTS`` (``reasoning_families.py``), chosen independently: the first
row with a sign that matches the model's template. Other servers' names for the same row are listed as its aliases.
"""

from __future__ import annotations

from dataclasses import replace

from parley.text.parsing.call_forms import (
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    DSML_BARE,
    DSML_FUNCTIONS,
    DSML_TOOLS,
    GIGACHAT31,
    HERMES,
    HERMES_LIST,
    LLAMA4,
    LLAMA_JSON,
    MINIMAX_MARK,
    MISTRAL_ARGS,
    MISTRAL_LIST,
    PYTHON_LIST,
    PYTHON_TAG,
    TOOL_CALLS,
    XLAM_WRAPPERS,
    CallFamily,
    function_form,
    hunyuan_form,
    invoke_form,
    json_list_form,
    key_value_form,
    kimi_form,
)
from parley.text.parsing.calls import CallForm

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
            kimi_form(("<|tool_calls_section_begin|>",), ("<|tool_calls_section_end|>",)),
            kimi_form((), ()),
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
        (invoke_form("<｜DSML｜ calls>\n", "</｜DSML｜ calls>", "｜DSML｜ ", typed=True),),
        (("<｜DSML｜ calls>",), ("dsml_token", "' calls'")),
        aliases=("deepseekv41",),
    ),
    CallFamily(
        "gigachat35",
        (invoke_form("<｜GCML｜tool_calls>\n", "</｜GCML｜tool_calls>", "｜GCML｜", typed=True),),
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
        (function_form(("<seed:tool_call>\n",), ("\n</seed:tool_call>",), ""),),
        (("<seed:tool_call>",),),
    ),
    CallFamily(
        "minimax_m2",
        (invoke_form("<minimax:tool_call>\n", "</minimax:tool_call>"),),
        (("<minimax:tool_call>",),),
    ),
    CallFamily(
        "dots",
        (
            invoke_form("<dots_function_call>\n", "</dots_function_call>"),
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
            invoke_form(
                "<｜tool_calls_begin｜>\n",
                "<｜tool_calls_end｜>",
                "steptml:",
                call_prefix=("<｜tool_call_begin｜>", "function", "<｜tool_sep｜>"),
                after=("<｜tool_call_end｜>\n",),
            ),
            invoke_form(
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
        (hunyuan_form(":opensource"), hunyuan_form("")),
        (("<tool_sep:opensource>",), ("<tool_sep{}>", ":opensource")),
    ),
    CallFamily(
        "hy_v3",
        (hunyuan_form(""), hunyuan_form(":opensource")),
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
    CallFamily("iquest_q1", (key_value_form("<iquest_tool_call>", "</iquest_tool_call>"),), (("<iquest_tool_call>",),)),
    CallFamily(
        "glm45",
        (key_value_form("<tool_call>", "</tool_call>"), HERMES),
        (("<arg_key>",),),
        aliases=("glm", "glm4", "glm47", "ling3", "poolside_v1", "spark25"),
    ),
    CallFamily(
        "qwen3_coder",
        (
            function_form(("<tool_call>\n",), ("\n</tool_call>",), "\n"),
            function_form((), ("</tool_call>",), "\n"),
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
            json_list_form("<|START_ACTION|>", "<|END_ACTION|>", keys=("tool_name", "parameters")),
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
        (json_list_form("<|tool_call|>"), json_list_form("<tool_call>"), HERMES),
        (("<|start_of_role|>", "<|tool_call|>"),),
    ),
    CallFamily(
        "phi4_mini_json",
        (json_list_form("<|tool_call|>", "<|/tool_call|>"), json_list_form("functools")),
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
        "nemotron_json", (json_list_form("<TOOLCALL>", "</TOOLCALL>"),), (("<TOOLCALL>",),), aliases=("nemotron",)
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
            json_list_form("", unmarked=True),
            *(replace(json_list_form(*marks), known_tools_only=True) for marks in XLAM_WRAPPERS),
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
