"""What a person at the terminal is told: what runs where, how far loading is, and how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterable

from parley.engine.messages import Progress
from parley.types import ModelInfo


def say(text: str) -> None:
    """Print a line at once; a closed pipe is nobody's problem."""
    with contextlib.suppress(OSError, ValueError):
        print(text, flush=True)


def address(host: str, port: int, encrypted: bool = False) -> str:
    """The root of what listens there as a URL that works on this machine."""
    return f"{'https' if encrypted else 'http'}://{reached(host, port)}"


def reached(host: str, port: int) -> str:
    """Where clients on this machine find what listens there."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def warning(places: Iterable[tuple[str, str]], told: str) -> str:
    """What everybody may do who reaches one of these addresses. ``places``: names of ports, and where they listen."""
    return f"  warning: everybody who reaches {' or '.join(dict.fromkeys(host for _, host in places))} {told}"


def ready(seconds: float) -> str:
    """The line after which requests for every model are answered."""
    return f"ready in {seconds:.1f} s"


def loaded(name: str, info: ModelInfo) -> str:
    """The line after which requests for this model are answered: with its memory plan."""
    numbers = info.dtype if info.quantization == "none" else f"{info.dtype} and {info.quantization}"
    plan = [f"{info.architecture}, {_count(info.parameters)} parameters, {numbers} on {info.device}"]
    if info.weights_bytes:
        plan.append(f"weights {_bytes(info.weights_bytes)}")
    if info.kv_bytes:
        tokens = info.kv_blocks * info.block_size
        kind = "" if info.kv_dtype == "auto" else f"{info.kv_dtype} "
        plan.append(f"{kind}KV cache {_bytes(info.kv_bytes)} for {tokens:,} tokens")
    plan.append(f"context {info.max_model_len:,} tokens")
    return f"  memory   {name}: {'; '.join(plan)}"


async def follow(progress: Callable[[], Progress]) -> None:
    """Show how loading goes on until cancelled; only on a terminal."""
    if not sys.stderr.isatty():
        return
    try:
        while True:
            now = progress()
            filled = round(24 * now.fraction)
            sys.stderr.write(f"\r\x1b[K  {'█' * filled}{'·' * (24 - filled)} {now.fraction:4.0%} {now.stage}")
            sys.stderr.flush()
            await asyncio.sleep(0.1)
    finally:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()


def _count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)


def _bytes(number: int) -> str:
    if number >= 2**30:
        return f"{number / 2**30:.2f} GiB"
    return f"{number / 2**20:.{0 if number >= 10 * 2**20 else 1}f} MiB"
