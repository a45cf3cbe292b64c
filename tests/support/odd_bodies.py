"""Hypothesis strategies for the bodies of generating routes: valid, nearly valid, and odd."""

from hypothesis import strategies as st
from support.http_client import HELLO_CHAT
from support.member_strategies import client_texts, grammar_texts, json_values, request_members, scalars, schemas

member_names = st.sampled_from(
    ["model", "messages", "prompt", "tokens", "temperature", "top_p", "top_k", "min_p", "n", "best_of", "seed", "stop",
     "stop_token_ids", "max_tokens", "max_completion_tokens", "min_tokens", "logprobs", "top_logprobs", "logit_bias",
     "prompt_logprobs", "presence_penalty", "frequency_penalty", "repetition_penalty", "stream", "stream_options",
     "echo", "suffix", "tools", "tool_choice", "functions", "function_call", "response_format", "reasoning_effort",
     "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "ignore_eos", "cache_salt",
     "guided_json", "structured_outputs", "modalities", "audio", "user", "return_token_ids", "parallel_tool_calls",
     "bad_words", "skip_special_tokens", "include_stop_str_in_output", "add_special_tokens", "return_token_strs",
     "documents", "truncate_prompt_tokens", "truncation_side", "request_id", "priority", "vllm_xargs", "echo",
     "kv_transfer_params", "repetition_detection", "stream_interval", "allowed_token_ids",
     "mm_processor_kwargs", "use_beam_search", "input", "dimensions", "encoding_format", "embed_dtype", "endianness",
     "normalize", "use_activation", "padding", "task", "data", "guided_regex", "guided_choice", "guided_grammar",
     "guided_whitespace_pattern", "guided_json_object", "length_penalty", "early_stopping", "typical_p", "watermark",
     "no_repeat_ngram_size", "thinking_token_budget", "enable_thinking", "include_reasoning", "lora_name", "timeout"]
)  # fmt: skip
chat_messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "assistant", "tool", "developer", "function", "x"]) | scalars},
    optional={
        "content": client_texts | json_values | st.deferred(lambda: st.lists(content_parts | scalars, max_size=3)),
        "name": client_texts | scalars,
        "tool_calls": json_values,
        "tool_call_id": scalars,
        "reasoning": scalars,
    },
)
custom_formats = st.fixed_dictionaries(
    {"type": st.just("grammar")},
    optional={"grammar": st.fixed_dictionaries({"syntax": st.sampled_from(["regex", "lark"])},
                                               optional={"definition": grammar_texts | scalars}) | json_values},
)  # fmt: skip
chat_tools = st.fixed_dictionaries(
    {"type": st.sampled_from(["function", "custom", "x"])},
    optional={
        "function": st.fixed_dictionaries({"name": st.just("f")}, optional={"parameters": schemas | json_values}),
        "custom": st.fixed_dictionaries({"name": st.just("g")}, optional={"format": custom_formats | json_values}),
    },
)
typed_members = st.fixed_dictionaries(
    {},
    optional={
        "messages": st.lists(chat_messages, max_size=3),
        "prompt": client_texts | json_values,
        "tools": st.lists(chat_tools, max_size=2),
    },
)
valid_members = st.sampled_from(
    [{}, {"messages": HELLO_CHAT["messages"], "prompt": "a", "tokens": [5], "input": ["a", "b"]}]
)
odd_members = st.dictionaries(member_names | st.text(max_size=5), json_values, max_size=4)
token_member_names = st.sampled_from(
    ["token_ids", "token_offsets", "features", "content_parts", "sampling_params", "model", "output_mode", "stream",
     "stream_options", "reasoning_ended", "return_token_ids", "request_id", "request_ids", "cache_salt", "priority",
     "kv_transfer_params", "ec_transfer_params"]
)  # fmt: skip
openai_bodies = st.builds(
    lambda *parts: parts[0] | parts[1] | parts[2] | parts[3],
    valid_members,
    typed_members,
    odd_members,
    st.just({}) | request_members,
)
token_bodies = st.builds(  # for the route from tokens to tokens, and ids of requests to abort
    lambda members, more: {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 3} | members} | more,
    odd_members | request_members,
    st.just({}) | st.just({"stream": True}) | st.dictionaries(token_member_names, json_values, max_size=3),
)

response_item_types = st.sampled_from(
    ["message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output", "reasoning",
     "item_reference", "compaction", "compaction_trigger", "additional_tools", "web_search_call", "mcp_call",
     "shell_call", "shell_call_output", "local_shell_call", "local_shell_call_output", "apply_patch_call",
     "apply_patch_call_output", "computer_call", "computer_call_output", "tool_search_call", "tool_search_output", "x"]
)  # fmt: skip
response_part_types = st.sampled_from(
    ["input_text", "output_text", "refusal", "text", "input_image", "input_file", "x"]
)
response_parts = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(("text", "refusal", "image_url", "file_data", "file_id"), scalars | client_texts)
    | {"type": response_part_types | scalars},
)
response_tools = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["function", "custom", "namespace", "web_search", "mcp", "shell", "local_shell",
                                  "apply_patch", "computer", "computer_use_preview", "tool_search"]) | scalars,
        "execution": st.just("client") | scalars,
        "defer_loading": scalars,
        "environment": st.sampled_from(["local", "browser"]) | json_values,
        "name": st.sampled_from(["f", "g", "a b", ""]) | scalars,
        "parameters": schemas | json_values,
        "strict": scalars,
        "tools": json_values,
        "format": st.fixed_dictionaries({"type": st.just("grammar"), "syntax": st.sampled_from(["regex", "lark"]),
                                         "definition": grammar_texts | scalars}) | json_values,
    },
)  # fmt: skip
client_call_members = ("type", "commands", "command", "env", "path", "diff", "timeout_ms", "image_url", "file_id")
client_call_objects = st.fixed_dictionaries({}, optional=dict.fromkeys(client_call_members, scalars | json_values))
response_items = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(("id", "call_id", "name", "arguments", "input", "encrypted_content", "status"), scalars)
    | {"type": response_item_types | scalars, "role": st.sampled_from(["user", "assistant", "system"]) | scalars}
    | {name: client_texts | st.lists(response_parts | scalars, max_size=2) | json_values
       for name in ("content", "summary")}
    | {"output": client_texts | st.lists(response_parts | scalars, max_size=2) | json_values | client_call_objects,
       "action": client_call_objects | json_values, "operation": client_call_objects | json_values}
    | {"tools": st.lists(response_tools, max_size=2) | json_values},
)  # fmt: skip
response_members = st.dictionaries(
    st.sampled_from(
        ["instructions", "previous_response_id", "conversation", "store", "background", "include", "max_output_tokens",
         "max_tool_calls", "temperature", "top_logprobs", "reasoning", "text", "tool_choice", "parallel_tool_calls",
         "truncation", "metadata", "user", "prompt_cache_key", "service_tier", "prompt", "stream", "stream_options",
         "items", "order", "model"]
    )
    | st.text(max_size=5),
    json_values,
    max_size=3,
)  # fmt: skip
response_bodies = st.builds(
    lambda *parts: parts[0] | parts[1] | parts[2],
    st.fixed_dictionaries({}, optional={"input": client_texts | st.lists(response_items | scalars, max_size=4)}),
    st.fixed_dictionaries({}, optional={"tools": st.lists(response_tools | scalars, max_size=3)}),
    response_members,
)


tgi_parameter_names = st.sampled_from(
    ["best_of", "temperature", "repetition_penalty", "frequency_penalty", "top_k", "top_p", "typical_p", "do_sample",
     "max_new_tokens", "return_full_text", "stop", "truncate", "watermark", "details", "decoder_input_details", "seed",
     "top_n_tokens", "grammar", "adapter_id"]
)  # fmt: skip
plausible_values = st.one_of(st.booleans(), st.integers(1, 5), st.floats(0.1, 0.9), st.just(["a"]), st.none())
tgi_grammars = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["json", "regex", "json_schema", "x"]) | scalars,
        "value": schemas | grammar_texts | json_values,
    },
)
tgi_parameters = st.one_of(
    st.dictionaries(tgi_parameter_names, plausible_values, max_size=6),
    st.dictionaries(tgi_parameter_names | st.text(max_size=5), plausible_values | json_values, max_size=6),
    st.builds(lambda grammar: {"grammar": grammar}, tgi_grammars),
    scalars,
)
tgi_bodies = st.fixed_dictionaries(
    {"inputs": client_texts.filter(len) | json_values},
    optional={"parameters": tgi_parameters, "stream": scalars, "messages": st.lists(chat_messages, max_size=3)},
)

tei_inputs = client_texts | st.lists(client_texts | st.lists(client_texts, max_size=3), max_size=3) | json_values
tei_bodies = st.fixed_dictionaries(
    {"inputs": tei_inputs},
    optional={
        "query": client_texts | scalars,
        "texts": st.lists(client_texts, max_size=3) | json_values,
        "ids": st.lists(st.integers(0, 700) | scalars, max_size=3) | json_values,
        "input": tei_inputs,
        "truncate": scalars,
        "truncation_direction": st.just("Left") | scalars,
        "prompt_name": scalars,
        "normalize": scalars,
        "dimensions": st.integers(1, 9) | scalars,
        "raw_scores": scalars,
        "return_text": scalars,
        "parameters": json_values,
    },
)

go_template_pieces = st.lists(
    st.sampled_from(
        ["{{", "}}", "{{-", "-}}", " ", ".Prompt", ".Messages", "range", "if", "else", "end", "with", "define", '"a"',
         "template", "block", "$x", ":=", "=", "|", "(", ")", "print", "len", "index", "slice", "eq", "and", "0", "nil",
         "break", "continue", ".", ",", "printf", '"%d%s"', "/*", "*/", "`", "'a'", "-1", "text\n", "not", "json"]
    ),
    max_size=40,
)  # fmt: skip
go_templates = go_template_pieces.map("".join) | go_template_pieces.map(lambda pieces: f"{{{{ {' '.join(pieces)} }}}}")
ollama_option_names = st.sampled_from(
    ["num_predict", "num_ctx", "temperature", "top_k", "top_p", "min_p", "typical_p", "repeat_penalty", "repeat_last_n",
     "presence_penalty", "frequency_penalty", "seed", "stop", "num_keep", "use_mmap", "mirostat"]
)  # fmt: skip
ollama_bodies = st.fixed_dictionaries(
    {"model": st.sampled_from(["tiny", "tiny:latest"]) | scalars},
    optional={
        "messages": st.lists(chat_messages, max_size=3) | json_values,
        "prompt": client_texts | json_values,
        "template": st.sampled_from(["{{ .Prompt }}:", "{{ range .Messages }}{{ .Content }}{{ end }}"]) | go_templates,
        "input": st.lists(client_texts, max_size=3) | json_values,
        "options": st.dictionaries(ollama_option_names, plausible_values | scalars, max_size=4) | json_values,
        "format": st.just("json") | schemas | scalars,
        "think": st.sampled_from([True, False, "high"]) | scalars,
        "keep_alive": st.sampled_from(["5m", "-1", 0]) | scalars,
        "context": st.lists(st.integers(0, 700), max_size=4) | json_values,
        "system": client_texts | scalars,
        "suffix": scalars,
        "raw": scalars,
        "images": json_values,
        "tools": json_values,
        "stream": scalars,
        "logprobs": scalars,
        "top_logprobs": st.integers(-1, 21) | scalars,
        "truncate": scalars,
        "name": scalars,
        "source": scalars,
        "destination": scalars,
    },
)

odd_stop_ids = st.fixed_dictionaries({}, optional={"stop_token_ids": st.lists(st.integers(0, 9) | scalars, max_size=3)})
data_urls = st.sampled_from(
    ["data:image/png;base64," + "A" * 64, "data:,x", "data:image/png;base64", "data:audio/wav;base64,UklGRg==",
     "data:application/pdf;base64,aGk=", "DATA:IMAGE/PNG;BASE64,aGk=", "data:" + "a" * 200 + ";base64,aGk="]
)  # fmt: skip
media_urls = data_urls | st.sampled_from(
    ["http://a.b/c.png", "https://[::1]/a.mp4", "http://", "file:///a.jpg", "file:", "/x.png", "/a b.wav", "ftp://a",
     "http://a/" + "b" * 4100, "/9j/4AAQ", "", "x" * 5000, "http://a.b/c.mp4?Signature=1"]
)  # fmt: skip
media_values = media_urls | scalars | st.fixed_dictionaries(
    {},
    optional={
        "url": media_urls | scalars,
        "detail": st.sampled_from(["low", "original", "x"]) | scalars,
        "data": media_urls | scalars,
        "format": st.sampled_from(["wav", "mp3", "flac", "ogg"]) | scalars,
        "file_data": data_urls | scalars,
        "file_id": scalars,
    },
)  # fmt: skip
media_part_types = ["image_url", "video_url", "audio_url", "input_audio", "input_image", "file", "image_embeds"]
media_parts = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from([*media_part_types, "text"]) | scalars,
        "text": client_texts | scalars,
        "uuid": st.just("u") | scalars,
        **dict.fromkeys(media_part_types, media_values),
    },
)
content_parts = media_parts | st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["text", "image_url", "video_url", "audio_url"]) | scalars,
        "text": client_texts | scalars,
        "image_url": st.just("/x.png") | scalars,
        "audio_url": scalars,
    },
)
mindie_bodies = st.one_of(
    tgi_bodies,
    st.builds(lambda parts: {"inputs": parts}, st.lists(content_parts | scalars, max_size=3)),
    st.fixed_dictionaries(
        {},
        optional={
            "prompt": st.just("a b") | json_values,
            "text_input": st.just("a b") | json_values,
            "id": st.just("i") | scalars,
            "input_id": st.just([5, 6]) | json_values,
            "inputs": st.just("a b") | json_values,
            "parameters": tgi_parameters,
            "do_decode": scalars,
            "outputs": st.just([{"name": "o"}]) | json_values,
            "stream": st.booleans() | scalars,
            "stop_token_ids": json_values,
            "n": st.integers(1, 3) | scalars,
            "best_of": st.integers(1, 3) | scalars,
            "max_tokens": st.integers(1, 5) | scalars,
            "timeout": st.integers(1, 9) | scalars,
            "priority": scalars,
        },
    ),
    st.fixed_dictionaries(
        {
            "inputs": st.lists(
                st.fixed_dictionaries(
                    {},
                    optional={
                        "name": st.just("i") | scalars,
                        "shape": st.sampled_from([[2], [1, 2]]) | json_values,
                        "datatype": st.just("UINT32") | scalars,
                        "data": st.just([5, 6]) | json_values,
                        "parameters": tgi_parameters,
                    },
                )
                | scalars,
                max_size=2,
            ),
            "outputs": st.just([{"name": "o"}]) | json_values,
        }
    ),
)

block_types = ["text", "image", "document", "search_result", "thinking", "tool_use", "tool_result", "tool_reference",
               "tool_addition", "server_tool_use", "redacted_thinking"]  # fmt: skip
anthropic_blocks = st.fixed_dictionaries(
    {"type": st.sampled_from(block_types) | scalars},
    optional={
        "text": client_texts | scalars,
        "thinking": client_texts | scalars,
        "signature": st.just("AAAA") | scalars,
        "source": json_values | st.just({"type": "text", "data": "a"}),
        "content": client_texts | json_values,
        "id": st.just("toolu_1") | scalars,
        "tool_use_id": st.just("toolu_1") | scalars,
        "name": st.just("f") | scalars,
        "input": st.just({}) | json_values,
        "tool": json_values | st.just({"type": "tool_reference", "name": "f"}),
        "cache_control": json_values | st.just({"type": "ephemeral"}),
    },
)
cohere_parts = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "thinking", "image_url", "document"]) | scalars},
    optional={
        "text": client_texts | scalars,
        "thinking": client_texts | scalars,
        "image_url": json_values,
        "document": json_values | st.just({"id": "a", "data": {"b": [1]}}),
    },
)
cohere_turns = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool"]) | scalars},
    optional={
        "content": client_texts | cohere_parts | st.lists(cohere_parts | scalars, max_size=3) | json_values,
        "tool_call_id": st.just("c") | scalars,
        "tool_plan": client_texts | scalars,
        "tool_calls": json_values | st.just([{"id": "c", "type": "function", "function": {"name": "f"}}]),
    },
)
cohere_bodies = st.builds(
    lambda base, body: base | body,
    st.sampled_from([{}, {"model": "tiny", "max_tokens": 3, "messages": HELLO_CHAT["messages"]}]),
    st.fixed_dictionaries(
        {},
        optional={
            "messages": st.lists(cohere_turns, max_size=3),
            "documents": st.lists(client_texts | json_values | st.just({"data": {}}), max_size=2) | json_values,
            "tools": json_values | st.just([{"type": "function", "function": {"name": "f", "parameters": {}}}]),
            "tool_choice": st.sampled_from(["REQUIRED", "NONE"]) | scalars,
            "strict_tools": scalars,
            "thinking": json_values | st.just({"type": "enabled", "token_budget": 2}),
            "response_format": json_values
            | st.builds(lambda schema: {"type": "json_object", "json_schema": schema}, schemas),
            "safety_mode": st.sampled_from(["OFF", "STRICT", "CONTEXTUAL"]) | scalars,
            "citation_options": json_values,
            "logprobs": scalars,
            "p": st.floats(0, 1) | scalars,
            "k": st.integers(-2, 501) | scalars,
            "priority": st.integers(-1, 1000) | scalars,
            "stop_sequences": json_values,
            "stream": scalars,
            "max_tokens": scalars,
        },
    ),
)
first_cohere_turns = st.fixed_dictionaries(
    {"role": st.sampled_from(["USER", "Chatbot", "SYSTEM", "TOOL"]) | scalars},
    optional={
        "message": client_texts | scalars,
        "tool_calls": json_values | st.just([{"name": "f", "parameters": {"a": 1}}]),
        "tool_results": json_values | st.just([{"call": {"name": "f", "parameters": {"a": 1}}, "outputs": [{"b": 2}]}]),
    },
)
first_cohere_bodies = st.builds(
    lambda base, body: base | body,
    st.sampled_from([{}, {"model": "tiny", "max_tokens": 3, "message": "Hello"}]),
    st.fixed_dictionaries(
        {},
        optional={
            "message": client_texts | scalars,
            "preamble": client_texts | scalars,
            "chat_history": st.lists(first_cohere_turns, max_size=3) | json_values,
            "tool_results": json_values | st.just([{"call": {"name": "f", "parameters": {}}, "outputs": [1]}]),
            "documents": st.lists(json_values | st.just({"text": "a", "_excludes": ["b"]}), max_size=2) | json_values,
            "tools": json_values
            | st.builds(
                lambda kind: [{"name": "f", "description": "", "parameter_definitions": {"a": {"type": kind}}}],
                st.sampled_from(["str", "List[int]", "Optional[Dict[str, int]]"]) | client_texts | scalars,
            ),
            "response_format": json_values
            | st.builds(lambda schema: {"type": "json_object", "schema": schema}, schemas),
            "safety_mode": st.sampled_from(["NONE", "STRICT", "CONTEXTUAL"]) | scalars,
            "citation_quality": st.sampled_from(["off", "ACCURATE"]) | scalars,
            "prompt_truncation": st.sampled_from(["OFF", "AUTO"]) | scalars,
            "raw_prompting": scalars,
            "connectors": json_values,
            "stop_sequences": json_values,
            "stream": scalars,
            "max_tokens": scalars,
        },
    ),
)
anthropic_turns = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system"]) | scalars},
    optional={"content": client_texts | st.lists(anthropic_blocks | scalars, max_size=3) | json_values},
)
edit_amounts = json_values | st.fixed_dictionaries(
    {
        "type": st.sampled_from(["input_tokens", "tool_uses", "thinking_turns", "all"]),
        "value": st.integers(0, 9) | scalars,
    }
)
context_edits = scalars | st.fixed_dictionaries(
    {"type": st.sampled_from(["clear_tool_uses_20250919", "clear_thinking_20251015", "compact_20260112"]) | scalars},
    optional={
        "trigger": edit_amounts,
        "keep": edit_amounts | st.just("all"),
        "clear_at_least": edit_amounts,
        "exclude_tools": json_values,
        "clear_tool_inputs": json_values,
        "pause_after_compaction": scalars,
        "instructions": client_texts | scalars,
    },
)
anthropic_bodies = st.builds(
    lambda base, body: base | body,
    st.sampled_from([{}, {"model": "tiny", "max_tokens": 3, "messages": HELLO_CHAT["messages"]}]),
    st.fixed_dictionaries(
        {},
        optional={
            "messages": st.lists(anthropic_turns, max_size=3),
            "system": client_texts | st.lists(anthropic_blocks, max_size=2) | json_values,
            "tools": json_values | st.just([{"name": "f", "input_schema": {}}]),
            "tool_choice": json_values | st.sampled_from([{"type": kind} for kind in ("auto", "any", "tool", "none")]),
            "thinking": json_values | st.just({"type": "adaptive"}) | st.just({"type": "enabled", "budget_tokens": 9}),
            "output_config": json_values
            | st.builds(lambda schema: {"format": {"type": "json_schema", "schema": schema}}, schemas),
            "compaction": json_values | st.just({"type": "summarize"}),
            "context_management": json_values | st.fixed_dictionaries({"edits": st.lists(context_edits, max_size=3)}),
            "metadata": json_values,
            "stop_sequences": json_values,
            "stream": scalars,
            "max_tokens": scalars,
        },
    ),
)
