"""The routes beside generation: models, tokens, health, metrics. One function per kind of route."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from parley import __version__
from parley.dialects.dialect import About, Answer, Detokenize, Halt, Kind, Route, Tokenize, Tokenized
from parley.errors import Invalid, NotFound
from parley.server import control, page
from parley.server.life import generate, head
from parley.server.metrics import View
from parley.server.respond import Exchange
from parley.server.service import Service
from parley.types import Chat, Text

Handle = Callable[[Service, Route, Exchange], Awaitable[None]]

# Paths of the server itself, the same whatever APIs it speaks.
OPERATIONS = (
    Route("GET", "/health", "health"),
    Route("GET", "/health/live", "live"),
    Route("GET", "/health/ready", "ready"),
    Route("GET", "/metrics", "metrics"),
)
OPEN: frozenset[Kind] = frozenset({"live", "ready", "state"})  # to clients without a key
PROBES: frozenset[Kind] = frozenset({"live", "ready", "state", "trial", "health", "metrics", "load"})


async def tokenize(service: Service, route: Route, exchange: Exchange) -> None:
    service.require()
    body = await exchange.body()
    assert route.read is not None and route.write is not None
    wish: Tokenize = await service.off_loop(len(body), partial(route.read, body))
    service.resolve(wish.model)
    prompt = wish.prompt
    if isinstance(prompt, Chat):
        exchange.names = {"prompt": "messages"}
    size = len(prompt.text) if isinstance(prompt, Text) else len(body)
    made = await service.off_loop(size, partial(_tokenized, service, wish))
    await exchange.answer(await service.off_loop(size, partial(route.write, made)))


def _tokenized(service: Service, wish: Tokenize) -> Tokenized:
    language, text = service.language, ""
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
    return Tokenized(ids, strings, service.info.max_model_len, text, spans)


async def detokenize(service: Service, route: Route, exchange: Exchange) -> None:
    service.require()
    body = await exchange.body()
    assert route.read is not None and route.write is not None
    wish: Detokenize = await service.off_loop(len(body), partial(route.read, body))
    service.resolve(wish.model)
    vocabulary = service.language.tokenizer.vocab_size
    ids = [id for id in wish.ids if id < vocabulary]
    if len(ids) < len(wish.ids) and not wish.lax:
        raise Invalid(f"Token id {max(wish.ids)} is not in the vocabulary of {vocabulary} tokens.", field="tokens")
    decode = partial(service.language.tokenizer.decode, ids, False)
    text = await service.off_loop(4 * len(wish.ids), decode)
    await exchange.answer(route.write(text))


async def models(service: Service, route: Route, exchange: Exchange) -> None:
    assert route.write is not None
    await exchange.answer(route.write([service.card(name) for name in service.names]))


async def model(service: Service, route: Route, exchange: Exchange) -> None:
    assert route.write is not None
    name = exchange.path["model"]
    if not name:  # "/v1/models/" is a list with a stroke too many, not the model without a name
        raise NotFound("No model is named. Leave out the last stroke for the list of models.")
    await exchange.answer(route.write(service.card(service.resolve(name))))


async def tokenizer(service: Service, route: Route, exchange: Exchange) -> None:
    """The tokenizer's configuration and the chat template, as evaluation tools ask for them."""
    assert route.write is not None
    if not service.options.tokenizer_info:
        raise NotFound("The tokenizer's configuration is not served; --tokenizer-info would serve it.")
    config: dict[str, Any] = {}
    path = Path(service.settings.model) / "tokenizer_config.json"
    if path.is_file():
        config = msgspec.json.decode(path.read_bytes())
    await exchange.answer(route.write(config | {"chat_template": service.language.template.text or None}))


async def version(service: Service, route: Route, exchange: Exchange) -> None:
    assert route.write is not None
    await exchange.answer(route.write(__version__))


async def info(service: Service, route: Route, exchange: Exchange) -> None:
    assert route.write is not None
    settings = service.settings
    about = About(service.card(service.names[0]), service.places, __version__, settings.dtype, settings.device)
    await exchange.answer(route.write(about))


async def halt(service: Service, route: Route, exchange: Exchange) -> None:
    assert route.read is not None
    if "model" in exchange.path:
        service.resolve(exchange.path["model"])
    wish: Halt = route.read(await exchange.body(), head(service, exchange))
    generation = service.labelled(wish.label)
    if generation is not None:
        generation.stop()
    await _tell(exchange, wish.done if generation is not None else wish.unknown)


async def load(service: Service, route: Route, exchange: Exchange) -> None:
    assert route.write is not None
    await exchange.answer(route.write(len(service.open)))


async def reset(service: Service, route: Route, exchange: Exchange) -> None:
    assert route.read is not None and route.write is not None
    service.require()
    running: bool = route.read(head(service, exchange))
    await exchange.answer(route.write(await service.engine.reset(running=running)))


async def health(service: Service, route: Route, exchange: Exchange) -> None:
    service.require()
    await exchange.answer(b"")


async def ask(service: Service, route: Route, exchange: Exchange) -> None:
    assert route.read is not None
    body = await exchange.body()
    told = await service.off_loop(len(body), partial(route.read, body, head(service, exchange), service.facts()))
    await _tell(exchange, told)


async def endpoint(service: Service, route: Route, exchange: Exchange) -> None:
    assert route.read is not None
    body = await exchange.body()
    told = await service.endpoints.change(partial(route.read, body, head(service, exchange), service.facts()))
    await _tell(exchange, told)


async def _tell(exchange: Exchange, told: Answer) -> None:
    await exchange.answer(told.body, told.status, told.type)


async def live(service: Service, route: Route, exchange: Exchange) -> None:
    if route.write is not None:
        await _tell(exchange, route.write(True))
        return
    await exchange.answer(b'{"status":"live"}')


async def ready(service: Service, route: Route, exchange: Exchange) -> None:
    refusal = service.refusal()
    if route.write is not None:
        await _tell(exchange, route.write(refusal is None))
        return
    if refusal is None:
        await exchange.answer(b'{"status":"ready"}')
        return
    progress = service.engine.progress
    state: dict[str, Any] = {"status": service.phase, "message": refusal.message}
    if service.phase in ("loading", "restarting"):
        state |= {"stage": progress.stage, "progress": round(progress.fraction, 4)}
    after = (b"retry-after", b"%d" % max(1, round(refusal.retry_after)))
    await exchange.answer(msgspec.json.encode(state), 503, extra=(after,))


async def metrics(service: Service, route: Route, exchange: Exchange) -> None:
    engine = service.engine
    view = View(
        model=service.names[0],
        metrics=service.metrics,
        stats=engine.stats,
        info=engine.info,
        prefix_cache=service.settings.prefix_cache,
        ready=service.refusal() is None,
        progress=1.0 if engine.state == "ready" else engine.progress.fraction,
        open=len(service.open),
    )
    await exchange.answer(page.text(view, exchange.dialect.name).encode(), type=page.CONTENT_TYPE)


HANDLERS: dict[Kind, Handle] = {
    "generate": generate,
    "tokenize": tokenize,
    "detokenize": detokenize,
    "models": models,
    "model": model,
    "tokenizer": tokenizer,
    "version": version,
    "info": info,
    "halt": halt,
    "load": load,
    "reset": reset,
    "health": health,
    "ask": ask,
    "endpoint": endpoint,
    "state": ask,
    "trial": control.trial,
    "order": control.order,
    "stop": control.stop,
    "live": live,
    "ready": ready,
    "metrics": metrics,
}
