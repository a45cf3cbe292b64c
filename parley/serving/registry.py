"""What all requests of a server share: the models that it serves, which of them a request means, and whether all serve.

Knows no HTTP. Models come and go while it runs (``add``, ``remove``); the first one is the main one, which stays.
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

# What clients of Hugging Face's servers, of which each has one model, say where a name has to stand.
PLACEHOLDER = re.compile(r"tgi|dummy|https?://.*", re.DOTALL)
LAST_WORDS = 0.5  # seconds for the last events of requests whose engine was closed
CLOSING = "The server is shutting down."


class ModelObserver(Protocol):
    """Follows which models are served."""

    def add_model(self, model: Model) -> None:
        """The model is served from now on."""

    def remove_model(self, model: Model) -> None:
        """The model takes no more requests."""


class Service:
    """The models that are served and what they share. ``drain`` and ``close`` end them all.

    ``observers`` are told of every model, of the first ones as well. ``stop`` ends the server.
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
        self.responses = Count()  # answers over HTTP, by status
        self.calls = Count()  # answers over gRPC, by status
        self.endpoints = Endpoints(options.endpoints)
        self.adapting = asyncio.Lock()  # held while an adapter is loaded or unloaded
        self.tokenizing = asyncio.Lock()  # held while a huge text is tokenized for its own sake
        self.draining = False
        self.stop = stop
        self._observers = observers
        for model in models:
            self._enlist(model)

    def _enlist(self, model: Model) -> None:
        known = {name for each in self.models for name in (*each.names, *each.settings.adapters)}
        taken = sorted(known & {*model.names, *model.settings.adapters})
        if taken:
            raise ValueError(f"The name {taken[0]} is that of another model already.")
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
        """The requests of all models that are being served."""
        return [request for model in self.models for request in model.open]

    @property
    def names(self) -> list[str]:
        """Every name that a client may say."""
        return [name for model in self.models for name in (*model.names, *model.adapters)]

    def get(self, name: str) -> Model | None:
        """The model that a client means; no name, or one that stands for any, means the main one."""
        for model in self.models:
            if name in model.names or name in model.adapters:
                return model
        return self.main if not name or PLACEHOLDER.fullmatch(name) else None

    def find(self, name: str) -> Model:
        """As ``get``. Raises UnknownModel."""
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
        """How many answers may be made or waited for."""
        return sum(model.places for model in self.models)

    # -- whether it serves

    def waits(self) -> Model | None:
        """The first model that does not take requests now."""
        return next((model for model in self.models if model.refusal() is not None), None)

    def refusal(self) -> NotReady | None:
        """Why not every model takes requests now, None if all do."""
        model = self.waits()
        return model.refusal() if model is not None else None

    def require(self) -> None:
        """Raise NotReady unless all models take requests."""
        refusal = self.refusal()
        if refusal is not None:
            raise refusal

    def admit(self) -> None:
        """Raise NotReady if no model takes requests: then it does not matter which of them one is for."""
        refusals = [model.refusal() for model in self.models]
        if all(refusals) and refusals[0] is not None:
            raise refusals[0]

    @property
    def phase(self) -> str:
        """One word for the state: that of the first model which is not ready."""
        model = self.waits()
        return model.phase if model is not None else "ready"

    def facts(self) -> Facts:
        cards = [card for model in self.models for card in model.cards()]
        return Facts(__version__, cards, self.waits() is None, self.main.vitals())

    def hold_back(self, how: str) -> None:
        """Refuse requests, in one of two ways, until they are let in again (empty); running ones go on."""
        for model in self.models:
            model.paused = how

    def shut(self) -> None:
        """Refuse requests for good; running ones go on."""
        self.draining = True
        for model in self.models:
            model.ending = CLOSING

    # -- models that come and go

    async def add(self, model: Model) -> None:
        """Serve one more model; it is listed from now on, and answers when this returns.

        Raises ValueError if a name of it is taken, NotReady while the server ends, and what ``Model.fetch`` and
        ``Model.load`` raise, after which it is listed no longer.
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
        """Serve a model no longer: unknown from now on, ended after its open requests. ValueError for the main one."""
        if model is self.main:
            raise ValueError("The main model cannot be removed.")
        self._withdraw(model)
        try:
            await model.end(f"The model {model.name} is being removed.", self.options.drain)
        finally:
            await model.close()

    async def drain(self, seconds: float | None = None) -> None:
        """Take no more requests; let the open ones end for a while (``options.drain``), then end them with an error."""
        self.shut()
        seconds = self.options.drain if seconds is None else seconds
        await asyncio.gather(*(model.end(CLOSING, seconds) for model in self.models))

    async def settle(self, seconds: float) -> None:
        """Wait until no request is open, but not for ever."""
        await asyncio.gather(*(model.settle(seconds) for model in self.models))

    async def close(self) -> None:
        """End all engines; open requests get their errors from them. Let another server have the file of endpoints."""
        self.endpoints.close()
        await asyncio.gather(*(model.close() for model in self.models))
        await self.settle(LAST_WORDS)
