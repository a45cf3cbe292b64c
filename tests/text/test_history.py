"""The form of past turns that chat templates of real families expect, each shown by a few template lines."""

from __future__ import annotations

import pytest

from parley.errors import BadRequest
from parley.text.parsing.chat_template import ChatTemplate
from parley.text.parsing.history import later_system_as_user
from parley.types import ChatPrompt, Media, MediaAddress, Message, PlacedMedia, ToolCall

TURNS = [
    Message("user", "Hi"),
    Message(
        "assistant",
        None,
        reasoning="hm",
        tool_calls=[ToolCall("call_1", "f", '{"a": "x", "b": [1]}'), ToolCall("call_2", "g", "")],
    ),
    Message("tool", "one", tool_call_id="call_1"),
    Message("tool", "two", tool_call_id="call_2"),
]

DICT = (
    "{{ call.function.arguments | tojson }}{% for key, value in call.function.arguments.items() %}{{ key }}{% endfor %}"
)
TEXT = "{{ 'f' + '\\n' + call['function']['arguments'] + '\\n' }}"
PRINTED = "{{ call.function.arguments }}"
EACH = "{% for m in messages %}{% for call in m.tool_calls or [] %}"
ENDS = "{% endfor %}{% endfor %}"


def render_turns(source: str, messages: list[Message] = TURNS) -> str:
    return ChatTemplate({"default": source}).render_conversation(ChatPrompt(messages))


def test_template_reads_arguments_as_object_or_text() -> None:
    assert render_turns(f"{EACH}{DICT}{ENDS}") == '{"a": "x", "b": [1]}ab{}'
    assert render_turns(f"{EACH}{TEXT}{ENDS}") == 'f\n{"a": "x", "b": [1]}\nf\n{}\n'
    assert render_turns(f"{EACH}{PRINTED}{ENDS}") == '{"a": "x", "b": [1]}{}'
    assert render_turns(
        EACH + "{{ call.function.arguments is mapping }}{{ call.function.arguments is string }}" + ENDS
    ) == ("TrueFalse" * 2)


def test_tool_results_carry_the_called_name() -> None:
    source = "{% for m in messages %}{% if m.role == 'tool' %}{{ m.name }}:{{ m.content }} {% endif %}{% endfor %}"
    assert render_turns(source) == "f:one g:two "
    assert render_turns(source, [Message("tool", "x", name="own", tool_call_id="call_1")]) == "own:x "


def test_call_ids_get_nine_letters_where_template_requires_it() -> None:
    source = (
        "{% for m in messages %}{% for call in m.tool_calls or [] %}"
        "{% if call.id|length != 9 %}{{ raise_exception('no') }}{% endif %}{{ call.id }} {% endfor %}"
        "{% if m.tool_call_id %}{{ m.tool_call_id }} {% endif %}{% endfor %}"
    )
    one, two, *rest = render_turns(source).split()
    assert [one, two] == rest and one != two and one.isalnum()
    kept_messages = [Message("assistant", None, tool_calls=[ToolCall("abcdefgh1", "f", "{}")])]
    assert render_turns(source, kept_messages) == "abcdefgh1 "


def test_call_ids_carry_names_where_template_shows_only_ids() -> None:
    source = f"{EACH}{{{{ call.id }}}}<|tool_call_argument_begin|>{ENDS}{{{{ messages[-1].tool_call_id }}}}"
    assert (
        render_turns(source)
        == "functions.f:0<|tool_call_argument_begin|>functions.g:1<|tool_call_argument_begin|>functions.g:1"
    )
    own = [Message("assistant", None, tool_calls=[ToolCall("functions.f:7", "f", "{}")])]
    assert render_turns(source, own) == "functions.f:7<|tool_call_argument_begin|>"


def test_parallel_calls_are_split_for_single_call_template() -> None:
    source = (
        "{% for m in messages %}{{ m.role }}{% if m.tool_calls %}{% if not m.tool_calls|length == 1 %}"
        "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
        "({{ m.tool_calls[0].function.name }},{{ m.reasoning_content }}){% endif %} {{ m.content }};{% endfor %}"
    )
    assert render_turns(source) == "user Hi;assistant(f,hm) ;tool one;assistant(g,) ;tool two;"


def test_reasoning_and_content_are_joined_where_template_takes_one() -> None:
    source = (
        "{% for message in messages %}{% if message.content and message.thinking %}{{ raise_exception('both') }}"
        "{% elif message.thinking %}{{ message.thinking }}{% endif %}{% endfor %}"
    )
    spoken = Message("assistant", "I look.", reasoning="hm", tool_calls=[ToolCall("1", "f", "{}")])
    assert render_turns(source, [spoken]) == "hm\n\nI look."
    with pytest.raises(BadRequest, match="both"):
        render_turns(source, [Message("assistant", "I look.", reasoning="hm")])


def test_turns_without_content_render_as_template_expects() -> None:
    assert render_turns("{% for m in messages %}{{ m.content is defined }} {% endfor %}") == "True False True True "
    none = "{% if m.content is none %}-{% else %}{{ m.content.split(' ')[0] }}{% endif %}"
    assert render_turns(f"{{% for m in messages %}}{none}{{% endfor %}}") == "Hi-onetwo"
    assert render_turns("{% for m in messages %}{{ m['content'] + ';' }}{% endfor %}") == "Hi;;one;two;"
    with pytest.raises(BadRequest, match="cannot render"):
        render_turns("{% for m in messages %}{{ m['content'] + 1 }}{% endfor %}")


def test_tool_results_join_calling_turn_where_template_reads_it() -> None:
    prompt = (
        "{% for m in messages %}{{ m.role }}{% for r in m.tool_responses or [] %} {{ r.name }}="
        "{% if r.response is mapping %}{% for k, v in r.response.items() %}{{ k }}:{{ v }}{% endfor %}"
        "{% else %}{{ r.response }}{% endif %}{% endfor %};{% endfor %}"
    )
    turns = [*TURNS, Message("tool", '{"k": 1}', tool_call_id="call_1"), Message("assistant", "So."), *TURNS[1:2]]
    assert render_turns(prompt, turns) == "user;assistant f=one g=two f=k:1;assistant;assistant;"
    assert render_turns(prompt, [Message("tool", "x"), *TURNS]) == "tool;user;assistant f=one g=two;"
    later = prompt + "{{ '' if messages[0].tool_call_id else '' }}"
    assert render_turns(later) == "user;assistant;tool;tool;"


def test_tool_results_stay_separate_for_other_templates() -> None:
    source = "{% for m in messages %}{{ m.role }}{{ m.content or '' }};{% endfor %}<tool_responses:x>"
    assert render_turns(source) == "userHi;assistant;toolone;tooltwo;<tool_responses:x>"


def test_calls_become_content_for_content_only_template() -> None:
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}<|tool_list_start|>"
    calls = '<|tool_call_start|>[f(a="x", b=[1]), g()]<|tool_call_end|>'
    prompt = f"user: Hi\nassistant: {calls}\ntool: one\ntool: two\n<|tool_list_start|>"
    assert render_turns(source) == prompt
    spoken = Message("assistant", "I look.", tool_calls=[ToolCall("1", "f", "{}")])
    assert "assistant: I look.\n<|tool_call_start|>[f()]<|tool_call_end|>" in render_turns(source, [spoken])
    broken = Message("assistant", "I look.", tool_calls=[ToolCall("1", "f", "[")])
    assert "assistant: I look.\n<|tool_list" in render_turns(source, [broken])


def test_templates_may_count_tools_and_map_messages() -> None:
    assert render_turns("{{ tools | length }}") == "0"
    assert render_turns("{{ messages | map(attribute='role') | tojson }}") == '["user", "assistant", "tool", "tool"]'


def test_later_system_messages_become_the_users_text_in_their_place():
    image = PlacedMedia(1, Media("image", MediaAddress("http://a"), "f"))
    turns = [
        Message("system", "S"), Message("user", "a"), Message("system", "x"), Message("assistant", "b"),
        Message("system", "y"), Message("user", "cd", media=[image]), Message("user", "e"),
    ]  # fmt: skip
    written = "<system>\ny\n</system>\n"
    assert later_system_as_user(turns) == [
        Message("system", "S"),
        Message("user", "a\n<system>\nx\n</system>"),
        Message("assistant", "b"),
        Message("user", written + "cd", media=[PlacedMedia(len(written) + 1, image.media)]),
        Message("user", "e"),
    ]
