"""A server that resumes the batches of another one, as it does after its start."""

from __future__ import annotations

import asyncio
from functools import partial

from support.http_client import RunningServer

from parley.dialects.mounts import universal_mounts
from parley.serving.records.background import tenant_records
from parley.serving.records.batch_resumption import BatchResumption


async def end_server(server: RunningServer) -> None:
    """Let a server end its requests in the background, as it does when it is stopped."""
    await server.service.background_runs.close()


def resume_batches(server: RunningServer) -> asyncio.Task[None]:
    """Let a server look for such batches. The task must be cancelled."""
    app = server.parts.make_port_app(universal_mounts(), "127.0.0.1")
    records_of = partial(tenant_records, server.service.record_store, server.service.background_runs)
    resumption = BatchResumption(server.service.batch_runner, [app], records_of)
    return asyncio.create_task(resumption.keep_resuming())
