"""The life of one request that generates: prompt to tokens, tokens to the engine, outputs to events, events to bytes.

    parse -> admit -> prepare (render, tokenise) -> check -> submit -> [outputs -> events -> bytes]* -> end

Whatever happens, ``close`` leaves nothing behind: works are cancelled and places given back. Knows neither the names of
an API's fields nor how its answers look.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass, field
from functools import partial

from parley.dialects.dialect import Head, Reply, Route
from parley.engine.protocol import Stream
from parley.errors import ContextLength, EngineDied, EngineError, Invalid, ParleyError
from parley.server.respond import Exchange, Note
from parley.server.service import Service
from parley.text import Choice, Prepared, Stops, scored
from parley.types import Accepted, Chat, Done, Event, Output, Prompt, Request, Score, Scored, Text, Usage, Work

PING = b": ping\n\n"
REASONS = {"stop": "stop", "tool": "stop", "length": "length", "cancel": "abort", "error": "error"}


async def generate(service: Service, route: Route, exchange: Exchange) -> None:
    """Answer a request of a route that generates. Raises ParleyError as long as nothing was sent, ClientGone."""
    service.require()
    reply = await _read(service, route, exchange)
    exchange.names = reply.names
    generation = Generation(service, reply.request, exchange.arrived, exchange.note)
    try:
        await exchange.while_connected(_answer(exchange, reply, generation))
    finally:
        generation.close()


async def _read(service: Service, route: Route, exchange: Exchange) -> Reply:
    """The parsed body; the body itself is let go of here."""
    assert route.read is not None
    body = await exchange.body()
    head = Head(exchange.unique, int(time.time()), service.fingerprint)
    return await service.off_loop(len(body), partial(route.read, body, head))


async def _answer(exchange: Exchange, reply: Reply, generation: Generation) -> None:
    await generation.begin()
    if reply.request.stream:
        await _stream(exchange, reply, generation)
        return
    while events := await generation.next():
        reply.add(events)
    await exchange.answer(reply.body(generation.usage))


async def _stream(exchange: Exchange, reply: Reply, generation: Generation) -> None:
    media_type, ping = reply.media_type, exchange.options.ping_interval
    ping = ping if media_type.startswith("text/event-stream") else None
    try:
        while events := await (_pinging(exchange, reply, generation, ping) if ping else generation.next()):
            if data := reply.chunk(events):
                await exchange.write(data, media_type)
        last = reply.end(generation.usage)
    except ParleyError as error:
        if not exchange.status:
            raise
        last = reply.fail(exchange.translate(error))
    await exchange.write(last, media_type, last=True)


async def _pinging(exchange: Exchange, reply: Reply, generation: Generation, interval: float) -> list[Event]:
    """The next events, with comments in the stream while there are none."""
    task = asyncio.ensure_future(generation.next())
    try:
        while not (await asyncio.wait({task}, timeout=interval))[0]:
            await exchange.write(PING, reply.media_type)
        return task.result()
    finally:
        task.cancel()


@dataclass(eq=False)
class Part:
    """One prompt of a request, in the engine's hands. Outputs are held until the scores that precede them are there."""

    number: int
    prepared: Prepared
    stream: Stream
    choices: list[Choice]
    scores_due: bool
    held: list[Output] = field(default_factory=list)


class Generation:
    """One request from its admission to its last event."""

    def __init__(self, service: Service, request: Request, arrived: float, note: Note):
        request.model = note.model = service.resolve(request.model)
        service.hold(request.n * len(request.prompts))
        service.open.add(self)
        self.usage = Usage()
        self._service = service
        self._request = request
        self._note = note
        self._parts: list[Part] = []
        self._pumps: list[asyncio.Task[None]] = []
        self._queue: asyncio.Queue[tuple[Part, list[Output]]] = asyncio.Queue()
        self._fresh: list[Event] = []  # made by begin, given by the first next
        self._left = request.n * len(request.prompts)  # choices without their last event
        self._error: ParleyError | None = None
        self._closed = False
        self._arrived = arrived
        self._submitted = 0.0
        self._first = 0.0
        self._last: dict[int, float] = {}  # choice -> when its last token came

    async def begin(self) -> None:
        """Make the prompts ready, check them, and hand them to the engine. Raises BadRequest, NotReady."""
        request, service = self._request, self._service
        self._check_ids()
        prepared = await service.off_loop(sum(map(_size, request.prompts)), self._prepare)
        if self._error is not None:
            raise self._error
        service.require()  # it may have changed while a long prompt was read
        stops = Stops(request.stop.strings) if request.stop.strings else None
        stop_ids = sorted({*request.stop.ids, *(() if request.stop.ignore_eos else service.language.tokenizer.eos_ids)})
        for number, (ready, max_tokens) in enumerate(prepared):
            self._submit(number, ready, max_tokens, stops, stop_ids)
        self._submitted = time.perf_counter()
        if len(self._parts) > 1:
            self._pumps = [asyncio.create_task(self._pump(part)) for part in self._parts]

    async def next(self) -> list[Event]:
        """The events since the last time, at least one; none when every choice has ended. Raises ParleyError."""
        while True:
            if self._fresh:
                events, self._fresh = self._fresh, []
                return events
            if self._error is not None:
                raise self._error
            if not self._left:
                return []
            if len(self._parts) == 1:
                arrived = [(self._parts[0], await self._parts[0].stream.next())]
            else:
                arrived = [await self._queue.get()]
                while not self._queue.empty():
                    arrived.append(self._queue.get_nowait())
            for part, outputs in arrived:
                if not outputs and not self._error and any(not choice.ended for choice in part.choices):
                    raise EngineError("The engine ended this request without an answer.")
                self._fresh += self._take(part, outputs)

    def abort(self, error: ParleyError) -> None:
        """End it from outside: the next ``next`` raises the error."""
        self._error = self._error or error
        for part in self._parts:
            part.stream.cancel()

    def close(self) -> None:
        """Stop whatever still runs, give the places back, and count what was done."""
        if self._closed:
            return
        self._closed = True
        for task in self._pumps:
            task.cancel()
        for part in self._parts:
            part.stream.cancel()
        self._service.held -= self._request.n * len(self._request.prompts)
        self._service.open.discard(self)
        self._count()

    # -- before the engine

    def _prepare(self) -> list[tuple[Prepared, int]]:
        """Each prompt in tokens, and how many may be generated behind it."""
        language, limit = self._service.language, self._service.info.max_model_len
        made = []
        for prompt in self._request.prompts:
            ready = language.prepare(prompt, limit)
            made.append((ready, self._room(ready.token_ids)))
        return made

    def _check_ids(self) -> None:
        """Token ids that a client gave must be in the vocabulary."""
        vocabulary = self._service.info.vocab_size
        request = self._request
        given = [("logit_bias", id) for id in request.sampling.logit_bias] + [
            ("stop_ids", id) for id in request.stop.ids
        ]
        for field_, id in given:
            if id >= vocabulary:
                raise Invalid(f"Token id {id} is not in the vocabulary of {vocabulary} tokens.", field=field_)

    def _room(self, ids: list[int]) -> int:
        """How many tokens may be generated behind the prompt. Raises ContextLength, Invalid."""
        info, stop = self._service.info, self._request.stop
        if not ids:
            raise Invalid("The prompt is empty: it has no tokens.", field="prompt")
        if max(ids) >= info.vocab_size:
            raise Invalid(f"Token id {max(ids)} is not in the vocabulary of {info.vocab_size} tokens.", field="prompt")
        room = info.max_model_len - len(ids)
        wanted = stop.max_tokens if stop.max_tokens is not None else max(1, stop.min_tokens)
        if wanted > room:
            asked = f" and {wanted} tokens were requested behind it" if stop.max_tokens is not None else ""
            raise ContextLength(
                f"This model's maximum context length is {info.max_model_len} tokens. The prompt has {len(ids)}{asked}."
                " Shorten the prompt or ask for fewer tokens.",
                field="prompt",
            )
        return room if stop.max_tokens is None else stop.max_tokens

    def _submit(self, number: int, ready: Prepared, max_tokens: int, stops: Stops | None, stop_ids: list[int]) -> None:
        request, service = self._request, self._service
        sampling, want = request.sampling, request.want
        seed = sampling.seed if sampling.seed is not None else secrets.randbits(63)
        work = Work(
            id=f"{request.id}-{number}",
            token_ids=ready.token_ids,
            max_tokens=max_tokens,
            sampling=sampling,
            seed=seed & (2**64 - 1),
            n=request.n,
            min_tokens=request.stop.min_tokens,
            stop_ids=stop_ids,
            logprobs=-1 if want.logprobs is None else want.logprobs,
            prompt_logprobs=-1 if want.prompt_logprobs is None else want.prompt_logprobs,
            salt=request.salt,
        )
        first = number * request.n
        tokenizer = service.language.tokenizer
        choices = [
            Choice(request, first + k, tokenizer, ready, stops, details=request.want.ids) for k in range(request.n)
        ]
        due = want.prompt_logprobs is not None
        self._parts.append(Part(number, ready, service.engine.submit(work), choices, due))
        self.usage.prompt_tokens += len(ready.token_ids)
        self._fresh.append(Accepted(number, ready.token_ids))
        if want.echo and not due:
            self._fresh.append(self._scored(self._parts[-1], None))

    # -- behind the engine

    async def _pump(self, part: Part) -> None:
        while outputs := await part.stream.next():
            self._queue.put_nowait((part, outputs))
        self._queue.put_nowait((part, []))

    def _take(self, part: Part, outputs: list[Output]) -> list[Event]:
        events: list[Event] = []
        if part.scores_due:
            outputs = part.held + outputs
            scores = next((output.prompt_scores for output in outputs if output.prompt_scores is not None), None)
            failed = any(output.finish == "error" for output in outputs)
            if scores is None and not failed:
                part.held = outputs
                return events
            part.scores_due, part.held = False, []
            if scores is not None:
                events.append(self._scored(part, scores))
        now = time.perf_counter()
        for output in outputs:
            if output.finish == "error":
                self._error = self._failure(output)
                raise self._error
            if output.token_ids:
                self._clock(part, output, now)
            choice = part.choices[output.index]
            for event in choice.push(output):
                events.append(event)
                if isinstance(event, Done):
                    self._end(event, output.index)
            if choice.ended and output.finish is None:
                part.stream.cancel(output.index)  # a stop string was found, of which the engine knows nothing
        return events

    def _scored(self, part: Part, scores: list[Score | None] | None) -> Scored:
        want, tokenizer, ids = self._request.want, self._service.language.tokenizer, part.prepared.token_ids
        event = scored(tokenizer, part.number, ids, scores, want.prompt_logprobs or 0)
        if want.echo:
            prompt = self._request.prompts[part.number]
            event.text = prompt.text if isinstance(prompt, Text) else tokenizer.decode(ids, want.skip_special)
        return event

    def _end(self, done: Done, index: int) -> None:
        self._left -= 1
        self._note.finish = done.reason
        self.usage.completion_tokens += done.usage.completion_tokens
        self.usage.reasoning_tokens += done.usage.reasoning_tokens
        if index == 0:  # the others always find the prompt in the cache
            self.usage.cached_tokens += done.usage.cached_tokens
        self._service.metrics.finished.add(value=REASONS[done.reason])

    def _failure(self, output: Output) -> ParleyError:
        message = output.error or "The engine failed this request."
        return EngineError(message) if self._service.engine.state == "ready" else EngineDied(message)

    # -- what is counted

    def _clock(self, part: Part, output: Output, now: float) -> None:
        index = part.number * self._request.n + output.index
        metrics = self._service.metrics
        if not self._first:
            self._first = now
            self._note.first_token = now - self._arrived
            metrics.first_token.observe(now - self._arrived)
        before = self._last.get(index)
        if before is not None:
            count = len(output.token_ids)
            metrics.between_tokens.observe((now - before) / count, count)
        self._last[index] = now

    def _count(self) -> None:
        metrics, request, usage = self._service.metrics, self._request, self.usage
        if not self._submitted:
            return
        now = time.perf_counter()
        delivered = sum(choice.usage.completion_tokens for part in self._parts for choice in part.choices)
        self._note.prompt_tokens, self._note.completion_tokens = usage.prompt_tokens, delivered
        if self._left:
            self._note.finish = "error" if self._error is not None else "abort"
            metrics.finished.add(self._left, self._note.finish)
        metrics.cached.add(usage.cached_tokens)
        metrics.queued.observe(self._submitted - self._arrived)
        metrics.whole.observe(now - self._arrived)
        metrics.inference.observe(now - self._submitted)
        metrics.prompt_length.observe(usage.prompt_tokens)
        metrics.output_length.observe(delivered)
        metrics.choices.observe(request.n)
        if request.stop.max_tokens is not None:
            metrics.max_tokens.observe(request.stop.max_tokens)
        if self._first:
            metrics.prefill.observe(self._first - self._submitted)
            metrics.decode.observe(now - self._first)
            if delivered > 1:
                metrics.per_token.observe((now - self._first) / (delivered - 1))


def _size(prompt: Prompt) -> int:
    """Characters of a prompt's text, roughly."""
    if isinstance(prompt, Text):
        return len(prompt.text)
    if isinstance(prompt, Chat):
        return sum(len(message.content or "") for message in prompt.messages) + 64 * len(prompt.messages)
    return 0
