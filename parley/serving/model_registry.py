"""The models that a server serves, which of them a request means, and whether they all take requests.

Knows no HTTP. Models may be added and removed while the server runs; the first one is the main model, which stays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from parley.dialects.facts import ServerFacts
from parley.dialects.mounts import known_spelling, names_any_model
from parley.dialects.reasoning_seal import ReasoningSeal
from parley.dialects.records import TenantRecords
from parley.dialects.route import Route
from parley.errors import NotReady, ServerStopping, UnknownModel, excerpt
from parley.metrics.http_requests import HttpRequestMetrics
from parley.metrics.series import LabelledCounter
from parley.serving.endpoints.inference_tables import InferenceTables
from parley.serving.endpoints.rate_limits import EndpointUsage
from parley.serving.endpoints.traffic_split import EndpointStore
from parley.serving.keys.accounts import KeyLedger
from parley.serving.keys.scopes import check_key_name, may_use_model
from parley.serving.keys.usage_store import UsageStore
from parley.serving.model_facts import model_cards, server_status
from parley.serving.open_requests import OpenRequest
from parley.serving.records.background import BackgroundRunner, tenant_records
from parley.serving.records.batch_runner import BatchRunner
from parley.serving.records.connection_records import ConnectionStore
from parley.serving.records.open_store import open_record_store
from parley.serving.served_model import ServedModel
from parley.serving.server_options import ServerOptions
from parley.serving.web_pages.activity_history import ActivityHistory
from parley.tracing.request_trace import SpanExporter
from parley.types import NO_TENANT, KeyOwner, Tenant
from parley.version import __version__
from parley.web.auth import owner_of

CLOSE_GRACE_SECONDS = 0.5  # seconds for the last events of requests after their engine was closed
SHUTDOWN_MESSAGE = "The server is shutting down."


class ModelObserver(Protocol):
    """Observes which models are served."""

    def add_model(self, model: ServedModel) -> None:
        """Called when a model is listed, before it is loaded."""

    def remove_model(self, model: ServedModel) -> None:
        """Called when a model is no longer served."""


class ModelRegistry:
    """The served models and their shared state. ``drain_models``, ``close_models`` and ``close_stores`` end them all.

    ``observers`` are notified of every model, including the first ones. ``stop_server`` ends the server.
    ``span_exporter`` sends the spans of requests elsewhere; None: requests are not traced.
    """

    def __init__(
        self,
        options: ServerOptions,
        models: Iterable[ServedModel],
        observers: Sequence[ModelObserver] = (),
        stop_server: Callable[[], None] = lambda: None,
        span_exporter: SpanExporter | None = None,
    ):
        self.options = options
        self.span_exporter = span_exporter
        self.models: list[ServedModel] = []
        self.http_requests = HttpRequestMetrics()
        self.http_responses = LabelledCounter()  # responses over HTTP, by status
        self.grpc_responses = LabelledCounter()  # responses over gRPC, by status
        self.endpoint_store = EndpointStore(options.endpoints)
        self.endpoint_usage = EndpointUsage()
        tables = options.inference_tables
        self.inference_tables = None if tables is None else InferenceTables(Path(tables))
        self.usage_store = None if options.usage_db is None else UsageStore(options.usage_db)
        self.key_ledger = KeyLedger(self.usage_store)
        self.adapter_lock = asyncio.Lock()  # held while an adapter is loaded or unloaded
        self.pull_lock = asyncio.Lock()  # held while a model is downloaded at a client's request
        self.huge_text_lock = asyncio.Lock()  # held while a huge text is tokenized at a client's request
        self.activity_history = ActivityHistory()
        self.shutting_down = False
        self.record_store = open_record_store(
            options.response_store, options.response_lifetime, options.response_store_file
        )
        self.connection_records = ConnectionStore()
        self.background_runs = BackgroundRunner(self.record_store)
        self.batch_runner = BatchRunner(self.background_runs, self.record_store, is_ending=lambda: self.shutting_down)
        self.reasoning_seal = ReasoningSeal(options.seal_secret)
        self.stop_server = stop_server
        self._observers = observers
        for model in models:
            self._list_model(model)

    def _list_model(self, model: ServedModel) -> None:
        known_names = {name for other in self.models for name in (*other.names, *other.settings.adapters)}
        taken_names = sorted(known_names & {*model.names, *model.settings.adapters})
        if taken_names:
            raise ValueError(f"The name {taken_names[0]} already belongs to another model.")
        self.models.append(model)
        model.use_endpoints(self.endpoint_store)
        for observer in self._observers:
            observer.add_model(model)

    def _unlist_model(self, model: ServedModel) -> None:
        self.models.remove(model)
        for observer in self._observers:
            observer.remove_model(model)

    @property
    def main_model(self) -> ServedModel:
        """The first model, which is never removed."""
        return self.models[0]

    @property
    def body_limit(self) -> int:
        """The largest body in bytes: more if a model reads images, videos or audio, which bodies may contain."""
        if any(model.engine.info is not None and model.engine.info.media_kinds for model in self.models):
            return max(self.options.body_limit, self.options.media_body_limit)
        return self.options.body_limit

    @property
    def open_requests(self) -> list[OpenRequest]:
        """The open requests of all models."""
        return [request for model in self.models for request in model.open_requests]

    @property
    def served_names(self) -> list[str]:
        """All names of models and adapters that clients may send."""
        return [name for model in self.models for name in (*model.names, *model.adapters)]

    def get_model(self, name: str, implied_model: ServedModel | None = None) -> ServedModel | None:
        """Return the model or the adapter's model of this name, None if unknown. An empty name means the implied model,
        by default the main one, as do the placeholders that stand for any model. The default tag is optional."""
        for model in self.models:
            if name in model.names or name in model.adapters:
                return model
        known_names = self.served_names
        if names_any_model(name, known_names):
            return implied_model or self.main_model
        spelling = known_spelling(name, known_names)
        return self.get_model(spelling) if spelling is not None else None

    def implied_model(self, route: Route, tenant: Tenant = NO_TENANT) -> ServedModel:
        """Return the model that requests for a route are for if they name none: the first that suits it, or else the
        first. One that has not been loaded counts as suitable, so that the choice does not depend on when each is
        loaded. Models that the client's key may not use do not count, as long as it may use another."""
        usable = [model for model in self.models if may_use_model(tenant, model)] or self.models
        if len(usable) == 1:
            return usable[0]
        infos = ((model, model.engine.info) for model in usable)
        return next((model for model, info in infos if info is None or route.suits_model(info.tasks)), usable[0])

    def find_model(
        self, name: str, tenant: Tenant = NO_TENANT, implied_model: ServedModel | None = None
    ) -> ServedModel:
        """Return the model of this name, as ``get_model`` does. Raises UnknownModel; Forbidden if the client's key may
        use neither the model nor an adapter of it."""
        model = self.get_model(name, implied_model)
        if model is not None:
            if not may_use_model(tenant, model):
                check_key_name(tenant, model, name)
            return model
        known_names = self.visible_names(tenant)
        raise UnknownModel(
            f"The model {excerpt(name)} does not exist. Served here: {', '.join(known_names)}.",
            name=name,
            served=known_names,
            field="model",
        )

    def visible_names(self, tenant: Tenant) -> list[str]:
        """The served names that a client's key may use."""
        return [card.name for model in self.models for card in model_cards(model, tenant)]

    def tenant_records(self, tenant: Tenant) -> TenantRecords:
        """Return the records of a tenant."""
        return tenant_records(self.record_store, self.background_runs, tenant.id)

    def use_options(self, options: ServerOptions) -> None:
        """Take other options from now on, for all models."""
        self.options = options
        for model in self.models:
            model.use_options(options)

    @property
    def total_slots(self) -> int:
        """The number of answers that may run or wait, over all models."""
        return sum(model.total_slots for model in self.models)

    # -- whether it serves

    def first_unready_model(self) -> ServedModel | None:
        """Return the first model that does not take requests now, None if all do."""
        return next((model for model in self.models if model.unready_error() is not None), None)

    def unready_error(self) -> NotReady | None:
        """Return the reason why not every model takes requests now, None if all do."""
        model = self.first_unready_model()
        return model.unready_error() if model is not None else None

    def require_ready(self) -> None:
        """Raise NotReady unless all models take requests."""
        unready_error = self.unready_error()
        if unready_error is not None:
            raise unready_error

    def require_any_ready(self) -> None:
        """Raise NotReady if no model takes requests, whichever model the request is for."""
        unready_errors = [model.unready_error() for model in self.models]
        if all(unready_errors) and unready_errors[0] is not None:
            raise unready_errors[0]

    @property
    def server_phase(self) -> str:
        """The state in one word: that of the first model which is not ready."""
        model = self.first_unready_model()
        return model.model_phase if model is not None else "ready"

    def server_facts(self, tenant: Tenant = NO_TENANT, main: ServedModel | None = None) -> ServerFacts:
        """Return the facts about the server that dialects report. ``main``: the model whose facts come first;
        None: the main one. A client whose key is limited to some models hears of no others."""
        main = main or self.main_model
        ordered = [main, *(model for model in self.models if model is not main)]
        cards = [card for model in ordered for card in model_cards(model, tenant)]
        ready = self.first_unready_model() is None
        keys = (*self.options.api_keys, *self.options.admin_keys) if self.options.has_keys else None
        owners = None if keys is None else [self.options.key_owners.get(key, KeyOwner()) for key in keys]
        if owners is not None:
            owners += map(owner_of, self.options.hashed_keys or ())
        return ServerFacts(
            __version__,
            cards,
            ready,
            status=server_status(main),
            cache_events=main.settings.cache_events,
            key_owners=owners,
            keeps_tables=self.inference_tables is not None,
            root_path=self.options.root_path,
        )

    def set_pause(self, pause_state: str) -> None:
        """Pause admission ("held" or "prepared") or resume it (""); open requests continue."""
        for model in self.models:
            model.pause_state = pause_state

    def stop_admission(self) -> None:
        """Stop admission for good; open requests continue."""
        self.shutting_down = True
        for model in self.models:
            model.ending_reason = SHUTDOWN_MESSAGE

    # -- models that come and go

    async def serve_model(self, model: ServedModel) -> None:
        """Serve one more model. It is listed at once and answers requests when this returns.

        Raises ValueError if one of its names is taken, NotReady while the server shuts down, and anything that
        ``ServedModel.fetch_weights`` and ``ServedModel.load_engine`` raise; the model is then no longer listed.
        """
        if self.shutting_down:
            raise ServerStopping(SHUTDOWN_MESSAGE, retry_after=5)
        self._list_model(model)
        model.pause_state = self.main_model.pause_state
        model.settings.kv_share = 1 / len(self.models)
        try:
            await model.fetch_weights()
            await model.load_engine()
        except BaseException:
            if model in self.models:
                self._unlist_model(model)
            await model.close_engine()
            raise

    async def retire_model(self, model: ServedModel) -> None:
        """Stop serving a model: unknown at once, closed after its open requests. ValueError for the main model."""
        if model is self.main_model:
            raise ValueError("The main model cannot be removed.")
        self._unlist_model(model)
        try:
            await model.drain_requests(f"The model {model.name} is being removed.", self.options.drain)
        finally:
            await model.close_engine()

    async def drain_models(self, seconds: float | None = None) -> None:
        """Stop admission, let open requests finish for ``seconds`` (default ``options.drain``), then fail the rest."""
        self.stop_admission()
        seconds = self.options.drain if seconds is None else seconds
        await asyncio.gather(*(model.drain_requests(SHUTDOWN_MESSAGE, seconds) for model in self.models))

    async def wait_all_idle(self, seconds: float) -> None:
        """Wait until no request is open, for at most ``seconds``."""
        await asyncio.gather(*(model.wait_until_idle(seconds) for model in self.models))

    async def close_models(self) -> None:
        """Close all engines, whose open requests then fail, and release the endpoints file to other servers."""
        self.endpoint_store.release_file()
        await self.background_runs.close()
        await asyncio.gather(*(model.close_engine() for model in self.models))
        await self.wait_all_idle(CLOSE_GRACE_SECONDS)

    async def close_stores(self) -> None:
        """Write usage, records and tables to their files, and close them. All requests have ended."""
        self.record_store.close()
        if self.inference_tables is not None:
            await asyncio.to_thread(self.inference_tables.close)
        if self.usage_store is not None:
            await asyncio.to_thread(self.usage_store.close)
