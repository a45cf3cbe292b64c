"""Part of ``make bench``: models in the shapes and files of published ones, by parley and by llama.cpp or vLLM.

    python bench/published_speed.py [--only 'qwen3-moe, bf16'] [--rounds 3]

Two servers with the same weights take turns, each stopped while the other is measured. A decode step is the median gap
between the tokens of streams that began with short prompts; a prefill is the median time to one client's first token.
"Limit" is the time that the machine allows for the weights alone, and "reached" is its share of parley's time. The
table goes to ``.peers/published.md``; rows of contests that were not run again stay. Needs llama.cpp of ``make
bench-peers``, and vLLM for its rows.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from contestant import Contestant, ContestantFailed, paused_contestants
from install_peers import MODELS, ROOT
from load_mixes import LoadMix, word_tokens
from machine_limits import measure_limits
from peer_servers import Peer, llama_peer, parley_peer, vllm_peer
from performance_page import markdown_table, weight_files
from published_models import PUBLISHED_SHAPES, WeightCounts, write_fp8, write_gguf, write_published_model

RESULTS = ROOT / "published.json"
TABLE = ROOT / "published.md"
LOG = ROOT / "log" / "published.log"
DECODE, PREFILL = "itl_ms", "ttft_ms"
# Bytes of a weight with its share of scales, of dense layers and of experts. Other kinds: by the size of parley's file.
BYTES = {"bf16": (2.0, 2.0), "int4": (0.53, 0.53), "MXFP4": (2.0, 0.53)}
HEAD = ["Model", "parley", "Peer", "Load", "parley, ms", "Peer, ms", "Ratio (range)", "Goal", "Limit, ms", "Reached"]


@dataclass(frozen=True)
class PublishedLoad:
    """A load, and the figure of its summary that counts. ``rows`` of its steps."""

    title: str
    mix: LoadMix
    figure: str
    rows: int


def decode_load(clients: int) -> PublishedLoad:
    """Return the load of streams with short prompts."""
    mix = LoadMix("", clients, max(2, clients), own=32, output=64)
    return PublishedLoad(f"decode, {clients} at once", mix, DECODE, clients)


def prefill_load(tokens: int) -> PublishedLoad:
    """Return the load of one prompt after another."""
    return PublishedLoad(f"prefill of {tokens:,}", LoadMix("", 1, 3, own=tokens, output=1), PREFILL, tokens)


@dataclass(frozen=True)
class Contest:
    """Two servers with a model. ``ours``, ``theirs``: the kinds of their weights. ``goal``: of each ratio.

    ``make_peers`` writes the files first. ``avx2``: both servers run without AVX-512, whose rate of operations the
    limits then leave out.
    """

    model: str
    ours: str
    theirs: str
    goal: float
    loads: Sequence[PublishedLoad]
    make_peers: Callable[[], tuple[Peer, Peer]]
    avx2: bool = False

    @property
    def name(self) -> str:
        """The model and the kinds of weights."""
        return f"{self.model}, {self.ours}, {self.theirs}"

    @property
    def title(self) -> str:
        """The name of the model's shape."""
        return PUBLISHED_SHAPES[self.model].title if self.model in PUBLISHED_SHAPES else "Qwen2.5-0.5B"


def make_folder(model: str) -> Path:
    """Return the folder of a model in Hugging Face's format."""
    return write_published_model(model) if model in PUBLISHED_SHAPES else MODELS / model


def with_llama(model: str, kind: str, same_file: bool, *flags: str) -> tuple[Peer, Peer]:
    """Return parley with the GGUF file or with the folder that it is made of, and llama.cpp with the file."""
    folder = make_folder(model)
    path = write_gguf(folder, kind)
    ours = parley_peer("parley", path.name if same_file else model, kind, (), *flags)
    return ours, llama_peer("llama.cpp", model, kind, ())


def with_llama_avx2(kind: str) -> tuple[Peer, Peer]:
    """Return parley and llama.cpp with the 0.5B model, both without AVX-512. Both read the GGUF file, if quantized."""
    path = write_gguf(make_folder("0.5b"), kind)
    ours = "0.5b" if kind == "bf16" else path.name
    return (
        parley_peer("parley", ours, kind, (), PARLEY_NATIVE="avx2"),
        llama_peer("llama.cpp", "0.5b", kind, (), avx2=True),
    )


def with_vllm(model: str) -> tuple[Peer, Peer]:
    """Return parley and vLLM with the same folder."""
    folder = make_folder(model).name
    return parley_peer("parley", folder, "bf16", ()), vllm_peer("vLLM", folder, "bf16", ())


def with_bf16(model: str) -> tuple[Peer, Peer]:
    """Return parley with a model in FP8 and in bf16."""
    folder = make_folder(model)
    in_fp8 = write_fp8(folder, MODELS / f"{model}-fp8").name
    return parley_peer("parley", in_fp8, "FP8", ()), parley_peer("parley", model, "bf16", ())


DECODES = (decode_load(1), decode_load(8), decode_load(32))
USUAL = (*DECODES, prefill_load(512))
SINGLE = (decode_load(1), prefill_load(512))
CONTESTS = [
    Contest("qwen3-moe", "bf16", "llama.cpp bf16", 1.3, USUAL,
            partial(with_llama, "qwen3-moe", "bf16", False)),
    Contest("qwen3-moe", "Q4_K_M", "llama.cpp Q4_K_M", 1.3, USUAL,
            partial(with_llama, "qwen3-moe", "Q4_K_M", True)),
    Contest("qwen3-moe", "int4", "llama.cpp Q4_K_M", 1.3, USUAL,
            partial(with_llama, "qwen3-moe", "Q4_K_M", False, "--quantization", "int4")),
    Contest("qwen3-moe", "bf16", "vLLM bf16", 1.2, USUAL, partial(with_vllm, "qwen3-moe")),
    Contest("gpt-oss", "MXFP4", "llama.cpp MXFP4", 1.3, USUAL,
            partial(with_llama, "gpt-oss", "bf16", False)),
    Contest("gemma3", "bf16", "llama.cpp bf16", 1.2, USUAL,
            partial(with_llama, "gemma3", "bf16", False)),
    Contest("gemma3", "Q4_0", "llama.cpp Q4_0", 1.2, USUAL,
            partial(with_llama, "gemma3", "Q4_0", True)),
    Contest("0.5b", "Q4_K_M", "llama.cpp Q4_K_M", 1.25, SINGLE,
            partial(with_llama, "0.5b", "Q4_K_M", True)),
    Contest("0.5b", "Q8_0", "llama.cpp Q8_0", 1.25, SINGLE,
            partial(with_llama, "0.5b", "Q8_0", True)),
    Contest("qwen3-next", "bf16", "llama.cpp bf16", 1.3, (*DECODES, prefill_load(2048)),
            partial(with_llama, "qwen3-next", "bf16", False)),
    Contest("0.5b", "FP8", "parley bf16", 1.61, (decode_load(1),), partial(with_bf16, "0.5b")),
    *(
        Contest("0.5b", f"{kind}, AVX2", f"llama.cpp {kind}, AVX2", 1, USUAL, partial(with_llama_avx2, kind), avx2=True)
        for kind in ("bf16", "Q8_0", "Q4_0")
    ),
]  # fmt: skip


def measure_contest(contest: Contest, rounds: int) -> list[list[str]]:
    """Return the table's rows of a contest. Raises ContestantFailed, and CalledProcessError for files."""
    peers = contest.make_peers()
    for peer in peers:
        if peer.missing_file:
            raise ContestantFailed(peer.missing_file)
    folder = make_folder(contest.model)
    pool, shape, counts = word_tokens(folder), PUBLISHED_SHAPES.get(contest.model), WeightCounts.from_folder(folder)
    of_file = sum(file.stat().st_size for file in weight_files(peers[0].weights)) / counts.total
    weight_bytes = BYTES.get(contest.ours.removesuffix(", AVX2"), (of_file, of_file))
    lines = []
    with paused_contestants(peers, LOG) as contestants:
        for contestant in contestants:
            contestant.pool = pool
            run_turn(contestant, PublishedLoad("", LoadMix("", 8, 8, 64, 8), DECODE, 8), "first")
        for load in contest.loads:
            pairs, limits = [], []
            for number in range(rounds):
                order = contestants if number % 2 else contestants[::-1]
                times = {contestant: run_turn(contestant, load, f"{load.title} {number}") for contestant in order}
                pairs.append([times[contestant] for contestant in contestants])
                machine = replace(measure_limits(), **({"bf16": math.inf} if contest.avx2 else {}))
                limits.append(1e3 * counts.step_seconds(machine, shape, load.rows, *weight_bytes))
            lines.append(
                [contest.title, contest.ours, contest.theirs, load.title, *figures(pairs, limits, contest.goal)]
            )
            print(" | ".join(lines[-1]), flush=True)
    return lines


def figures(pairs: Sequence[Sequence[float]], limits: Sequence[float], goal: float) -> list[str]:
    """Return a load's columns. ``pairs``: the times of both servers in each round; ``limits``: of the rounds; in ms."""
    ours, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratios = sorted(theirs / ours for ours, theirs in pairs)
    limit = statistics.median(limits)
    shown = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    return [f"{ours:.1f}", f"{theirs:.1f}", shown, f"≥ {goal}", f"{limit:.1f}", f"{limit / ours:.2f}"]


def run_turn(contestant: Contestant, load: PublishedLoad, seed: str) -> float:
    """Return the load's figure in ms, while the other server is paused. Raises ContestantFailed."""
    contestant.resume()
    summary = contestant.run_load(load.mix, seed)
    contestant.pause()
    if summary["errors"]:
        raise ContestantFailed(f"requests to {contestant.peer.title} failed: {summary['reasons']}")
    return float(summary[load.figure]["p50"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a part of a contest's name, such as 'qwen3-moe, bf16' or 'vLLM'")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    results: dict[str, list[list[str]]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    failed = 0
    for contest in CONTESTS:
        if options.only not in contest.name:
            continue
        try:
            results[contest.name] = measure_contest(contest, options.rounds)
        except (ContestantFailed, OSError, subprocess.CalledProcessError) as error:
            failed += 1
            print(f"{contest.name}: {error}", file=sys.stderr, flush=True)
            continue
        ROOT.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(results))
        TABLE.write_text(
            markdown_table(HEAD, [row for contest in CONTESTS for row in results.get(contest.name, [])]) + "\n", "utf-8"
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
