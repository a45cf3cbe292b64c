"""The chat templates of Mistral's models, for folders without one: Mistral formats conversations in code.

``version`` is that of tekken.json. github.com/mistralai/mistral-common (``InstructTokenizerV3`` and later) has them.
"""

from __future__ import annotations

TEMPLATE = """\
{{%- set system = messages | selectattr('role', 'equalto', 'system') | map(attribute='content') | join('\\n\\n') -%}}
{{%- set users = messages | selectattr('role', 'equalto', 'user') | list -%}}
{{%- set count = namespace(users=0) -%}}
{{{{- bos_token -}}}}
{{%- for message in messages -%}}
{{%- if message.role == 'system' -%}}
{system}
{{%- elif message.role == 'user' -%}}
{{%- set count.users = count.users + 1 -%}}
{{%- if tools and count.users == {tools_at} -%}}
{{{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' -}}}}
{{%- endif -%}}
{{{{- '[INST]' -}}}}
{user}
{{%- if message.content is string -%}}
{{{{- message.content -}}}}
{{%- else -%}}
{{%- for part in message.content -%}}
{{{{- part.text if part.type == 'text' else '[IMG]' if part.type == 'image' else '[BEGIN_AUDIO][AUDIO]' -}}}}
{{%- endfor -%}}
{{%- endif -%}}
{{{{- '[/INST]' -}}}}
{{%- elif message.role == 'assistant' -%}}
{{{{- message.content or '' -}}}}
{calls}
{{{{- eos_token -}}}}
{{%- elif message.role == 'tool' -%}}
{result}
{{%- endif -%}}
{{%- endfor -%}}
"""
JSON_CALLS = """\
{%- if message.tool_calls -%}
{{- '[TOOL_CALLS][' -}}
{%- for call in message.tool_calls -%}
{{- '{"name": ' + call.function.name | tojson + ', "arguments": ' + call.function.arguments | tojson -}}
{%- if call.id -%}{{- ', "id": ' + call.id | tojson -}}{%- endif -%}
{{- '}' + ('' if loop.last else ', ') -}}
{%- endfor -%}
{{- ']' -}}
{%- endif -%}"""
NAMED_CALLS = """\
{%- for call in message.tool_calls or [] -%}
{{- '[TOOL_CALLS]' + call.function.name MARK + '[ARGS]' + call.function.arguments | tojson -}}
{%- endfor -%}"""
SYSTEM_IN_PLACE = "{{- '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' -}}"
SYSTEM_IN_LAST_USER = "{%- if system and count.users == users | length -%}{{- system + '\\n\\n' -}}{%- endif -%}"
# Mistral parses a result that is JSON; of other values than these, a template cannot know it
RESULT_AS_JSON = (
    "{%- set is_json = message.content[:1] in ('{', '[') or message.content | int(0) | string == message.content -%}"
    "{{- '[TOOL_RESULTS]{\"content\": ' + (message.content if is_json else message.content | tojson) + '"
    ", \"call_id\": ' + message.tool_call_id | tojson + '}[/TOOL_RESULTS]' -}}"
)
RESULT_WITH_ID = (
    "{{- '[TOOL_RESULTS]' + (message.tool_call_id or '') + '[TOOL_CONTENT]' + message.content + '[/TOOL_RESULTS]' -}}"
)
PLAIN_RESULT = "{{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' -}}"

# System message, start of a user's, calls and result, by version
PARTS = {
    "v3": ("", SYSTEM_IN_LAST_USER, JSON_CALLS, RESULT_AS_JSON),
    "v7": (SYSTEM_IN_PLACE, "", JSON_CALLS, RESULT_WITH_ID),
    "v11": (SYSTEM_IN_PLACE, "", NAMED_CALLS.replace("MARK", "+ '[CALL_ID]' + call.id"), RESULT_WITH_ID),
    "v13": (SYSTEM_IN_PLACE, "", NAMED_CALLS.replace("MARK ", ""), PLAIN_RESULT),
}


def mistral_template(version: str) -> str | None:
    """Return the chat template of a version of tekken.json; None for a version that is not known."""
    if version not in PARTS:
        return None
    system, user, calls, result = PARTS[version]
    tools_at = "1" if version == "v13" else "users | length"  # the user's message that tools stand before
    return TEMPLATE.format(system=system, user=user, calls=calls, result=result, tools_at=tools_at)
