"""A model in a script or a notebook, without a server: ``LLM().generate("…")``, ``.chat``, ``.stream``, ``.embed``.

Options are read and answers made by what serves HTTP; only bytes and sockets are missing. An event loop in a thread of
its own drives it all, so that the methods work from plain code, from notebooks (whose own loop is busy), and, in their
``a…`` forms, from any other loop.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from difflib import get_close_matches
from typing import Any, TypeVar

from parley.dialects import vectors
from parley.dialects.dialect import Head, Reply
from parley.dialects.fields import Fields
from parley.dialects.openai.chat import ChatReply
from parley.dialects.openai.completions import CompletionReply
from parley.dialects.openai.embeddings import EmbeddingReply
from parley.engine.local import LocalEngine
from parley.engine.protocol import Engine
from parley.engine.remote import RemoteEngine
from parley.errors import Invalid, WrongType
from parley.hub import resolve, served_name
from parley.server.generation import Generation
from parley.server.logs import Note
from parley.server.model import Model
from parley.server.options import ServerOptions
from parley.server.tally import Tally
from parley.types import Delta, Done, Event, Grammar, Reason, Request, Scored, Settings, Token, ToolCall, Usage, Vector

T = TypeVar("T")
Input = str | list[int]  # text or token ids
Turn = dict[str, Any]  # a message as the OpenAI API has it

UNBOUNDED = 1 << 40  # a script waits for its own work; nobody else is kept out by it


@dataclasses.dataclass
class Completion:
    """One choice. ``text`` is the answer proper; ``tokens`` are filled when log-probabilities were asked for."""

    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = dataclasses.field(default_factory=list)
    tokens: list[Token] = dataclasses.field(default_factory=list)
    finish: Reason = "stop"
    stop: str | int | None = None  # the stop string or stop id that ended it


@dataclasses.dataclass
class Answer:
    """The answer to one prompt: ``n`` completions, and the prompt's own tokens when they were asked for."""

    completions: list[Completion]
    usage: Usage
    prompt: list[Token] = dataclasses.field(default_factory=list)

    @property
    def text(self) -> str:
        """The text of the first completion."""
        return self.completions[0].text


class LLM:
    """A model, loaded when the object is made. ``model``: a folder, a hub name, or None for the built-in one.

    ``settings`` are the fields of ``parley.types.Settings`` (``dtype="float32"``, ``kv_memory=1 << 30``, …);
    ``adapters``: folders as PEFT writes them, by name; ``adapter="name"`` chooses one in every method.
    ``in_process`` False runs the engine in a process of its own. Raises hub.ModelMissing or
    engine.protocol.EngineFailed. Use it as a context manager or ``close`` it to give the memory back.

    Options of the generating methods are the members of the OpenAI API's bodies with vLLM's extras, as the server
    reads them: ``temperature``, ``top_p``, ``seed``, ``max_tokens``, ``stop``, ``n``, ``logprobs``, ``tools``, … Wrong
    ones raise ``errors.BadRequest``. Two are its own: ``schema``, a JSON schema that the answer follows, and
    ``grammar``, any other form of it: a ``parley.types.Grammar``, or text in llguidance's Lark.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        in_process: bool = True,
        adapters: Mapping[str, str] | None = None,
        **settings: Any,
    ):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="parley-llm", daemon=True)
        self._thread.start()
        self._closed = False
        self._model: Model | None = None
        try:
            folder = str(resolve(model))
            plan = Settings(model=folder, adapters=dict(adapters or {}), **settings)
            engine: Engine = LocalEngine(plan) if in_process else RemoteEngine(plan, name=served_name(model))
            self._model = Model((served_name(model),), plan, engine, ServerOptions(max_queue=UNBOUNDED))
            self._wait(self._model.load())
        except BaseException:
            self.close()
            raise

    def generate(self, prompt: Input | Sequence[Input], **options: Any) -> Any:
        """Continue a prompt (gives an Answer) or several at once (a list of them). Token ids may stand for text."""
        return self._wait(self._generate(prompt, options))

    def chat(self, messages: Sequence[Turn], **options: Any) -> Answer:
        """Answer a conversation. ``chat_template_kwargs={"enable_thinking": True}`` is for the chat template."""
        return self._wait(self._answer(_request(messages, options)))

    def embed(self, texts: Sequence[Input], **options: Any) -> list[list[float]]:
        """A vector for each text, or list of token ids. ``dimensions=256`` cuts them, ``prompt_name="query"`` puts one
        of the model's own prompts before the texts, ``truncate_prompt_tokens=-1`` cuts texts that are too long."""
        return self._wait(self._embed(texts, options))

    def stream(self, prompt: Input | Sequence[Turn], **options: Any) -> Iterator[str]:
        """Pieces of the first completion's text as they are made. ``prompt`` is text, token ids or a conversation.

        Leaving the loop early cancels the work.
        """
        pieces = self._pieces(_request(prompt, options))
        try:
            while (piece := self._wait(_next(pieces))) is not None:
                yield piece
        finally:
            if not self._closed:
                self._wait(pieces.aclose())

    async def agenerate(self, prompt: Input | Sequence[Input], **options: Any) -> Any:
        """As ``generate``."""
        return await self._follow(self._generate(prompt, options))

    async def achat(self, messages: Sequence[Turn], **options: Any) -> Answer:
        """As ``chat``."""
        return await self._follow(self._answer(_request(messages, options)))

    async def aembed(self, texts: Sequence[Input], **options: Any) -> list[list[float]]:
        """As ``embed``."""
        return await self._follow(self._embed(texts, options))

    async def astream(self, prompt: Input | Sequence[Turn], **options: Any) -> AsyncIterator[str]:
        """As ``stream``."""
        pieces = self._pieces(_request(prompt, options))
        try:
            while (piece := await self._follow(_next(pieces))) is not None:
                yield piece
        finally:
            if not self._closed:
                await self._follow(pieces.aclose())

    def close(self) -> None:
        """End the engine and free its memory. Work that is still running ends with an error."""
        if self._closed:
            return
        if self._model is not None:
            self._wait(self._model.close())
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run in our loop, and block the calling thread. An interrupted caller leaves no work behind."""
        future = self._begin(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def _follow(self, work: Coroutine[Any, Any, T]) -> T:
        """Run in our loop, awaited from another."""
        return await asyncio.wrap_future(self._begin(work))

    def _begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if self._closed:
            work.close()
            raise RuntimeError("This LLM was closed.")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    # From here on: in our loop.

    async def _generate(self, prompt: Input | Sequence[Input], options: dict[str, Any]) -> Answer | list[Answer]:
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            return await self._answer(_request(prompt, options))
        requests = [_request(one, options) for one in prompt]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._answer(request)) for request in requests]
        return [task.result() for task in tasks]

    async def _answer(self, request: Request) -> Answer:
        answer = Answer([Completion() for _ in range(request.n)], Usage())
        async with self._generation(request) as generation:
            while events := await generation.next():
                for event in events:
                    _fold(answer, event)
            answer.usage = generation.usage
        return answer

    async def _embed(self, texts: Sequence[Input], options: dict[str, Any]) -> list[list[float]]:
        assert self._model is not None, "loaded in __init__"
        if not texts:
            return []
        found: dict[int, bytes] = {}
        context = self._model.info.max_model_len
        request = _read(EmbeddingReply, {"input": list(texts), **options}, context)
        async with self._generation(request) as generation:
            while events := await generation.next():
                found |= {event.prompt: event.values for event in events if isinstance(event, Vector)}
        return [vectors.numbers(found[number]) for number in range(len(texts))]

    async def _pieces(self, request: Request) -> AsyncGenerator[str, None]:
        async with self._generation(request) as generation:
            while events := await generation.next():
                for event in events:
                    if isinstance(event, Delta) and event.index == 0 and event.part == "content" and event.text:
                        yield event.text

    @asynccontextmanager
    async def _generation(self, request: Request) -> AsyncIterator[Generation]:
        assert self._model is not None, "loaded in __init__"
        tally = Tally(self._model.metrics, Note(), time.perf_counter())
        generation = Generation(self._model, request, tally)
        try:
            await generation.begin()
            yield generation
        finally:
            generation.close()


async def _next(pieces: AsyncGenerator[str, None]) -> str | None:
    return await anext(pieces, None)


class _Members(dict[str, Any]):
    """The options as a body's members. Remembers which names were asked for, so that others are told as wrong."""

    def __init__(self, members: dict[str, Any]):
        super().__init__(members)
        self.asked: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.asked.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.asked.add(name)
        return super().get(name, default)

    def __contains__(self, name: object) -> bool:
        self.asked.add(str(name))
        return super().__contains__(name)


def _request(prompt: Any, options: dict[str, Any]) -> Request:
    """A Request for text, token ids or a conversation. Raises BadRequest for a wrong option or value."""
    grammar = _form(options)
    options = {name: value for name, value in options.items() if name not in ("schema", "grammar")}
    request = _body(prompt, options)
    if grammar is not None:
        request.grammar = grammar
    return request


def _form(options: dict[str, Any]) -> Grammar | None:
    """What ``schema`` or ``grammar`` say of the answer. Raises Invalid, WrongType."""
    schema, grammar = options.get("schema"), options.get("grammar")
    if schema is not None and grammar is not None:
        raise Invalid("schema and grammar cannot both be given.", field="grammar")
    if isinstance(grammar, str):
        return Grammar("lark", grammar, field="grammar")
    if isinstance(grammar, Grammar | None):
        return grammar if schema is None else Grammar("json", schema, field="schema")
    raise WrongType("grammar must be text or a parley.types.Grammar.", field="grammar")


def _body(prompt: Any, options: dict[str, Any]) -> Request:
    talk = isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], dict)
    if talk:
        return _read(ChatReply, {**options, "messages": prompt})
    return _read(CompletionReply, {**options, "prompt": prompt})


def _read(reply: Callable[[Fields, Head], Reply], body: dict[str, Any], context: int = 0) -> Request:
    """What a body asks for. Raises BadRequest for a wrong option or value."""
    members = _Members({"model": "", **body})
    adapter = members.pop("adapter", None)
    request = reply(Fields(members), Head(secrets.token_hex(8), int(time.time()), "", context)).request
    request.adapter = adapter
    unknown = sorted(members.keys() - members.asked)
    if unknown:
        near = get_close_matches(unknown[0], members.asked, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise Invalid(f"There is no option {unknown[0]!r}.{hint}", field=unknown[0])
    return request


def _fold(answer: Answer, event: Event) -> None:
    match event:
        case Delta(index=index, text=text, part=part, tokens=tokens, call=call):
            completion = answer.completions[index]
            completion.tokens += tokens
            if part == "content":
                completion.text += text
            elif part == "reasoning":
                completion.reasoning += text
            elif call is not None and call.name is not None:
                completion.tool_calls.append(ToolCall(call.id or "", call.name, call.arguments))
            elif call is not None:
                last = completion.tool_calls[call.index]
                completion.tool_calls[call.index] = ToolCall(last.id, last.name, last.arguments + call.arguments)
        case Scored(tokens=tokens):
            answer.prompt = tokens
        case Done(index=index, reason=reason, stop=stop):
            answer.completions[index].finish = reason
            answer.completions[index].stop = stop
