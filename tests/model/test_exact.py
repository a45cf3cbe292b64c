"""The same request gives the same tokens and log-probabilities, bit for bit in bfloat16, regardless of the schedule:
other requests, chunk sizes, prefix hits, preemptions and cancels. The page accounting is checked after every step.
"""

from __future__ import annotations

import functools
import os
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import tiny_models
from support.model_zoo.mlx_files import mlx_folder
from support.mxfp4_files import mxfp4_folder
from support.unpack_int4 import fill_with_nan

from parley.core.engine_loop import EngineLoop
from parley.core.step_budget import FixedBudget
from parley.model.load.loader import load_runner
from parley.model.networks.paged_kv import PagedKV
from parley.model.runner import DecoderRunner
from parley.native import library
from parley.types import EngineOutput, EngineRequest, EngineStats, ParleySettings, SamplingOptions

WIDE = {"hidden_size": 896, "intermediate_size": 1024, "num_attention_heads": 14, "num_key_value_heads": 2}
MODEL_SIZES: dict[str, dict[str, int]] = {
    "tiny": {},
    "wide": WIDE,
    "real": WIDE | {"intermediate_size": 4864, "num_hidden_layers": 4},
}
MODEL_SIZES |= {"int8": MODEL_SIZES["real"], "int4": MODEL_SIZES["real"], "tiny int8": {}}
MADE_FOLDERS = {"mxfp4": mxfp4_folder, "mlx": mlx_folder}
SLOTS = 5
ENOUGH_PAGES = 200  # pages


@functools.cache
def load_network(architecture: str, size: str = "tiny"):
    if size in MADE_FOLDERS:
        folder = MADE_FOLDERS[size]()
    else:
        folder = tiny_models.model_folder(architecture, **MODEL_SIZES[size])
    kind = size.split()[-1] if "int" in size else "none"
    settings = ParleySettings(model=str(folder), kv_memory=1 << 20, quantization=kind)
    runner, info = load_runner(settings, lambda stage, fraction: None)
    return runner.network, info


def make_runner(architecture: str, blocks: int, size: str = "tiny", int8: bool = False) -> DecoderRunner:
    model, info = load_network(architecture, size)
    import torch

    pages = PagedKV(model.kv_layers, blocks, torch.bfloat16, int8=int8)
    # Pages start with the NaN of a previous owner: reading one that was not cleared breaks the output.
    for i in range(len(model.kv_layers)):
        fill_with_nan(pages.layer_pool(i))
    runner = DecoderRunner(model, pages, max_model_len=info.max_model_len, slots=SLOTS, snapshot_slots=2 * SLOTS)
    if runner.states is not None:
        for layer in runner.states.layers:
            layer.fill_(float("nan"))
    return runner


class RandomBudget(FixedBudget):
    """A step budget that changes at every step."""

    def __init__(self, seed: int, max_size: int):
        super().__init__(0)
        self.random, self.max_size = random.Random(seed), max_size

    def begin_step(self, decodes: int) -> None:
        self.remaining = self.random.randint(1, self.max_size)


class WholePromptBudget(FixedBudget):
    """A step budget that computes every prompt in one chunk."""

    def __init__(self) -> None:
        super().__init__(1 << 20)


class KnownOutputProposer:
    """A proposer that knows the outputs of some requests, by prompt and seed, and proposes 80 % of the tokens right."""

    def __init__(self, seed: int, known: dict[tuple[tuple[int, ...], int], list[int]]):
        self.random, self.known = random.Random(seed), known

    def propose_drafts(self, draft_limits) -> list[list[int]]:
        return [self._mostly_right(sequence, length) for sequence, length in draft_limits]

    def _mostly_right(self, sequence, length: int) -> list[int]:
        output = self.known.get((tuple(sequence.request.token_ids), sequence.seed), [])
        right = output[sequence.output_length : sequence.output_length + length] or [7] * length
        return [
            token_id if self.random.random() < 0.8 else self.random.randrange(-2, tiny_models.VOCAB + 2)
            for token_id in right
        ]

    def forget_sequence(self, sequence) -> None:
        pass


class CheckedLoop:
    """A loop that collects outputs by request and choice, and checks the page accounting after every step."""

    def __init__(self, runner: DecoderRunner, pace, prefix_cache: bool, proposer=None):
        self.outputs: dict[tuple[str, int], list[EngineOutput]] = {}
        options = ParleySettings(model="m", max_batch=SLOTS, prefix_cache=prefix_cache)
        runner.proposer = proposer
        self.loop = EngineLoop(runner, options, self._collect, pace)
        if proposer is not None:  # propose regardless of the expected gain
            self.loop.speculation.draft_length = lambda sequence: options.speculate_tokens
            self.loop.speculation.costs.best_draft_count = lambda rows, chances: len(chances)

    def _collect(self, outputs: list[EngineOutput], stats) -> None:
        for output in outputs:
            self.outputs.setdefault((output.id, output.index), []).append(output)

    def step(self) -> None:
        self.loop.step()
        self.loop.check_invariants()

    def finish(self) -> None:
        while not self.loop.is_idle:
            self.step()
        assert self.loop.pool.used_count == 0

    def choice_result(self, request_id: str, index: int = 0):
        """Tokens, their scores, the finish reason, the error and the prompt's scores of one choice."""
        outputs = self.outputs[request_id, index]
        assert [output.finish_reason for output in outputs].count(None) == len(outputs) - 1 and outputs[
            -1
        ].finish_reason
        tokens = [token for output in outputs for token in output.token_ids]
        scores = [score for output in outputs for score in output.scores or []]
        return tokens, scores, outputs[-1].finish_reason, outputs[-1].error, outputs[0].prompt_scores


def family_prompt(family: int, length: int) -> list[int]:
    """Families share their first 40 tokens, so that hits end in the middle of a page as well as at its edge."""
    start, family_random = random.Random(99), random.Random(family)
    ids = [start.randrange(3, tiny_models.VOCAB) for _ in range(40)] + [
        family_random.randrange(3, tiny_models.VOCAB) for _ in range(200)
    ]
    return ids[:length]


SAMPLINGS = [
    SamplingOptions(temperature=0.0),
    SamplingOptions(),
    SamplingOptions(temperature=0.8, top_p=0.9, min_p=0.01),
    SamplingOptions(temperature=1.3, top_k=20, repetition_penalty=1.2, frequency_penalty=0.4, presence_penalty=0.3),
    SamplingOptions(
        temperature=0.7, repetition_penalty=1.4, frequency_penalty=0.3, presence_penalty=0.2, penalty_window=9
    ),
    SamplingOptions(temperature=0.0, logit_bias={7: 3.0, 9: -100.0}, repetition_penalty=1.5),
    SamplingOptions(allowed=list(range(3, 50)), banned=[[7], [8, 9]], no_repeat_ngram=2, watermark=True),
]


def make_request(
    request_id: str,
    family: int,
    length: int,
    tokens: int,
    sampling_index: int,
    seed: int,
    n: int,
    scored: bool,
    min_tokens: int = 2,
) -> EngineRequest:
    return EngineRequest(
        request_id,
        family_prompt(family, length),
        tokens,
        SAMPLINGS[sampling_index],
        seed,
        n=n,
        min_tokens=min(min_tokens, tokens),
        stop_ids=[2, 11],
        logprobs=2 if sampling_index % 2 else 0,
        prompt_logprobs=1 if scored else -1,
        priority=1 - n,
    )


@functools.cache
def result_alone(
    architecture: str,
    family: int,
    length: int,
    tokens: int,
    sampling_index: int,
    seed: int,
    scored: bool,
    size: str = "tiny",
    int8: bool = False,
    min_tokens: int = 2,
):
    """The result of a request that runs alone: in one chunk, with enough pages and without a prefix cache."""
    engine = CheckedLoop(make_runner(architecture, ENOUGH_PAGES, size, int8), WholePromptBudget(), prefix_cache=False)
    engine.loop.add_request(make_request("a", family, length, tokens, sampling_index, seed, 1, scored, min_tokens))
    engine.finish()
    return engine.choice_result("a")


REQUEST = st.tuples(
    st.integers(0, 2),  # family
    st.sampled_from([1, 2, 15, 16, 17, 33, 40, 41, 48, 64, 90]),  # length of the prompt
    st.sampled_from([1, 3, 17, 24]),  # tokens to generate
    st.integers(0, len(SAMPLINGS) - 1),
    st.integers(0, 3),  # seed
    st.sampled_from([1, 1, 1, 3]),  # n
    st.booleans(),  # prompt scores
    st.integers(0, 12),  # arrives at this step
    st.sampled_from([None, None, None, None, 3, 9]),  # is cancelled after this number of steps
)


def check_schedule(
    architecture, requests, blocks, max_step_tokens, cache, seed, int8=False, size="tiny", drafts=False, min_tokens=2
) -> EngineStats:
    """Run a schedule, compare each request that was not cancelled with the same request alone, and return the stats."""
    expected_results = {
        (i, index): result_alone(
            architecture, family, length, tokens, sampling_index, draw + index, scored, size, int8, min_tokens
        )
        for i, (family, length, tokens, sampling_index, draw, n, scored, *_) in enumerate(requests)
        for index in range(n)
    }
    proposer = None
    if drafts:
        known_outputs = {
            (tuple(family_prompt(requests[i][0], requests[i][1])), requests[i][4] + index): expected[0]
            for (i, index), expected in expected_results.items()
        }
        proposer = KnownOutputProposer(seed, known_outputs)
    engine = CheckedLoop(
        make_runner(architecture, blocks, size, int8), RandomBudget(seed, max_step_tokens), cache, proposer
    )
    events: dict[int, list] = {}
    for i, (*_, arrives, leaves) in enumerate(requests):
        events.setdefault(arrives, []).append((i, True))
        if leaves is not None:
            events.setdefault(arrives + leaves, []).append((i, False))
    for step in range(max(events) + 1):
        for i, comes in events.get(step, []):
            family, length, tokens, sampling_index, draw, n, scored, *_ = requests[i]
            if comes:
                engine.loop.add_request(
                    make_request(str(i), family, length, tokens, sampling_index, draw, n, scored, min_tokens)
                )
            else:
                engine.loop.cancel_request(str(i))
        engine.step()
    engine.finish()
    for i, (*_, n, _, _, leaves) in enumerate(requests):
        for index in range(n):
            expected = expected_results[i, index]
            if leaves is None:
                actual = engine.choice_result(str(i), index)
                assert actual[:4] == expected[:4]
                if index == 0:
                    assert actual[4] == expected[4]
            else:  # outputs before the cancel are a prefix of the full output
                outputs = engine.outputs.get((str(i), index), [])
                actual = [token for output in outputs for token in output.token_ids]
                assert actual == expected[0][: len(actual)]
    return engine.loop.collect_stats()


@pytest.mark.parametrize(
    "architecture", ["qwen3", "mistral", "qwen2", "gemma3", "gemma4 with inputs of layers", "mixtral", "lfm2"]
)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    requests=st.lists(REQUEST, min_size=1, max_size=7),
    blocks=st.integers(8, 24),
    max_size=st.sampled_from([1, 7, 16, 50, 500]),
    cache=st.booleans(),
    seed=st.integers(0, 1 << 20),
    drafts=st.booleans(),
)
def test_any_schedule_matches_each_request_alone(architecture, requests, blocks, max_size, cache, seed, drafts):
    check_schedule(architecture, requests, blocks, max_size, cache, seed, drafts=drafts)


@pytest.mark.parametrize(
    ("architecture", "int8", "size"),
    [
        ("qwen3", False, "tiny"),
        ("gemma3", True, "tiny"),
        ("mistral", False, "tiny int8"),
        ("mixtral", False, "tiny"),
        ("qwen3_5", False, "tiny"),
    ],
)
def test_draft_tokens_save_steps_without_changing_outputs(architecture, int8, size):
    """Mostly correct drafts, at any temperature, with logits processors, scores, several choices and too few pages."""
    crowd = [(i % 3, 30 + i, 24, i % len(SAMPLINGS), i, 1 + (i == 3), i % 2 == 0, i, None) for i in range(7)]
    for cache in (True, False):
        plain = check_schedule(architecture, crowd, 9, 60, cache, 1, int8, size)
        drafted = check_schedule(architecture, crowd, 9, 60, cache, 1, int8, size, drafts=True)
        assert drafted.steps < 0.6 * plain.steps and drafted.preemptions
        assert drafted.draft_tokens > sum(drafted.draft_accepted) > drafted.drafts / 2


PREEMPTED = [
    ("qwen3", False, "tiny"),
    ("qwen3", True, "tiny"),
    ("gemma3", True, "tiny"),
    ("qwen3", False, "tiny int8"),
    ("mistral", True, "tiny int8"),
    ("qwen3", False, "mlx"),
    ("deepseek_v3", False, "tiny"),
    ("deepseek_v32", False, "tiny"),
    ("lfm2", False, "tiny"),
    ("nemotron_h", False, "tiny"),
    ("gemma4 with inputs of layers", True, "tiny"),
]
PREEMPTED_BY_NIGHT = [
    ("gemma3n", False, "tiny"),
    ("gemma3n of three streams", True, "tiny int8"),
    ("gemma4", False, "tiny int8"),
    ("gemma4 of experts", False, "tiny"),
    ("deepseek_v2", True, "tiny int8"),
    ("deepseek_v2_lite", True, "tiny"),
    ("glm_moe_dsa", True, "tiny int8"),
    ("minimax_m3", False, "tiny"),
    ("axk2", True, "tiny int8"),
    ("hy4", False, "tiny"),
    ("deepseek_v4", False, "tiny"),
    ("deepseek_v4", True, "tiny int8"),
    ("minimax_m3", True, "tiny int8"),
    ("minicpm3", False, "tiny"),
    ("gpt_oss", False, "tiny"),
    ("gpt_oss", True, "tiny int8"),
    ("gpt_oss", False, "mxfp4"),
    ("minimax_m2", False, "tiny"),
    ("lfm2_moe", True, "tiny int8"),
    ("qwen3_next", False, "tiny"),
    ("qwen3_next", True, "tiny int8"),
    ("qwen3_5", False, "tiny"),
    ("granite_hybrid", True, "tiny int8"),
    ("bamba", False, "tiny"),
    ("falcon_h1", False, "tiny"),
    ("mamba2", False, "tiny"),
    ("mamba", False, "tiny int8"),
    ("falcon_mamba", False, "tiny"),
    ("jamba", True, "tiny"),
    ("lfm3", False, "tiny"),
    ("olmo_hybrid", True, "tiny int8"),
    ("mistral4", False, "tiny"),
]


@pytest.mark.parametrize(
    ("architecture", "int8", "size"), PREEMPTED + PREEMPTED_BY_NIGHT * bool(os.environ.get("PARLEY_NIGHTLY"))
)
def test_preemption_in_a_small_pool_does_not_change_outputs(architecture, int8, size):
    """Guards against recomputation that restores a random state, a penalty or a KV page wrongly."""
    crowd = [(i % 3, 60 + i, 24, i % len(SAMPLINGS), i, 1, i % 2 == 0, 0, None) for i in range(6)]
    for cache in (True, False):
        # No request ends early, which would leave its pages to the others.
        assert check_schedule(architecture, crowd, 9, 500, cache, 1, int8, size, min_tokens=24).preemptions > 3


@pytest.mark.parametrize(("cache", "drafts"), [(True, False), (False, False), (True, True)])
def test_preemption_at_every_step_keeps_outputs_bit_for_bit(cache, drafts):
    request_fields = (1, 45, 20, 2, 5, True)
    family, length, tokens, sampling_index, seed, scored = request_fields
    expected = result_alone("qwen3", *request_fields)
    step = 0
    while True:
        proposer = (
            KnownOutputProposer(step, {(tuple(family_prompt(family, length)), seed): expected[0]}) if drafts else None
        )
        engine = CheckedLoop(make_runner("qwen3", 20), RandomBudget(step, 20), cache, proposer)
        engine.loop.add_request(make_request("a", family, length, tokens, sampling_index, seed, 1, scored))
        for _ in range(step):
            engine.step()
        if engine.loop.is_idle:
            break
        if engine.loop.scheduler.running:
            engine.loop.scheduler.preempt_last()
        engine.finish()
        assert engine.choice_result("a") == expected
        step += 1
    assert step > (8 if drafts else 20)


def test_prefix_hit_matches_a_miss_even_after_eviction():
    request_fields = (2, 90, 10, 1, 3, False)
    expected = result_alone("qwen3", *request_fields)
    engine = CheckedLoop(make_runner("qwen3", 12), WholePromptBudget(), True)

    def cached_tokens(request_id: str) -> int:
        engine.loop.add_request(make_request(request_id, *request_fields[:5], 1, False))
        engine.finish()
        assert engine.choice_result(request_id) == expected
        return engine.outputs[request_id, 0][0].cached_tokens

    assert cached_tokens("first") == 0
    assert cached_tokens("second") == 80
    engine.loop.add_request(EngineRequest("other", list(range(3, 180)), 3))  # takes all pages
    engine.finish()
    assert cached_tokens("third") == 0


def test_cache_salts_do_not_share_prefix_pages():
    """Guards against a timing attack: a tenant must not see from cache hits that another one sent the same prompt."""
    engine = CheckedLoop(make_runner("qwen3", 40), WholePromptBudget(), True)
    for request_id, salt in (("a", "x"), ("b", "y"), ("c", "x")):
        engine.loop.add_request(
            EngineRequest(request_id, family_prompt(0, 64), 2, SamplingOptions(temperature=0.0), cache_salt=salt)
        )
        engine.finish()
    assert [engine.outputs[request_id, 0][0].cached_tokens for request_id in "abc"] == [0, 0, 48]


@pytest.mark.parametrize("size", ["wide", "real", "int8", "int4"])
def test_n_choices_match_n_single_requests_at_real_width(size):
    """At the width of real layers, where torch's own linear layers change a row with the batch (above 1,024 inputs)."""
    if size in ("real", "int4") and library.load_kernels() is None:  # sums of int8 are exact with any kernel
        pytest.skip("needs the compiled kernels")
    engine = CheckedLoop(make_runner("qwen2", 80, size), RandomBudget(3, 60), True)
    for i in range(3):
        engine.loop.add_request(make_request(str(i), i, 50 + 7 * i, 8, 2, 10 * i, 3, False))
    engine.finish()
    for i in range(3):
        for index in range(3):
            expected = result_alone("qwen2", i, 50 + 7 * i, 8, 2, 10 * i + index, False, size=size)
            assert engine.choice_result(str(i), index) == expected
