"""The anthropic package: edits of the context, summaries, and their token counts. Arguments: HOST:PORT MODEL."""

import sys

import anthropic

address, model = sys.argv[1:]
client = anthropic.Anthropic(base_url=f"http://{address}", api_key="none", max_retries=0)
create, count = client.beta.messages.create, client.beta.messages.count_tokens
EDIT = {
    "type": "clear_tool_uses_20250919",
    "trigger": {"type": "tool_uses", "value": 1},
    "keep": {"type": "tool_uses", "value": 1},
    "clear_at_least": {"type": "input_tokens", "value": 1},
}
TOOLS = [{"name": "get_weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}]
turns = [{"role": "user", "content": "What is the weather in Paris?"}]
for number in range(3):
    call = {"type": "tool_use", "id": f"toolu_{number}", "name": "get_weather", "input": {"city": "Paris"}}
    result = {"type": "tool_result", "tool_use_id": f"toolu_{number}", "content": "It is sunny and 21 degrees. " * 20}
    turns += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
prompt = {"model": model, "messages": turns, "tools": TOOLS, "betas": ["context-management-2025-06-27"]}
managed = prompt | {"context_management": {"edits": [EDIT]}}
options = {"max_tokens": 50, "extra_body": {"temperature": 0}}

counted = count(**managed)
assert counted.context_management.original_input_tokens == count(**prompt).input_tokens
answer = create(**managed, **options)
(edit,) = answer.context_management.applied_edits
assert (edit.type, edit.cleared_tool_uses) == ("clear_tool_uses_20250919", 2)
assert edit.cleared_input_tokens == counted.context_management.original_input_tokens - counted.input_tokens
usage = answer.usage
assert usage.input_tokens + usage.cache_read_input_tokens == counted.input_tokens
with client.beta.messages.stream(**managed, **options) as stream:
    final = stream.get_final_message()
assert final.context_management == answer.context_management and final.stop_reason == answer.stop_reason

talk = [
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "The capital of France is Paris."},
    {"role": "user", "content": "Thank you!"},
]
pausing = {
    "type": "compact_20260112",
    "trigger": {"type": "input_tokens", "value": 1},
    "pause_after_compaction": True,
}
for members in ({"compaction": {"type": "summarize"}}, {"context_management": {"edits": [pausing]}}):
    body = {"model": model, "messages": talk, "betas": ["compact-2026-01-12"]} | options | members
    whole = create(**body)
    with client.beta.messages.stream(**body) as stream:
        final = stream.get_final_message()
    for message in (whole, final):
        (block,) = message.content
        assert message.stop_reason == "compaction" and block.type == "compaction" and block.content, message
    assert whole.content[0].content == final.content[0].content
    summarized = {"role": "assistant", "content": [whole.content[0].to_dict()]}
    later = [*talk, summarized, {"role": "user", "content": "What is the capital of France?"}]
    # The block stands for all before it, so that the talk costs nothing.
    assert count(model=model, messages=later).input_tokens == count(model=model, messages=later[-2:]).input_tokens
    assert create(model=model, messages=later, **options).content[0].text

long_talk = [{"role": "user", "content": "The harbour opens at seven. " * 60}, *talk[1:]]
going_on = {"context_management": {"edits": [pausing | {"pause_after_compaction": False}]}}
prompt_of_talk = {"model": model, "messages": long_talk}
body = {"model": model, "messages": long_talk, "betas": ["compact-2026-01-12"]} | options | going_on
whole = create(**body)
with client.beta.messages.stream(**body) as stream:
    final = stream.get_final_message()
for message in (whole, final):
    assert [block.type for block in message.content] == ["compaction", "text"], message
    summary, answer = message.usage.iterations
    assert (summary.type, answer.type) == ("compaction", "message")
    assert message.usage.output_tokens == answer.output_tokens > 0 < summary.output_tokens
    assert summary.input_tokens + summary.cache_read_input_tokens > count(**prompt_of_talk).input_tokens
print("good")
