"""What all requests of a server share: the engine, the language, names, places in the queue, and whether it serves now.

Knows no HTTP. Its states follow one another: loading, serving (with the engine's own restarts in between), draining.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from parley import __version__
from parley.dialects.dialect import Card, Facts, Head, Vitals
from parley.engine.protocol import Engine
from parley.errors import NotReady, Overloaded, Stopping, UnknownModel, excerpt
from parley.server.endpoints import Endpoints
from parley.server.metrics import Metrics
from parley.server.options import ServerOptions
from parley.text import Language
from parley.types import ModelInfo, Settings

if TYPE_CHECKING:
    from parley.server.generation import Generation

T = TypeVar("T")

LARGE = 16 << 10  # bytes or characters from which work on a text leaves the event loop
# What clients of Hugging Face's servers, of which each has one model, say where a name has to stand.
PLACEHOLDER = re.compile(r"tgi|dummy|https?://.*", re.DOTALL)
GRACE = 2.0  # seconds for the last events of aborted requests to be written


class Service:
    """``load`` makes it serve, ``drain`` ends that. ``held`` places are taken of ``places``; a place is one choice."""

    def __init__(self, options: ServerOptions, settings: Settings, engine: Engine):
        self.options = options
        self.settings = settings
        self.engine = engine
        self.names = options.names or (Path(settings.model).name or "model",)
        self.created = int(time.time())
        self.metrics = Metrics()
        engine.watch = self.metrics.step
        self.fingerprint = ""
        self.places = settings.max_batch + options.max_queue
        self.held = 0
        self.endpoints = Endpoints(options.endpoints)
        self.open: dict[Generation, None] = {}  # the oldest first
        self.draining = False
        self.stop: Callable[[], None] = lambda: None  # ends the server
        self._held = ""  # held or prepared: requests are refused until they are let in again
        self._language: Language | None = None

    async def load(self) -> ModelInfo:
        """Load tokenizer and model side by side. Raises EngineFailed, BadTokenizer."""
        language = asyncio.create_task(asyncio.to_thread(Language.load, self.settings.model))
        try:
            await self.engine.start()
            self._language = await language
            info = await self.engine.ready()
            self.metrics.fit(info.max_model_len)
        finally:
            language.cancel()
        numbers = f"{info.dtype} {info.quantization} {info.kv_dtype}"
        identity = f"{__version__} {info.architecture} {info.parameters} {numbers} {info.device}"
        self.fingerprint = "fp_" + hashlib.sha256(identity.encode()).hexdigest()[:10]
        return info

    @property
    def language(self) -> Language:
        """Raises NotReady before it is loaded."""
        if self._language is None:
            raise NotReady("The model is still loading.")
        return self._language

    @property
    def info(self) -> ModelInfo:
        """Raises NotReady before it is loaded."""
        if self.engine.info is None:
            raise NotReady("The model is still loading.")
        return self.engine.info

    def refusal(self) -> NotReady | None:
        """Why requests cannot be taken now, None if they can."""
        if self.draining:
            return Stopping("The server is shutting down.", retry_after=5)
        engine = self.engine
        if self._held:
            return NotReady("The server is paused.", retry_after=5)
        match engine.state:
            case "ready" if self._language is not None:
                return None
            case "restarting":
                return NotReady("The engine stopped and is being restarted.", retry_after=2)
            case "failed" | "closed":
                return NotReady("The engine has stopped, so nothing can be answered.", retry_after=10)
            case _:
                done = f"{engine.progress.fraction:.0%}"
                return NotReady(f"The model is still loading ({done}, {engine.progress.stage}).", retry_after=1)

    def require(self) -> None:
        """Raise NotReady unless requests are taken."""
        refusal = self.refusal()
        if refusal is not None:
            raise refusal

    @property
    def phase(self) -> str:
        """One word for the state."""
        if self.draining:
            return "draining"
        if self._held and self.engine.state == "ready":
            return self._held
        return "loading" if self.engine.state in ("idle", "ready") and self.refusal() else self.engine.state

    def resolve(self, model: str) -> str:
        """The served name that a client means; none given means the main one. Raises UnknownModel."""
        if model in self.names:
            return model
        if not model or PLACEHOLDER.fullmatch(model):
            return self.names[0]
        raise UnknownModel(
            f"The model {excerpt(model)} does not exist. Served here: {', '.join(self.names)}.",
            name=model,
            served=self.names,
            field="model",
        )

    def card(self, name: str) -> Card:
        info = self.engine.info
        return Card(name, self.created, info.max_model_len if info is not None else None)

    def head(self, id: str, path: Mapping[str, str], headers: Mapping[bytes, bytes], query: bytes = b"") -> Head:
        """What a dialect is told of a request with this id."""
        info, stats = self.engine.info, self.engine.stats
        context, device, size = (info.max_model_len, info.device, info.block_size) if info is not None else (0, "", 0)
        cached, capacity = stats.blocks_used * size, stats.blocks_total * size
        advice = self._language.advice if self._language is not None else {}
        return Head(
            id, int(time.time()), self.fingerprint, context, device, path, headers, query, cached, capacity, advice
        )

    def facts(self) -> Facts:
        cards = [self.card(name) for name in self.names]
        return Facts(__version__, cards, self.refusal() is None, self.phase, self.metrics.totals, self._vitals())

    def _vitals(self) -> Vitals:
        first, gap = self.metrics.first_tokens.mean, self.metrics.gaps.mean
        batch, stats = self.settings.max_batch, self.engine.stats
        return Vitals(self.phase, self.places, self.held, batch, stats, self.engine.info, first, gap)

    def hold_back(self, how: str) -> None:
        """Refuse requests, in one of two ways, until they are let in again (empty); running ones go on."""
        self._held = how

    def hold(self, choices: int) -> None:
        """Take places. A request is let in whole as long as one place is free. Raises Overloaded."""
        if self.held >= self.places:
            self.metrics.rejected.add(value="queue_full")
            self.metrics.totals.rejected += 1
            raise Overloaded(f"{self.held} answers are being made or waited for, as many as may be. Try again later.")
        self.held += choices

    def labelled(self, label: str) -> Generation | None:
        """The oldest open request under this label, or with this id."""
        return next((each for each in self.open if label in each.labels), None)

    async def off_loop(self, size: int, work: Callable[[], T]) -> T:
        """Do the work, in a thread if its input is large."""
        return await asyncio.to_thread(work) if size > LARGE else work()

    async def drain(self) -> None:
        """Take no more requests; let the open ones end for a while, then end them with an error."""
        self.draining = True
        if await self.settle(self.options.drain):
            return
        for generation in list(self.open):
            generation.abort(Stopping("The server is shutting down and could not finish this answer.", retry_after=5))
        await self.settle(GRACE)

    async def settle(self, seconds: float) -> bool:
        """Wait until no request is open, but not for ever."""
        deadline = time.monotonic() + seconds
        while self.open and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return not self.open
