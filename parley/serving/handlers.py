"""Handlers of the routes that do not generate: models, tokens, health, metrics. One function per kind of route."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from parley.dialects.admin_requests import (
    AbortList,
    AbortRequest,
    AdapterChange,
    DetokenizeRequest,
    TokenizeRequest,
    TokenizeResult,
)
from parley.dialects.batch_job import BatchJob
from parley.dialects.dialect import Answer, Reply, Route, RouteKind, model_in_body
from parley.dialects.facts import ModelCard, ServerInfo
from parley.dialects.records import StreamReplay
from parley.errors import Invalid, NotFound, ParleyError
from parley.metrics.recorded import ModelSnapshot
from parley.serving.admin import adapters, control, pull
from parley.serving.answer_writer import follow_events
from parley.serving.generate import handle_generate
from parley.serving.keys.usage_page import handle_usage
from parley.serving.media.request_media import prompt_media
from parley.serving.model_facts import describe_name
from parley.serving.pages import metrics_page
from parley.serving.pages.activity import handle_activity
from parley.serving.pages.page_files import handle_page
from parley.serving.records.background import BackgroundRuns
from parley.serving.records.inner_sender import resume_info, sender_of_client
from parley.serving.registry import ModelRegistry
from parley.serving.render import handle_render
from parley.serving.request_reader import request_context
from parley.serving.served_model import ServedModel
from parley.serving.socket_handshake import handle_socket
from parley.text.tokens.tokenizer import Tokenizer
from parley.types import Chat, ProcessedMedia, Prompt, Text
from parley.version import __version__
from parley.web.exchange import Exchange
from parley.web.offload import OFFLOAD_SIZE, to_thread_if_large

RouteHandler = Callable[[ModelRegistry, Route, Exchange], Awaitable[None]]

HUGE_TEXT = 1 << 20  # characters; longer texts are tokenized one at a time, so that they leave threads to others
MAX_TOKENS_COUNTED = 1 << 20  # most tokens of a text to tokenize, or twice the model's context if that is more

PROBE_KINDS: frozenset[RouteKind] = frozenset(
    {"live", "ready", "probe", "self_test", "health", "metrics", "load", "instance_status", "page", "activity"}
)


async def handle_tokenize(registry: ModelRegistry, route: Route, exchange: Exchange) -> None:
    """Tokenize a prompt."""
    registry.require_any_ready()
    body = await exchange.read_body()
    if route.refuse_headers is not None and (refusal := route.refuse_headers(exchange.headers)) is not None:
        await exchange.send_response(refusal.body, refusal.status, refusal.content_type)
        return
    tokenize_request = await exchange.to_thread_if_large(
        len(body), partial(_read_tokenize_request, registry, route, exchange, body)
    )
    writer = tokenize_request.writer or route.writer
    assert writer is not None
    model = registry.find_model(tokenize_request.model)
    model.require_ready()
    prompt = tokenize_request.prompt
    processed: Sequence[ProcessedMedia] = ()
    if media := prompt_media(prompt):
        lease = await exchange.while_connected(model.load_media(media, exchange.tenant))
        processed = lease.items
        lease.release()  # tokens need the replacements alone
    if isinstance(prompt, Chat):
        exchange.field_names = {"prompt": "messages"}
    is_one_text = isinstance(prompt, Text) and not tokenize_request.further_prompts
    size = len(prompt.text) if isinstance(prompt, Text) and is_one_text else len(body)
    work = partial(_tokenize_and_encode, model, tokenize_request, writer, processed)
    if size > HUGE_TEXT:
        answer = await exchange.while_connected(
            _run_alone(registry.huge_text_lock, partial(to_thread_if_large, size, work))
        )
    else:
        answer = await exchange.to_thread_if_large(size, work)
    await exchange.send_response(answer)


def _read_tokenize_request(registry: ModelRegistry, route: Route, exchange: Exchange, body: bytes) -> TokenizeRequest:
    """Read a body with the facts about the model that it names; an unknown name is reported after other mistakes."""
    assert route.reader is not None
    model = registry.get_model(model_in_body(body)) or registry.main_model
    tokenize_request: TokenizeRequest = route.reader(body, request_context(registry, model, exchange))
    return tokenize_request


async def _run_alone(lock: asyncio.Lock, work: Callable[[], Awaitable[bytes]]) -> bytes:
    async with lock:
        return await work()


def _tokenize_and_encode(
    model: ServedModel,
    tokenize_request: TokenizeRequest,
    writer: Callable[[TokenizeResult], bytes],
    media: Sequence[ProcessedMedia],
) -> bytes:
    result = _tokenize_prompt(model, tokenize_request, tokenize_request.prompt, media)
    further = [_tokenize_prompt(model, tokenize_request, text, ()) for text in tokenize_request.further_prompts]
    return writer(replace(result, further_results=further) if further else result)


def _tokenize_prompt(
    model: ServedModel, tokenize_request: TokenizeRequest, prompt: Prompt, media: Sequence[ProcessedMedia]
) -> TokenizeResult:
    pipeline, context_length = model.text_pipeline, model.model_info.max_model_len
    if tokenize_request.pooling is not None and isinstance(prompt, Text):
        prompt = pipeline.apply_embedding_prompt(prompt, tokenize_request.pooling)
    text, token_ids, spans = pipeline.tokenize_prompt(
        prompt, tokenize_request.with_spans, max(MAX_TOKENS_COUNTED, 2 * context_length), media
    )
    if tokenize_request.last_tokens is not None:
        first = max(0, len(token_ids) - tokenize_request.last_tokens)
        token_ids, spans = token_ids[first:], spans[first:]
    pieces = None
    if tokenize_request.with_pieces:
        pieces = [pipeline.tokenizer.token_str(token_id) or "" for token_id in token_ids]
    elif tokenize_request.with_texts:
        pieces = [pipeline.tokenizer.decode([token_id], False) for token_id in token_ids]
    return TokenizeResult(token_ids, pieces, context_length, text if tokenize_request.with_spans else "", spans)


async def handle_detokenize(registry: ModelRegistry, route: Route, exchange: Exchange) -> None:
    """Decode token ids to text."""
    registry.require_any_ready()
    body = await exchange.read_body()
    assert route.reader is not None and route.writer is not None
    detokenize_request: DetokenizeRequest = await exchange.to_thread_if_large(len(body), partial(route.reader, body))
    model = registry.find_model(detokenize_request.model)
    model.require_ready()
    decode = partial(_decode_texts, model.text_pipeline.tokenizer, detokenize_request)
    size = 4 * sum(map(len, (detokenize_request.token_ids, *detokenize_request.further_ids)))
    texts = await exchange.to_thread_if_large(size, decode)
    await exchange.send_response(route.writer(*texts))


def _decode_texts(tokenizer: Tokenizer, detokenize_request: DetokenizeRequest) -> list[str]:
    """Return the text of each list of ids. Raises Invalid for an unknown id, unless those are ignored."""
    vocabulary, texts = tokenizer.vocab_size, []
    for ids in (detokenize_request.token_ids, *detokenize_request.further_ids):
        known_ids = [token_id for token_id in ids if token_id < vocabulary]
        if len(known_ids) < len(ids) and not detokenize_request.ignore_unknown:
            raise Invalid(f"Token id {max(ids)} is not in the vocabulary of {vocabulary} tokens.", field="tokens")
        texts.append(tokenizer.decode(known_ids, detokenize_request.skip_special))
    return texts


async def handle_models(registry: ModelRegistry, route: Route, exchange: Exchange) -> None:
    """List the served models."""
    assert route.writer is not None
    await exchange.send_response(
        route.writer(registry.server_facts().cards), content_type=route.content_types[0].encode()
    )


async def handle_model(registry: ModelRegistry, route: Route, exchange: Exchange) -> None:
    """Describe one model."""
    assert route.writer is not None
    name = exchange.path_params["model"]
    if not name:  # "/v1/models/" is the list with a slash too many, not a model with an empty name
        raise NotFound("No model is named. Leave out the trailing slash to list the models.")
    await exchange.send_response(route.writer(_find_model_card(registry, name)))


def _find_model_card(registry: ModelRegistry, name: str) -> ModelCard:
    model = registry.find_model(name)
    return describe_name(model, model.answer_name(name))


async def handle_tokenizer(registry: ModelRegistry, route: Route, exchange: Exchange) -> None:
    """Return the tokenizer's configuration and the chat template, which evaluation tools read."""
    assert route.writer is not None
    if not registry.options.tokenizer_info:
        raise NotFound("The tokenizer configuration is not served. Start the server with --tokenizer-info to serve it.")
    config: dict[str, Any] = {}
    path = Path(registry.main_model.settings.model) / "tokenizer_config.json"
    if path.is_file():
        config = msgspec.json.decode(path.read_bytes())
    await exchange.send_response(
        route.writer(config | {"chat_template": registry.main_model.text_pipeline.template.all_sources or None})
    )


async def handle_version(registry: ModelRegistry, route: Route, exchange: Exchange) -> None:
    """Return the version of parley."""
    assert route.writer is not None
    await exchange.send_response(route.writer(__version__), content_type=route.content_types[0].encode())


async def handle_server_info(registry: ModelRegistry, route: Route, exchange: Exchange) -> None:
    """Describe the server and its main model."""
    assert route.writer is not None
    main = registry.main_model
    settings, engine_info = main.settings, main.engine.info
    device = settings.device if engine_info is None else engine_info.device  # the option may be "auto"
    server_info = ServerInfo(describe_name(main, main.name), main.total_slots, __version__, settings.dtype, device)
    await exchange.send_response(route.writer(server_info))


async def handle_abort(
    registry: ModelRegistry, route: Route, exchange: Exchange, drop_results: Callable[[str], bool] = lambda label: False
) -> None:
    """Cancel an open request of the client. ``drop_results`` discards waiting results of a finished request; True if
    there were any. Its ids are known to coordinators only."""
    assert route.reader is not None
    model = registry.find_model(exchange.path_params.get("model", ""))
    body = await exchange.read_body()
    abort_request: AbortRequest = await exchange.to_thread_if_large(
        len(body), partial(route.reader, body, request_context(registry, model, exchange))
    )
    open_request = model.find_open_request(abort_request.request_label, exchange.tenant)
    if open_request is not None:
        open_request.cancel_by_id(abort_request.request_label)
    dropped = not exchange.tenant.id and drop_results(abort_request.request_label)
    await _send_answer(
        exchange, abort_request.success if open_request is not None or dropped else abort_request.not_found
    )


async def handle_abort_list(registry: ModelRegistry, route: Route, exchange: Exchange) -> None:
    """Cancel open requests of the client, of any model."""
    assert route.reader is not None
    body = await exchange.read_body()
    abort_list: AbortList = await exchange.to_thread_if_large(
        len(body), partial(route.reader, body, request_context(registry, registry.main_model, exchange))
    )
    for open_request in registry.open_requests:
        if exchange.tenant.may_see(open_request.tenant) and (
            abort_labels := abort_list.labels.intersection(open_request.cancel_ids)
        ):
            open_request.cancel_by_id(min(abort_labels))
    await _send_answer(exchange, abort_list.answer)


async def handle_adapter(registry: ModelRegistry, route: Route, exchange: Exchange) -> None:
    """Load or unload a LoRA adapter."""
    assert route.reader is not None
    body = await exchange.read_body()
    adapter_change: AdapterChange | Answer = await exchange.to_thread_if_large(
        len(body), partial(route.reader, body, request_context(registry, registry.main_model, exchange))
    )
    if isinstance(adapter_change, Answer):
        await _send_answer(exchange, adapter_change)
        return
    try:
        await adapters.change_adapter(registry, adapter_change)
    except ParleyError as error:
        if adapter_change.render_failure is None:
            raise
        await _send_answer(exchange, adapter_change.render_failure(error))
        return
    await _send_answer(exchange, adapter_change.success)


async def handle_open_requests(registry: ModelRegistry, route: Route, exchange: Exchange) -> None:
    """Return the number of open requests."""
    assert route.writer is not None
    await exchange.send_response(route.writer(len(registry.open_requests)))


async def handle_cache_reset(registry: ModelRegistry, route: Route, exchange: Exchange) -> None:
    """Clear the prefix cache of every model."""
    assert route.reader is not None and route.writer is not None
    registry.require_ready()
    running: bool = route.reader(request_context(registry, registry.main_model, exchange))
    reset_results = await asyncio.gather(
        *(model.engine.reset_prefix_cache(running=running) for model in registry.models)
    )
    await exchange.send_response(route.writer(all(reset_results)))


async def handle_media_reset(registry: ModelRegistry, route: Route, exchange: Exchange) -> None:
    """Drop the processed media of every model."""
    registry.require_ready()
    for model in registry.models:
        model.drop_kept_media()
    await exchange.send_response(b"", content_type=b"")


async def handle_health(registry: ModelRegistry, route: Route, exchange: Exchange) -> None:
    """Answer 200 if all models take requests; otherwise raise NotReady."""
    registry.require_ready()
    await exchange.send_response(b"", content_type=b"")


async def handle_info(registry: ModelRegistry, route: Route, exchange: Exchange) -> None:
    """Answer a question about the server or its models, as the dialect words it."""
    assert route.reader is not None
    body = await exchange.read_body()
    answer = await exchange.to_thread_if_large(
        len(body),
        partial(route.reader, body, request_context(registry, registry.main_model, exchange), registry.server_facts()),
    )
    await _send_answer(exchange, answer)


async def handle_stored(registry: ModelRegistry, route: Route, exchange: Exchange) -> None:
    """Read or change the client's stored records, stream a background request again, or begin a batch."""
    assert route.reader is not None
    body = await exchange.read_body()
    context = request_context(registry, registry.main_model, exchange)
    size = OFFLOAD_SIZE + 1 if route.reads_many else len(body)
    result: Answer | StreamReplay | BatchJob = await exchange.to_thread_if_large(
        size, partial(route.reader, body, context)
    )
    if isinstance(result, Answer):
        await _send_answer(exchange, result)
    elif isinstance(result, BatchJob):
        app, tenant = exchange.scope["app"], exchange.tenant
        sender = sender_of_client(app, exchange.scope, result)
        run = resume_info(exchange.scope, result, app.apis, app.keys.tenant_reference(tenant))
        await exchange.send_response(registry.batch_runner.accept_batch(tenant.id, result, sender, run))
    else:
        await replay_stream(registry.background_runs, exchange.tenant.id, exchange, result)


async def replay_stream(runs: BackgroundRuns, tenant: str, exchange: Exchange, replay: StreamReplay) -> None:
    """Stream a background request again. Raises its refusal if its events are not kept."""
    run = runs.find_run(tenant, replay.name)
    if run is None or not run.is_stream:
        raise replay.refusal
    await follow_events(exchange, run.kept_events, replay.first_event, Reply.media_type)


async def handle_endpoint(registry: ModelRegistry, route: Route, exchange: Exchange) -> None:
    """Show or change the endpoints whose models share requests."""
    assert route.reader is not None
    body = await exchange.read_body()
    context = replace(request_context(registry, registry.main_model, exchange), client=exchange.tenant)
    answer = await registry.endpoint_store.change_endpoints(
        partial(route.reader, body, context, registry.server_facts()), len(body)
    )
    await _send_answer(exchange, answer)


async def _send_answer(exchange: Exchange, answer: Answer) -> None:
    await exchange.send_response(answer.body, answer.status, answer.content_type)


async def handle_live(registry: ModelRegistry, route: Route, exchange: Exchange) -> None:
    """Answer 200: the process is alive."""
    if route.writer is not None:
        await _send_answer(exchange, route.writer(True))
        return
    await exchange.send_response(b'{"status":"live"}')


async def handle_ready(registry: ModelRegistry, route: Route, exchange: Exchange) -> None:
    """Answer 200 if all models take requests, otherwise 503 with the progress of loading."""
    unready_model = registry.first_unready_model()
    if route.writer is not None:
        await _send_answer(exchange, route.writer(unready_model is None))
        return
    if unready_model is None:
        await exchange.send_response(b'{"status":"ready"}')
        return
    unready_error, progress = unready_model.unready_error(), unready_model.engine.progress
    assert unready_error is not None
    state: dict[str, Any] = {
        "status": unready_model.model_phase,
        "message": unready_error.message,
        "model": unready_model.name,
    }
    if unready_model.model_phase in ("loading", "restarting"):
        state |= {"stage": progress.stage, "progress": round(progress.fraction, 4)}
    state["models"] = {model.name: model.model_phase for model in registry.models}
    retry_header = (b"retry-after", b"%d" % max(1, round(unready_error.retry_after)))
    await exchange.send_response(msgspec.json.encode(state), 503, extra_headers=(retry_header,))


async def handle_metrics(registry: ModelRegistry, route: Route, exchange: Exchange) -> None:
    """Render the metrics page."""
    if route.reader is not None:
        context = replace(request_context(registry, registry.main_model, exchange), client=exchange.tenant)
        route.reader(b"", context, registry.server_facts(), registry.endpoint_store.by_name)
    views = [
        ModelSnapshot(
            model=model.name,
            metrics=model.metrics,
            stats=model.engine.stats,
            info=model.engine.info,
            prefix_cache=model.settings.prefix_cache,
            ready=model.unready_error() is None,
            progress=model.load_progress,
            open_requests=len(model.open_requests),
            active_adapters=frozenset(
                open_request.adapter_state
                for open_request in model.open_requests
                if open_request.adapter_state is not None
            ),
            adapter_places=model.settings.max_adapters if model.adapters or registry.options.lora_root else 0,
            engine_restarts=model.engine.restarts,
        )
        for model in registry.models
    ]
    responses = {"http": registry.http_responses, "grpc": registry.grpc_responses}
    page = metrics_page.render_metrics_page(views, responses, registry.http_requests, exchange.dialect)
    await exchange.send_response(page.encode(), content_type=metrics_page.METRICS_CONTENT_TYPE)


SERVER_HANDLERS: dict[RouteKind, RouteHandler] = {  # all kinds but those that only members of a cluster serve
    "generate": handle_generate,
    "embed": handle_generate,
    "render": handle_render,
    "tokenize": handle_tokenize,
    "detokenize": handle_detokenize,
    "models": handle_models,
    "model": handle_model,
    "tokenizer": handle_tokenizer,
    "version": handle_version,
    "server_info": handle_server_info,
    "abort": handle_abort,
    "abort_list": handle_abort_list,
    "adapter": handle_adapter,
    "load": handle_open_requests,
    "reset": handle_cache_reset,
    "reset_media": handle_media_reset,
    "health": handle_health,
    "stored": handle_stored,
    "socket": handle_socket,
    "info": handle_info,
    "summed_info": handle_info,
    "endpoint": handle_endpoint,
    "probe": handle_info,
    "self_test": control.handle_self_test,
    "pause": control.handle_pause,
    "pull": pull.handle_pull,
    "stop": control.handle_stop,
    "live": handle_live,
    "ready": handle_ready,
    "metrics": handle_metrics,
    "page": handle_page,
    "activity": handle_activity,
    "usage": handle_usage,
}
