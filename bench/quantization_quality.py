"""Measures the quality loss of quantized weights and KV against bf16. Appends to ``.peers/results.jsonl``.

The built-in model answers its held-out evaluation (``parley/demo/evaluate.py``): an answer is exact if each of its
tokens has rank 1. Many stories are right, so they are generated and matched with their grammar. Both models, the
built-in one and one of random weights, generate greedily; then tokens that bf16 chose are forced on both, to compare
their log-probabilities. With random weights no token is much more probable than the next, so agreement means little
there, but the differences of log-probabilities do.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from install_peers import MODELS, ROOT
from load_mixes import word_tokens
from results_file import append_record
from tokenizers import Tokenizer

from parley import demo
from parley.demo import corpus
from parley.demo.evaluate import STORY_TOKENS, is_story, prompt_and_answer
from parley.demo.tokenizer import END_OF_TURN
from parley.llm import LLM

BUILT_IN, SHAPE = "built-in", "0.5B shape, random weights"
VARIANTS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "int8 KV cache": {"kv_dtype": "int8"},
    "int8 and int8 KV cache": {"quantization": "int8", "kv_dtype": "int8"},
}
GREEDY = 64  # tokens
Ids = list[int]


@dataclass
class Case:
    """A prompt and its expected answer. ``story``: other answers may be right as well."""

    prompt: Ids
    wanted: Ids
    story: str = ""


@dataclass
class VariantResult:
    """A variant's results: greedy tokens of each case, log-probabilities of forced tokens, number of right answers."""

    greedy: list[Ids]
    logprobs: list[list[float]]
    right: int


def held_out(count: int) -> list[Case]:
    """Return ``count`` questions of every task of the built-in model."""
    tokenizer = Tokenizer.from_file(str(demo.model_folder() / "tokenizer.json"))
    cases = []
    for task in corpus.TASKS:
        for sample in corpus.draw_held_out(task, count):
            prompt, answer = prompt_and_answer(sample)
            story = answer.removesuffix(END_OF_TURN) if task == "story" else ""
            cases.append(Case(tokenizer.encode(prompt).ids, tokenizer.encode(answer).ids, story))
    return cases


def random_cases(count: int) -> list[Case]:
    """Return random prompts without an expected answer."""
    pool, rng = word_tokens(MODELS / "0.5b"), random.Random("quality")
    return [Case(rng.choices(pool, k=64), []) for _ in range(count)]


def run_variant(llm: LLM, cases: Sequence[Case], forced: Sequence[Ids]) -> VariantResult:
    """Generate greedy continuations, and score the forced tokens after each prompt."""
    prompts = [case.prompt for case in cases]
    answers = llm.generate(prompts, max_tokens=GREEDY, temperature=0, logprobs=0)
    greedy = [[token.id for token in answer.completions[0].tokens] for answer in answers]
    forced = forced or [case.wanted or ids for case, ids in zip(cases, greedy, strict=True)]
    texts = [prompt + ids for prompt, ids in zip(prompts, forced, strict=True)]
    scored = [
        answer.prompt[len(prompt) :]
        for answer, prompt in zip(llm.generate(texts, max_tokens=1, prompt_logprobs=0), prompts, strict=True)
    ]
    right = sum(
        all(token.rank == 1 for token in tokens)
        for case, tokens in zip(cases, scored, strict=True)
        if case.wanted and not case.story
    )
    for case in cases:
        if case.story:
            story = llm.generate(case.prompt, max_tokens=STORY_TOKENS, temperature=0).completions[0]
            right += story.finish == "stop" and is_story(story.text, case.story)
    return VariantResult(greedy, [[token.logprob for token in tokens] for tokens in scored], right)


def compare_results(before: VariantResult, after: VariantResult) -> dict[str, float]:
    """Return the shares of equal greedy tokens, overall and before the first difference, and logprob differences."""
    pairs = list(zip(before.greedy, after.greedy, strict=True))
    tokens = sum(len(a) for a, _ in pairs)
    same = sum(x == y for a, b in pairs for x, y in zip(a, b, strict=False))
    prefix = sum(
        next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(map(len, (a, b)))) for a, b in pairs
    )
    gaps = [abs(x - y) for a, b in zip(before.logprobs, after.logprobs, strict=True) for x, y in zip(a, b, strict=True)]
    return {
        "tokens": tokens,
        "agreement": same / tokens,
        "prefix": prefix / tokens,
        "difference": sum(gaps) / len(gaps),
        "worst": max(gaps),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--questions", type=int, default=10, help="of each task of the built-in model")
    parser.add_argument("--prompts", type=int, default=16, help="for the random model")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--out", type=Path, default=ROOT / "results.jsonl")
    options = parser.parse_args()
    failed = 0
    for model, folder, cases in (
        (BUILT_IN, None, held_out(options.questions)),
        (SHAPE, str(MODELS / "0.5b"), random_cases(options.prompts)),
    ):
        base: VariantResult | None = None
        forced: list[Ids] = []
        for variant in dict.fromkeys(["bf16", *options.only]):
            try:
                with LLM(folder, kv_memory=1 << 30, **VARIANTS[variant]) as llm:
                    result = run_variant(llm, cases, forced)
            except Exception as error:  # a variant that does not work here must not stop the others
                failed += 1
                print(f"{model}, {variant} is skipped: {error}", file=sys.stderr)
                continue
            base = base or result
            forced = forced or [case.wanted or ids for case, ids in zip(cases, base.greedy, strict=True)]
            question_count = sum(bool(case.wanted) for case in cases)
            exact = {"exact": result.right / question_count, "asked": question_count} if question_count else {}
            record = {"kind": "quality", "model": model, "variant": variant, **exact, **compare_results(base, result)}
            append_record(options.out, record)
            print(record, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
