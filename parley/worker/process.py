"""Runs an engine: loads the model, then serves messages, in a process of its own or in a thread.

As a process (``python -m parley.worker.process FD``) it communicates over a stream socket, inherited as file descriptor
FD. The first frame is Settings; then ToEngine frames arrive and FromEngine frames are sent. End of file means that the
API process is gone. It ends this process at once, even during a step: there is no state worth saving.
"""

from __future__ import annotations

import gc
import logging
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from parley import wire
from parley.engine.messages import Fatal, Filled, FromEngine, Outputs, Progress, Ready, ToEngine
from parley.types import Output, Settings, Stats, Work
from parley.worker.messages_loop import Inbox, Send, serve

if TYPE_CHECKING:
    from parley.core.adapter_cache import Fetch, Fetched
    from parley.core.sequence import Runner

log = logging.getLogger("parley.engine")

# Environment variables that are read when torch is imported. oneDNN and torch cache compiled code for every shape, by
# default 1,024 each: half a gigabyte after an hour of mixed load. An evicted shape costs a fraction of a millisecond
# when it is needed again. An idle OpenMP thread spins for milliseconds by default, on a core that the API process
# needs; this number of spins bridges the gap between two kernels, some 30 microseconds.
LIBRARIES = {
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
    "LRU_CACHE_CAPACITY": "128",
    "GOMP_SPINCOUNT": "2000",
}


def work(settings: Settings, inbox: Inbox, send: Send) -> None:
    """Load the model and serve messages until Shutdown. Errors are sent as EngineFatal and not raised."""
    if settings.costs:
        from parley.worker import simulated

        simulated.work(settings, inbox, send)
        return
    try:
        from parley.core.loop import Loop
        from parley.core.shared_pages.staging import Transit
        from parley.model.load.loader import LoadError, load
    except ImportError as error:
        send(Fatal(f"The engine cannot start: {error}. Is the package installed completely?"))
        return
    try:
        runner, info = load(settings, lambda stage, fraction: send(Progress(stage, fraction)))
    except LoadError as error:
        send(Fatal(str(error)))
        return
    except Exception as error:
        log.exception("loading failed")
        send(Fatal(f"The model could not be loaded: {type(error).__name__}: {error}"))
        return
    reading, preparing = ThreadPoolExecutor(1, "adapters"), ThreadPoolExecutor(1, "grammars")

    def prepare(work: Work, done: Callable[[], None]) -> None:
        left = runner.prepare(work)
        if left is None:
            done()
        else:
            preparing.submit(left).add_done_callback(lambda _: inbox.put(done))

    def filled(id: str, pages: list[int]) -> None:
        send(Filled(id, pages))

    transit = Transit(runner.staging, filled) if runner.staging is not None else None

    def emit(outputs: list[Output], stats: Stats) -> None:
        if transit is not None:
            transit.flush()
            stats.unstaged = transit.short
        send(Outputs(outputs, stats))

    fetch = _beside(runner, reading, inbox)
    loop = Loop(
        runner, settings, emit, fetch=fetch, prepare=prepare, filled=filled if transit is None else transit.fill
    )
    if transit is not None:
        transit.holds = loop.holds
    send(Ready(info))
    try:
        serve(loop, transit or loop.holds, inbox, send)
    except Exception as error:
        log.exception("the engine loop failed")
        send(Fatal(f"The engine stopped on an internal error: {type(error).__name__}."))
    finally:
        for thread in (reading, preparing):
            thread.shutdown(wait=False, cancel_futures=True)


def _beside(runner: Runner, thread: ThreadPoolExecutor, inbox: Inbox) -> Fetch:
    """Return a function that loads adapters in a thread and posts the result to the inbox."""
    from parley.model.load.loader import LoadError

    def read(folder: str, done: Callable[[Fetched], None]) -> None:
        fetched: Fetched
        try:
            fetched = runner.fetch(folder)
        except LoadError as error:
            fetched = str(error)
        except MemoryError:
            fetched = "There is not enough memory for the adapter."
        except Exception as error:
            log.exception("an adapter could not be read")
            fetched = f"The adapter could not be read: {type(error).__name__}."
        inbox.put(partial(done, fetched))

    def fetch(folder: str, done: Callable[[Fetched], None]) -> None:
        thread.submit(read, folder, done)

    return fetch


def main(fd: int) -> None:
    """Serve over an inherited socket until it is closed. ``fd``: its file descriptor."""
    # A terminal's Ctrl-C and a service manager's SIGTERM reach every process of the group, but the API process decides
    # when to end, since it drains first. This process follows at end of file.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    for name, value in LIBRARIES.items():
        os.environ.setdefault(name, value)
    sock = socket.socket(fileno=fd)
    settings = wire.receive(sock, msgspec.msgpack.Decoder(Settings))
    if settings is None:
        return
    inbox: Inbox = queue.SimpleQueue()

    def listen() -> None:
        decoder = msgspec.msgpack.Decoder(ToEngine)
        try:
            while (message := wire.receive(sock, decoder)) is not None:
                inbox.put(message)
        except OSError:
            pass
        except (wire.BrokenFrame, msgspec.DecodeError) as error:
            log.error("the stream from the API process is malformed: %s", error)
            os._exit(1)
        os._exit(0)

    def send(message: FromEngine) -> None:
        if isinstance(message, Ready):
            # Objects made while loading stay for good. Scanning them in each garbage collection would take a tenth of
            # a second, and every client would wait.
            gc.collect()
            gc.freeze()
        try:
            sock.sendall(wire.frame(message))
        except OSError:
            os._exit(0)

    threading.Thread(target=listen, name="inbox", daemon=True).start()
    work(settings, inbox, send)
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
