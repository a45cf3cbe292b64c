"""The call syntax of every model family: the parser reads it however the text is cut, and loses nothing."""

from __future__ import annotations

import functools
import itertools
import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from support.answer_parts import AnswerParts, parse_pieces, split_text
from support.tiny_tokenizers import byte_level
from tokenizers import AddedToken

from parley.settings.families import FAMILIES_FILE
from parley.text.answer_choice import AnswerChoice
from parley.text.parsing.call_families import CALLS
from parley.text.parsing.call_forms import CallFamily
from parley.text.parsing.calls import RequestTools, write_calls
from parley.text.parsing.calls.literals import MAX_WORD_CHARACTERS
from parley.text.parsing.harmony_parser import make_output_parser
from parley.text.parsing.markup import Markup, detect_markup, family_names, reasoning_options, starts_in_reasoning
from parley.text.parsing.reasoning_families import THOUGHTS
from parley.text.prepared_prompt import PreparedPrompt
from parley.text.tokens.tokenizer import Tokenizer
from parley.types import ChoiceDelta, ChoiceDone, EngineOutput, Request

TOOLS = RequestTools(
    [
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {
                    "properties": {
                        "s": {"type": "string"},
                        "n": {"type": "integer"},
                        "x": {"anyOf": [{"type": "number"}, {"type": "null"}]},
                        "b": {"type": "boolean"},
                        "l": {"type": "array"},
                        "o": {"$ref": "#/$defs/o"},
                        "e": {"enum": ["1", 1]},
                        "text": {"type": "string"},
                    },
                    "$defs": {"o": {"type": "object"}},
                },
            },
        }
        for name in ("f", "get_weather", "a-b.c")
    ]
)


def parse(pieces: list[str], markup: Markup, thinking: bool = False, tools: RequestTools = TOOLS) -> AnswerParts:
    return parse_pieces(make_output_parser(markup, thinking, tools), pieces)


def family(name: str, think: tuple[str, str] | None = None) -> Markup:
    markup = detect_markup("", name, "none")
    return Markup(think, markup.call_forms, None, markup.short_call_ids, markup.uses_channels)


F = ("f", '{"s": "a"}')
EXAMPLES: dict[str, list[tuple[str, str, list[tuple[str, str]]]]] = {
    "llama3_json": [
        ('{"name": "f", "parameters": {"s": "a"}}', "", [F]),
        ('{"name": "f", "parameters": {"s": "a"}}; {"name": "f", "parameters": {"s": "a"}}', "", [F, F]),
        ('{"name": "f", "parameters": {"s": "a"}}\n{"name": "f", "parameters": {"s": "a"}}', "", [F, F]),
        ('{"name": "f", "parameters": {"s": "a"}} with {"s": "a"}', ' with {"s": "a"}', [F]),
        ('{"name": "f", "parameters": {"s": "a"}} {"s": "a"}', ' {"s": "a"}', [F]),
        ('<|python_tag|>{"name": "f", "parameters": {"s": "a"}}', "", [F]),
        ('<|python_tag|>f.call(s="a")', "", [F]),
        ("<|python_tag|>f(s='a'", "", [("f", '{"s": "a"')]),
        ('<|python_tag|>print("a")', '<|python_tag|>print("a")', []),
        ('{"name": "other", "parameters": {}}', '{"name": "other", "parameters": {}}', []),
        ('Yes: {"name": "f", "parameters": {}}', 'Yes: {"name": "f", "parameters": {}}', []),
        ('\n{"a": 1}\n', '\n{"a": 1}\n', []),
    ],
    "mistral": [
        ('[TOOL_CALLS]f[ARGS]{"s": "a"}[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"s": "a"}', "", [F, F]),
        ('Ok.\n [TOOL_CALLS]f{"s": "a"}', "Ok.", [F]),
        ('[TOOL_CALLS][{"name": "f", "arguments": {"s": "a"}}, {"arguments": {"s": "a"}, "name": "f"}]', "", [F, F]),
        ('[TOOL_CALLS] {"name": "f", "arguments": {"s": "a"}} then', " then", [F]),
        ("[TOOL_CALLS] nothing", "[TOOL_CALLS] nothing", []),
    ],
    "mistral_v3": [('[TOOL_CALLS] [{"name": "f", "arguments": {"s": "a"}, "id": "x"}]', "", [F])],
    "deepseek_v3": [
        (
            "Hm.\n\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
            '{"s": "a"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"s": "a"}\n```'
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "Hm.",
            [F, F],
        ),
        ('<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"s": "a"}<｜tool▁call▁end｜>', "", [F]),
    ],
    "deepseek_v31": [
        (
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"s": "a"}<｜tool▁call▁end｜>'
            '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"s": "a"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
            "",
            [F, F],
        )
    ],
    "deepseek_v32": [
        (
            'So\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="s" string="true">a'
            '</｜DSML｜parameter>\n<｜DSML｜parameter name="o" string="false">{"k": [1]}</｜DSML｜parameter>\n'
            '</｜DSML｜invoke>\n<｜DSML｜invoke name="f">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
            "So",
            [("f", '{"s": "a", "o": {"k": [1]}}'), ("f", "{}")],
        ),
        (
            'So\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="n" string="true">42</｜DSML｜parameter>\n'
            "</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
            "So",
            [("f", '{"n": 42}')],
        ),
    ],
    "qwen3_coder": [
        (
            "<tool_call>\n<function=f>\n<parameter=s>\na\n</parameter>\n</function>\n</tool_call>\n"
            "<function=f>\n<parameter=s>\na\n</parameter>\n</function>\n</tool_call>",
            "",
            [F, F],
        ),
        (
            '<tool_call>\n<function=f>\n<parameter=s>\n\n{"a": \'"<b>\n</para\n\n</parameter>\n<parameter=n>\n7\n'
            "</parameter>\n<parameter=x>\n-1.5e3\n</parameter>\n<parameter=b>\nTrue\n</parameter>\n<parameter=l>\n"
            "['a', None]\n</parameter>\n<parameter=e>\n1\n</parameter>\n</function>\n</tool_call>",
            "",
            [
                (
                    "f",
                    r'{"s": "\n{\"a\": '"'"r'\"<b>\n</para\n", "n": 7, "x": -1.5e3, "b": true, "l": ["a", null], '
                    '"e": 1}',
                )
            ],
        ),
        ("<tool_call>\n<function=f>\n<parameter=n>\nmany\n</parameter>\n</function>", "", [("f", '{"n": "many"}')]),
        ("<tool_call>\n<function=f>\n<parameter=s>\nhal", "", [("f", '{"s": "hal')]),
        ("<function=f>\nwhat?</function>", "what?</function>", [("f", "{}")]),
        ("<function>", "<function>", []),
        (
            "<tool_call>\n<function=f>\n<parameter=s>\na <parameter=n>\n<parameter=n>\n3\n</function>\n</tool_call>",
            "",
            [("f", '{"s": "a <parameter=n>", "n": 3}')],
        ),
        (
            '<tool_call>\n<function=f>\n<parameter=arguments>\n{"s": "a"}\n</parameter>\n<parameter=n>\n3\n'
            "</parameter>\n</function>\n</tool_call>",
            "",
            [("f", '{"s": "a", "n": 3}')],
        ),
        (
            "<tool_call>\n<function=f>\n<parameter=input>\nwhat\n</parameter>\n</function>\n</tool_call>",
            "",
            [("f", '{"input": "what"}')],
        ),
        ('<tool_call>\n{"name": "f", "arguments": {"s": "a"}}\n</tool_call>', "", [F]),
        (
            "<function=f>\n<parameter=x>\nNaN\n</parameter>\n<parameter=l>\n[1e999]\n</parameter>\n"
            '<parameter=o>\n{\\"k\\": [\\"a\\"]}\n</parameter>\n</function>',
            "",
            [("f", '{"x": "NaN", "l": [1e999], "o": {"k": ["a"]}}')],
        ),
    ],
    "seed_oss": [
        (
            "<seed:tool_call>\n<function=f>\n<parameter=s>a</parameter>\n</function>\n</seed:tool_call>",
            "",
            [F],
        ),
        ("<seed:tool_call><function=f><parameter=n>3<parameter=s>a\n</function>", "", [("f", '{"n": 3, "s": "a\\n"}')]),
    ],
    "glm45": [
        (
            "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>a</arg_value>\n<arg_key>n</arg_key>\n<arg_value>3"
            "</arg_value>\n</tool_call>\n<tool_call>f\n</tool_call>",
            "",
            [("f", '{"s": "a", "n": 3}'), ("f", "{}")],
        ),
        ("<tool_call>f<arg_key>s</arg_key><arg_value>a</arg_value></tool_call>", "", [F]),
        (
            "<tool_call>f<arg_key>s</arg_key><arg_value>a</arg_value></tool_call>\n<tool_call>f</tool_call>",
            "",
            [F, ("f", "{}")],
        ),
        ('<tool_call>{"name": "f", "arguments": {"s": "a"}}</tool_call>', "", [F]),
    ],
    "hy_v3": [
        (
            "So.<tool_calls>\n<tool_call>f<tool_sep>\n<arg_key>s</arg_key>\n<arg_value>a</arg_value>\n<arg_key>n</arg_key>"
            "\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>f<tool_sep>\n</tool_call>\n</tool_calls>",
            "So.",
            [("f", '{"s": "a", "n": 3}'), ("f", "{}")],
        ),
        ("<tool_calls><tool_call>f<tool_sep></tool_call></tool_calls>", "", [("f", "{}")]),
        (
            "<tool_calls:opensource>\n<tool_call:opensource>f<tool_sep:opensource>\n<arg_key:opensource>s"
            "</arg_key:opensource>\n<arg_value:opensource>a</arg_value:opensource>\n</tool_call:opensource>\n"
            "</tool_calls:opensource>",
            "",
            [F],
        ),
    ],
    "hy_v3_opensource": [
        (
            "<tool_calls:opensource><tool_call:opensource>f<tool_sep:opensource><arg_key:opensource>s"
            "</arg_key:opensource><arg_value:opensource>a</arg_value:opensource></tool_call:opensource>"
            "</tool_calls:opensource>",
            "",
            [F],
        ),
    ],
    "solar_open2": [
        (
            "Let me see.<|tool_call:start|>f\n<|tool_arg:start|>s<|tool_arg:value|>a<|tool_arg:end|>\n"
            "<|tool_arg:start|>n<|tool_arg:value|>3<|tool_arg:end|>\n<|tool_call:end|><|tool_call:start|>f\n"
            "<|tool_call:end|>",
            "Let me see.",
            [("f", '{"s": "a", "n": 3}'), ("f", "{}")],
        ),
    ],
    "minimax_m2": [
        (
            '<minimax:tool_call>\n<invoke name="f">\n<parameter name="s">a</parameter>\n</invoke>\n<invoke name="f">\n'
            '<parameter name="s">a</parameter>\n</invoke>\n</minimax:tool_call>',
            "",
            [F, F],
        )
    ],
    "minimax_m3": [
        (
            'So.\n]<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="f">]<]minimax[>[<text>a]<]minimax[>[</text>'
            ']<]minimax[>[<n>3]<]minimax[>[</n>]<]minimax[>[</invoke>\n]<]minimax[>[<invoke name="f">'
            "]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
            "So.",
            [("f", '{"text": "a", "n": 3}'), ("f", "{}")],
        ),
        (
            ']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="f">\n]<]minimax[>[<l>]<]minimax[>[<item>1'
            "]<]minimax[>[</item>]<]minimax[>[<item>]<]minimax[>[<k> é<]]<]minimax[>[</k>]<]minimax[>[</item>"
            "]<]minimax[>[</l>\n]<]minimax[>[<o>\n]<]minimax[>[<item>true]<]minimax[>[</item>]<]minimax[>[</o>"
            "]<]minimax[>[<x>null]<]minimax[>[</x>]<]minimax[>[<o>]<]minimax[>[</o>]<]minimax[>[<l>]<]minimax[>[</l>\n"
            "]<]minimax[>[</invoke>]<]minimax[>[</tool_call>",
            "",
            [("f", '{"l": [1, {"k": " é<]"}], "o": {"item": true}, "x": null, "o": {}, "l": []}')],
        ),
        (
            ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="f">]<]minimax[>[<text>a]<]mini',
            "",
            [("f", '{"text": "a]<]mini')],
        ),
        ("]<]minimax[>[<tool_call>what?", "]<]minimax[>[<tool_call>what?", []),
    ],
    "minicpm5": [
        (
            'So.\n<function name="f"><param name="s">a</param><param name="n">3</param></function>\n'
            '<function name="f"></function>',
            "So.",
            [("f", '{"s": "a", "n": 3}'), ("f", "{}")],
        ),
        (
            '<function name="f"><param name="s"><![CDATA[ <b>a</param> "]]></param>\n'
            '<param name="l"><![CDATA[["</param>"]]]></param></function>',
            "",
            [("f", '{"s": " <b>a</param> \\"", "l": ["</param>"]}')],
        ),
        ('<function name="f"><param name="s"><![CDATA[a', "", [("f", '{"s": "a')]),
        ('<function name="f"><param name="s"><![CD</param></function>', "", [("f", '{"s": "<![CD"}')]),
        ('<function name="">', '<function name="">', []),
    ],
    "minimax": [
        (
            '<tool_calls>\n{"name": "f", "arguments": {"s": "a"}}\n{"name": "f", "arguments": {"s": "a"}}\n'
            "</tool_calls>",
            "",
            [F, F],
        )
    ],
    "step3": [
        (
            '<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="f">\n'
            '<steptml:parameter name="s">a</steptml:parameter>\n</steptml:invoke><｜tool_call_end｜>\n'
            "<｜tool_calls_end｜>",
            "",
            [F],
        ),
        (
            '<｜tool_calls_begin｜><｜tool_call_begin｜><steptml:invoke name="f"><steptml:parameter name="s">a'
            '</steptml:parameter></steptml:invoke><｜tool_call_end｜><｜tool_sep｜><｜tool_call_begin｜>'
            '<steptml:invoke name="f"></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>',
            "",
            [F, ("f", "{}")],
        ),
    ],
    "kimi_k2": [
        (
            '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"s": "a"}'
            '<|tool_call_end|><|tool_call_begin|>functions.f:1<|tool_call_argument_begin|>{"s": "a"}<|tool_call_end|>'
            "<|tool_calls_section_end|>",
            "",
            [F, F],
        )
    ],
    "internlm": [('Let<|action_start|><|plugin|>\n{"name": "f", "parameters": {"s": "a"}}<|action_end|>', "Let", [F])],
    "cohere_command3": [
        (
            '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {"s": "a"}},\n'
            '    {"tool_call_id": "1", "tool_name": "f", "parameters": {"s": "a"}}\n]<|END_ACTION|>',
            "",
            [F, F],
        ),
        ('Action: ```json\n[\n{"tool_name": "f", "parameters": {"s": "a"}}\n]\n```', "", [F]),
        ("Action: wait", "Action: wait", []),
    ],
    "granite": [('<|tool_call|>[{"name": "f", "arguments": {"s": "a"}}]', "", [F])],
    "granite-20b-fc": [('<function_call> {"name": "f", "arguments": {"s": "a"}}', "", [F])],
    "phi4_mini_json": [
        ('functools[{"name": "f", "arguments": {"s": "a"}}]', "", [F]),
        ('<|tool_call|>[{"name": "f", "arguments": {"s": "a"}}]<|/tool_call|>', "", [F]),
        ("import functools\nfunctools.cache", "import functools\nfunctools.cache", []),
    ],
    "jamba": [('<tool_calls>[{"name": "f", "arguments": {"s": "a"}}]</tool_calls>', "", [F])],
    "nemotron_json": [('<TOOLCALL>[{"name": "f", "arguments": {"s": "a"}}]</TOOLCALL>', "", [F])],
    "longcat": [('<longcat_tool_call>{"name": "f", "arguments": {"s": "a"}}</longcat_tool_call>', "", [F])],
    "apertus": [('<|tools_prefix|>[{"f": {"s": "a"}}, {"f": {"s": "a"}}]<|tools_suffix|>', "", [F, F])],
    "gigachat3": [('function call<|role_sep|>\n{"name": "f", "arguments": {"s": "a"}}', "", [F])],
    "xlam": [
        ('[{"name": "f", "arguments": {"s": "a"}}]', "", [F]), ("[1, 2]", "[1, 2]", []),
        ('Yes.\n```json\n[{"name": "f", "arguments": {"s": "a"}}]\n```', "Yes.", [F]),
        ("```json\n[1]\n```", "```json\n[1]\n```", []),
        ('<tool_call>[{"name": "f", "arguments": {"s": "a"}}]</tool_call>', "", [F]),
    ],
    "lfm2": [
        ("<|tool_call_start|>[f(s='a')]<|tool_call_end|>Checking", "Checking", [F]),
        ("<|tool_call_start|>[f(s='sed -n '1,5p' \"a\"', n=07)]<|tool_call_end|>", "",
         [("f", """{"s": "sed -n '1,5p' \\"a\\"", "n": 7}""")]),
        ("<|tool_call_start|>[f(l={'a', \"b\"}, x={ 1 , 2 }, o={'k': {7}}, e={})]<|tool_call_end|>", "",
         [("f", '{"l": ["a", "b"], "x": [1, 2], "o": {"k": [7]}, "e": {}}')]),
    ],
    "olmo3": [('<function_calls>\nf(s="a")\nf(s="a")\n</function_calls>', "", [F, F])],
    "llama4_pythonic": [
        ('[f(s="a"), a-b.c(n=-1, x=.5, b=False, l=["\\x41", (1,)], o={"k": None})]', "",
         [F, ("a-b.c", '{"n": -1, "x": 0.5, "b": false, "l": ["A", [1]], "o": {"k": null}}')]),
        ('<|python_start|>[f(s="a")]<|python_end|>', "", [F]),
        ("[f('a', 7)]", "", [("f", '{"s": "a", "n": 7}')]),
        ("[other(s='a')]", "[other(s='a')]", []),
        ("[f] is a list", "[f] is a list", []),
        ('{"name": "f", "parameters": {"s": "a"}}', "", [F]),
        ("[f(s='a', n=", "", [("f", '{"s": "a", "n": ')]),
        (r"""[f(s='it\'s "\u00e9\ud83d\ude00\n\q')]""", "", [("f", r'{"s": "it'"'"r's \"é\ud83d\ude00\n\\q"}')]),
    ],
    "llama4_json": [('{"name": "f", "parameters": {"s": "a"}}', "", [F]), ('[f(s="a")]', "", [F])],
    "pythonic": [("Ok\n```tool_code\nf(s='a')\n```", "Ok", [F])],
    "gemma4": [
        (
            '<|tool_call>call:f{s:<|"|>a<|"|>}<tool_call|><|tool_call>call:f{l:[<|"|>b"<|"|>,1],o:{k:true},s:<|"|>{<|"|>}'
            "<tool_call|>",
            "",
            [F, ("f", r'{"l": ["b\"", 1], "o": {"k": true}, "s": "{"}')],
        ),
        ('Hm:\n<|tool_call>:f{s:<|"|>a<|"|>}<tool_call|>', "Hm:", [F]),
        ('<|tool_call>:call:f{s:<|"|>a<|"|>}', "", [F]),
        ('call:f{s:<|"|>a<|"|>}', "", [F]),
        ("call:other{s:1}", "call:other{s:1}", []),
        ('So <call>f{s:<|"|>a<|"|>}', "So ", [F]),
        ('<|tool_call>call:f{s:,text: two: words ,l:[a b,-1],o:{<|"|>3<|"|>:x.},n:}<tool_call|>', "",
         [("f", '{"s": "", "text": "two: words", "l": ["a b", -1], "o": {"3": "x."}, "n": ""}')]),
    ],
    "functiongemma": [("<start_function_call>call:f{s:<escape>a<escape>}<end_function_call>", "", [F])],
    "openai": [
        ('<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"s": "a"}<|call|>', "", [F]),
        ('<|channel|>final<|message|>Hello<|return|>', "Hello", []),
        ('<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"s": "a"}<|call|>', "", [F]),
        ("<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>final<|message|>Yes",
         "I look.Yes", []),
        ("No marks at all.", "No marks at all.", []),
        (' to=functions.f<|channel|>commentary <|constrain|>json<|message|>{"s": "a"}<|call|>', "", [F]),
        ("<|channel|>commentary to=functions.f<|message|><|call|>", "", [("f", "{}")]),
        ("to=be or not", "to=be or not", []),
        ("<|channel|>commentary to=assistant<|channel|>final<|message|>Yes", "Yes", []),
        ('<|channel|> final<|message|>  Yes<|end|><|start|> assistant to=functions.f<|channel|> commentary<|message|> '
         '{"s": "a"}<|call|>', " Yes", [F]),
    ],
    "kimi_k3": [
        (
            '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="s" type="string"<|sep|>'
            ' "a"\n<|close|>argument<|sep|><|open|>argument key="n" type="number"<|sep|>3<|close|>argument<|sep|>'
            '<|open|>argument key="e" type="string"<|sep|>1<|close|>argument<|sep|>'
            '<|open|>argument key="z" type="object"<|sep|>{"k": []}<|close|>argument<|sep|><|close|>call<|sep|>'
            '<|open|>call tool="f" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
            "",
            [("f", '{"s": " \\"a\\"\\n", "n": 3, "e": "1", "z": {"k": []}}'), ("f", "{}")],
        ),
        ('<|open|>tools<|sep|><|open|>call tool="f" index="1"', "", [("f", "")]),
    ],
    "deepseek_v41": [
        (
            'So<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n<｜DSML｜ parameter name="s" string="true">a'
            "</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>",
            "So",
            [F],
        )
    ],
    "deepseek_v4": [
        (
            '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="s" string="true">a'
            "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
            "",
            [F],
        )
    ],
    "gigachat35": [
        (
            '<｜GCML｜tool_calls>\n<｜GCML｜invoke name="f">\n<｜GCML｜parameter name="s" string="true">a'
            "</｜GCML｜parameter>\n</｜GCML｜invoke>\n</｜GCML｜tool_calls>",
            "",
            [F],
        )
    ],
    "gigachat31": [('So.<|function_call|>{"name": "f", "arguments": {"s": "a"}}', "So.", [F])],
    "dots": [
        (
            '<dots_function_call>\n<invoke name="f">\n<parameter name="s">a</parameter>\n</invoke>\n'
            "</dots_function_call>",
            "",
            [F],
        ),
        ('<dots_function_call>{"name": "f", "arguments": {"s": "a"}}</dots_function_call>', "", [F]),
    ],
    "k2_horizon": [
        (
            "So.\n<ifm|tool_calls><ifm|tool_call>f<ifm|arg_key>s</ifm|arg_key><ifm|arg_value>a</ifm|arg_value>"
            "</ifm|tool_call>\n<ifm|tool_call>f<ifm|arg_key>z</ifm|arg_key><ifm|arg_type>string</ifm|arg_type>"
            "<ifm|arg_value>7</ifm|arg_value></ifm|tool_call></ifm|tool_calls>",
            "So.",
            [F, ("f", '{"z": "7"}')],
        ),
        (
            '<ifm|tool_calls><ifm|tool_call>{"name": "f", "arguments": {"s": "a"}}</ifm|tool_call></ifm|tool_calls>',
            "",
            [F],
        ),
    ],
    "plamo3": [
        (
            "<|plamo:begin_tool_requests:plamo|><|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>f"
            "<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>"
            '{"s": "a"}<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>'
            "<|plamo:end_tool_requests:plamo|>",
            "",
            [F],
        )
    ],
    "solar_open": [
        (
            '<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>f<|tool_call:args|>{"s": "a"}'
            "<|tool_call:end|><|tool_call:begin|>b1b2c3d4e5<|tool_call:name|>f<|tool_call:args|>{}<|tool_call:end|><|calls|>",
            "",
            [F, ("f", "{}")],
        )
    ],
    "iquest_q1": [
        (
            "<iquest_tool_call>f\n<arg_key>s</arg_key>\n<arg_value>a</arg_value>\n</iquest_tool_call>",
            "",
            [F],
        )
    ],
    "functionary_v3.1": [('<function=f>{"s": "a"}</function><function=f>{"s": "a"}</function>', "", [F, F])],
    "hermes": [
        (r'<tool_call>{"name": "f", "arguments": "{\"s\": \"\u00e9\\n\\\"\ud83d\ude00\"}"}</tool_call>!', "!",
         [("f", r'{"s": "é\n\"\ud83d\ude00"}')]),
        (r'<tool_call>{"arguments": "{\n\"s\": \"a\"}", "name": "f"}</tool_call>', "", [("f", '{\n"s": "a"}')]),
        ('<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>\n[{"name": "f", "arguments": {"s": "a"}}, {"name": "f", "arguments": {"s": "a"}}]\n</tool_call>!',
         "!", [F, F]),
        ("<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
        ('<tool_call>{"name": "f", "arguments": "{hm}"}</tool_call>', "", [("f", '"{hm}"')]),
        (r'<tool_call>{"name": "f", "arguments": "{\"s\": \"a\u00', "", [("f", r'{"s": "a\u00')]),
    ],
}  # fmt: skip

CASES = [(name, *example) for name, examples in EXAMPLES.items() for example in examples]


def test_every_family_has_examples() -> None:
    assert set(EXAMPLES) == {row.name for row in CALLS}


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_family_examples_parse_under_any_cut(name: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    markup = family(name)
    for _, arguments in calls if text.rstrip().endswith((">", "]", "}")) else ():
        json.loads(arguments)
    assert parse([text], markup) == ("", content, calls)
    assert parse(list(text), markup) == ("", content, calls)
    for middle in range(len(text)):
        assert parse([text[:middle], text[middle:]], markup) == ("", content, calls)


@pytest.mark.parametrize("size", [MAX_WORD_CHARACTERS - 4, MAX_WORD_CHARACTERS - 3, MAX_WORD_CHARACTERS + 9])
def test_sets_with_a_long_first_item_parse_under_any_cut(size: int) -> None:
    """How much of an item has come when its braces are read depends on the cut."""
    text = f"<|tool_call_start|>[f(l={{'{'a' * size}' , 'b'}})]<|tool_call_end|>"
    whole = parse([text], family("lfm2"))
    assert parse(list(text), family("lfm2")) == parse([text[:900], text[900:]], family("lfm2")) == whole
    assert (whole[2][0][1] == f'{{"l": ["{"a" * size}", "b"]}}') is (size == MAX_WORD_CHARACTERS - 4)


@functools.cache
def marked_tokenizer() -> Tokenizer:
    """Return a tokenizer with all bracketed marks of the families as special tokens."""
    all_marks = " ".join(mark for row in CALLS for mark in detect_markup("", row.name, "none").all_marks)
    backend = tokenizers.Tokenizer.from_str(byte_level().backend.to_str())
    bracketed_marks = set(re.findall(r"<[|｜]?[^<>=\s/]+[^<>=\s]*>|\[/?[A-Z_]+\]|\]<\]\w+\[>\[", all_marks))
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in sorted(bracketed_marks)])
    return Tokenizer(backend)


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_family_marks_may_be_special_tokens(name: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    """The parser must see these marks although special tokens are hidden from clients."""
    choice = AnswerChoice(
        Request(id="r", model="m", prompts=[]), 0, marked_tokenizer(), PreparedPrompt([], family(name), False, TOOLS)
    )
    ids = marked_tokenizer().encode(text, add_special_tokens=False)
    events = [event for token_id in ids for event in choice.push_output(EngineOutput("r", 0, [token_id]))]
    events += choice.push_output(EngineOutput("r", 0, [], finish_reason="stop"))
    parsed_calls: list[tuple[str, str]] = []
    for event in events[:-1]:
        assert isinstance(event, ChoiceDelta)
        if event.tool_call is not None and event.tool_call.name is not None:
            parsed_calls.append((event.tool_call.name, ""))
        elif event.tool_call is not None:
            parsed_calls[-1] = (parsed_calls[-1][0], parsed_calls[-1][1] + event.tool_call.arguments)
    assert parsed_calls == calls
    assert "".join(event.text for event in events[:-1] if isinstance(event, ChoiceDelta)) == content
    done = events[-1]
    assert isinstance(done, ChoiceDone) and done.reason == ("tool" if calls else "stop")


@pytest.mark.parametrize("name", [row.name for row in CALLS])
def test_no_call_trigger_is_prefix_of_another(name: str) -> None:
    triggers = {form.trigger_mark for form in family(name).call_forms if not form.unmarked}
    assert not [(one, two) for one, two in itertools.permutations(triggers, 2) if one.startswith(two)]


def markup_fragments(markup: Markup) -> list[str]:
    marks = [part for mark in markup.all_marks for part in (mark, mark[:3], mark[3:])]
    return [*marks, "f", '{"name": "f", "', 'arguments": {', "}", "{", '"', "\\", "'", "(", ")", "[", "]", ",", "=",
            ":", "\n", " ", "s", "n", "1", "-", "é", "😀", "x" * 20, "True", "u00e9"]  # fmt: skip


MARKUPS = {row.name: detect_markup("", row.name, "none") for row in CALLS}
REASONING_MARKUPS = {
    row.name: Markup(row.marks, MARKUPS["hermes"].call_forms, row.answer_wrapper) for row in THOUGHTS[1:]
}
FRAGMENTS = {name: markup_fragments(markup) for name, markup in (MARKUPS | REASONING_MARKUPS).items()}


CALL = '<tool_call>\n{"name": "f", "arguments": {"s": "a"}}\n</tool_call>'


@st.composite
def mixed_texts(draw: st.DrawFn) -> tuple[Markup, str, list[int]]:
    """Draw a markup, a text of its marks and parts of its examples in any order, and the sizes of the pieces."""
    name = draw(st.sampled_from(sorted(FRAGMENTS)))
    examples = [text for text, _, _ in EXAMPLES.get(name, [])]
    if name in REASONING_MARKUPS:
        opening, closing = REASONING_MARKUPS[name].reasoning_marks or ("", "")
        examples = [f"{opening}hm\n{CALL}\n{CALL}{closing}{CALL}"]
    texts = [
        example[: draw(st.integers(0, len(example)))]
        for example in draw(st.lists(st.sampled_from(examples or [""]), max_size=2))
    ]
    noise = draw(st.lists(st.sampled_from(FRAGMENTS[name]), max_size=20))
    position = draw(st.integers(0, len(noise)))
    text = "".join(noise[:position] + texts + noise[position:])
    return (MARKUPS | REASONING_MARKUPS)[name], text, draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))


@given(mixed_texts(), st.booleans())
@settings(max_examples=600, deadline=None)
def test_family_parser_result_ignores_cuts(case: tuple[Markup, str, list[int]], thinking: bool) -> None:
    markup, text, sizes = case
    thinking = thinking and markup.reasoning_marks is not None
    whole = parse([text], markup, thinking)
    assert parse(split_text(text, sizes), markup, thinking) == whole
    if markup.reasoning_marks is None and not markup.uses_channels and not whole[2]:
        assert whole[1] == text, "text without a call is content"


@pytest.mark.parametrize("name", sorted(FRAGMENTS))
def test_family_parser_holds_back_little_of_long_texts(name: str) -> None:
    """The parser holds back only a short text at any time; otherwise time would grow with the square of the length."""
    markup = (MARKUPS | REASONING_MARKUPS)[name]
    openings = ["", *(text[: len(text) // 2] for text, _, _ in EXAMPLES.get(name, [])[:2]), "<think>"]
    for opening, unit in itertools.product(openings, [*markup.all_marks[:4], "{", "[", "\\", '"', "\n", "f(", "x "]):
        parser = make_output_parser(markup, False, TOOLS)
        text = opening + unit * (20_000 // len(unit))
        for at in range(0, len(text), 97):
            parser.parse_piece(text[at : at + 97])
            assert parser.unread_length <= 128, (opening, unit)


def test_json_without_call_is_streamed() -> None:
    parser = make_output_parser(family("llama3_json"), False, TOOLS)
    text = '{"answer": [1, 2'
    assert "".join(piece for part, piece, _ in parser.parse_piece(text) if part == "content") == text


def test_failed_call_syntax_is_not_retried_inside() -> None:
    """Each part begins and ends like a call but is none; a parser that tried again inside each could take hours."""
    depth = 20_000
    text = '[TOOL_CALLS][{"k": [' * depth + "]}]" * depth
    assert parse([text], family("mistral")) == ("", text, [])
    text = "[TOOL_CALLS] no " * depth
    assert parse([text], family("mistral")) == parse([text[:100], text[100:]], family("mistral")) == ("", text, [])


@pytest.mark.parametrize("row", CALLS, ids=lambda row: row.name)
def test_written_calls_parse_back(row: CallFamily) -> None:
    arguments = {"s": "a\nb", "n": 3, "x": None, "b": True, "l": ["é", [1.5]], "o": {"k": {"z": "w"}}}
    for form in row.forms:
        calls = [("a1b2c3d4e5", "f", arguments), ("b1b2c3d4e5", "get_weather", {})][: 1 if form.single_call else 2]
        text = write_calls(form, calls)
        _, content, parsed_calls = parse(list(text), family(row.name))
        assert [(name, json.loads(arguments_json)) for name, arguments_json in parsed_calls] == [
            call[1:] for call in calls
        ] and not content, text


json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(
    st.dictionaries(st.sampled_from(["s", "alpha", "b_2"]), json_values),
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
)
@settings(max_examples=200, deadline=None)
def test_pythonic_arguments_become_json(arguments: dict[str, Any], sizes: list[int]) -> None:
    text = "[f(" + ", ".join(f"{key}={value!r}" for key, value in arguments.items()) + ")]"
    _, content, calls = parse(split_text(text, sizes), family("llama4_pythonic"))
    assert content == "" and len(calls) == 1
    expected = json.loads(json.dumps(arguments))
    assert json.loads(calls[0][1]) == expected


@given(st.text(max_size=40), st.lists(st.integers(1, 5), min_size=1, max_size=5))
@settings(max_examples=200, deadline=None)
def test_tagged_parameter_texts_become_json_strings(value: str, sizes: list[int]) -> None:
    text = f"<tool_call>\n<function=f>\n<parameter=s>\n{value}\n</parameter>\n</function>\n</tool_call>"
    assert json.loads(parse(split_text(text, sizes), family("qwen3_coder"))[2][0][1]) == {"s": value}


REASONING_EXAMPLES = [
    ("seed_oss", "<seed:think>\nhm</seed:think>\nYes", ("hm", "Yes")),
    ("granite", "Here is my thought process: hm\n\nHere is my response: Yes", (" hm", " Yes")),
    ("gemma4", "<|channel>thought\nhm<channel|>Yes", ("hm", "Yes")),
    ("hunyuan_a13b", "<think>\nhm\n</think>\n<answer>\nYes\n</answer>", ("hm", "Yes")),
    ("hunyuan_a13b", "<think>hm</think>No <answer>", ("hm", "No <answer>")),
    ("ernie45", "<think>hm</think>\n\n<response>\nYes</response>\n", ("hm", "Yes")),
    ("cohere_command3", "<|START_THINKING|>hm<|END_THINKING|>Yes", ("hm", "Yes")),
    ("mistral", "[THINK]hm[/THINK]Yes", ("hm", "Yes")),
    ("openai_gptoss", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes",
     ("hm", "Yes")),
    ("openai_gptoss", "<|channel|>analysis<|message|>hm", ("hm", "")),
    ("minimax_m3", "<mm:think>hm</mm:think>Yes", ("hm", "Yes")),
    ("minimax_m3", "</mm:think>Yes", ("", "Yes")),
    ("minimax_m3", "\n</mm:thinking", ("", "\n</mm:thinking")),
    ("qwen3", "</think>\n\nYes</think>", ("", "Yes</think>")),
    ("kimi_k3", "<|open|>think<|sep|>hm<|close|>think<|sep|><|open|>response<|sep|>Yes<|close|>response<|sep|>"
     "<|close|>message<|sep|><|end_of_msg|>", ("hm", "Yes")),
    ("kimi_k3", "Yes<|close|>response<|sep|><|close|>message<|sep|>", ("", "Yes")),
    ("solar_open", "<|think|>hm<|end|><|begin|>assistant<|content|>Yes<|end|>", ("hm", "Yes")),
    ("solar_open", "<|content|>Yes", ("", "Yes")),
    ("apriel", "Here are my reasoning steps:\nhm\n[BEGIN FINAL RESPONSE]\nYes", ("hm", "Yes")),
    ("deepseek_r1", "</think>Yes", ("", "Yes")),
    ("cohere_command3", "<|START_THINKING|>hm<|END_THINKING|><|START_TEXT|>Yes<|END_TEXT|>", ("hm", "Yes")),
    ("cohere_command3", "<|START_RESPONSE|>Yes<|END_RESPONSE|>", ("", "Yes")),
    ("gemma4", "<|channel>thought\n<channel|>Yes<|channel>thought\nhm<channel|><channel|>", ("hm", "Yes")),
    ("mistral", "[THINK]hm[/THINK]Yes [THINK]so[/THINK]No", ("hmso", "Yes No")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "expected"), REASONING_EXAMPLES)
def test_family_reasoning_parses_whole_and_by_character(name: str, text: str, expected: tuple[str, str]) -> None:
    markup = detect_markup("", "none", name)
    for pieces in ([text], list(text)):
        assert parse(pieces, markup) == (*expected, [])


def test_calls_inside_closed_reasoning_are_ignored() -> None:
    inside = '<think><tool_call>\n{"name": "f", "arguments": {}}\n</tool_call></think>\n\n'
    outside = '<tool_call>\n{"name": "f", "arguments": {"s": "a"}}\n</tool_call>'
    reasoning, content, calls = parse(list(inside + outside), family("hermes", ("<think>", "</think>")))
    assert reasoning.startswith("<tool_call>") and content == "" and calls == [F]
    harmony = (
        "<|channel|>analysis<|message|>maybe to=functions.f<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.f <|constrain|>json<|message|>{"s": "a"}<|call|>'
    )
    assert parse(list(harmony), detect_markup("", "openai", "gptoss")) == ("maybe to=functions.f", "", [F])


KIMI = '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"s": "a"}'
TENTATIVE_CALL_EXAMPLES: list[tuple[str, str, AnswerParts]] = [
    ("hermes", f"<think>So.\n\n{CALL}", ("So.", "", [F])),
    ("hermes", f"<think>So.\n{CALL}\n{CALL}\n", ("So.", "", [F, F])),
    ("hermes", f"<think>A <tool_call> is one: {CALL}", ("A <tool_call> is one: ", "", [F])),
    ("hermes", f"<think>{CALL} perhaps, or {CALL}", (f"{CALL} perhaps, or ", "", [F])),
    ("hermes", f"<think>{CALL}</think>{CALL}", (CALL, "", [F])),
    ("hermes", f"<think>{CALL} perhaps", (f"{CALL} perhaps", "", [])),
    ("hermes", f"<think>{CALL}<tool_c", (f"{CALL}<tool_c", "", [])),
    ("hermes", f"<think>{CALL.replace('f', 'other')}", (CALL.replace("f", "other"), "", [])),
    ("hermes", f"<think>So.\n{CALL[:45]}", ("So.", "", [("f", '{"s": ')])),
    ("hermes", f"<think>So.\n{CALL[:20]}", (f"So.\n{CALL[:20]}", "", [])),
    ("hermes", f"<think>{CALL[:45]}</think>So", (CALL[:45], "So", [])),
    ("kimi_k2", f"<think>So.<|tool_calls_section_begin|>{KIMI}<|tool_call_end|><|tool_calls_section_end|>",
     ("So.", "", [F])),
    ("kimi_k2", f"<think>So.{KIMI}{KIMI}", ("So.", "", [F, F])),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "expected"), TENTATIVE_CALL_EXAMPLES)
def test_calls_at_end_of_open_reasoning_are_accepted(name: str, text: str, expected: AnswerParts) -> None:
    markup = family(name, ("<think>", "</think>"))
    assert parse([text], markup) == parse(list(text), markup) == expected
    for middle in range(len(text)):
        assert parse([text[:middle], text[middle:]], markup) == expected


def test_call_ids_follow_family_format() -> None:
    def ids(name: str, text: str) -> list[str | None]:
        return [
            call.id
            for _, _, call in make_output_parser(family(name), False, TOOLS).parse_piece(text)
            if call and call.name
        ]

    (mistral,) = ids("mistral", "[TOOL_CALLS]f[ARGS]{}")
    assert mistral is not None and len(mistral) == 9 and mistral.isalnum()
    assert ids("mistral", "[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}") == ["abcdefghi"]
    kimi = "<|tool_call_begin|>functions.f:3<|tool_call_argument_begin|>{}<|tool_call_end|>"
    assert ids("kimi_k2", kimi) == ["functions.f:3"]
    calls = parse([kimi.replace("f:3", "a:b:3")], family("kimi_k2"))[2]
    assert calls == [("a:b", "{}")], "names may have colons"
    single = RequestTools([{"type": "function", "function": {"name": "f"}}])
    kimi = kimi.replace("functions.f:3", "0")
    assert parse([kimi], family("kimi_k2"), tools=single)[2] == [("f", "{}")]
    assert parse([kimi], family("kimi_k2"))[2] == [("0", "{}")]


def test_family_names_are_unique_and_unknown_name_raises() -> None:
    for rows in (CALLS, THOUGHTS):
        listed = [name for row in rows for name in (row.name, *row.aliases)]
        assert len(listed) == len(set(listed)) and sorted(listed) == family_names(rows)
    with pytest.raises(ValueError, match=r"Unknown model family 'klingon'. It must be one of: auto, none, .*hermes"):
        detect_markup("", "klingon")
    assert detect_markup("<think><tool_call>", "none", "none") == Markup()
    assert detect_markup("", "Qwen3-Coder", "deepseek-r1").call_forms == detect_markup("", "qwen3_coder").call_forms


TEMPLATE_SIGNS = [
    ("<|im_start|><tool_call>{{ tool_call | tojson }}</tool_call><think>", "hermes", "qwen3"),
    ("<tool_call>\n<function=name>\n<parameter=key>", "qwen3_coder", "none"),
    ("<tool_call>name\n<arg_key></arg_key></tool_call> </think>", "glm45", "qwen3"),
    ("<|start|>assistant<|channel|>analysis<|message|>", "openai", "openai_gptoss"),
    ("<|start_header_id|>ipython {\"name\": function name, \"parameters\": dict}", "llama3_json", "none"),
    ("[AVAILABLE_TOOLS][TOOL_CALLS] [", "mistral_v3", "none"),
    ("[TOOL_CALLS]name[ARGS] [THINK]", "mistral", "mistral"),
    ("<｜tool▁calls▁begin｜>```json</think>", "deepseek_v3", "qwen3"),
    ("<｜tool▁calls▁begin｜></think>", "deepseek_v31", "qwen3"),
    ("<tool_calls><tool_call>name<tool_sep><arg_key></arg_key></tool_call><think>", "hy_v3", "qwen3"),
    ("<tool_call:opensource>name<tool_sep:opensource><arg_key:opensource><think:opensource>", "hy_v3_opensource",
     "hy_v3_opensource"),
    ("<|think:start|><|tool_call:start|>name\n<|tool_arg:start|>", "solar_open2", "solar_open2"),
    ("'<function name=\"' ~ name ~ '\">' '<param name=\"' <think>", "minicpm5", "qwen3"),
    ("{%- set ns = ']<]minimax[>[' %}<tool_call> <mm:think>", "minimax_m3", "minimax_m3"),
    ("<|open|>think<|sep|> <|close|>think<|sep|>", "kimi_k3", "kimi_k3"),
    ("<|begin|>assistant<|think|> <|tool_call:args|>", "solar_open", "solar_open"),
    ("'<tool_sep{}>'.format(':opensource') '<think{}>'", "hy_v3_opensource", "hy_v3_opensource"),
    ("{%- set dsml_token = '｜DSML｜' %}<think>{{ '<' + dsml_token + 'tool_calls>' }}", "deepseek_v4", "qwen3"),
    ("plain", "none", "none"),
]  # fmt: skip


@pytest.mark.parametrize(("template", "tools", "reasoning"), TEMPLATE_SIGNS)
def test_family_is_detected_from_template(template: str, tools: str, reasoning: str) -> None:
    assert detect_markup(template) == detect_markup("", tools, reasoning)


def test_families_page_is_up_to_date() -> None:
    script = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "families.py"))
    assert script["PAGE"].read_text("utf-8") == script["families_page"](), "docs/families.md is old: make docs"
    assert script["NAMES"].read_text("utf-8") == script["family_names_json"](), (
        "parley/settings/families.json is old: make docs"
    )
    assert script["NAMES"] == FAMILIES_FILE


def test_family_detects_reasoning_opened_by_prompt() -> None:
    assert starts_in_reasoning(detect_markup("", "none", "gemma4"), "<|turn>model\n<|channel>thought\n", False)
    assert not starts_in_reasoning(
        detect_markup("", "none", "gemma4"), "<|turn>model\n<|channel>thought\n<channel|>", False
    )
    assert parse(["hm<|end|><|channel|>final<|message|>So"], detect_markup("", "none", "gptoss"), True) == (
        "hm",
        "So",
        [],
    )


def test_thinking_switch_sets_template_variables() -> None:
    assert reasoning_options({"enable_thinking"}, {}, False, None) == {"enable_thinking": False}
    assert reasoning_options({"enable_thinking"}, {}, None, "high") == {"enable_thinking": True}
    assert reasoning_options({"thinking", "reasoning_effort"}, {}, None, "none") == {"thinking": False}
    assert reasoning_options({"reasoning_effort"}, {}, None, "max") == {"reasoning_effort": "high"}
    assert reasoning_options({"reasoning_effort"}, {}, False, None) == {"reasoning_effort": "low"}
    assert reasoning_options({"thinking_budget"}, {}, False, None) == {"thinking_budget": 0}
    assert reasoning_options({"enable_thinking"}, {"enable_thinking": True}, False, None) == {"enable_thinking": True}
    assert reasoning_options({"messages"}, {"a": 1}, True, "low") == {"a": 1}
