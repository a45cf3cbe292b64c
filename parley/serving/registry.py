"""The models that a server serves, which of them a request means, and whether they all take requests.

Knows no HTTP. Models may be added and removed while the server runs; the first one is the main model, which stays.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from parley.dialects.facts import Facts
from parley.errors import NotReady, Stopping, UnknownModel, excerpt
from parley.metrics.series import Count
from parley.serving.options import ServerOptions
from parley.serving.served_model import Model, OpenRequest
from parley.serving.traffic_split import Endpoints
from parley.version import __version__

# Clients of Hugging Face's servers, which serve one model each, send these where a model's name is required.
PLACEHOLDER = re.compile(r"tgi|dummy|https?://.*", re.DOTALL)
LAST_WORDS = 0.5  # seconds for the last events of requests after their engine was closed
CLOSING = "The server is shutting down."


class ModelObserver(Protocol):
    """Observes which models are served."""

    def add_model(self, model: Model) -> None:
        """Called when a model is listed, before it is loaded."""

    def remove_model(self, model: Model) -> None:
        """Called when a model is no longer served."""


class Service:
    """The served models and their shared state. ``drain_models`` and ``close_models`` end them all.

    ``observers`` hear of every model, including the first ones. ``stop_server`` ends the server.
    """

    def __init__(
        self,
        options: ServerOptions,
        models: Iterable[Model],
        observers: Sequence[ModelObserver] = (),
        stop: Callable[[], None] = lambda: None,
    ):
        self.options = options
        self.models: list[Model] = []
        self.responses = Count()  # responses over HTTP, by status
        self.calls = Count()  # responses over gRPC, by status
        self.endpoints = Endpoints(options.endpoints)
        self.adapting = asyncio.Lock()  # held while an adapter is loaded or unloaded
        self.tokenizing = asyncio.Lock()  # held while a huge text is tokenized at a client's request
        self.draining = False
        self.stop = stop
        self._observers = observers
        for model in models:
            self._enlist(model)

    def _enlist(self, model: Model) -> None:
        known = {name for each in self.models for name in (*each.names, *each.settings.adapters)}
        taken = sorted(known & {*model.names, *model.settings.adapters})
        if taken:
            raise ValueError(f"The name {taken[0]} already belongs to another model.")
        self.models.append(model)
        for observer in self._observers:
            observer.add_model(model)

    def _withdraw(self, model: Model) -> None:
        self.models.remove(model)
        for observer in self._observers:
            observer.remove_model(model)

    @property
    def main(self) -> Model:
        return self.models[0]

    @property
    def open(self) -> list[OpenRequest]:
        """The open requests of all models."""
        return [request for model in self.models for request in model.open]

    @property
    def names(self) -> list[str]:
        """All names of models and adapters that clients may send."""
        return [name for model in self.models for name in (*model.names, *model.adapters)]

    def get(self, name: str) -> Model | None:
        """Return the model or the adapter's model of this name, None if unknown. An empty name means the main model,
        as do the placeholders that stand for any model."""
        for model in self.models:
            if name in model.names or name in model.adapters:
                return model
        return self.main if not name or PLACEHOLDER.fullmatch(name) else None

    def find(self, name: str) -> Model:
        """Return the model of this name, as ``get_model`` does. Raises UnknownModel."""
        model = self.get(name)
        if model is not None:
            return model
        served = self.names
        raise UnknownModel(
            f"The model {excerpt(name)} does not exist. Served here: {', '.join(served)}.",
            name=name,
            served=served,
            field="model",
        )

    @property
    def places(self) -> int:
        """The number of answers that may run or wait, over all models."""
        return sum(model.places for model in self.models)

    # -- whether it serves

    def waits(self) -> Model | None:
        """Return the first model that does not take requests now, None if all do."""
        return next((model for model in self.models if model.refusal() is not None), None)

    def refusal(self) -> NotReady | None:
        """Return the reason why not every model takes requests now, None if all do."""
        model = self.waits()
        return model.refusal() if model is not None else None

    def require(self) -> None:
        """Raise NotReady unless all models take requests."""
        refusal = self.refusal()
        if refusal is not None:
            raise refusal

    def admit(self) -> None:
        """Raise NotReady if no model takes requests, whichever model the request is for."""
        refusals = [model.refusal() for model in self.models]
        if all(refusals) and refusals[0] is not None:
            raise refusals[0]

    @property
    def phase(self) -> str:
        """The state in one word: that of the first model which is not ready."""
        model = self.waits()
        return model.phase if model is not None else "ready"

    def facts(self) -> Facts:
        """Return the facts about the server that dialects report."""
        cards = [card for model in self.models for card in model.cards()]
        return Facts(__version__, cards, self.waits() is None, self.main.vitals())

    def hold_back(self, how: str) -> None:
        """Pause admission ("held" or "prepared") or resume it (""); open requests continue."""
        for model in self.models:
            model.paused = how

    def shut(self) -> None:
        """Stop admission for good; open requests continue."""
        self.draining = True
        for model in self.models:
            model.ending = CLOSING

    # -- models that come and go

    async def add(self, model: Model) -> None:
        """Serve one more model. It is listed at once and answers requests when this returns.

        Raises ValueError if one of its names is taken, NotReady while the server shuts down, and anything that
        ``ServedModel.fetch_weights`` and ``ServedModel.load_engine`` raise; the model is then no longer listed.
        """
        if self.draining:
            raise Stopping(CLOSING, retry_after=5)
        self._enlist(model)
        model.paused = self.main.paused
        model.settings.kv_share = 1 / len(self.models)
        try:
            await model.fetch()
            await model.load()
        except BaseException:
            if model in self.models:
                self._withdraw(model)
            await model.close()
            raise

    async def remove(self, model: Model) -> None:
        """Stop serving a model: unknown at once, closed after its open requests. ValueError for the main model."""
        if model is self.main:
            raise ValueError("The main model cannot be removed.")
        self._withdraw(model)
        try:
            await model.end(f"The model {model.name} is being removed.", self.options.drain)
        finally:
            await model.close()

    async def drain(self, seconds: float | None = None) -> None:
        """Stop admission, let open requests finish for ``seconds`` (default ``options.drain``), then fail the rest."""
        self.shut()
        seconds = self.options.drain if seconds is None else seconds
        await asyncio.gather(*(model.end(CLOSING, seconds) for model in self.models))

    async def settle(self, seconds: float) -> None:
        """Wait until no request is open, for at most ``seconds``."""
        await asyncio.gather(*(model.settle(seconds) for model in self.models))

    async def close(self) -> None:
        """Close all engines, whose open requests then fail, and release the endpoints file to other servers."""
        self.endpoints.close()
        await asyncio.gather(*(model.close() for model in self.models))
        await self.settle(LAST_WORDS)
