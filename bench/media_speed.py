"""Measures images: their way to embeddings, the streams of others meanwhile, and what they cost texts.

    python bench/media_speed.py [--side 448] [--rounds 3] [--layers 4] [--only parley|vllm]

The model has Qwen2-VL's architecture and random weights: a language model of the 0.5B shape and a vision encoder of
``--layers`` layers, 1,280 wide. Every number is a ratio against Transformers' own processor and encoder in one process,
or against the same server without images, in turns on the same machine. The comparison with vLLM needs the one that
``make engines`` installs: 8 clients send different images, to one server after the other, three times per round, and
the server whose turn it is not is paused. Prints Markdown.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from machine_usage import process_tree
from media_contest import compare_with_vllm
from vision_model import write_language_model, write_vision_model

import parley.model.load  # noqa: F401  # makes torchvision importable
from parley.cli.apis import BENCHED_APIS
from parley.cli.client import ServerAddress
from parley.cli.load.generator import LoadGenerator, RequestSample
from parley.cli.load.images import random_png
from parley.cli.load.summary import percentile
from parley.dialects.bench import LoadShape
from parley.serving.media.data_urls import media_part

WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state")
STEP_MS = 250  # parley's default of --step-ms


def make_image(side: int, seed: str) -> bytes:
    """Return a PNG file of random pixels."""
    return random_png(side, side, random.Random(seed))


class TransformersEncoder:
    """Transformers' processor and vision encoder in this process, as a script would use them."""

    def __init__(self, folder: Path):
        import torch
        from transformers import AutoModelForImageTextToText, AutoProcessor

        self._torch = torch
        self._processor = AutoProcessor.from_pretrained(folder)
        self._model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16).eval()
        self.block_seconds = 0.0  # the longest block of the encoder in the last image

    def encode(self, data: bytes) -> tuple[float, int]:
        """Return the seconds from bytes to embeddings, and the number of embeddings."""
        from PIL import Image

        begin = time.perf_counter()
        features = self._processor.image_processor(Image.open(io.BytesIO(data)).convert("RGB"), return_tensors="pt")
        with self._torch.inference_mode(), self._timed_blocks():
            rows = self._model.get_image_features(**features).pooler_output
        return time.perf_counter() - begin, sum(map(len, rows))

    @contextlib.contextmanager
    def _timed_blocks(self) -> Iterator[None]:
        starts: list[float] = []
        hooks = [
            block.register_forward_pre_hook(lambda *_: starts.append(time.perf_counter()))
            for block in self._model.model.visual.blocks
        ]
        yield
        for hook in hooks:
            hook.remove()
        self.block_seconds = max(after - before for before, after in pairwise(starts))


class ParleyServer:
    """A ``parley serve`` process."""

    def __init__(self, folder: Path, *flags: str):
        command = [sys.executable, "-m", "parley", "serve", str(folder), "--port", "0", "--quiet", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert self.process.stdout is not None
        self.port = 0
        for line in self.process.stdout:
            if address := re.search(r"http://[\w.]+:(\d+)", line):
                self.port = int(address[1])
            if line.startswith("ready in"):
                break
        if not self.port:
            raise SystemExit("the server did not start")

    def load(self, output: int) -> LoadGenerator:
        """Return a generator of requests with so many output tokens."""
        address = ServerAddress.parse_url(f"http://127.0.0.1:{self.port}")
        return LoadGenerator(address, None, LoadShape("", output, 600.0), BENCHED_APIS["chat"])

    def run(self, prompts: Sequence[Any], clients: int, output: int = 1) -> tuple[list[RequestSample], float]:
        """Send the prompts; return their samples and the seconds that all took."""
        samples, wall = asyncio.run(self.load(output).run_load(prompts, clients))
        for sample in samples:
            if sample.error:
                raise SystemExit(f"a request failed: {sample.error}")
        return samples, wall

    def media_process_bytes(self) -> int:
        """Return the resident memory of the server's media processes."""
        total = 0
        for pid in process_tree(self.process.pid):
            with contextlib.suppress(OSError):
                if b"parley.worker.media_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                    total += resident * os.sysconf("SC_PAGE_SIZE")
        return total

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(60)


def text_prompt(seed: str, words: int) -> str:
    """Return a text of random words."""
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def image_prompt(data: bytes, seed: str) -> list[dict[str, Any]]:
    """Return a message's content: an image, and a short text."""
    return [media_part(data), {"type": "text", "text": text_prompt(seed, 4)}]


@dataclass
class Measured:
    """One row of the table."""

    what: str
    value: float
    goal: str

    def row(self) -> str:
        return f"| {self.what} | {self.value:.2f} | {self.goal} |"


def measure_way(server: ParleyServer, reference: TransformersEncoder, side: int, rounds: int) -> Iterator[Measured]:
    """Compare an image's way to embeddings: a first token after a new image, less one after as long a text."""
    ratios, shared = [], []
    for number in range(rounds):
        data = make_image(side, f"way {number}")
        expected, tokens = reference.encode(data)
        [with_image], _ = server.run([image_prompt(data, f"{number}")], 1)
        [with_text], _ = server.run([text_prompt(f"way {number}", tokens + 6)], 1)
        own = (with_image.end - with_image.start) - (with_text.end - with_text.start)
        ratios.append(own / expected)
        data = make_image(side, f"shared {number}")
        _, wall = server.run([image_prompt(data, f"shared {number} {k}") for k in range(8)], 8)
        _, text_wall = server.run([text_prompt(f"shared {number} {k}", 10) for k in range(8)], 8)
        shared.append(8 * expected / max(1e-9, wall - text_wall))
    yield Measured("seconds from bytes to embeddings, over Transformers in one process", median(ratios), "≤ 1.1")
    yield Measured("8 clients with the same image: per request, times quicker", median(shared), "≥ 2")


def measure_gaps(server: ParleyServer, reference: TransformersEncoder, side: int, rounds: int) -> Iterator[Measured]:
    """Measure the gaps between tokens of 8 text streams while images arrive."""

    async def run_both() -> list[RequestSample]:
        texts = asyncio.create_task(
            server.load(256).run_load([text_prompt(f"gap {time.time()} {k}", 32) for k in range(8)], 8)
        )
        await asyncio.sleep(1.0)
        while not texts.done():
            data = make_image(side, f"gap {time.time()}")
            await server.load(1).run_load([image_prompt(data, str(time.time()))], 1)
        samples, _ = await texts
        return samples

    reference.encode(make_image(side, "block"))
    worst = []
    for _ in range(rounds):
        samples = asyncio.run(run_both())
        gaps = [after - before for sample in samples for before, after in pairwise(sample.arrivals)]
        worst.append(percentile(gaps, 0.99) or 0.0)
    limit = STEP_MS / 1000 + reference.block_seconds
    yield Measured("gap between tokens, p99, over --step-ms + one encoder block", median(worst) / limit, "≤ 1")


def measure_texts(vision: ParleyServer, text: ParleyServer, rounds: int) -> Iterator[Measured]:
    """Compare texts on the vision model with texts on its language model alone."""
    ratios = []
    for number in range(rounds):
        prompts = [text_prompt(f"text {number} {k}", 64) for k in range(16)]
        servers = (vision, text) if number % 2 else (text, vision)
        seconds = {server: server.run(prompts, 8, 16)[1] for server in servers}
        ratios.append(seconds[text] / seconds[vision])
    yield Measured("texts: requests per second over the language model alone", median(ratios), "≥ 0.98")


def measure_alone(vision_folder: Path, text_folder: Path, options: argparse.Namespace) -> Iterator[Measured]:
    """Compare parley with Transformers, and with itself without images."""
    reference = TransformersEncoder(vision_folder)
    reference.encode(make_image(options.side, "warm"))
    with contextlib.closing(ParleyServer(vision_folder)) as vision:
        vision.run([image_prompt(make_image(options.side, "warm up"), "warm")], 1)
        yield from measure_way(vision, reference, options.side, options.rounds)
        yield from measure_gaps(vision, reference, options.large_side, max(1, options.rounds // 2))
        yield Measured("memory of the media process, MB", vision.media_process_bytes() / 1e6, "≤ 450")
        with contextlib.closing(ParleyServer(text_folder)) as text:
            yield from measure_texts(vision, text, options.rounds)


def measure_beside_vllm(folder: Path, side: int, rounds: int) -> Iterator[Measured]:
    """Compare parley with vLLM while clients send different images."""

    def draw_prompts(seed: str, count: int) -> list[list[dict[str, Any]]]:
        return [image_prompt(make_image(side, f"{seed} {k}"), f"{seed} {k}") for k in range(count)]

    ratio = compare_with_vllm(folder, draw_prompts, rounds)
    yield Measured("8 clients with different images: requests per second over vLLM", ratio.requests_per_second, "≥ 1.2")
    yield Measured("the same: time to the first token over vLLM", ratio.ttft, "≤ 0.9")
    yield Measured("the same: processor time for each request over vLLM", ratio.processor, "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=448, help="width and height of an image in pixels")
    parser.add_argument("--large-side", type=int, default=896, help="of the images that arrive beside streams")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=4, help="layers of the vision encoder")
    parser.add_argument("--only", choices=("parley", "vllm"), help="measure parley alone, or beside vLLM")
    options = parser.parse_args()
    with TemporaryDirectory() as home:
        vision_folder, text_folder = Path(home) / "vision", Path(home) / "text"
        write_vision_model(vision_folder, options.layers, options.large_side**2)
        rows: list[Measured] = []
        if options.only != "vllm":
            write_language_model(vision_folder, text_folder)
            rows += measure_alone(vision_folder, text_folder, options)
        if options.only != "parley":
            rows += measure_beside_vllm(vision_folder, options.side, 3 * options.rounds)
    print("| | measured | goal |\n|---|---:|---:|")
    for measured in rows:
        print(measured.row())


if __name__ == "__main__":
    main()
