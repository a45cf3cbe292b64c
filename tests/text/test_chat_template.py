"""Rendering agrees with Transformers for templates of many styles, and hostile templates end on a budget."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from support.tiny_tokenizers import byte_level

from parley.demo.template import CHAT_TEMPLATE as DEMO
from parley.errors import BadRequest, InvalidValue
from parley.text.parsing import chat_template as module
from parley.text.parsing.chat_template import ChatTemplate
from parley.text.tokens.json_files import BadTokenizer
from parley.types import ChatPrompt, Message, ToolCall

CHATML = """{% for message in messages %}
    {%- if loop.first and message['role'] != 'system' %}{{ '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{%- endif %}
"""
STRICT = """{{ bos_token }}{% for m in messages %}
{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Not your turn: ' ~ m.role) }}{% endif %}
{% if m['role'] == 'user' %}{{ '[Q] ' + m['content'] | trim + ' [/Q]' }}{% elif m['role'] == 'assistant' %}
{{ ' ' + m['content'] | trim + eos_token }}{% else %}{{ raise_exception('Only user and assistant!') }}{% endif %}
{% endfor %}"""
TOOLED = """{{- bos_token }}
{%- if documents %}{{ documents | length }}{% endif %}
{%- set ns = namespace(last=-1, text='') %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for t in tools or [] %}{{ t | tojson(indent=4) }}
{% endfor %}
{%- for m in messages %}
{%- if m.role == 'skip' %}{% continue %}{% endif %}
{%- if m.role == 'end' %}{% break %}{% endif %}
<|{{ m.role | upper }}|>{% if m.name is defined %}({{ m.name }}){% endif %}
{%- if m.reasoning_content is string and loop.index0 > ns.last %}<think>{{ m.reasoning_content }}</think>{% endif %}
{%- generation %}{{ m.content if m.content is defined else '-' }}{% endgeneration %}
{%- for call in m.tool_calls or [] %}
call {{ call.id }} {{ call.function.name }}({{ call.function.arguments | tojson }}
{%- for key, value in call.function.arguments | items %}{{ ' ' ~ key ~ '=' ~ value }}{% endfor %})
{%- endfor %}
{%- if m.tool_call_id is defined %} -> {{ m.tool_call_id }}{% endif %}
{%- if not loop.last %}|{{ loop.length ~ loop.revindex ~ loop.nextitem.role }}{{ loop.cycle('a', 'b') }}{% endif %}
{%- endfor %}
{%- for n in range(3) %}{{ n }}{% else %}none{% endfor %}
{%- if add_generation_prompt %}<|A|>{{ '' if enable_thinking is undefined or enable_thinking else '<x>' }}{% endif %}
{%- if strftime_now is defined %}{{ strftime_now('%Y') }}{% endif %}"""
TEMPLATES = {"chatml": CHATML, "strict": STRICT, "tooled": TOOLED, "demo": DEMO}

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": 'How\'s the <weather> in "Köln"?', "parameters": {"type": "object"}},
}
CALL = ToolCall("call_1", "weather", '{"city": "Zürich & <b>", "days": [1, 2.5, null]}')
CHATS = {
    "one": ChatPrompt([Message("user", "Hi, <|im_end|> you\n")]),
    "turns": ChatPrompt([Message("user", " a "), Message("assistant", "b "), Message("user", "c\n\n")]),
    "closed": ChatPrompt([Message("user", "a"), Message("assistant", "b")], add_generation_prompt=False),
    "options": ChatPrompt([Message("user", "a")], options={"enable_thinking": False, "custom": [1, {"x": None}]}),
    "named": ChatPrompt(
        [Message("system", "S"), Message("user", "a", name="Ann"), Message("skip", "x"), Message("user", "b")]
    ),
    "tools": ChatPrompt(
        [
            Message("user", "weather?"),
            Message("assistant", None, reasoning="hm\n", tool_calls=[CALL, ToolCall("call_2", "weather", "{}")]),
            Message("tool", "sunny", tool_call_id="call_1"),
            Message("tool", "rain", name="weather", tool_call_id="call_2"),
        ],
        tools=[WEATHER],
    ),
    "continued": ChatPrompt([Message("user", "a"), Message("assistant", "Once upon ")], continue_final=True),
    "continued trimmed": ChatPrompt([Message("user", "a"), Message("assistant", " Once  ")], continue_final=True),
}


def render_with_transformers(chat: ChatPrompt, template: str, silent: str | None = None) -> str:
    """Render with Transformers; turns without content get ``silent``."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level().backend, bos_token="<s>", eos_token="</s>")
    messages: list[dict[str, Any]] = []
    call_names = {call.id: call.name for message in chat.messages for call in message.tool_calls}
    for message in chat.messages:
        content = silent if message.content is None else message.content
        name = call_names.get(message.tool_call_id or "") if message.name is None else message.name
        entry: dict[str, Any] = {"role": message.role, "content": content, "name": name}
        entry |= {"reasoning_content": message.reasoning, "tool_call_id": message.tool_call_id}
        if message.tool_calls:
            entry["tool_calls"] = [
                {"type": "function", "id": c.id, "function": {"name": c.name, "arguments": json.loads(c.arguments)}}
                for c in message.tool_calls
            ]
        messages.append(entry)
    return tokenizer.apply_chat_template(
        messages,
        tools=chat.tools or None,
        chat_template=template,
        add_generation_prompt=chat.add_generation_prompt and not chat.continue_final,
        continue_final_message=chat.continue_final,
        tokenize=False,
        **chat.options,
    )


@pytest.mark.parametrize("style", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS)
def test_chat_template_renders_like_transformers(style: str, chat: str) -> None:
    template = ChatTemplate({"default": TEMPLATES[style]}, byte_level().names)
    try:
        try:
            expected = render_with_transformers(CHATS[chat], TEMPLATES[style])
        except Exception:
            expected = render_with_transformers(CHATS[chat], TEMPLATES[style], "")
    except Exception as error:
        with pytest.raises(BadRequest) as refused:
            template.render_conversation(CHATS[chat])
        assert str(error) in refused.value.message or "cannot" in refused.value.message
    else:
        assert template.render_conversation(CHATS[chat]) == expected


def render_source(source: str, chat: ChatPrompt | None = None, **names: str) -> str:
    return ChatTemplate({"default": source}, names).render_conversation(chat or CHATS["one"])


def test_chat_with_tools_uses_tool_template() -> None:
    template = ChatTemplate({"default": "D", "tool_use": "T"})
    assert template.render_conversation(CHATS["one"]) == "D"
    assert template.render_conversation(CHATS["tools"]) == "T"


def test_arguments_that_are_no_object_stay_text_in_template() -> None:
    source = "{% for c in messages[0].tool_calls %}{{ c.function.arguments is string }} {% endfor %}"
    calls = [ToolCall("1", "f", text) for text in ("{}", "", "[1]", "{", "[" * 100_000)]
    assert (
        render_source(source, ChatPrompt([Message("assistant", None, tool_calls=calls)]))
        == "False False True True True "
    )


def test_template_exception_message_reaches_client() -> None:
    with pytest.raises(BadRequest) as refused:
        render_source(STRICT, CHATS["named"])
    assert refused.value.message == "Not your turn: system"
    with pytest.raises(BadRequest) as refused:
        render_source("{{ raise_exception(messages[0].content * 9999) }}")
    assert len(refused.value.message) < 1000


def test_missing_template_or_messages_is_bad_request() -> None:
    with pytest.raises(BadRequest, match="no chat template"):
        ChatTemplate({}).render_conversation(CHATS["one"])
    with pytest.raises(BadRequest, match="at least one message"):
        render_source(CHATML, ChatPrompt([]))


@pytest.mark.parametrize(
    "name",
    [
        "messages", "tools", "add_generation_prompt", "continue_final_message", "tokenize", "chat_template",
        "__class__", "_private", "not a name", "", "bos_token", "raise_exception", "range", "namespace",
        "conversation", "self",
    ],
)  # fmt: skip
def test_reserved_template_options_are_refused(name: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        render_source(CHATML, ChatPrompt(CHATS["one"].messages, options={name: True}), bos_token="<s>")
    assert refused.value.field == "chat_template_kwargs"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ (messages | attr('__class__')).mro() }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ '{0.__class__}' | format(messages) ~ ('%s' | attr('__class__')) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['json'] }}",
        "{{ dict.__init__ }}",
        "{{ namespace(__class__=1) }}",
        "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ messages[0].content.join.__func__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ lipsum.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_template_cannot_escape_sandbox(source: str) -> None:
    try:
        text = render_source(source)
    except BadRequest as refused:
        assert "0x" not in refused.message
    else:
        assert "class" not in text and "root:" not in text and "uid=" not in text


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{{ b }}{% endfor %}{% endfor %}",
        "{% set l = range(9999) | list %}{% for a in l %}{% for b in l %}{% if a %}{% endif %}{% endfor %}{% endfor %}",
        "{% for a in 'abcdefgh' %}" * 12 + "{% endfor %}" * 12,
        "{% macro f(n) %}{% for x in range(2) %}{{ f(n) if n else '' }}{% endfor %}{% endmacro %}{{ f(9) }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{{ range(10 ** 9) | list }}",
        "{{ 'x' * 10 ** 10 }}",
        "{{ [0] * 10 ** 10 }}",
        "{{ 10 ** 10 ** 10 }}",
        "{{ lipsum(10 ** 9) }}",
        "{{ messages | tojson(indent=10 ** 9) }}",
        "{{ 'x' * 10 ** 7 }}" * 9,
    ],
)
def test_hostile_templates_end_on_a_budget(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_RENDER_SECONDS", 0.3)
    template = ChatTemplate({"default": source})
    started_at = time.monotonic()
    with pytest.raises(BadRequest):
        template.render_conversation(CHATS["one"])
    assert time.monotonic() - started_at < 60  # the point is that it ends at all
    assert render_source("{{ messages[0].role }}") == "user"


def test_template_renders_many_messages_within_budget() -> None:
    chat = ChatPrompt([Message("user" if n % 2 == 0 else "assistant", "x") for n in range(20_001)])
    assert render_source(STRICT, chat, bos_token="<s>", eos_token="</s>").count("[Q]") == 10_001


def test_template_that_alters_content_cannot_be_continued() -> None:
    upper = "{% for m in messages %}{{ m.content | upper }}{% endfor %}"
    for source in (upper, "{{ messages[0].content }}", "no messages"):
        with pytest.raises(BadRequest) as refused:
            render_source(source, CHATS["continued"])
        assert refused.value.field == "continue_final_message"
    with pytest.raises(BadRequest):
        render_source(CHATML, ChatPrompt([Message("assistant", None)], continue_final=True))


def test_chat_template_loads_from_model_folder(tmp_path: Path) -> None:
    tokenizer = byte_level()
    assert ChatTemplate.from_folder(tmp_path, tokenizer).sources == {}
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "{{ bos_token }}A"}))
    assert ChatTemplate.from_folder(tmp_path, tokenizer).render_conversation(CHATS["one"]) == "<s>A"
    config.write_text(
        json.dumps({"chat_template": [{"name": "default", "template": "B"}, {"name": "tool_use", "template": "C"}]})
    )
    assert ChatTemplate.from_folder(tmp_path, tokenizer).sources == {"default": "B", "tool_use": "C"}
    config.write_text(json.dumps({"chat_template": {"default": "B", "rag": "R"}}))
    assert ChatTemplate.from_folder(tmp_path, tokenizer).sources == {"default": "B", "rag": "R"}
    config.write_text(
        json.dumps({"chat_template": [{"default": "B", "x": 1}, {"name": "default", "template": 3}, "B"]})
    )
    assert ChatTemplate.from_folder(tmp_path, tokenizer).sources == {}
    (tmp_path / "chat_template.jinja").write_text("D")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("E")
    assert ChatTemplate.from_folder(tmp_path, tokenizer).sources == {"default": "D", "tool_use": "E"}
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(BadTokenizer, match="not valid"):
        ChatTemplate.from_folder(tmp_path, tokenizer)


PARTS = (
    "{% for m in messages %}{{ m['role'] | upper }}:"
    "{% for part in m['content'] | selectattr('type', 'equalto', 'text') %} {{ part['text'] }}{% endfor %};"
    "{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
EITHER = (
    "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %};{% endfor %}"
)


def test_template_that_reads_parts_gets_parts_and_others_get_text() -> None:
    turns = [Message("system", "Be kind."), Message("user", "Hi"), Message("assistant", "Yes"), Message("user", "Why?")]
    parts = ChatTemplate({"default": PARTS}).render_conversation(ChatPrompt(turns))
    assert parts == "SYSTEM: Be kind.;USER: Hi;ASSISTANT: Yes;USER: Why?;ASSISTANT:"
    assert ChatTemplate({"default": EITHER}).render_conversation(ChatPrompt(turns[1:2])) == "user: Hi;"
    open_turn = ChatPrompt([Message("user", "Hi"), Message("assistant", "Yes, ")], continue_final=True)
    assert ChatTemplate({"default": PARTS}).render_conversation(open_turn) == "USER: Hi;ASSISTANT: Yes, "


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.json", "processor_config.json"])
def test_template_of_a_processor_is_read(tmp_path: Path, name: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / name).write_text(json.dumps({"chat_template": PARTS}))
    template = ChatTemplate.from_folder(tmp_path, byte_level())
    assert template.render_conversation(ChatPrompt([Message("user", "Hi")])) == "USER: Hi;ASSISTANT:"


FIRST_SYSTEM_ONLY = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system must be first') }}"
    "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
ANY_SYSTEM = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def test_later_system_messages_keep_their_place_and_so_the_beginning_of_the_prompt() -> None:
    turns = [Message("system", "S"), Message("user", "a"), Message("system", "x"), Message("assistant", "b")]
    longer = [*turns, Message("user", "c"), Message("system", "y")]
    assert render_source(ANY_SYSTEM, ChatPrompt(turns)) == "[system]S[user]a[system]x[assistant]b"
    expected = "[system]S[user]a\n<system>\nx\n</system>[assistant]b"
    assert render_source(FIRST_SYSTEM_ONLY, ChatPrompt(turns)) == expected
    assert render_source(FIRST_SYSTEM_ONLY, ChatPrompt(longer)) == expected + "[user]c\n<system>\ny\n</system>"
