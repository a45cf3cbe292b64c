"""Downloads a model from the hub at a client's request, and reports the progress meanwhile.

The operator must allow it (``ServerOptions.pull``). One model is downloaded at a time, by its name on the hub. It is
served only when the server is started again with it.
"""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

from parley import hub
from parley.dialects.admin_requests import PullRequest
from parley.dialects.reply import Answer
from parley.dialects.route import Route
from parley.errors import NotFound
from parley.serving.keys.scopes import check_key_name
from parley.serving.model_registry import ModelRegistry
from parley.serving.request_reader import request_context
from parley.serving.workers.daemon_thread import run_in_daemon_thread
from parley.web.exchange import Exchange

REPORT_SECONDS = 0.5  # between two lines about the progress


async def handle_pull(registry: ModelRegistry, route: Route, exchange: Exchange) -> None:
    """Answer a request for a model: at once if it is served, else by downloading it if the operator allows that."""
    assert route.reader is not None
    body = await exchange.read_body()
    context = request_context(registry, registry.main_model, exchange)
    facts = registry.server_facts(exchange.tenant)
    pull = await exchange.to_thread_if_large(len(body), partial(route.reader, body, context, facts))
    if not isinstance(pull, Answer) and (served_model := registry.get_model(pull.model)) is not None:
        check_key_name(exchange.tenant, served_model, pull.model)
    answer = pull if isinstance(pull, Answer) else None if registry.options.pull else pull.refusal
    if answer is not None:
        await exchange.send_answer(answer)
        return
    await exchange.while_connected(_pull_model(registry, pull, exchange))


async def _pull_model(registry: ModelRegistry, pull: PullRequest, exchange: Exchange) -> None:
    """Download a model. A client that leaves does not end the download, which other clients may wait for."""
    progress = [0.0]

    def report(stage: str, fraction: float) -> None:
        progress[0] = fraction

    def end_download(ended: asyncio.Future[Path]) -> None:
        registry.pull_lock.release()
        if not ended.cancelled():
            ended.exception()  # perhaps no client waits for it any more

    await registry.pull_lock.acquire()  # held until the download ends, even if the client leaves before
    download = asyncio.ensure_future(run_in_daemon_thread(partial(hub.pull_model, pull.model, report), "parley-pull"))
    download.add_done_callback(end_download)
    if pull.stream:
        await exchange.write_stream(pull.write_progress(0.0), pull.media_type)
    while not (await asyncio.wait({download}, timeout=REPORT_SECONDS))[0]:
        if pull.stream:
            await exchange.write_stream(pull.write_progress(progress[0]), pull.media_type)
    try:
        download.result()
    except hub.ModelMissing as error:
        await _end_pull(pull, exchange, pull.write_failure(NotFound(str(error))), 500)
    else:
        await _end_pull(pull, exchange, pull.success, 200)


async def _end_pull(pull: PullRequest, exchange: Exchange, data: bytes, status: int) -> None:
    if pull.stream:
        await exchange.write_stream(data, pull.media_type, last=True)
    else:
        await exchange.send_response(data, status, pull.refusal.content_type)
