"""One served model: its engine, text pipeline, names, slots in the queue, and metrics.

Knows no HTTP and no other models. Its states follow one another: loading, serving (the engine may restart meanwhile),
ending.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

from parley import hub
from parley.dialects.dialect import Head
from parley.dialects.facts import Card, Vitals
from parley.engine.messages import Progress
from parley.engine.protocol import Engine, EngineFailed
from parley.errors import NotReady, Overloaded, ParleyError, Stopping
from parley.metrics.recorded import Metrics
from parley.serving.options import ServerOptions
from parley.text import Language
from parley.types import ModelInfo, Settings
from parley.version import __version__

GRACE = 2.0  # seconds to write the last events of failed requests


class OpenRequest(Protocol):
    """A request between admission and its last event.

    ``adapter_state``: the name of its adapter, and whether no token has arrived yet.
    """

    @property
    def labels(self) -> tuple[str, ...]: ...

    @property
    def adapter(self) -> tuple[str, bool] | None: ...

    def halt(self, label: str) -> None: ...

    def lose(self, error: ParleyError) -> None: ...


class Model:
    """A model with its engine. ``fetch_weights`` and ``load_engine`` bring it into service; ``drain_requests`` and
    ``close_engine`` take it out.

    ``names``: the names that clients may use; answers carry the first one if the request named none. ``total_slots``:
    the slots for choices that may run or wait; ``used_slots`` of them are taken, ``tenant_slots`` counts them by
    tenant.
    """

    def __init__(self, names: tuple[str, ...], settings: Settings, engine: Engine, options: ServerOptions):
        self.options = options
        self.names = names
        self.settings = settings
        self.engine = engine
        self.created = int(time.time())
        self.metrics = Metrics()
        engine.step_observers.append(self.metrics.step)
        self.fingerprint = ""
        self.places = settings.max_batch + options.max_queue
        self.held = 0
        self.holders: Counter[str] = Counter()  # tenants with at least one slot
        self.open: dict[OpenRequest, None] = {}  # oldest first
        self.ending = ""  # the reason why it takes no more requests
        self.paused = ""  # "held" or "prepared": requests are refused until admission resumes
        self.adapters: dict[str, int] = {}  # name -> when it was loaded; the folders are in the settings
        self._language: Language | None = None

    @property
    def name(self) -> str:
        """The main name."""
        return self.names[0]

    async def fetch(self) -> None:
        """Find or download the model's folder, in a thread that does not keep the process from exiting.

        Raises ModelMissing.
        """
        if self.engine.scripted:  # needs no weights
            self.settings.model = str(hub.find(self.settings.model) or self.settings.model)
            return
        loop = asyncio.get_running_loop()
        found: asyncio.Future[Path] = loop.create_future()

        def settle(result: Path | Exception) -> None:
            if found.done():
                return
            if isinstance(result, Exception):
                found.set_exception(result)
            else:
                found.set_result(result)

        def report(stage: str, fraction: float) -> None:
            self.engine.progress = Progress(stage, fraction / 2)  # the other half is loading

        def look() -> None:
            result: Path | Exception
            try:
                result = hub.resolve(self.settings.model, report)
            except Exception as error:
                result = error
            with contextlib.suppress(RuntimeError):  # the loop is closed and has no waiter left
                loop.call_soon_threadsafe(settle, result)

        threading.Thread(target=look, name="parley-hub", daemon=True).start()
        self.settings.model = str(await found)

    @property
    def weight(self) -> int:
        """Bytes of memory that it needs in addition to a share of free memory, estimated from folder and settings."""
        folders = (self.settings.model, self.settings.draft)
        files = [file for folder in folders if folder is not None for file in Path(folder).glob("*.safetensors")]
        return sum(file.stat().st_size for file in files) + (self.settings.kv_memory or 0)

    def _read(self) -> Language:
        """Load the tokenizer and all else that text needs; slow, so call it in a thread."""
        settings = self.settings
        return Language.load(settings.model, settings.tool_parser, settings.reasoning_parser)

    async def load(self) -> ModelInfo:
        """Load tokenizer and engine in parallel, then the adapters. Raises EngineFailed, BadTokenizer."""
        language = asyncio.create_task(asyncio.to_thread(self._read))
        try:
            await self.engine.start()
            self._language = await language
            info = await self.engine.ready()
            self.metrics.fit(info.max_model_len)
            for name, folder in list(self.settings.adapters.items()):
                if why := await self.adopt(name, folder):
                    raise EngineFailed(f"The adapter {name} cannot be loaded: {why}")
        finally:
            language.cancel()
        if info.kv_bytes:
            self.settings.kv_memory = info.kv_bytes  # a restart takes the same amount, however much is free then
        numbers = f"{info.dtype} {info.quantization} {info.kv_dtype}"
        identity = f"{__version__} {info.architecture} {info.parameters} {numbers} {info.device}"
        self.fingerprint = "fp_" + hashlib.sha256(identity.encode()).hexdigest()[:10]
        return info

    async def adopt(self, name: str, folder: str) -> str:
        """Serve an adapter under this name, replacing any other. Return why it failed, or an empty string."""
        why = await self.engine.load_adapter(name, folder)
        if not why:
            self.adapters[name] = int(time.time())
            self.settings.adapters[name] = folder  # a restarted engine loads it too
        return why

    async def disown(self, name: str) -> str:
        """Stop serving an adapter; open requests keep it. Return why it failed, or an empty string."""
        del self.adapters[name], self.settings.adapters[name]
        return await self.engine.unload_adapter(name)

    @property
    def language(self) -> Language:
        """The text pipeline. Raises NotReady until it is loaded."""
        if self._language is None:
            raise self._loading()
        return self._language

    @property
    def info(self) -> ModelInfo:
        """The engine's description of the model. Raises NotReady until it is loaded."""
        if self.engine.info is None:
            raise self._loading()
        return self.engine.info

    def _loading(self) -> NotReady:
        progress = self.engine.progress
        done = f"{progress.fraction:.0%}"
        return NotReady(f"The model {self.name} is still loading ({done}, {progress.stage}).", retry_after=1)

    def refusal(self) -> NotReady | None:
        """Return the reason why requests cannot be taken now, None if they can."""
        if self.ending:
            return Stopping(self.ending, retry_after=5)
        if self.paused:
            return NotReady("The server is paused.", retry_after=5)
        match self.engine.state:
            case "ready" if self._language is not None:
                return None
            case "restarting":
                return NotReady(f"The engine of {self.name} stopped and is being restarted.", retry_after=2)
            case "failed" | "closed":
                return NotReady(f"The engine of {self.name} has stopped; no request can be answered.", retry_after=10)
            case _:
                return self._loading()

    def require(self) -> None:
        """Raise NotReady unless requests can be taken."""
        refusal = self.refusal()
        if refusal is not None:
            raise refusal

    @property
    def phase(self) -> str:
        """The state in one word."""
        if self.ending:
            return "draining"
        if self.paused and self.engine.state == "ready":
            return self.paused
        return "loading" if self.engine.state in ("idle", "ready") and self.refusal() else self.engine.state

    @property
    def loaded(self) -> float:
        """Loading progress, 0 to 1."""
        return 1.0 if self.engine.state == "ready" else self.engine.progress.fraction

    def called(self, name: str) -> str:
        """Return the name that answers carry if the request used ``name``."""
        return name if name in self.names or name in self.adapters else self.name

    def cards(self) -> list[Card]:
        """Return one card for each name, adapters last."""
        return [self.card(name) for name in (*self.names, *self.adapters)]

    def card(self, name: str) -> Card:
        """Describe the model, or one of its adapters, under this name."""
        info = self.engine.info
        context = info.max_model_len if info is not None else None
        created, folder = self.created, ""
        if name in self.adapters:
            created, folder = self.adapters[name], self.settings.adapters[name]
        totals = self.metrics.totals
        return Card(name, created, context, self.name, self.phase, totals, self._purpose, folder)

    @property
    def _purpose(self) -> Literal["chat", "text", "vectors"]:
        if self.engine.info is not None and not self.engine.info.generates:
            return "vectors"
        return "chat" if self._language is None or self._language.template else "text"

    def vitals(self) -> Vitals:
        """Return slots, engine statistics and mean latencies at this moment."""
        first, gap = self.metrics.first_tokens.mean, self.metrics.gaps.mean
        batch, stats = self.settings.max_batch, self.engine.stats
        return Vitals(self.phase, self.places, self.held, batch, stats, self.engine.info, first, gap)

    def head(
        self,
        id: str,
        path: Mapping[str, str],
        headers: Mapping[bytes, bytes],
        query: bytes = b"",
        created: int | None = None,
    ) -> Head:
        """Return the server state that a dialect needs to read request ``unique_id``; ``created`` defaults to now."""
        info, stats = self.engine.info, self.engine.stats
        context, device, size = (info.max_model_len, info.device, info.block_size) if info is not None else (0, "", 0)
        cached, capacity, waiting = stats.blocks_used * size, stats.blocks_total * size, stats.waiting
        advice = self._language.advice if self._language is not None else {}
        created = int(time.time()) if created is None else created
        mark = self.fingerprint
        return Head(id, created, mark, context, device, path, headers, query, cached, capacity, advice, waiting)

    def hold(self, choices: int, tenant: str = "") -> None:
        """Take a slot for each choice. A request is admitted as a whole if one slot is free. Raises Overloaded.

        No tenant can starve the others: when all slots are taken, tenants that hold less than an equal share are still
        admitted. Two tenants can then hold up to 1.5 times ``total_slots`` together, four about twice as many.
        """
        fair = self.places / len(self.holders.keys() | {tenant})
        if self.held >= self.places and self.holders[tenant] >= fair:
            self.metrics.rejected.add(value="queue_full")
            self.metrics.totals.rejected += 1
            raise Overloaded(f"The queue is full ({self.held} answers running or waiting). Try again later.")
        self.held += choices
        self.holders[tenant] += choices

    def free(self, choices: int, tenant: str = "") -> None:
        """Give slots back."""
        self.held -= choices
        self.holders[tenant] -= choices
        if not self.holders[tenant]:
            del self.holders[tenant]

    def labelled(self, label: str) -> OpenRequest | None:
        """Return the oldest open request with this cancel id, None if there is none."""
        return next((each for each in self.open if label in each.labels), None)

    async def end(self, why: str, seconds: float) -> None:
        """Stop admission, let open requests finish for ``seconds``, then fail the rest with ``reason``."""
        self.ending = why
        if await self.settle(seconds):
            return
        for request in list(self.open):
            request.lose(Stopping(f"{why} This answer could not be finished.", retry_after=5))
        await self.settle(GRACE)

    async def settle(self, seconds: float) -> bool:
        """Wait until no request is open, for at most ``seconds``. Return whether none is."""
        deadline = time.monotonic() + seconds
        while self.open and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return not self.open

    async def close(self) -> None:
        """Close the engine; requests that are still open fail."""
        await self.engine.close()


def share(models: Sequence[Model]) -> None:
    """Divide memory between models that will be loaded in this order; call it when all have been fetched.

    Models without a ``kv_memory`` of their own get equal parts of the memory that all weights leave for KV caches.
    """
    sharing = sum(model.settings.kv_memory is None for model in models)
    for number, model in enumerate(models, 1):
        model.settings.kv_share = 1 / max(1, sharing)
        model.settings.set_aside = sum(later.weight for later in models[number:])
