"""Terminal output: the addresses at the start, the progress of loading, and the result."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable, Iterable

from parley.dialects.media import name_readable_kinds
from parley.engine.messages import LoadProgress
from parley.log_lines import logs_json
from parley.settings.option_kinds import UNIX_PREFIX
from parley.types import ModelInfo

log = logging.getLogger("parley.server")

LINE_SECONDS = 10.0  # seconds between two progress lines where no bar can be drawn
CLEAR_LINE = "\r\x1b[K"


def print_line(text: str, *, is_error: bool = False) -> None:
    """Print a line and flush it, in place of a progress bar if one is drawn; an error goes to standard error. Errors of
    a closed pipe are ignored.

    If log lines are JSON, the text becomes log lines too, so that a log collector gets everything that is printed.
    """
    if logs_json():
        for line in filter(None, map(str.strip, text.splitlines())):
            log.info(line)
        return
    with contextlib.suppress(OSError, ValueError):
        if _shows_progress():
            sys.stderr.write(CLEAR_LINE)
            sys.stderr.flush()
        print(text, file=sys.stderr if is_error else sys.stdout, flush=True)


def print_failure(reason: str) -> None:
    """Print to standard error why the server does not start, or why it ends."""
    if logs_json():
        log.error(reason)
    else:
        print_line(f"parley: {reason}", is_error=True)


def local_url(host: str, port: int, encrypted: bool = False) -> str:
    """Return the root URL of a listener, usable on this machine; of a Unix socket its path."""
    if host.startswith(UNIX_PREFIX):
        return f"{'https' if encrypted else 'http'}+{host}:"
    return f"{'https' if encrypted else 'http'}://{local_address(host, port)}"


def local_address(host: str, port: int) -> str:
    """Return ``host:port`` as clients on this machine can reach it; wildcard addresses become loopback."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def open_port_warning(ports: Iterable[tuple[str, str]], consequence: str) -> str:
    """Return a warning: anyone who can reach these hosts ``consequence``. ``ports``: pairs of port name and host."""
    return f"  warning: anyone who can reach {' or '.join(dict.fromkeys(host for _, host in ports))} {consequence}"


def ready_line(seconds: float) -> str:
    """Return the line that announces that all models are loaded and requests are answered."""
    return f"ready in {seconds:.1f} s"


def loaded_line(name: str, info: ModelInfo) -> str:
    """Return the line that announces that one model is loaded, with its memory plan."""
    number_format = info.dtype if info.quantization == "none" else f"{info.dtype} and {info.quantization}"
    kernels = f" with {info.kernels} kernels" if info.kernels else ""
    plan = [
        f"{info.architecture}, {_format_count(info.parameters)} parameters, {number_format} on {info.device}{kernels}"
    ]
    if info.weights_bytes:
        plan.append(f"weights {_format_bytes(info.weights_bytes)}")
    if info.kv_bytes:
        tokens = info.kv_pages * info.page_tokens
        kv_format = "" if info.kv_dtype == "auto" else f"{info.kv_dtype} "
        plan.append(f"{kv_format}KV cache {_format_bytes(info.kv_bytes)} for {tokens:,} tokens")
    if info.state_bytes:
        plan.append(f"states {_format_bytes(info.state_bytes)}")
    plan.append(f"context {info.max_model_len:,} tokens")
    if info.media_kinds:
        plan.append(f"reads {name_readable_kinds(info.media_kinds)}")
    return f"  memory   {name}: {'; '.join(plan)}"


async def show_progress(get_progress: Callable[[], LoadProgress]) -> None:
    """Draw a progress bar on standard error until cancelled; without a terminal, print a line now and then.

    The cursor is left at the start of the line, so that lines of others (the log, the engine) overwrite the bar.
    """
    if not _shows_progress():
        while True:
            await asyncio.sleep(LINE_SECONDS)
            current = get_progress()
            print_line(f"  loading  {current.stage}, {current.fraction:.0%}")
    try:
        while True:
            current = get_progress()
            bar_length = round(24 * current.fraction)
            sys.stderr.write(
                f"{CLEAR_LINE}  {'█' * bar_length}{'·' * (24 - bar_length)} {current.fraction:4.0%} {current.stage}\r"
            )
            sys.stderr.flush()
            await asyncio.sleep(0.1)
    finally:
        sys.stderr.write(CLEAR_LINE)
        sys.stderr.flush()


def _shows_progress() -> bool:
    """Whether standard error is a terminal; Python has no such stream if it was closed at the start."""
    return sys.stderr is not None and sys.stderr.isatty()


def _format_count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)


def _format_bytes(number: int) -> str:
    if number >= 2**30:
        return f"{number / 2**30:.2f} GiB"
    return f"{number / 2**20:.{0 if number >= 10 * 2**20 else 1}f} MiB"
