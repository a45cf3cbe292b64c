"""Runs an engine: loads the model, then serves messages, in a process of its own or in a thread.

As a process (``python -m parley.worker.process [early] FD``) it communicates over a stream socket, inherited as file
descriptor FD. The first frame has the ``ParleySettings``; then ``ToEngine`` frames arrive and ``FromEngine`` frames are
sent. End of file means that the API process is gone. It ends this process at once, even during a step: there is no
state worth saving.
"""

from __future__ import annotations

import gc
import logging
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from parley import wire
from parley.child_process import ignore_group_signals
from parley.engine.engine_process import EARLY
from parley.engine.messages import (
    EngineFatal,
    EngineReady,
    FromEngine,
    Heartbeat,
    LoadProgress,
    PagesComputed,
    StepOutputs,
    ToEngine,
)
from parley.heartbeat import send_beats
from parley.log_lines import set_up_child_logging
from parley.tenant_executor import TenantExecutor
from parley.types import EngineOutput, EngineRequest, EngineStats, ParleySettings
from parley.worker.messages_loop import EngineInbox, SendMessage, serve_messages

if TYPE_CHECKING:
    from parley.core.adapter_cache import FetchAdapter, FetchedAdapter
    from parley.core.sequence import ModelRunner
    from parley.model.encoder_runner import EncoderRunner
    from parley.model.runner import DecoderRunner
    from parley.types import ModelInfo
    from parley.worker.kv_events import KVEventPublisher

log = logging.getLogger("parley.engine")

# Environment variables that are read when torch and numpy are imported. oneDNN and torch cache compiled code for every
# shape, by default for 1,024 shapes each: half a gigabyte after an hour of mixed load. Compiling an evicted shape again
# takes a fraction of a millisecond. By default, an idle OpenMP thread spins for milliseconds on a core that the API
# process needs; this number of spins covers the gap between two kernels, about 30 microseconds. Threads of numpy's
# OpenBLAS, which multiplies nothing here, would spin for a tenth of a second while the server starts.
LIBRARY_SETTINGS = {
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
    "LRU_CACHE_CAPACITY": "128",
    "GOMP_SPINCOUNT": "2000",
    "OPENBLAS_NUM_THREADS": "1",
}


def run_engine(settings: ParleySettings, inbox: EngineInbox, send_message: SendMessage) -> None:
    """Load the model and serve messages until Shutdown. Errors are sent as EngineFatal and not raised."""
    try:
        if settings.costs:
            from parley.worker import simulated_engine

            simulated_engine.run_simulated(settings, inbox, send_message)
        else:
            _run_model(settings, inbox, send_message)
    except Exception as error:
        log.exception("the engine failed")
        send_message(EngineFatal(f"The engine stopped on an internal error: {type(error).__name__}."))


def _load_model(
    settings: ParleySettings, send_message: SendMessage
) -> tuple[DecoderRunner | EncoderRunner, ModelInfo, KVEventPublisher | None] | None:
    """Load the model, and open the publisher of its cache events. None if an EngineFatal with the reason was sent."""
    try:
        import parley.core.engine_loop
        import parley.core.shared_pages.staging  # noqa: F401
        from parley.model.load.loader import LoadError, load_runner
        from parley.worker.kv_events import EventsError, KVEventPublisher
    except ImportError as error:
        send_message(EngineFatal(f"The engine cannot start: {error}. Is the package installed completely?"))
        return None
    try:
        runner, info = load_runner(settings, lambda stage, fraction: send_message(LoadProgress(stage, fraction)))
    except LoadError as error:
        send_message(EngineFatal(str(error)))
        return None
    except Exception as error:
        log.exception("loading failed")
        send_message(EngineFatal(f"The model could not be loaded: {type(error).__name__}: {error}"))
        return None
    try:
        return runner, info, None if settings.cache_events is None else KVEventPublisher(settings.cache_events)
    except EventsError as error:
        send_message(EngineFatal(str(error)))
        return None


def _run_model(settings: ParleySettings, inbox: EngineInbox, send_message: SendMessage) -> None:
    """Load the model and run its loop in this thread, with threads for adapters and grammars."""
    loaded = _load_model(settings, send_message)
    if loaded is None:
        return
    from parley.core.engine_loop import EngineLoop
    from parley.core.shared_pages.staging import PageStaging
    from parley.native import mapped_weights

    runner, info, publisher = loaded
    adapter_thread, grammar_thread = ThreadPoolExecutor(1, "adapters"), TenantExecutor(1, "grammars")

    def prepare_request(request: EngineRequest, on_prepared: Callable[[], None]) -> None:
        preparation = runner.prepare_request(request)
        if preparation is None:
            on_prepared()
        else:
            grammar_thread.submit(request.tenant, preparation).add_done_callback(lambda _: inbox.put(on_prepared))

    def send_computed_pages(request_id: str, pages: list[int]) -> None:
        send_message(PagesComputed(request_id, pages))

    page_staging = PageStaging(runner.staging, send_computed_pages) if runner.staging is not None else None

    def emit_outputs(outputs: list[EngineOutput], stats: EngineStats) -> None:
        if page_staging is not None:
            page_staging.flush_outgoing()
            stats.unstaged_pages = page_staging.unstaged_count
        send_message(StepOutputs(outputs, stats))

    fetch_adapter = _adapter_loader(runner, adapter_thread, inbox)
    loop = EngineLoop(
        runner,
        msgspec.structs.replace(settings, device=info.device),
        emit_outputs,
        fetch_adapter=fetch_adapter,
        prepare_request=prepare_request,
        on_pages_leased=send_computed_pages if page_staging is None else page_staging.add_leased_pages,
        post=inbox.put,
        publish_events=None if publisher is None else publisher.publish,
    )
    if page_staging is not None:
        page_staging.attach_pinned_pages(loop.pinned_pages)
    send_message(EngineReady(info))
    mapped_weights.start_copying()
    try:
        serve_messages(loop, page_staging or loop.pinned_pages, inbox, send_message)
    finally:
        loop.close()
        if publisher is not None:
            publisher.close()
        adapter_thread.shutdown(wait=False, cancel_futures=True)
        grammar_thread.shutdown()


def _adapter_loader(runner: ModelRunner, thread: ThreadPoolExecutor, inbox: EngineInbox) -> FetchAdapter:
    """Return a function that loads adapters in a thread and posts the result to the inbox."""
    from parley.model.load.loader import LoadError

    def load_and_post(folder: str, on_loaded: Callable[[FetchedAdapter], None]) -> None:
        result: FetchedAdapter
        try:
            result = runner.load_adapter(folder)
        except LoadError as error:
            result = str(error)
        except MemoryError:
            result = "There is not enough memory for the adapter."
        except Exception as error:
            log.exception("an adapter could not be read")
            result = f"The adapter could not be read: {type(error).__name__}."
        inbox.put(partial(on_loaded, result))

    def fetch_adapter(folder: str, on_loaded: Callable[[FetchedAdapter], None]) -> None:
        thread.submit(load_and_post, folder, on_loaded)

    return fetch_adapter


def serve_engine_socket(fd: int, *, is_early: bool = False) -> None:
    """Serve over an inherited socket until it is closed. ``fd``: its file descriptor; ``is_early``: the settings come
    only when the API process has imported its own libraries."""
    ignore_group_signals()
    set_up_child_logging()
    for name, value in LIBRARY_SETTINGS.items():
        os.environ.setdefault(name, value)
    threading.excepthook = _exit_at_thread_death
    sock = socket.socket(fileno=fd)
    if is_early:
        gc.disable()  # the objects of libraries are never freed, and each scan of them takes a tenth of a second
        with suppress(Exception):  # the import fails again below, where the error is reported
            import parley.core.engine_loop
            import parley.model.load.loader  # noqa: F401
        gc.freeze()
        gc.enable()
    settings = wire.receive_frame(sock, msgspec.msgpack.Decoder(ParleySettings))
    if settings is None:
        return
    inbox: EngineInbox = queue.SimpleQueue()

    def read_socket() -> None:
        decoder = msgspec.msgpack.Decoder(ToEngine)
        try:
            while (message := wire.receive_frame(sock, decoder)) is not None:
                inbox.put(message)
        except OSError:
            pass
        except (wire.BrokenFrame, msgspec.DecodeError) as error:
            log.error("the stream from the API process is malformed: %s", error)
            os._exit(1)
        os._exit(0)

    def write_socket(message: FromEngine) -> None:
        if isinstance(message, EngineReady):
            # Objects made while loading stay for good. Scanning them in each garbage collection would take a tenth of
            # a second, and every client would wait.
            gc.collect()
            gc.freeze()
        try:
            sock.sendall(wire.encode_frame(message))
        except OSError:
            os._exit(0)

    threading.Thread(target=read_socket, name="inbox", daemon=True).start()
    send_beats(lambda: write_socket(Heartbeat()))
    run_engine(settings, inbox, write_socket)
    sys.stderr.flush()
    os._exit(0)


def _exit_at_thread_death(args: threading.ExceptHookArgs) -> None:
    """End the process if an exception ends one of its threads; its requests would wait for ever."""
    log.error(
        "the thread %s of the engine failed",
        args.thread.name if args.thread is not None else "of a library",
        exc_info=args.exc_value,
    )
    sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    serve_engine_socket(int(sys.argv[-1]), is_early=EARLY in sys.argv)
