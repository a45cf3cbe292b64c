"""One served model: its engine, text pipeline, names, slots in the queue, and metrics.

Knows no HTTP and no other models. Its states follow one another: loading, serving (the engine may restart meanwhile),
ending.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from parley import hub
from parley.dialects.mounts import known_spelling
from parley.engine.messages import LoadProgress
from parley.engine.protocol import Engine, EngineFailed
from parley.errors import NotReady, Overloaded, ServerStopping, Unsupported
from parley.gguf.folder import LINK_PATTERN
from parley.hub.license_text import read_license
from parley.metrics.model_metrics import ModelMetrics
from parley.serving.endpoints.traffic_split import EndpointStore
from parley.serving.media.fetcher import MediaFetcher
from parley.serving.media.loader import MediaLease, MediaLoader
from parley.serving.media.local_files import LocalMediaFolder
from parley.serving.media.media_adapters import adapter_rank, find_media_adapters
from parley.serving.media.workers import MediaWorkerPool
from parley.serving.open_requests import OpenRequest
from parley.serving.server_options import MediaOptions, ServerOptions
from parley.serving.web_pages.metrics_page import fit_buckets
from parley.serving.workers.daemon_thread import run_in_daemon_thread
from parley.text.text_pipeline import TextPipeline
from parley.text.tokens.json_files import read_json_object
from parley.types import EngineSettings, Media, MediaItem, MediaKind, ModelInfo, ParleySettings, Tenant
from parley.version import __version__

LAST_EVENTS_SECONDS = 2.0  # seconds to write the last events of failed requests


class ServedModel:
    """A model with its engine. ``fetch_weights`` and ``load_engine`` bring it into service; ``drain_requests`` and
    ``close_engine`` take it out.

    * ``names``: the names that clients may use; answers carry the first one if the request named none.
    * ``total_slots``: how many choices may run or wait at a time; ``used_slots``: how many do.
    * ``tenant_slots``: the used slots, by tenant.
    """

    def __init__(self, names: tuple[str, ...], settings: EngineSettings, engine: Engine, options: ServerOptions):
        self.options = options
        self.names = names
        self.settings = settings
        self.engine = engine
        self.created = int(time.time())
        self.metrics = ModelMetrics()
        fit_buckets(self.metrics, 0)
        engine.step_observers.append(self.metrics.record_step)
        engine.info_observers.append(self._list_own_adapters)
        self.adapter_observers: list[Callable[[], None]] = []  # called each time the adapters have changed
        self.fingerprint = ""
        self.total_slots = settings.max_batch + options.max_queue
        self.used_slots = 0
        self.tenant_slots: Counter[str] = Counter()  # tenants with at least one slot
        self.open_requests: dict[OpenRequest, None] = {}  # oldest first
        self.ending_reason = ""  # the reason why it takes no more requests
        self._endpoint_store: EndpointStore | None = None
        self.pause_state = ""  # "held" or "prepared": requests are refused until admission resumes
        self.adapters: dict[str, int] = {}  # name -> when it was loaded; the folders are in the settings
        # The adapter of a prompt that names none, by the kind of the prompt's media.
        self.media_adapters: dict[MediaKind, str] = {}
        self._own_adapters: frozenset[str] = frozenset()  # the adapters that the engine has without being asked
        self.loaded_pipeline: TextPipeline | None = None  # None until it is loaded
        self.config: Mapping[str, object] = {}  # the content of the model's config.json
        self.license_text = ""  # the text of the license file in the model's folder
        self.weight_format: Literal["safetensors", "gguf"] = "safetensors"  # of the files in that folder
        self.media_workers: MediaWorkerPool | None = None  # None for a model that reads no media
        self._media_loader: MediaLoader | None = None
        self._media_start: asyncio.Task[None] | None = None  # the start of a process before the first item

    def use_options(self, options: ServerOptions) -> None:
        """Take other options from now on."""
        self.total_slots += options.max_queue - self.options.max_queue
        self.options = options

    def use_endpoints(self, endpoint_store: EndpointStore) -> None:
        """Let the endpoints of a server decide which clients may use the names of this model."""
        self._endpoint_store = endpoint_store

    def check_query(self, name: str, tenant: Tenant) -> None:
        """Raise Forbidden if an endpoint has this name and the client may not query it."""
        if self._endpoint_store is not None:
            self._endpoint_store.check_query(name, tenant)

    @property
    def name(self) -> str:
        """The main name."""
        return self.names[0]

    async def fetch_weights(self) -> None:
        """Find or download the folders of the model and of its draft model, in threads that do not keep the process
        from exiting.

        Raises ModelMissing.
        """
        if self.engine.scripted:  # needs no weights
            folder = hub.find_model(self.settings.model, overrides=self.settings.overrides)
            self.settings.model = str(folder or self.settings.model)
            return

        def report_progress(stage: str, fraction: float) -> None:
            self.engine.progress = LoadProgress(stage, fraction / 2)  # the other half is loading

        resolve_folder = partial(
            hub.resolve_model,
            self.settings.model,
            report_progress,
            needs_weights=self.engine.needs_weights,
            overrides=self.settings.overrides,
        )
        self.settings.model = str(await run_in_daemon_thread(resolve_folder, "parley-hub"))
        if isinstance(self.settings, ParleySettings) and (draft := self.settings.draft_model):
            resolve_draft = partial(hub.resolve_draft_model, draft, report_progress)
            self.settings.speculate = f"draft={await run_in_daemon_thread(resolve_draft, 'parley-hub')}"

    @property
    def memory_need(self) -> int:
        """Bytes of memory that it needs in addition to a share of free memory, estimated from folder and settings."""
        patterns = ("*.safetensors", LINK_PATTERN)
        folders = [Path(folder) for folder in self.settings.weight_folders]
        files = [file for folder in folders for pattern in patterns for file in folder.glob(pattern)]
        return sum(file.stat().st_size for file in files) + (self.settings.kv_memory or 0)

    def _load_text_pipeline(self) -> TextPipeline:
        """Load the tokenizer and all else that text needs; slow, so call it in a thread."""
        settings = self.settings
        self.config = read_json_object(Path(settings.model) / "config.json")
        self.license_text = read_license(Path(settings.model))
        self.weight_format = "gguf" if any(Path(settings.model).glob(LINK_PATTERN)) else "safetensors"
        return TextPipeline.from_folder(
            settings.model, settings.tool_parser, settings.reasoning_parser, settings.trust_marks
        )

    async def load_engine(self) -> ModelInfo:
        """Load tokenizer and engine in parallel, then the adapters. Raises EngineFailed, BadTokenizer."""
        self._plan_media_adapters()
        pipeline_task = asyncio.create_task(asyncio.to_thread(self._load_text_pipeline))
        try:
            await self.engine.start()
            self.loaded_pipeline = await pipeline_task
            info = await self.engine.wait_until_ready()
            fit_buckets(self.metrics, info.max_model_len)
            for name, folder in list(self.settings.adapters.items()):
                if name in self._own_adapters:
                    continue
                if failure := await self.serve_adapter(name, folder):
                    raise EngineFailed(f"The adapter {name} ({folder}) cannot be loaded: {failure}")
        finally:
            pipeline_task.cancel()
        if info.media_kinds:
            await self._open_media_loader(self.options.media)
        if info.kv_bytes or info.state_bytes:
            # A restart takes the same amount, however much is free then.
            self.settings.kv_memory = info.kv_bytes + info.state_bytes
        numbers = f"{info.dtype} {info.quantization} {info.kv_dtype}"
        identity = f"{__version__} {info.architecture} {info.parameters} {numbers} {info.device}"
        self.fingerprint = "fp_" + hashlib.sha256(identity.encode()).hexdigest()[:10]
        return info

    def _plan_media_adapters(self) -> None:
        """Let the engine load the adapters in the model's own folder that its media need."""
        if not isinstance(self.settings, ParleySettings):
            return
        for kind, folder in find_media_adapters(Path(self.settings.model)).items():
            own_name = f"{kind}-lora" if folder == Path(self.settings.model) else folder.name
            self.media_adapters[kind] = f"{self.name}-{own_name}"
            self.settings.adapters.setdefault(self.media_adapters[kind], str(folder))
            self.settings.max_rank = max(self.settings.max_rank, adapter_rank(folder))

    def find_media_adapter(self, media: Sequence[MediaItem]) -> str:
        """Return the name of the adapter for a prompt with these items; "" if it needs none."""
        kinds = {item.kind for item in media}
        names = [name for kind, name in self.media_adapters.items() if kind in kinds and name in self.adapters]
        return names[0] if names else ""

    async def _open_media_loader(self, options: MediaOptions) -> None:
        """Get ready for media. Processes start with the first item unless the options want one now.

        Raises EngineFailed if that does not start. Those of another Python may take a minute, so one starts meanwhile.
        """
        self.media_workers = MediaWorkerPool(self.settings.model, options.workers, self.engine.media_command)
        self._media_loader = MediaLoader(self.media_workers, MediaFetcher(options), LocalMediaFolder(options), options)
        if not options.eager:
            if self.engine.media_command is not None:
                self._media_start = asyncio.create_task(self._start_media_workers(self.media_workers))
            return
        try:
            await self.media_workers.start()
        except (NotReady, Unsupported) as error:
            raise EngineFailed(error.message) from error

    async def _start_media_workers(self, workers: MediaWorkerPool) -> None:
        """Start a media process. If it does not start, the first item tries again and reports it."""
        with contextlib.suppress(NotReady, Unsupported):
            await workers.start()

    async def serve_adapter(self, name: str, folder: str) -> str:
        """Serve an adapter under this name, replacing any other. Return why it failed, or an empty string."""
        failure = await self.engine.load_adapter(name, folder)
        if not failure:
            self.adapters[name] = int(time.time())
            self.settings.adapters[name] = folder  # a restarted engine loads it too
            self._report_adapters()
        return failure

    def _report_adapters(self) -> None:
        for observe in self.adapter_observers:
            observe()

    def _list_own_adapters(self, info: ModelInfo) -> None:
        """List the adapters that the engine has without being asked, and no others of that kind."""
        for name in self._own_adapters - info.adapters.keys():
            del self.adapters[name], self.settings.adapters[name]
        for name in info.adapters.keys() - self._own_adapters - set(self.names):
            self.adapters[name], self.settings.adapters[name] = int(time.time()), info.adapters[name]
        self._own_adapters = frozenset(info.adapters.keys() & self.adapters.keys())

    async def remove_adapter(self, name: str) -> str:
        """Stop serving an adapter; open requests keep it. Return why it failed, or an empty string."""
        del self.adapters[name], self.settings.adapters[name]
        self._report_adapters()
        return await self.engine.unload_adapter(name)

    @property
    def text_pipeline(self) -> TextPipeline:
        """The text pipeline. Raises NotReady until it is loaded."""
        if self.loaded_pipeline is None:
            raise self._loading_error()
        return self.loaded_pipeline

    @property
    def model_info(self) -> ModelInfo:
        """The engine's description of the model. Raises NotReady until it is loaded."""
        if self.engine.info is None:
            raise self._loading_error()
        return self.engine.info

    def _loading_error(self) -> NotReady:
        progress = self.engine.progress
        done = f"{progress.fraction:.0%}"
        return NotReady(f"The model {self.name} is still loading ({done}, {progress.stage}).", retry_after=1)

    def unready_error(self) -> NotReady | None:
        """Return the reason why requests cannot be accepted now, None if they can."""
        if self.ending_reason:
            return ServerStopping(self.ending_reason, retry_after=5)
        if self.pause_state:
            return NotReady("The server is paused.", retry_after=5)
        return self.engine_error()

    def engine_error(self) -> NotReady | None:
        """Return the reason why the engine cannot compute, None if it can."""
        match self.engine.state:
            case "ready" if self.loaded_pipeline is not None:
                return None
            case "restarting":
                reason = self.engine.failure or f"The engine of {self.name} stopped and is being restarted."
                return NotReady(reason, retry_after=2)
            case "failed" | "closed":
                return NotReady(f"The engine of {self.name} has stopped; no request can be answered.", retry_after=10)
            case _:
                return self._loading_error()

    def require_ready(self) -> None:
        """Raise NotReady unless requests can be accepted."""
        unready_error = self.unready_error()
        if unready_error is not None:
            raise unready_error

    @property
    def model_phase(self) -> str:
        """The state in one word."""
        if self.ending_reason:
            return "draining"
        if self.pause_state and self.engine.state == "ready":
            return self.pause_state
        return "loading" if self.engine.state in ("idle", "ready") and self.unready_error() else self.engine.state

    @property
    def is_encoder(self) -> bool:
        """Whether the model is known to compute numbers and no text."""
        return self.engine.info is not None and not self.engine.info.generates

    @property
    def load_progress(self) -> float:
        """Loading progress, 0 to 1."""
        return 1.0 if self.engine.state == "ready" else self.engine.progress.fraction

    def answer_name(self, name: str) -> str:
        """Return the name that answers carry if the request used ``name``."""
        return known_spelling(name, self.names) or known_spelling(name, self.adapters) or self.name

    def take_slots(self, choices: int, tenant: str = "") -> None:
        """Take a slot for each choice. A request is admitted as a whole if one slot is free. Raises Overloaded.

        No tenant can starve the others: when all slots are taken, tenants that hold less than an equal share are still
        admitted. Two tenants can then hold up to 1.5 times ``total_slots`` together, four about twice as many.
        """
        if self.used_slots >= self.total_slots and self.tenant_slots[tenant] >= self._fair_share(tenant):
            self.metrics.rejected_requests.add_count(value="queue_full")
            self.metrics.totals.rejected += 1
            raise Overloaded(f"The queue is full ({self.used_slots} answers running or waiting). Try again later.")
        self.used_slots += choices
        self.tenant_slots[tenant] += choices

    def _fair_share(self, tenant: str) -> float:
        """Return an equal share of the slots, for this tenant and all that hold slots."""
        return self.total_slots / len(self.tenant_slots.keys() | {tenant})

    def release_slots(self, choices: int, tenant: str = "") -> None:
        """Give slots back."""
        self.used_slots -= choices
        self.tenant_slots[tenant] -= choices
        if not self.tenant_slots[tenant]:
            del self.tenant_slots[tenant]

    def find_open_request(self, cancel_id: str, tenant: Tenant) -> OpenRequest | None:
        """Return the tenant's oldest open request with this cancel id, None if there is none.

        Ids belong to tenants: a request of another one is unknown.
        """
        return next(
            (
                request
                for request in self.open_requests
                if cancel_id in request.cancel_ids and tenant.may_see(request.tenant)
            ),
            None,
        )

    async def drain_requests(self, reason: str, seconds: float) -> None:
        """Stop admission, let open requests finish for ``seconds``, then fail the rest with ``reason``."""
        self.ending_reason = reason
        if await self.wait_until_idle(seconds):
            return
        for request in list(self.open_requests):
            request.fail_on_shutdown(ServerStopping(f"{reason} This answer could not be finished.", retry_after=5))
        await self.wait_until_idle(LAST_EVENTS_SECONDS)

    async def wait_until_idle(self, seconds: float) -> bool:
        """Wait until no request is open, for at most ``seconds``. Return whether none is."""
        deadline = time.monotonic() + seconds
        while self.open_requests and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return not self.open_requests

    async def load_media(self, items: Sequence[Media], tenant: Tenant) -> MediaLease:
        """Fetch and process the media of a request; the caller releases the lease at its end.

        Raises BadMedia, Overloaded, NotReady, Unsupported.
        """
        if self._media_loader is None:
            raise Unsupported("This model reads text only.")
        return await self._media_loader.load_items(items, tenant.id)

    def drop_kept_media(self) -> None:
        """Drop the processed media that are kept for later requests."""
        if self._media_loader is not None:
            self._media_loader.drop_kept_items()

    async def close_engine(self) -> None:
        """Close the engine; requests that are still open fail."""
        await self.engine.close()
        if self.media_workers is not None:
            await asyncio.to_thread(self.media_workers.close)


def divide_memory(models: Sequence[ServedModel]) -> None:
    """Divide memory between models that will be loaded in this order; call it when all have been fetched.

    Models without a ``kv_memory`` of their own get equal parts of the memory that all weights leave for KV caches.
    """
    sharing = sum(model.settings.kv_memory is None for model in models)
    for number, model in enumerate(models, 1):
        model.settings.kv_share = 1 / max(1, sharing)
        model.settings.set_aside = sum(later.memory_need for later in models[number:])
