"""The chat template of the built-in model, and an equivalent in Python that also marks the text to be learnt.

`CHAT_TEMPLATE` is the Jinja text shipped with the model. It follows the Qwen3 format (ChatML turns, Hermes tool calls,
an optional thinking block) with shorter tool instructions. One thing differs from Qwen3: earlier assistant turns keep
their empty thinking block, so that the prompt of the next turn starts with exactly the tokens of the previous one and
the prefix cache can reuse all of them. `render_pieces` builds the same text in pieces for training;
tests/demo/test_demo_corpus.py checks that both agree.
"""

from __future__ import annotations

import json
from typing import Any

DemoMessage = dict[str, Any]

END_OF_TEXT = "<|endoftext|>"  # ends text that is no conversation

TOOLS_HEAD = "# Tools\n\n<tools>"
TOOLS_TAIL = '\n</tools>\n\nCall a tool with\n<tool_call>\n{"name": <name>, "arguments": <arguments>}\n</tool_call>'
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"

CHAT_TEMPLATE = r"""
{%- macro text_of(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- elif content is not none and content is not undefined -%}
        {%- for part in content -%}
            {%- if part is string -%}{{- part -}}{%- elif 'text' in part -%}{{- part['text'] -}}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(system='', start=0, last_query=-1) -%}
{%- if messages and messages[0]['role'] in ['system', 'developer'] -%}
    {%- set ns.system = text_of(messages[0]['content']) -%}
    {%- set ns.start = 1 -%}
{%- endif -%}
{%- if tools -%}
    {{- '<|im_start|>system\n' -}}
    {%- if ns.system -%}{{- ns.system + '\n\n' -}}{%- endif -%}
    {{- '# Tools\n\n<tools>' -}}
    {%- for tool in tools -%}{{- '\n' + (tool | tojson) -}}{%- endfor -%}
    {{- '\n</tools>\n\nCall a tool with\n<tool_call>\n{"name": <name>, "arguments": <arguments>}\n</tool_call>' -}}
    {{- '<|im_end|>\n' -}}
{%- elif ns.system -%}
    {{- '<|im_start|>system\n' + ns.system + '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message['role'] == 'user' -%}{%- set ns.last_query = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
    {%- if loop.index0 < ns.start -%}
    {%- elif message['role'] in ['user', 'system', 'developer'] -%}
        {%- set role = 'user' if message['role'] == 'user' else 'system' -%}
        {{- '<|im_start|>' + role + '\n' + text_of(message['content']) + '<|im_end|>\n' -}}
    {%- elif message['role'] == 'assistant' -%}
        {%- set content = text_of(message['content']) -%}
        {%- set thought = '' -%}
        {%- if message['reasoning_content'] is string -%}
            {%- set thought = message['reasoning_content'] -%}
        {%- elif message['reasoning'] is string -%}
            {%- set thought = message['reasoning'] -%}
        {%- elif '</think>' in content -%}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1] -%}
            {%- set content = content.split('</think>')[-1].lstrip('\n') -%}
        {%- endif -%}
        {%- set thought = thought.strip('\n') if loop.index0 > ns.last_query else '' -%}
        {{- '<|im_start|>assistant\n<think>\n' + thought + '\n</think>\n\n' + content -}}
        {%- if message['tool_calls'] -%}
            {%- for call in message['tool_calls'] -%}
                {%- if content or not loop.first -%}{{- '\n' -}}{%- endif -%}
                {%- set call = call['function'] if call['function'] else call -%}
                {{- '<tool_call>\n{"name": ' + (call['name'] | tojson) + ', "arguments": ' -}}
                {{- call['arguments'] if call['arguments'] is string else (call['arguments'] | tojson) -}}
                {{- '}\n</tool_call>' -}}
            {%- endfor -%}
        {%- endif -%}
        {{- '<|im_end|>\n' -}}
    {%- elif message['role'] == 'tool' -%}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1]['role'] != 'tool' -%}
            {{- '<|im_start|>user' -}}
        {%- endif -%}
        {{- '\n<tool_response>\n' + text_of(message['content']) + '\n</tool_response>' -}}
        {%- if loop.last or messages[loop.index0 + 1]['role'] != 'tool' -%}
            {{- '<|im_end|>\n' -}}
        {%- endif -%}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\n' -}}
    {%- if not enable_thinking -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}
{%- endif -%}
""".strip()


def _json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def call_text(call: DemoMessage) -> str:
    """Return one tool call in Hermes format."""
    return (
        f'<tool_call>\n{{"name": {_json_text(call["name"])}, "arguments": '
        f"{_json_text(call['arguments'])}}}\n</tool_call>"
    )


def render_pieces(
    messages: list[DemoMessage], tools: list[DemoMessage] | None, thinking: bool
) -> list[tuple[str, bool]]:
    """Return the conversation as pieces (text, learnt): text that the model writes is learnt, everything else is given.

    An assistant message is text that the model wrote in the given thinking mode. With thinking its block is learnt too,
    except in turns before the last question, whose thoughts the template drops.
    """
    pieces: list[tuple[str, bool]] = []
    system = messages[0]["content"] if messages[0]["role"] == "system" else ""
    if tools:
        listing = "".join("\n" + _json_text(tool) for tool in tools)
        system = (system + "\n\n" if system else "") + TOOLS_HEAD + listing + TOOLS_TAIL
    if system:
        pieces.append((f"<|im_start|>system\n{system}<|im_end|>\n", False))
    last_query = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
    for index, message in enumerate(messages):
        role = message["role"]
        if role == "user":
            pieces.append((f"<|im_start|>user\n{message['content']}<|im_end|>\n", False))
        elif role == "assistant":
            pieces.append(("<|im_start|>assistant\n", False))
            if thinking and index > last_query:
                pieces.append((f"<think>\n{message['reasoning_content']}\n</think>\n\n", True))
            else:
                pieces.append((EMPTY_THOUGHT, False))
            calls = "\n".join(call_text(call) for call in message.get("tool_calls", ()))
            turn_text = "\n".join(part for part in (message["content"], calls) if part)
            pieces += [(turn_text + "<|im_end|>", True), ("\n", False)]
        elif role == "tool":
            first = messages[index - 1]["role"] != "tool"
            last = index + 1 == len(messages) or messages[index + 1]["role"] != "tool"
            opening, closing = "<|im_start|>user" * first, "<|im_end|>\n" * last
            pieces.append((f"{opening}\n<tool_response>\n{message['content']}\n</tool_response>{closing}", False))
    return pieces
