"""Resumes the batches of servers that have ended, whose records lie in a file that this server shares."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from starlette.types import Receive, Scope, Send

from parley.dialects.batch_job import BatchJob
from parley.dialects.records import TenantRecords
from parley.dialects.route import Route
from parley.errors import NotReady
from parley.serving.records.batch_runner import BatchRun, BatchRunner
from parley.serving.records.inner_sender import sender_of_tenant
from parley.web.auth import ApiKeys, TenantReference

log = logging.getLogger("parley.server")

RESUME_SECONDS = 20.0  # seconds between two searches for orphaned batches


class PortEndpoint(Protocol):
    """An endpoint of a port."""

    @property
    def route(self) -> Route:
        """The route that the endpoint answers."""


class PortApp(Protocol):
    """The application of a port."""

    apis: str

    @property
    def keys(self) -> ApiKeys:
        """The accepted API keys."""

    @property
    def route_table(self) -> Mapping[tuple[str, str], PortEndpoint]:
        """The endpoints, by method and path."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""


class BatchResumption:
    """Resumes orphaned batches at the ports of ``apps``. ``records_of``: returns the records of a tenant by its id."""

    def __init__(self, runner: BatchRunner, apps: Sequence[PortApp], records_of: Callable[[str], TenantRecords]):
        self._runner, self._apps, self._records_of = runner, apps, records_of

    async def keep_resuming(self) -> None:
        """Resume orphaned batches until the server ends. Return at once if the store is no file."""
        while self._runner.batch_log.outlives_server:
            with contextlib.suppress(NotReady):  # the store has logged it
                for tenant, name in await asyncio.to_thread(self._runner.batch_log.list_orphaned_batches):
                    # After a sleep of the machine, a batch of this server may seem to be orphaned
                    if not self._runner.runs_batch(tenant, name):
                        await self._resume_batch(tenant, name)
            await asyncio.sleep(RESUME_SECONDS)

    async def _resume_batch(self, tenant: str, name: str) -> None:
        """Resume a batch that has lost its server, if this server can run it."""
        batch_id = name.rpartition("/")[2]
        try:
            batch = await asyncio.to_thread(partial(self._take_batch, tenant, name))
        except NotReady:  # the store has logged it
            return
        except Exception:  # other batches may still be resumed
            log.exception("The batch %s, which no server runs, cannot be resumed.", batch_id)
            return
        if batch is not None:
            log.info("Resuming the batch %s, which no server runs.", batch_id)
            self._runner.start_batch(batch)

    def _take_batch(self, tenant: str, name: str) -> BatchRun | None:
        """Claim a batch. Return None if it has ended, or another server has it, or this one has no such port or key."""
        resume_info = self._runner.batch_log.load_resume_info(tenant, name)
        if resume_info is None:
            return None
        reference = TenantReference(tenant, resume_info.key_id)
        for app in self._apps:
            endpoint = app.route_table.get(("POST", resume_info.prefix + resume_info.creation_path))
            restorer = None if endpoint is None else endpoint.route.batch_restorer
            if app.apis != resume_info.apis or restorer is None or app.keys.find_tenant(reference) is None:
                continue
            if not self._runner.batch_log.claim_batch(tenant, name, resume_info):
                return None
            job: BatchJob | None = restorer(self._records_of(tenant), name, resume_info.result_expiry)
            if job is None:
                self._runner.batch_log.drop_batch(tenant, name)
                return None
            sender = sender_of_tenant(app, reference, tuple(resume_info.headers), resume_info.prefix)
            return BatchRun(tenant, job, sender, survives_server=True, is_paused=True)
        return None
