"""Compares parley with a peer on chat completions, Responses and Messages: 64 clients on the 10M model, in turns.

    python bench/api_contest.py [--peer vllm] [--rounds 4] [--requests 1024] [--streams 192] [--only chat,responses]

``--peer parley`` compares a second parley, to check the bench; vLLM is that of ``make engines``. The servers take turns
within a round, the one that waits is stopped. Each turn sends answers in one piece of one token, then streams of 64
tokens; every request has a text of its own. Times are medians of the pairs. The last columns say what parley's
processes used: the one that serves the APIs, and the engine. Prints Markdown.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import uvloop
from contestant import Contestant, ContestantFailed, paused_contestants
from install_peers import MODELS, ROOT
from load_mixes import word_tokens
from machine_usage import process_seconds, process_tree
from peer_servers import Peer, parley_peer, vllm_peer
from random_model import SHAPES, write_model

from parley.cli.apis import BENCHED_APIS
from parley.cli.load.generator import LoadGenerator
from parley.dialects.bench import BenchApi, EventSummary, LoadShape, TimedBytes

MODEL = "tiny"
CLIENTS = 64
WORDS = 16  # of each text
STREAMED = 64  # tokens
TIMEOUT = 300.0  # seconds for one request
APIS = ("chat", "responses", "messages")


@dataclasses.dataclass(frozen=True)
class TurnFigures:
    """Figures of a turn. ``api_seconds``, ``engine_seconds``: processor time of the server's processes, per request or
    per token."""

    rate: float  # requests or tokens per second
    api_seconds: float
    engine_seconds: float


def whole_api(name: str) -> BenchApi:
    """Return the API with answers in one piece."""
    api = BENCHED_APIS[name]

    def build_body(shape: LoadShape, prompt: Any) -> dict[str, Any]:
        body = api.build_body(shape, prompt) | {"stream": False}
        body.pop("stream_options", None)
        return body

    return dataclasses.replace(api, build_body=build_body, read_event=_read_whole, split_events=_whole_event)


def _whole_event(pieces: Sequence[TimedBytes]) -> Iterator[TimedBytes]:
    if pieces:
        yield pieces[-1][0], b"".join(piece for _, piece in pieces)


def _read_whole(data: bytes) -> EventSummary:
    usage = json.loads(data)["usage"]
    return EventSummary(True, 0, usage.get("completion_tokens") or usage.get("output_tokens") or 0, last=True)


class TextSource:
    """Draws texts of random words, each a token of the model."""

    def __init__(self, model: Path):
        vocabulary = json.loads((model / "tokenizer.json").read_text("utf-8"))["model"]["vocab"]
        texts = {token_id: text for text, token_id in vocabulary.items()}
        self._words = [texts[token_id][1:] for token_id in word_tokens(model)]

    def draw(self, seed: str, count: int) -> list[str]:
        """Return this many texts."""
        rng = random.Random(seed)
        return [" ".join(rng.choices(self._words, k=WORDS)) for _ in range(count)]


def run_load(
    contestant: Contestant, api: BenchApi, output: int, texts: Sequence[str], warm: Sequence[str]
) -> TurnFigures:
    """Run a load after one that does not count. Raises SystemExit if a request fails."""
    load = LoadGenerator(contestant.address, None, LoadShape("m", output, TIMEOUT), api)
    server, *engines = process_tree(contestant.process.pid)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(load.run_load(warm, CLIENTS))
        before = process_seconds(server), sum(map(process_seconds, engines))
        samples, wall = runner.run(load.run_load(texts, CLIENTS))
    after = process_seconds(server), sum(map(process_seconds, engines))
    if errors := [sample.error for sample in samples if sample.error]:
        raise SystemExit(f"a request to {contestant.peer.title} failed: {errors[0]}")
    units = len(samples) if output == 1 else sum(sample.tokens for sample in samples)
    return TurnFigures(units / wall, (after[0] - before[0]) / units, (after[1] - before[1]) / units)


def run_turn(
    contestant: Contestant, name: str, source: TextSource, options: argparse.Namespace, seed: str
) -> dict[str, TurnFigures]:
    """Run both loads of an API on one contestant."""
    contestant.resume()
    loads: dict[str, tuple[BenchApi, int, int]] = {
        "requests/s": (whole_api(name), 1, options.requests),
        "streamed tokens/s": (BENCHED_APIS[name], STREAMED, options.streams),
    }
    figures = {
        title: run_load(
            contestant, api, output, source.draw(f"{seed} {title}", count), source.draw(f"{seed} warm", CLIENTS)
        )
        for title, (api, output, count) in loads.items()
    }
    contestant.pause()
    return figures


def compare_servers(peers: Sequence[Peer], options: argparse.Namespace) -> str:
    """Return the table of all pairs. Raises ContestantFailed."""
    source = TextSource(MODELS / MODEL)
    pairs: dict[tuple[str, str], list[tuple[TurnFigures, TurnFigures]]] = {}
    with paused_contestants(peers, ROOT / "log" / "api-contest.log") as (ours, theirs):
        for number in range(options.rounds):
            for name in options.only.split(","):
                order = (ours, theirs) if number % 2 else (theirs, ours)
                turns = {
                    contestant: run_turn(contestant, name, source, options, f"{number} {name}") for contestant in order
                }
                for title, figures in turns[ours].items():
                    pairs.setdefault((name, title), []).append((figures, turns[theirs][title]))
                    print(f"{name}, {title}: {figures} {turns[theirs][title]}", file=sys.stderr, flush=True)
    head = ("API", "", "parley", peers[1].title, "ratio", "µs of the API process", "of the engine")
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for (name, title), rows in pairs.items():
        ratio = median(our.rate / their.rate for our, their in rows)
        rates = (middle(rows, lambda our, _: our.rate), middle(rows, lambda _, their: their.rate))
        shares = (
            1e6 * middle(rows, lambda our, _: our.api_seconds), 1e6 * middle(rows, lambda our, _: our.engine_seconds)
        )  # fmt: skip
        cells = (name, title, *(f"{rate:.0f}" for rate in rates), f"{ratio:.2f}", *(f"{share:.0f}" for share in shares))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def middle(
    rows: Sequence[tuple[TurnFigures, TurnFigures]], value: Callable[[TurnFigures, TurnFigures], float]
) -> float:
    """Return the median of a value of the pairs."""
    return median(value(*row) for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", choices=("vllm", "parley"), default="vllm")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--requests", type=int, default=1024, help="answers of one token in a turn")
    parser.add_argument("--streams", type=int, default=192, help=f"streams of {STREAMED} tokens in a turn")
    parser.add_argument("--only", default=",".join(APIS), help="names of APIs, separated by commas")
    options = parser.parse_args()
    if not (MODELS / MODEL / "model.safetensors").exists():
        write_model(MODELS / MODEL, SHAPES[MODEL])
    other = vllm_peer("vLLM", MODEL, "bf16", ()) if options.peer == "vllm" else parley_peer("peer", MODEL, "bf16", ())
    if other.missing_file:
        print(f"{other.title} is not installed: {other.missing_file}. make engines installs vLLM.", file=sys.stderr)
        return 1
    try:
        print(compare_servers((parley_peer("parley", MODEL, "bf16", ()), other), options))
    except ContestantFailed as error:
        print(f"A server failed: {error}.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
