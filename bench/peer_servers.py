"""The contestants: each server's command line, model and loads. Only data; ``contestant.py`` runs them.

A server gets the loads that a target or a comparison needs. All servers get the same KV memory if they take a size.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from install_peers import LLAMA_AVX2_BIN, LLAMA_BIN, MODELS, OPENVINO_MODEL, ROOT, VLLM_FOLDER

KV = 2 << 30
THREADS = os.cpu_count() or 1
ALL = ("c1", "c8", "c32", "prefix", "prefix32", "prefill", "stall")
SMALL = ("api", "stream", "c8")
LONG = ("long8k", "long32k")


@dataclass(frozen=True)
class Peer:
    """``command`` returns the arguments for a port. ``ready`` is the route that answers 200 once loaded; empty for a
    worker without HTTP. ``kv``: bytes of KV cache requested. ``start``: estimated seconds until ready."""

    title: str
    model: str  # a folder of MODELS: prompts use its tokenizer
    kind: str  # of machine_limits.KINDS
    weights: Path
    loads: tuple[str, ...]
    command: Callable[[int], list[object]]
    ready: str = "/health"
    env: dict[str, str] = field(default_factory=dict)
    kv: int = KV
    start: float = 4

    @property
    def missing_file(self) -> str:
        """The first missing file, or an empty string if the peer is installed."""
        needed = [self.weights, Path(str(self.command(0)[0]))]
        return next((f"{path} is not there" for path in needed if not path.exists()), "")


def parley_peer(title: str, folder: str, kind: str, loads: tuple[str, ...], *flags: str, **env: str) -> Peer:
    """Return parley's server with a folder of MODELS, or with any folder by its whole path."""

    def command(port: int) -> list[object]:
        serve = [sys.executable, "-m", "parley", "serve", MODELS / folder, "--name", "m", "--port", port, "--quiet"]
        return [*serve, "--kv-memory", str(KV), *flags]

    return Peer(title, folder, kind, MODELS / folder, loads, command, "/health/ready", env)


def vllm_peer(title: str, folder: str, kind: str, loads: tuple[str, ...], *flags: str) -> Peer:
    """Return vLLM's server with a folder of MODELS, or with any folder by its whole path."""

    def command(port: int) -> list[object]:
        serve = [VLLM_FOLDER / "bin" / "vllm", "serve", MODELS / folder, "--served-model-name", "m", "--port", port]
        limits = ["--dtype", "bfloat16", "--max-model-len", "4096", "--max-num-seqs", "64"]
        quiet = ["--disable-log-stats", "--disable-uvicorn-access-log"]
        return [*serve, "--host", "127.0.0.1", *limits, "--enable-prefix-caching", *quiet, *flags]

    env = {
        "LD_PRELOAD": ":".join([*tcmalloc(), str(VLLM_FOLDER / "lib" / "libiomp5.so")]),
        "VLLM_CPU_KVCACHE_SPACE": str(KV >> 30),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{THREADS - 1}",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return Peer(title, folder, kind, MODELS / folder, loads, command, env=env, start=60)


def tcmalloc() -> list[str]:
    """Return the path of tcmalloc if it is installed. vLLM's documentation recommends this allocator."""
    cache = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=False).stdout
    paths = [line.rpartition("=> ")[2] for line in cache.splitlines() if "libtcmalloc_minimal.so" in line]
    return paths[:1]


def llama_peer(
    title: str, folder: str, kind: str, loads: tuple[str, ...], avx2: bool = False, slots: int = 32, context: int = 2176
) -> Peer:
    """Return llama.cpp's server with the GGUF file of a folder of MODELS and of this kind, perhaps without AVX-512.

    It serves ``slots`` requests at once, of ``context`` tokens each.
    """
    weights = MODELS / f"{folder}-{kind}.gguf"
    programs = LLAMA_AVX2_BIN if avx2 else LLAMA_BIN

    def command(port: int) -> list[object]:
        serve = [programs / "llama-server", "-m", weights, "--host", "127.0.0.1", "--port", port, "-a", "m"]
        memory = ["--parallel", str(slots), "-cb", "-c", str(slots * context)]
        return [*serve, "-t", THREADS, "-tb", THREADS, *memory, "-fa", "on", "-b", "2048", "-ub", "512", "-lv", "2"]

    return Peer(title, folder, kind, weights, loads, command)


def _openvino(title: str, folder: str, kind: str, loads: tuple[str, ...]) -> Peer:
    python, worker = ROOT / "openvino" / "bin" / "python", Path(__file__).with_name("openvino_worker.py")
    return Peer(
        title, folder, kind, OPENVINO_MODEL, loads, lambda _: [python, worker, OPENVINO_MODEL, THREADS, KV >> 30], ""
    )


PEERS: dict[str, Peer] = {
    "parley-bf16": parley_peer("parley, bf16", "0.5b", "bf16", ALL),
    "vllm-bf16": vllm_peer("vLLM, bf16", "0.5b", "bf16", ALL),
    "llama-bf16": llama_peer("llama.cpp, bf16", "0.5b", "bf16", ("c1",)),
    "parley-w8a8": parley_peer("parley, W8A8", "0.5b-w8a8", "w8a8", ALL),
    "vllm-w8a8": vllm_peer("vLLM, W8A8", "0.5b-w8a8", "w8a8", ALL),
    "parley-int8": parley_peer("parley, int8", "0.5b", "int8", ("c1", "prefill"), "--quantization", "int8"),
    "openvino-int8": _openvino("OpenVINO GenAI, int8 weights (no HTTP)", "0.5b", "int8 weights", ("c1",)),
    "llama-q8": llama_peer("llama.cpp, Q8_0", "0.5b", "Q8_0", ("c1",)),
    "parley-int4": parley_peer("parley, int4", "0.5b", "int4", ("c1",), "--quantization", "int4"),
    "llama-q4": llama_peer("llama.cpp, Q4_0", "0.5b", "Q4_0", ("c1",)),
    "torch-bf16": parley_peer("parley in torch forms, bf16", "0.5b", "bf16", ("prefill",), PARLEY_NATIVE="off"),
    "parley-long": parley_peer("parley, bf16, 32k context", "0.5b", "bf16", LONG),
    "vllm-long": vllm_peer("vLLM, bf16, 32k context", "0.5b", "bf16", LONG, "--max-model-len", "32768"),
    "llama-long": llama_peer("llama.cpp, bf16, 32k context", "0.5b", "bf16", LONG, slots=1, context=32768),
    "parley-tiny": parley_peer("parley", "tiny", "bf16", SMALL),
    "vllm-tiny": vllm_peer("vLLM", "tiny", "bf16", SMALL),
    "llama-tiny": llama_peer("llama.cpp", "tiny", "bf16", ("api", "stream")),
}
