"""Handlers of the routes that do not generate: models, tokens, health, metrics. One function per kind of route."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from parley.dialects.dialect import Answer, Kind, Route
from parley.dialects.facts import About, Card
from parley.dialects.wishes import Adapt, Detokenize, Halt, Tokenize, Tokenized
from parley.errors import Invalid, NotFound, ParleyError
from parley.metrics.recorded import View
from parley.serving import adapters, control, metrics_page
from parley.serving.generate import generate, head
from parley.serving.registry import Service
from parley.serving.served_model import Model
from parley.types import Chat, Text
from parley.version import __version__
from parley.web.exchange import Exchange
from parley.web.offload import give_back, off_loop

Handle = Callable[[Service, Route, Exchange], Awaitable[None]]

HUGE = 1 << 20  # characters; tokenizing a longer text takes much memory, so such requests run one at a time

PROBES: frozenset[Kind] = frozenset({"live", "ready", "state", "trial", "health", "metrics", "load", "instance_status"})


async def tokenize(service: Service, route: Route, exchange: Exchange) -> None:
    """Tokenize a prompt."""
    service.admit()
    body = await exchange.body()
    assert route.read is not None and route.write is not None
    wish: Tokenize = await off_loop(len(body), partial(route.read, body))
    model = service.find(wish.model)
    model.require()
    prompt = wish.prompt
    if isinstance(prompt, Chat):
        exchange.names = {"prompt": "messages"}
    size = len(prompt.text) if isinstance(prompt, Text) else len(body)
    async with service.tokenizing if size > HUGE else nullcontext():
        answer = await off_loop(size, partial(_told, model, wish, route.write, size > HUGE))
    await exchange.answer(answer)


def _told(model: Model, wish: Tokenize, write: Callable[[Tokenized], bytes], huge: bool) -> bytes:
    """Tokenize and encode the answer; after a huge text, return freed memory to the system."""
    try:
        return write(_tokenized(model, wish))
    finally:
        if huge:
            give_back()


def _tokenized(model: Model, wish: Tokenize) -> Tokenized:
    language, text = model.language, ""
    spans: list[tuple[int, int]] = []
    if wish.spans:
        text, ids, spans = language.spell(wish.prompt)
    else:
        ids = language.prepare(wish.prompt).token_ids
    if wish.truncate is not None:
        ids, spans = ids[-wish.truncate :], spans[-wish.truncate :]
    strings = None
    if wish.strings:
        strings = [language.tokenizer.token_str(id) or "" for id in ids]
    elif wish.texts:
        strings = [language.tokenizer.decode([id], False) for id in ids]
    return Tokenized(ids, strings, model.info.max_model_len, text, spans)


async def detokenize(service: Service, route: Route, exchange: Exchange) -> None:
    """Decode token ids to text."""
    service.admit()
    body = await exchange.body()
    assert route.read is not None and route.write is not None
    wish: Detokenize = await off_loop(len(body), partial(route.read, body))
    model = service.find(wish.model)
    model.require()
    vocabulary = model.language.tokenizer.vocab_size
    ids = [id for id in wish.ids if id < vocabulary]
    if len(ids) < len(wish.ids) and not wish.lax:
        raise Invalid(f"Token id {max(wish.ids)} is not in the vocabulary of {vocabulary} tokens.", field="tokens")
    decode = partial(model.language.tokenizer.decode, ids, False)
    text = await off_loop(4 * len(wish.ids), decode)
    await exchange.answer(route.write(text))


async def models(service: Service, route: Route, exchange: Exchange) -> None:
    """List the served models."""
    assert route.write is not None
    await exchange.answer(route.write(service.facts().cards))


async def model(service: Service, route: Route, exchange: Exchange) -> None:
    """Describe one model."""
    assert route.write is not None
    name = exchange.path["model"]
    if not name:  # "/v1/models/" is the list with a slash too many, not a model with an empty name
        raise NotFound("No model is named. Leave out the trailing slash to list the models.")
    await exchange.answer(route.write(_card(service, name)))


def _card(service: Service, name: str) -> Card:
    known = service.find(name)
    return known.card(known.called(name))


async def tokenizer(service: Service, route: Route, exchange: Exchange) -> None:
    """Return the tokenizer's configuration and the chat template, which evaluation tools read."""
    assert route.write is not None
    if not service.options.tokenizer_info:
        raise NotFound("The tokenizer configuration is not served. Start the server with --tokenizer-info to serve it.")
    config: dict[str, Any] = {}
    path = Path(service.main.settings.model) / "tokenizer_config.json"
    if path.is_file():
        config = msgspec.json.decode(path.read_bytes())
    await exchange.answer(route.write(config | {"chat_template": service.main.language.template.text or None}))


async def version(service: Service, route: Route, exchange: Exchange) -> None:
    """Return the version of parley."""
    assert route.write is not None
    await exchange.answer(route.write(__version__))


async def info(service: Service, route: Route, exchange: Exchange) -> None:
    """Describe the server and its main model."""
    assert route.write is not None
    main = service.main
    settings = main.settings
    about = About(main.card(main.name), main.places, __version__, settings.dtype, settings.device)
    await exchange.answer(route.write(about))


async def halt(
    service: Service, route: Route, exchange: Exchange, drop: Callable[[str], bool] = lambda label: False
) -> None:
    """Cancel an open request. ``drop_results`` discards waiting results of a finished one; True if there were any."""
    assert route.read is not None
    model = service.find(exchange.path.get("model", ""))
    wish: Halt = route.read(await exchange.body(), head(model, exchange))
    generation = model.labelled(wish.label)
    if generation is not None:
        generation.halt(wish.label)
    dropped = drop(wish.label)
    await _tell(exchange, wish.done if generation is not None or dropped else wish.unknown)


async def adapter(service: Service, route: Route, exchange: Exchange) -> None:
    """Load or unload a LoRA adapter."""
    assert route.read is not None
    wish: Adapt | Answer = route.read(await exchange.body(), head(service.main, exchange))
    if isinstance(wish, Answer):
        await _tell(exchange, wish)
        return
    try:
        await adapters.change(service, wish)
    except ParleyError as error:
        if wish.failed is None:
            raise
        await _tell(exchange, wish.failed(error))
        return
    await _tell(exchange, wish.done)


async def load(service: Service, route: Route, exchange: Exchange) -> None:
    """Return the number of open requests."""
    assert route.write is not None
    await exchange.answer(route.write(len(service.open)))


async def reset(service: Service, route: Route, exchange: Exchange) -> None:
    """Clear the prefix cache of every model."""
    assert route.read is not None and route.write is not None
    service.require()
    running: bool = route.read(head(service.main, exchange))
    done = await asyncio.gather(*(model.engine.reset(running=running) for model in service.models))
    await exchange.answer(route.write(all(done)))


async def health(service: Service, route: Route, exchange: Exchange) -> None:
    """Answer 200 if all models take requests; otherwise raise NotReady."""
    service.require()
    await exchange.answer(b"")


async def ask(service: Service, route: Route, exchange: Exchange) -> None:
    """Answer a question about the server or its models, as the dialect words it."""
    assert route.read is not None
    body = await exchange.body()
    told = await off_loop(len(body), partial(route.read, body, head(service.main, exchange), service.facts()))
    await _tell(exchange, told)


async def endpoint(service: Service, route: Route, exchange: Exchange) -> None:
    """Show or change the endpoints whose models share requests."""
    assert route.read is not None
    body = await exchange.body()
    told = await service.endpoints.change(partial(route.read, body, head(service.main, exchange), service.facts()))
    await _tell(exchange, told)


async def _tell(exchange: Exchange, told: Answer) -> None:
    await exchange.answer(told.body, told.status, told.type)


async def live(service: Service, route: Route, exchange: Exchange) -> None:
    """Answer 200: the process is alive."""
    if route.write is not None:
        await _tell(exchange, route.write(True))
        return
    await exchange.answer(b'{"status":"live"}')


async def ready(service: Service, route: Route, exchange: Exchange) -> None:
    """Answer 200 if all models take requests, otherwise 503 with the progress of loading."""
    waiting = service.waits()
    if route.write is not None:
        await _tell(exchange, route.write(waiting is None))
        return
    if waiting is None:
        await exchange.answer(b'{"status":"ready"}')
        return
    refusal, progress = waiting.refusal(), waiting.engine.progress
    assert refusal is not None
    state: dict[str, Any] = {"status": waiting.phase, "message": refusal.message, "model": waiting.name}
    if waiting.phase in ("loading", "restarting"):
        state |= {"stage": progress.stage, "progress": round(progress.fraction, 4)}
    state["models"] = {model.name: model.phase for model in service.models}
    after = (b"retry-after", b"%d" % max(1, round(refusal.retry_after)))
    await exchange.answer(msgspec.json.encode(state), 503, extra=(after,))


async def metrics(service: Service, route: Route, exchange: Exchange) -> None:
    """Render the metrics page."""
    views = [
        View(
            model=model.name,
            metrics=model.metrics,
            stats=model.engine.stats,
            info=model.engine.info,
            prefix_cache=model.settings.prefix_cache,
            ready=model.refusal() is None,
            progress=model.loaded,
            open=len(model.open),
            adapters=frozenset(each.adapter for each in model.open if each.adapter is not None),
            places=model.settings.max_adapters if model.adapters else 0,
        )
        for model in service.models
    ]
    told = metrics_page.text(views, {"http": service.responses, "grpc": service.calls}, exchange.dialect)
    await exchange.answer(told.encode(), type=metrics_page.CONTENT_TYPE)


HANDLERS: dict[Kind, Handle] = {  # all kinds but those that only members of a cluster serve
    "generate": generate,
    "embed": generate,
    "tokenize": tokenize,
    "detokenize": detokenize,
    "models": models,
    "model": model,
    "tokenizer": tokenizer,
    "version": version,
    "info": info,
    "halt": halt,
    "adapter": adapter,
    "load": load,
    "reset": reset,
    "health": health,
    "ask": ask,
    "count": ask,
    "endpoint": endpoint,
    "state": ask,
    "trial": control.trial,
    "order": control.order,
    "stop": control.stop,
    "live": live,
    "ready": ready,
    "metrics": metrics,
}
