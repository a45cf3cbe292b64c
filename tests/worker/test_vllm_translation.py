"""The host translates requests for vLLM, and vLLM's outputs back. Stand-ins take the place of vLLM."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import llguidance
import msgspec
import numpy as np
import pytest
from support import tiny_tokenizers

from parley.core.sequence import Sequence
from parley.model.sampling.extra_options import ExtraOptions
from parley.model.sampling.grammar_mask import TokenBytes
from parley.text.grammar.compiler import GrammarCompiler
from parley.types import (
    ALL_ENGINE_FEATURES,
    EngineOutput,
    EngineRequest,
    Grammar,
    PoolingOptions,
    ReasoningLimit,
    SamplingOptions,
    StructuralTag,
    TokenCost,
    TokenScore,
    TriggeredTags,
    VLLMSettings,
)
from parley.worker.vllm.capabilities import BOUNDS, vllm_features
from parley.worker.vllm.outputs.generated_output import read_generated, read_prompt_scores
from parley.worker.vllm.outputs.output_reader import read_output, read_token_scores
from parley.worker.vllm.requests.continuation import Continuation
from parley.worker.vllm.requests.engine_args import engine_arguments
from parley.worker.vllm.requests.extra_options import read_extra_options
from parley.worker.vllm.requests.lark_text import decompile_lark
from parley.worker.vllm.requests.sampling_fields import (
    translate_choice,
    translate_pooling,
    wrap_seed,
)

DOCS = Path(__file__).parents[2] / "docs"
EOS = 2
COST = TokenCost(3, 0.5, 0.25)


def request(**members: Any) -> EngineRequest:
    return EngineRequest(**({"id": "r", "token_ids": [5, 6], "max_tokens": 4} | members))


def sampling_of(index: int = 0, **members: Any) -> dict[str, Any]:
    return translate_choice(request(**members), index, Continuation()).sampling


def test_sampling_options_keep_their_values():
    options = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1}
    options |= {"presence_penalty": 0.5, "frequency_penalty": -0.5}
    fields = sampling_of(sampling=SamplingOptions(**options, logit_bias={7: 250.0}, allowed=[7, 8]), stop_ids=[EOS])
    assert {name: fields[name] for name in options} == options
    assert fields["logit_bias"] == {7: 250.0} and fields["allowed_token_ids"] == [7, 8]
    assert fields["stop_token_ids"] == [EOS] and fields["ignore_eos"] and fields["max_tokens"] == 4


def test_choices_draw_with_seeds_that_count_up():
    assert [sampling_of(index, seed=7, n=3)["seed"] for index in range(3)] == [7, 8, 9]
    assert sampling_of(1, seed=2**64 - 1)["seed"] == 0
    assert wrap_seed(2**63 + 5) == -(2**63) + 5
    assert wrap_seed(2**64 - 1) != -1  # vLLM would draw a seed of its own


def test_min_tokens_stay_within_max_tokens():
    assert sampling_of(max_tokens=0, min_tokens=3)["max_tokens"] == 1
    assert sampling_of(max_tokens=2, min_tokens=3)["min_tokens"] == 2


def test_logprobs_and_named_logprobs_exclude_each_other():
    assert sampling_of(logprobs=3)["logprobs"] == 3
    assert "logprobs" not in sampling_of()
    fields = sampling_of(logprobs=0, logprob_ids=[7, 8])
    assert fields["logprob_token_ids"] == [7, 8] and fields["logprobs"] == 2


def test_only_the_first_choice_scores_the_prompt():
    assert sampling_of(0, prompt_logprobs=1, n=2)["prompt_logprobs"] == 1
    assert "prompt_logprobs" not in sampling_of(1, prompt_logprobs=1, n=2)


def test_banned_sequences_travel_as_tokens():
    assert translate_choice(request(sampling=SamplingOptions(banned=[[7], [7, 8]])), 0, Continuation()).banned == [
        [7],
        [7, 8],
    ]


def test_options_of_the_plugin_travel_with_the_request():
    limit = ReasoningLimit("<t>", "</t>", True, 3, [9])
    fields = sampling_of(sampling=SamplingOptions(watermark=True, no_repeat_ngram=2), reasoning_limit=limit)
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(fields["extra_args"]))
    assert read_extra_options(sent) == ExtraOptions(watermark=True, no_repeat_ngram=2, reasoning_limit=limit)
    assert read_extra_options({"other": 1}) is None and read_extra_options(None) is None
    assert "extra_args" not in sampling_of(sampling=SamplingOptions(temperature=0.7, top_p=0.9))


def test_typical_p_takes_the_cuts_before_it_along():
    sampling = SamplingOptions(typical_p=0.5, temperature=0.7, top_p=0.9, top_k=5, min_p=0.1)
    fields = sampling_of(sampling=sampling)
    expected = ExtraOptions(typical_p=0.5, temperature=0.7, top_p=0.9, top_k=5, min_p=0.1)
    assert read_extra_options(fields["extra_args"]) == expected
    assert (fields["temperature"], fields["top_p"], fields["top_k"], fields["min_p"]) == (0.7, 1.0, 0, 0.0)
    greedy = sampling_of(sampling=msgspec.structs.replace(sampling, temperature=0.0))
    assert "extra_args" not in greedy and greedy["top_k"] == 5


def test_penalties_with_a_window_are_the_plugins():
    penalties = SamplingOptions(repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.1, penalty_window=8)
    fields = sampling_of(sampling=msgspec.structs.replace(penalties, temperature=0.7, top_k=5))
    assert read_extra_options(fields["extra_args"]) == ExtraOptions(penalties=penalties)
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty", "temperature", "top_k")
    assert [fields[name] for name in names] == [1.0, 0.0, 0.0, 0.7, 5]
    plain = sampling_of(sampling=msgspec.structs.replace(penalties, penalty_window=0))
    assert "extra_args" not in plain and plain["repetition_penalty"] == 1.2


def test_pooling_options_keep_their_values():
    pooling = PoolingOptions(dimensions=4, normalize=False)
    assert translate_pooling(request(pooling=pooling)) == {"task": "embed", "use_activation": False}


def test_vllm_refuses_options_its_samplers_lack():
    assert ALL_ENGINE_FEATURES - vllm_features(adapters=True, plugin=True) == {
        "beam_edits", "limited_grammar", "page_transfer"
    }  # fmt: skip
    plugin_features = vllm_features(plugin=True) - vllm_features()
    assert plugin_features == {"typical_p", "no_repeat_ngram", "penalty_window", "watermark", "thinking_budget"}
    assert "adapters" not in vllm_features()
    assert vllm_features(adapters=True) - vllm_features(adapters=True, on_cpu=True) == {"prompt_logprobs"}
    assert "prompt_logprobs" in vllm_features(on_cpu=True)
    assert not {"min_p", "logit_bias"} & vllm_features(speculation=True)
    assert BOUNDS["temperature"] == (0, 2)


def test_page_about_engines_lists_features_and_bounds():
    script = runpy.run_path(str(DOCS / "engines.py"))
    assert script["PAGE"].read_text("utf-8") == script["page_text"](), "docs/engines.md is old: make docs"


def test_engine_arguments_follow_from_settings(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 24}))
    settings = VLLMSettings(
        model="m", max_model_len=99, max_batch=3, kv_memory=1 << 20, prefix_cache=False, loads_adapters=True,
        max_rank=0, adapters={"a": str(tmp_path), "b": "gone"},
    )  # fmt: skip
    arguments = engine_arguments(settings)
    assert arguments["max_model_len"] == 99 and arguments["max_num_seqs"] == 3
    assert arguments["kv_cache_memory_bytes"] == 1 << 20 and not arguments["enable_prefix_caching"]
    assert arguments["enable_lora"] and arguments["max_lora_rank"] == 32
    assert arguments["scheduling_policy"] == "priority" and arguments["generation_config"] == "vllm"
    assert "enable_lora" not in engine_arguments(VLLMSettings(model="m"))


# Outputs.


def sequence(**members: Any) -> Sequence:
    wanted = request(**members)
    return Sequence("r", 0, wanted, wanted.token_ids, 2, 0, 0, queued_at=10.0)


def raw_output(**members: Any) -> SimpleNamespace:
    names = ("new_logprobs", "new_prompt_logprobs_tensors", "pooling_output", "finish_reason", "events")
    defaults = dict.fromkeys((*names, "prefill_stats", "stop_reason")) | {"new_token_ids": []}
    return SimpleNamespace(**(defaults | members))


def read(choice: Sequence, **members: Any) -> EngineOutput | None:
    return read_output(choice, raw_output(**members), end_ids={EOS}, cost=COST)


def score_arrays(*rows: list[tuple[int, float]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    ids = np.array([[token for token, _ in row] for row in rows])
    return ids, np.array([[value for _, value in row] for row in rows]), np.array([1] * len(rows))


def test_first_output_reports_cached_tokens_and_queue_time():
    events = [SimpleNamespace(type=1, timestamp=10.0), SimpleNamespace(type=2, timestamp=10.5)]
    stats = SimpleNamespace(num_cached_tokens=1)
    output = read(sequence(), new_token_ids=[7], events=events, prefill_stats=stats)
    assert output == EngineOutput("r", 0, [7], cached_tokens=1, queue_seconds=0.5)


def test_preemptions_add_up():
    choice = sequence()
    assert read(choice, events=[SimpleNamespace(type=3, timestamp=0.0)]) is None
    assert read(choice, new_token_ids=[7]).preemptions == 1


def test_choice_ends_with_its_stop_token():
    output = read(sequence(stop_ids=[9]), new_token_ids=[7, 9], finish_reason=0, stop_reason=9)
    assert output.token_ids == [7, 9] and output.finish_reason == "stop" and output.stop_id == 9


@pytest.mark.parametrize(("stop_ids", "token_ids", "stop_id"), [([], [7], None), ([EOS], [7, EOS], EOS)])
def test_end_of_a_grammar_is_an_end_token_only_if_the_request_stops_at_it(stop_ids, token_ids, stop_id):
    output = read(sequence(grammar="{}", stop_ids=stop_ids), new_token_ids=[7, EOS], finish_reason=0)
    assert output.token_ids == token_ids and output.stop_id == stop_id and output.finish_reason == "stop"


def test_request_without_output_tokens_drops_the_token_that_vllm_draws():
    choice = sequence(max_tokens=0, prompt_logprobs=0)
    choice.prompt_scores.append(None)
    output = read(choice, new_token_ids=[7], finish_reason=1, new_prompt_logprobs_tensors=score_arrays([(6, -1.5)]))
    assert not output.token_ids and output.finish_reason == "length"
    assert output.prompt_scores == [None, TokenScore(-1.5, 1)]


def test_scores_list_the_alternatives_after_the_token():
    arrays = score_arrays([(7, -0.5), (7, -0.5), (8, -np.inf)])
    output = read(sequence(logprobs=2), new_token_ids=[7], new_logprobs=arrays)
    assert output.scores == [TokenScore(-0.5, 1, [7], [-0.5])]  # a grammar forbids the other
    named = read(sequence(logprobs=0, logprob_ids=[7, 8]), new_token_ids=[7], new_logprobs=arrays)
    assert named.scores == [TokenScore(-0.5, 1, [7, 8], [-0.5, -9999.0])]
    arrays = score_arrays([(7, -0.5), (9, -3.0)])
    output = read(sequence(logprobs=0, logprob_ids=[9]), new_token_ids=[7], new_logprobs=arrays)
    assert output.scores == [TokenScore(-0.5, 1, [9], [-3.0])]


def test_tokens_of_a_step_share_its_cost():
    output = read(sequence(token_costs=True), new_token_ids=[7, 8])
    assert output.token_costs == [TokenCost(3, 0.25, 0.125, 2)] * 2


@pytest.mark.parametrize("number", [2, 3])
def test_request_that_vllm_ends_unasked_is_an_error(number):
    output = read(sequence(), finish_reason=number)
    assert output.finish_reason == "error" and output.error.startswith("vLLM ended the request")
    assert "grammar" in read(sequence(grammar="{}"), finish_reason=number).error


def test_vector_is_written_as_float32():
    import torch

    output = read(sequence(pooling=PoolingOptions()), pooling_output=torch.tensor([1.0, -2.0], dtype=torch.bfloat16))
    assert output.vector == np.array([1.0, -2.0], dtype="<f4").tobytes() and output.finish_reason == "stop"


@pytest.mark.parametrize(("vector", "part"), [([0.6, 0.0, 0.8], [1.0, 0.0]), ([3.0, 4.0, 5.0], [3.0, 4.0])])
def test_part_of_a_normalized_vector_is_normalized(vector, part):
    import torch

    output = read(sequence(pooling=PoolingOptions(dimensions=2)), pooling_output=torch.tensor(vector))
    assert output.vector == np.array(part, dtype="<f4").tobytes()


# Grammars.

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}
CALLS = TriggeredTags(triggers=["<f"], tags=[StructuralTag("<f>", SCHEMA, "</f>")])
EMAIL = Grammar("tags", StructuralTag("<m>", Grammar("lark", 'start: /[a-z]+/ "@" /[a-z}]+/'), "</m>"))
GRAMMARS = {
    "schema": (Grammar("json", SCHEMA), '{"a": "x"}', '{"b": 1}'),
    "regex": (Grammar("regex", r"[a-z]{2}@\d"), "ab@1", "ab1"),
    "choice": (Grammar("choice", ["@form", 'a"b']), 'a"b', "ab"),
    "lark": (Grammar("lark", 'start: "@x" /[a-z@]+/'), "@xb@", "b"),
    "ebnf": (Grammar("ebnf", 'root ::= "a" [0-9]+ "@"'), "a12@", "a@"),
    "tags": (Grammar("tags", CALLS), 'so <f>{"a": "x"}</f>', 'so <f>{"b": 1}</f>'),
    "lark within tags": (EMAIL, "<m>ab@c}</m>", "<m>ab</m>"),
}


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizers.byte_level()


def accepts(tokenizer: Any, compiled: str, text: str) -> bool:
    pieces = TokenBytes(tokenizer)
    vocabulary = llguidance.LLTokenizer(llguidance.TokenizerWrapper(pieces))
    matcher = llguidance.LLMatcher(vocabulary, compiled, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    marks = re.split(f"({'|'.join(map(re.escape, tokenizer.marks))})", text)
    ids = [i for part in marks for i in ([tokenizer.marks[part]] if part in tokenizer.marks else pieces(part))]
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("reasons", [False, True])
def test_combined_lark_grammar_accepts_the_same_texts_as_the_list(tokenizer, name, reasons):
    grammar, good, bad = GRAMMARS[name]
    compiler = GrammarCompiler(tokenizer)
    compiled = compiler.compile_grammar(grammar)
    if reasons:
        compiled = compiler.allow_reasoning_before(compiled, ("<think>", "</think>"), starts_inside=False)
    joined = json.dumps({"grammars": [{"lark_grammar": decompile_lark(compiled)}]})
    for text in (good, bad):
        assert accepts(tokenizer, joined, text) == accepts(tokenizer, compiled, text) == (text == good), text
    if reasons:
        assert accepts(tokenizer, joined, f"<think>hm</think>{good}")


@pytest.mark.parametrize("grammar", [Grammar("json", SCHEMA), Grammar("tags", CALLS)])
def test_white_space_of_schemas_is_limited_by_options_that_vllms_llguidance_knows(tokenizer, grammar):
    text = decompile_lark(GrammarCompiler(tokenizer).compile_grammar(grammar))
    assert "whitespace_pattern" not in text and '"whitespace_flexible": false' in text
    joined = json.dumps({"grammars": [{"lark_grammar": text}]})
    frame = "{}" if grammar.kind == "json" else "<f>{}</f>"
    for answer, good in (('{"a":"x"}', True), ('{"a":\n  "x"}', True), ('{"a":\n\n"x"}', False), ('{ "a":"x"}', False)):
        assert accepts(tokenizer, joined, frame.format(answer)) == good


def scored(logprob: float, rank: int) -> SimpleNamespace:
    return SimpleNamespace(logprob=logprob, rank=rank)


def test_outputs_of_the_public_interface_become_engine_core_outputs():
    completion = SimpleNamespace(
        token_ids=[7, 9],
        finish_reason="length",
        logprobs=[{7: scored(-3.0, 9), 5: scored(-0.5, 1)}, {9: scored(-0.25, 1)}],
    )
    prompt_logprobs = [None, {6: scored(-1.0, 2), 8: scored(-0.5, 1)}]
    output = SimpleNamespace(
        outputs=[completion], prompt_logprobs=prompt_logprobs, kv_transfer_params={"remote_port": 1}
    )
    request = EngineRequest("r", [5, 6], 4, logprobs=1, prompt_logprobs=1)
    read = read_generated("c", request, output)
    assert (read.request_id, read.new_token_ids, read.finish_reason) == ("c", [7, 9], 1)
    first, second = read_token_scores(read.new_logprobs, 1)
    assert (first.logprob, first.rank, first.top_ids) == (-3.0, 9, [5])
    assert (second.logprob, second.rank, second.top_ids) == (-0.25, 1, [9])
    (prompt_score,) = read_token_scores(read_prompt_scores(request, output), 1)
    assert (prompt_score.logprob, prompt_score.rank, prompt_score.top_ids) == (-1.0, 2, [8])
    completion.finish_reason = completion.logprobs = None
    assert read_generated("c", request, output).finish_reason is None
