"""What a person at the terminal is told: what runs where, how far loading is, and how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterable

from parley.dialects.dialect import Dialect
from parley.engine.messages import Progress
from parley.server.auth import is_loopback
from parley.server.options import Offer, ServerOptions
from parley.server.surfaces import PLANES
from parley.types import ModelInfo
from parley.version import __version__


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


def opening(
    options: ServerOptions,
    offers: Iterable[Offer],
    root: str,
    surfaces: Iterable[tuple[Dialect, str]],
    grpc: Iterable[str] = (),
) -> str:
    """The first lines: known before anything is loaded. ``surfaces``: every API with the URL that it is at; ``grpc``:
    addresses for that."""
    lines = [
        f"parley {__version__}",
        *(f"  model    {', '.join(names)} (on {settings.device})" for names, settings in offers),
    ]
    if member := options.role not in ("mixed", "none"):  # whose APIs clients see at a coordinator
        lines.append(f"  role     {options.role}, for coordinators at {root}")
    places = [] if member else [(dialect.title, url + dialect.base) for dialect, url in surfaces]
    places += [*(("gRPC", place) for place in grpc), ("health", f"{root}/health/ready")]
    wide = max(8, *(len(title) for title, _ in places))
    lines += [f"  {title:<{wide}} {place}" for title, place in places]
    own = [] if options.port is None else [("", options.host)]
    others = [(each.api, each.host) for each in options.listen + options.grpc if not each.tls or not each.tls.clients]
    public = [(api, host) for api, host in own + others if not is_loopback(host)]
    ordered = options.role != "mixed"  # by whoever may
    if public and ordered and not options.cluster_secret:
        lines.append(warning(public, "may act for the cluster; --cluster-secret would name those who may"))
        return "\n".join(lines)
    if ordered:  # who knows the secret; planes take no orders
        public = [(api, host) for api, host in public if api in PLANES]
    if public and not options.api_keys:
        lines.append(warning(public, "may use this server; --api-key would ask for a key"))
    return "\n".join(lines)


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
