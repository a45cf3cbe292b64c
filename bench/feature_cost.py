"""Part of ``make bench``: the cost of each generation feature per step, in percent, at batch 1, 8 and 32.

    python bench/feature_cost.py [FOLDER] [--batches 1,8,32] [--rounds 6] [--steps 4] [--only NAME …]

It runs in one process, with weights of the 0.5B shape. For each feature, a group of sequences with it and a group
without it take turns, a few steps each; the result is the median of the ratios of adjacent turns. Grammars run with a
vocabulary as large as those of real models (``large_vocabulary.py``), greedily and at temperature 1. The API process
matches stop strings, so their cost is its CPU time per token, as a share of the plain step. The table is written to
``.peers/features.md`` for ``performance_page.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, process_time, thread_time
from typing import Any

import large_vocabulary
import torch
from install_peers import MODELS, ROOT
from performance_page import markdown_table
from profile_engine import BenchEngine
from random_model import write_model
from safetensors.torch import save_file

from parley import demo
from parley.core.sequence import Sequence
from parley.model.sampling.grammar_mask import GrammarCache
from parley.text.answer_choice import AnswerChoice
from parley.text.grammar.compiler import GrammarCompiler
from parley.text.prepared_prompt import PreparedPrompt
from parley.text.tokens.stop_strings import StopAutomaton
from parley.text.tokens.tokenizer import Tokenizer
from parley.types import (
    BeamOptions,
    EngineOutput,
    EngineRequest,
    Grammar,
    ParleySettings,
    Request,
    SamplingOptions,
    StopConditions,
    TextPrompt,
)
from parley.worker.process import LIBRARY_SETTINGS

PROMPT = 33  # tokens
LONG = 100_000  # max_tokens: no sequence ends by itself
KNOWN = 4000  # prompts use token ids below this
ADAPTERS = 8
RANKS = (8, 16)
TOOL = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "unit": {"enum": ["celsius", "fahrenheit"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
            "at": {"type": "string", "format": "date-time"},
        },
        "required": ["name", "unit", "days", "at"],
        "additionalProperties": False,
    },
}
REGEX = r"([A-Z][a-z]{1,9} [0-9]{1,4}\. ){1000}"
DRAW = {"temperature": 1.0}


@dataclass(frozen=True)
class Feature:
    """One feature. ``sampling`` and ``request``: its settings. ``base``: settings that plain sequences have as well."""

    name: str
    goal: float | None = None  # percent
    sampling: dict[str, Any] | None = None
    request: dict[str, Any] | None = None
    base: dict[str, Any] | None = None
    rank: int = 0  # if set, each sequence has one of ``ADAPTERS`` adapters of this rank


def write_adapter(folder: Path, model: Path, seed: int, rank: int) -> str:
    """Write an adapter with random weights for all linear layers of a model. Return its folder."""
    config = json.loads((model / "config.json").read_text("utf-8"))
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    narrow = hidden // heads * config["num_key_value_heads"]
    shapes = {  # inputs, outputs
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (hidden, narrow),
        "self_attn.v_proj": (hidden, narrow), "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (hidden, inner), "mlp.up_proj": (hidden, inner), "mlp.down_proj": (inner, hidden),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (in_features, out_features) in shapes.items():
            stem = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(rank, in_features, generator=generator).bfloat16() * 0.02
            tensors[f"{stem}.lora_B.weight"] = torch.randn(out_features, rank, generator=generator).bfloat16() * 0.02
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    names = [name.rpartition(".")[2] for name in shapes]
    adapter_config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": names, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(adapter_config), "utf-8")
    return str(folder)


def list_features(compiler: GrammarCompiler) -> list[Feature]:
    """Return the features to measure, with the goals in percent."""
    draw = random.Random(0)
    words = [[draw.randrange(KNOWN) for _ in range(draw.randint(1, 4))] for _ in range(100)]
    biased = {draw.randrange(KNOWN): draw.uniform(-5, 5) for _ in range(100)}
    penalties = {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5}
    json_schema = compiler.compile_grammar(Grammar("json", TOOL))
    regex = compiler.compile_grammar(Grammar("regex", REGEX))
    return [
        Feature("JSON schema", 5, request={"grammar": json_schema}),
        Feature("JSON schema, temperature 1", 5, request={"grammar": json_schema}, base=DRAW),
        Feature("regular expression", 5, request={"grammar": regex}),
        Feature("regular expression, temperature 1", 5, request={"grammar": regex}, base=DRAW),
        *(Feature(f"LoRA, {ADAPTERS} adapters of rank {rank}", 15, rank=rank) for rank in RANKS),
        Feature("log-probabilities of 20", 10, request={"logprobs": 20}),
        Feature("repetition, presence and frequency penalty", 5, sampling=penalties),
        Feature("logit_bias of 100 tokens", sampling={"logit_bias": biased}),
        Feature("100 bad words", sampling={"banned": words}),
        Feature("no_repeat_ngram of 3", sampling={"no_repeat_ngram": 3}),
        Feature("watermark", sampling={"watermark": True}),
        Feature("temperature 1, over greedy", sampling=DRAW),
        Feature("min_p of 0.05", sampling={"min_p": 0.05}, base=DRAW),
        Feature("top_k of 50 and top_p of 0.9", sampling={"top_k": 50, "top_p": 0.9}, base=DRAW),
        Feature("typical_p of 0.9", sampling={"typical_p": 0.9}, base=DRAW),
    ]


class FeatureBench:
    """An engine whose running sequences are swapped between steps."""

    def __init__(self, folder: Path, words: Path, adapters: dict[str, str], threads: int, clock: Callable[[], float]):
        settings = ParleySettings(
            model=str(folder), kv_memory=1 << 30, threads=threads, speculate="ngram", adapters=adapters,
            max_adapters=len(adapters), max_rank=max(RANKS),
        )  # fmt: skip
        self.engine = BenchEngine(settings)
        sampler = self.engine.runner.sampler
        sampler.grammars = GrammarCache(words, sampler.vocab_size)
        self.loop = self.engine.loop
        self.speculation, self.loop.speculation = self.loop.speculation, None
        self.loop.scheduler.speculation = None
        self._request_count = 0
        self._clock = clock

    def prompt(self, number: int) -> list[int]:
        """Return prompt ``number``. Every group uses the same ones, so they are prefilled once."""
        draw = random.Random(number)
        return [draw.randrange(KNOWN) for _ in range(PROMPT)]

    def make_request(self, number: int, sampling: dict[str, Any], **members: Any) -> EngineRequest:
        """Return a request with these sampling settings and members."""
        self._request_count += 1
        request_members = {"max_tokens": LONG, **members}
        tokens = request_members.pop("token_ids", None) or self.prompt(number)
        return EngineRequest(
            f"{self._request_count:032x}-0",
            tokens,
            sampling=SamplingOptions(**{"temperature": 0.0, **sampling}),
            **request_members,
        )

    def start_group(self, requests: list[EngineRequest]) -> list[Sequence]:
        """Start sequences for these requests, generate a few tokens each, and return them, not running."""
        scheduler = self.loop.scheduler
        scheduler.running = []
        for request in requests:
            self.loop.add_request(request)
        while self.loop.collect_stats().waiting or any(sequence.output_length < 3 for sequence in scheduler.running):
            self.loop.step()
        assert len(scheduler.running) == len(requests), "some were refused"
        return list(scheduler.running)

    def time_step(self, group: list[Sequence]) -> float:
        """Return the seconds of a step of this group."""
        self.loop.scheduler.running = group
        began = self._clock()
        self.loop.step()
        return self._clock() - began

    def cancel_groups(self, *groups: list[Sequence]) -> None:
        """Cancel all sequences of the groups."""
        for sequence in [sequence for group in groups for sequence in group]:
            self.loop.scheduler.running = [sequence]
            self.loop.cancel_request(sequence.request_id, -1)
        self.loop.scheduler.running = []
        self.loop.step()

    def step_ratio(self, plain: list[Sequence], other: list[Sequence], rounds: int, steps: int) -> float:
        """Return the time of a step of ``other`` over that of ``plain``."""
        ratios = []
        for _ in range(rounds):
            seconds = []
            for group in (plain, other):
                self.time_step(group)  # not timed: the other group has replaced the contents of the caches
                seconds.append(median(self.time_step(group) for _ in range(steps)))
            ratios.append(seconds[1] / seconds[0])
        return median(ratios)

    def time_requests(self, requests: list[EngineRequest]) -> float:
        """Return the seconds from the first step after the prompts to the end of the last request."""
        for request in requests:
            self.loop.add_request(request)
        while self.loop.collect_stats().waiting or any(s.output_length < 1 for s in self.loop.scheduler.running):
            self.loop.step()
        began = self._clock()
        while self.loop.step():
            pass
        return self._clock() - began


def feature_costs(bench: FeatureBench, feature: Feature, batches: list[int], rounds: int, steps: int) -> list[float]:
    """Return the cost in percent of a plain step, for each batch size."""
    costs = []
    for batch in batches:
        base = feature.base or {}
        plain = bench.start_group([bench.make_request(k, base) for k in range(batch)])
        sampling, request = {**base, **(feature.sampling or {})}, feature.request or {}
        names = [f"{feature.rank}/{k % ADAPTERS}" if feature.rank else "" for k in range(batch)]
        other = bench.start_group(
            [bench.make_request(k, sampling, **request, adapter=name) for k, name in enumerate(names)]
        )
        costs.append(100 * (bench.step_ratio(plain, other, rounds, steps) - 1))
        bench.cancel_groups(plain, other)
    return costs


def fork_costs(
    bench: FeatureBench, make: Callable[[int], list[EngineRequest]], batches: list[int], tokens: int
) -> list[float]:
    """Return the percentage that several choices of one prompt take more than as many prompts, for each batch size."""
    costs = []
    for batch in batches:
        ratios = []
        for _ in range(3):
            alone = bench.time_requests([bench.make_request(k, {}, max_tokens=tokens) for k in range(batch)])
            ratios.append(bench.time_requests(make(batch)) / alone)
        costs.append(100 * (median(ratios) - 1))
    return costs


def stop_string_seconds(tokenizer: Tokenizer, strings: int) -> float:
    """Return the CPU seconds per token of an answer that is searched for this many stop strings."""
    draw = random.Random(1)
    stop_strings = ["".join(draw.choice("abcdefghijklmnop \n") for _ in range(12)) for _ in range(strings)]
    ids = [draw.randrange(KNOWN) for _ in range(4000)]
    request = Request(id="0", model="", prompts=[TextPrompt("a")], stop_conditions=StopConditions(strings=stop_strings))
    stops = StopAutomaton(stop_strings)
    seconds = []
    for _ in range(5):
        choice = AnswerChoice(request, 0, tokenizer, PreparedPrompt([1]), stops)
        began = thread_time()
        for token_id in ids:
            choice.push_output(EngineOutput("0", 0, [token_id]))
        seconds.append((thread_time() - began) / len(ids))
    return min(seconds)


def stop_string_costs(bench: FeatureBench, tokenizer: Tokenizer, batches: list[int]) -> list[float]:
    """Return the API process's cost of 1,024 stop strings over one, in percent of a plain step."""
    more = max(0.0, stop_string_seconds(tokenizer, 1024) - stop_string_seconds(tokenizer, 1))
    costs = []
    for batch in batches:
        group = bench.start_group([bench.make_request(k, {}) for k in range(batch)])
        costs.append(100 * batch * more / median(bench.time_step(group) for _ in range(8)))
        bench.cancel_groups(group)
    return costs


def speculation_gain(bench: FeatureBench, sampling: dict[str, Any], tokens: int, batch: int) -> float:
    """Return the tokens per second with n-gram speculation over those without."""
    ratios = []
    for turn in range(4):
        seconds = []
        for speculation in (None, bench.speculation):
            bench.loop.speculation = bench.loop.scheduler.speculation = speculation
            numbers = range(turn * batch, (turn + 1) * batch)
            seconds.append(
                bench.time_requests([bench.make_request(k, sampling, max_tokens=tokens, seed=k) for k in numbers])
            )
        ratios.append(seconds[0] / seconds[1])
    bench.loop.speculation = bench.loop.scheduler.speculation = None
    return median(ratios)


def table_rows(bench: FeatureBench, compiler: GrammarCompiler, options: argparse.Namespace) -> Iterator[list[str]]:
    """Yield the rows of the table."""
    tokenizer = Tokenizer.from_folder(demo.model_folder())
    batches = [int(size) for size in options.batches.split(",")]

    def format_row(name: str, values: list[float], goal: float | None) -> list[str]:
        worst = max(values)
        verdict = "-" if goal is None else "yes" if worst <= goal else "**no**"
        percentages = [f"{value:.1f} %" for value in values]
        return [name, *percentages, "-" if goal is None else f"≤ {goal:g} %", verdict]

    def is_selected(name: str) -> bool:
        return not options.only or any(part in name for part in options.only)

    for feature in list_features(compiler):
        if is_selected(feature.name):
            yield format_row(
                feature.name, feature_costs(bench, feature, batches, options.rounds, options.steps), feature.goal
            )
    if is_selected("stop strings"):
        yield format_row("1,024 stop strings over one, API process", stop_string_costs(bench, tokenizer, batches), 1)
    several = [batch for batch in batches if batch > 1]
    blank = ["-"] * (len(batches) - len(several))
    for name, make in (
        ("n choices of one prompt, over as many prompts", lambda n: [bench.make_request(0, DRAW, max_tokens=24, n=n)]),
        ("beams of one prompt, over as many prompts",
         lambda n: [bench.make_request(0, {}, max_tokens=24, beam=BeamOptions(n), n=1)]),
    ):  # fmt: skip
        if is_selected(name):
            row = format_row(name, fork_costs(bench, make, several, 24), None)
            yield [row[0], *blank, *row[1:]]
    # With a single allowed token the text repeats itself. Drawn from nearly even probabilities it does not. Drawn from
    # a few tokens, pairs recur but continue differently.
    for name, sampling, goal, counted in (
        ("n-gram speculation, text that repeats", {"allowed": [7]}, 1.8, batches[:1]),
        ("n-gram speculation, text that does not", DRAW, 0.97, batches),
        ("n-gram speculation, text that hardly does", {**DRAW, "allowed": list(range(16))}, 0.97, batches),
    ):
        if is_selected(name):
            gains = {batch: speculation_gain(bench, sampling, 64, batch) for batch in batches}
            verdict = "yes" if min(gains[batch] for batch in counted) >= goal else "**no**"
            where = "" if counted == batches else f", batch {counted[0]}"
            yield [name, *(f"{value:.2f} times" for value in gains.values()), f"≥ {goal} tokens/s{where}", verdict]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=MODELS / "0.5b")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument(
        "--cpu",
        action="store_true",
        help="CPU time, with one thread: for shared machines",
    )
    parser.add_argument("--only", nargs="*", default=[], help="parts of names")
    options = parser.parse_args()
    missing = {name: value for name, value in LIBRARY_SETTINGS.items() if name not in os.environ}
    if missing:  # as in the worker process; libraries read these variables when they are loaded
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **missing})
    if not (options.folder / "config.json").exists():
        write_model(options.folder)
    if options.cpu:
        options.threads = 1
    with TemporaryDirectory() as folder:
        root = Path(folder)
        names = {f"{rank}/{k}": rank for rank in RANKS for k in range(ADAPTERS)}
        adapters = {
            name: write_adapter(root / name, options.folder, k, rank) for k, (name, rank) in enumerate(names.items())
        }
        large_vocabulary.write_tokenizer(root)
        clock = process_time if options.cpu else perf_counter
        bench = FeatureBench(options.folder, root, adapters, options.threads, clock)
        return measure_features(bench, GrammarCompiler(Tokenizer.from_folder(root)), options)


def measure_features(bench: FeatureBench, compiler: GrammarCompiler, options: argparse.Namespace) -> int:
    """Print the table and write it to a file."""
    head = ["Feature", *(f"batch {size}" for size in options.batches.split(",")), "Goal", "Met"]
    rows = []
    for row in table_rows(bench, compiler, options):
        print(json.dumps(row, ensure_ascii=False), file=sys.stderr, flush=True)
        rows.append(row)
    text = (
        f"More time per step than a plain one of the 0.5B shape, {options.threads} "
        f"threads.\n\n{markdown_table(head, rows)}\n"
    )
    print(text)
    if not options.only:
        ROOT.mkdir(exist_ok=True)
        (ROOT / "features.md").write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
