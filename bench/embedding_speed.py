"""Part of ``make bench``: embedded texts per second, compared with sentence-transformers, on MiniLM's weights.

parley answers over HTTP, one request per batch; sentence-transformers runs in its own process. Both processes run all
the time and take turns: one is idle while the other works. First the vectors of 200 texts of 1 to 500 tokens are
compared: the exit code is 1 if any number differs by more than 1e-3. The table is written to ``.peers/embeddings.md``
for ``performance_page.py``.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from struct import unpack
from typing import Any

from install_peers import ROOT
from performance_page import markdown_table

BENCH = Path(__file__).parent
LENGTH = 512  # positions of MiniLM
BATCHES = (1, 8, 32)
# the fewest and the most words of a text
KINDS = {"short: 4 to 24 words": (4, 24), "mixed: 4 to 160 words": (4, 160), "all alike: 12 words": (12, 12)}
TEXTS = 96  # per measurement
CLOSE = 1e-3


def read_words() -> list[str]:
    """Return English words from this repository's documentation, in order."""
    pages = [BENCH.parent / "README.md", *sorted((BENCH.parent / "docs").glob("*.md"))]
    return [word for page in pages for word in page.read_text("utf-8").split() if word.isalpha()]


def draw_texts(fewest: int, most: int, source: list[str], draw: random.Random, *, alike: bool = False) -> list[str]:
    """Return TEXTS texts of ``fewest`` to ``most`` words. ``alike``: all begin at the same word."""
    texts = []
    for _ in range(TEXTS):
        count = draw.randint(fewest, most)
        start = 0 if alike else draw.randrange(len(source) - count)
        texts.append(" ".join(source[start : start + count]))
    return texts


class SentenceWorker:
    """sentence-transformers in a worker process, connected by pipes."""

    def __init__(self, threads: int):
        python = ROOT / "sentence" / "bin" / "python"
        # -P: the script must not import the modules in its folder
        command = [python, "-P", BENCH / "sentence_worker.py", str(threads), str(LENGTH)]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": "", "OMP_NUM_THREADS": str(threads)}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        ready = self._read_line()
        self.version, self.folder = ready["ready"], ready["folder"]

    def seconds(self, texts: list[str], batch: int) -> float:
        """Return the seconds to embed the texts in batches."""
        return float(self._send_order(texts=texts, batch=batch)["seconds"])

    def vectors(self, texts: list[str]) -> list[list[float]]:
        """Return the vectors of the texts."""
        return list(self._send_order(texts=texts, batch=32, vectors=True)["vectors"])

    def _send_order(self, **order: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return self._read_line()

    def _read_line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit("sentence-transformers exited; python bench/install_peers.py --only sentence installs it")
        return dict(json.loads(line))


class EmbeddingServer:
    """A parley server that is ready."""

    def __init__(self, port: int):
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)

    def seconds(self, texts: list[str], batch: int) -> float:
        """Return the seconds to embed the texts in batches."""
        began = time.perf_counter()
        for i in range(0, len(texts), batch):
            self.vectors(texts[i : i + batch])
        return time.perf_counter() - began

    def vectors(self, texts: list[str]) -> list[list[float]]:
        """Return the vectors of the texts."""
        body = json.dumps({"input": texts, "encoding_format": "base64"})
        self._connection.request("POST", "/v1/embeddings", body, {"content-type": "application/json"})
        answer = json.load(self._connection.getresponse())
        if "data" not in answer:
            sys.exit(str(answer))
        coded = [base64.b64decode(entry["embedding"]) for entry in answer["data"]]
        return [list(unpack(f"<{len(vector) // 4}f", vector)) for vector in coded]


@contextmanager
def run_server(folder: str, threads: int) -> Iterator[EmbeddingServer]:
    """Run a parley server and yield it when it is ready."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
    command = [sys.executable, "-m", "parley", "serve", folder, "--port", str(port), "--quiet"]
    command += ["--threads", str(threads), "--max-model-len", str(LENGTH)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < end:
            try:
                probe = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
                probe.request("GET", "/health/ready")
                if probe.getresponse().status == 200:
                    break
            except OSError:
                pass
            time.sleep(0.1)
        yield EmbeddingServer(port)
    finally:
        process.terminate()
        process.wait(60)


def largest_difference(
    server: EmbeddingServer, worker: SentenceWorker, source: list[str], draw: random.Random
) -> float:
    """Return the largest difference of a number, over 200 texts of about 1 to 500 tokens in batches of mixed sizes."""
    texts = [" ".join(source[start : start + 1 + i * 320 // 199])
             for i, start in ((i, draw.randrange(len(source) - 330)) for i in range(200))]  # fmt: skip
    draw.shuffle(texts)
    worst, expected = 0.0, worker.vectors(texts)
    while texts:
        count = draw.randint(1, 40)
        for actual, reference in zip(server.vectors(texts[:count]), expected[:count], strict=True):
            worst = max(worst, *(abs(a - b) for a, b in zip(actual, reference, strict=True)))
        texts, expected = texts[count:], expected[count:]
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    if not (ROOT / "sentence").exists():
        print("sentence-transformers is not installed: python bench/install_peers.py --only sentence", file=sys.stderr)
        return 1
    source, draw = read_words(), random.Random(1)
    worker = SentenceWorker(options.threads)
    rows = []
    with run_server(worker.folder, options.threads) as server:
        worst = largest_difference(server, worker, source, draw)
        print(f"largest difference of a number: {worst:.2g}", flush=True)
        for kind, (fewest, most) in KINDS.items():
            texts = draw_texts(fewest, most, source, draw, alike=fewest == most)
            for batch in BATCHES:
                pairs = []
                for turn in range(options.turns + 1):
                    both = [server, worker] if turn % 2 else [worker, server]
                    took = {who: who.seconds(texts, batch) for who in both}
                    pairs += [(took[server], took[worker])] if turn else []  # the first one warms up
                ours, theirs = (median(TEXTS / pair[i] for pair in pairs) for i in (0, 1))
                ratios = sorted(theirs / ours for ours, theirs in pairs)
                spread = f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
                rows.append([kind, str(batch), f"{ours:.0f}", f"{theirs:.0f}", spread])
                print(rows[-1], flush=True)
    head = [
        "Texts",
        "In a batch",
        "parley, over HTTP, texts/s",
        f"sentence-transformers {worker.version}, texts/s",
    ]
    table = markdown_table([*head, "Ratio, median of turns (range)"], rows)
    note = f"all-MiniLM-L6-v2, {options.threads} threads each. The largest difference of a number: {worst:.2g}."
    (ROOT / "embeddings.md").write_text(f"{note}\n\n{table}\n", "utf-8")
    return int(worst > CLOSE)


if __name__ == "__main__":
    sys.exit(main())
