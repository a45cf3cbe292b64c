"""Use a model in a script or notebook without a server: ``LLM().generate("…")``, ``.chat``, ``.stream``, ``.embed``.

The code that serves HTTP also reads the options and produces the answers here; only bytes and sockets are left out. An
event loop in its own thread runs everything, so the methods work in plain code, in notebooks (whose own loop is busy)
and, in their ``a…`` forms, from any other event loop.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from difflib import get_close_matches
from typing import Any, TypeVar

from parley.dialects import vectors
from parley.dialects.fields import Fields
from parley.dialects.openai.chat import ChatReply
from parley.dialects.openai.completions import CompletionReply
from parley.dialects.openai.embeddings import EmbeddingReply
from parley.dialects.reply import Reply
from parley.dialects.request_context import RequestContext
from parley.engine.protocol import Engine
from parley.engine.remote_engine import RemoteEngine
from parley.errors import InvalidValue, WrongType
from parley.hub import resolve_draft_model, resolve_model, served_name
from parley.serving.generation import open_generation
from parley.serving.media.script_media import MEDIA_OPTIONS, with_media_parts
from parley.serving.served_model import ServedModel
from parley.serving.server_options import ServerOptions
from parley.settings.serve_options.model_options import DTYPE_NAMES
from parley.types import (
    ChoiceDelta,
    ChoiceDone,
    Event,
    FinishReason,
    Grammar,
    MediaKind,
    ModelOverrides,
    ParleySettings,
    PromptScored,
    PromptVector,
    Request,
    TokenInfo,
    ToolCall,
    Usage,
)
from parley.worker.thread_engine import ThreadEngine

T = TypeVar("T")
PromptInput = str | list[int]  # text or token ids
ChatMessage = dict[str, Any]  # a message in the OpenAI API's format

UNBOUNDED_MEDIA = 1 << 20  # items per request: a script limits itself
UNBOUNDED_QUEUE = 1 << 40  # queue limit: a script waits for its own work, so there are no other clients to protect


@dataclasses.dataclass
class Completion:
    """One choice. ``text``: the answer without reasoning and calls; ``tokens``: filled if logprobs were requested."""

    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = dataclasses.field(default_factory=list)
    tokens: list[TokenInfo] = dataclasses.field(default_factory=list)
    finish: FinishReason = "stop"
    stop: str | int | None = None  # the stop string or stop id that ended it


@dataclasses.dataclass
class Answer:
    """The answer to one prompt: ``n`` completions, and the prompt's own tokens if they were requested."""

    completions: list[Completion]
    usage: Usage
    prompt: list[TokenInfo] = dataclasses.field(default_factory=list)

    @property
    def text(self) -> str:
        """Return the text of the first completion."""
        return self.completions[0].text


class LLM:
    """A model, loaded by the constructor. ``model``: a folder, a hub name, or None for the built-in one.

    ``settings`` are the fields of ``parley.types.ParleySettings`` (``dtype="float32"``, ``kv_memory=1 << 30``, …).
    ``revision``, ``tokenizer``, ``chat_template``, ``hf_overrides`` and ``mmproj`` are those of
    ``parley.types.ModelOverrides``.
    ``adapters``: folders of LoRA adapters in PEFT's format, by name; ``adapter="name"`` selects one in every method.
    ``in_process=False`` runs the engine in a separate process. Raises hub.ModelMissing or engine.protocol.EngineFailed.
    Use it as a context manager or call ``close`` to free the memory.

    The generating methods take the members of the OpenAI API's bodies with vLLM's additions, as the server reads them:
    ``temperature``, ``top_p``, ``seed``, ``max_tokens``, ``stop``, ``n``, ``logprobs``, ``tools``, … Wrong options
    raise ``errors.BadRequest``. Two options exist only here: ``schema``, a JSON schema for the answer, and ``grammar``,
    any other grammar for it: a ``parley.types.Grammar``, or text in llguidance's Lark.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        in_process: bool = True,
        adapters: Mapping[str, str] | None = None,
        revision: str = "",
        tokenizer: str = "",
        chat_template: str = "",
        hf_overrides: Mapping[str, Any] | None = None,
        mmproj: str = "",
        **settings: Any,
    ):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="parley-llm", daemon=True)
        self._thread.start()
        self._closed = False
        self._model: ServedModel | None = None
        try:
            overrides = ModelOverrides(revision, tokenizer, chat_template, dict(hf_overrides or {}), mmproj)
            folder = str(resolve_model(model, overrides=overrides))
            if "dtype" in settings:
                settings["dtype"] = DTYPE_NAMES.get(settings["dtype"], settings["dtype"])
            plan = ParleySettings(model=folder, adapters=dict(adapters or {}), **settings)
            if plan.draft_model is not None:
                plan.speculate = f"draft={resolve_draft_model(plan.draft_model)}"
            engine: Engine = ThreadEngine(plan) if in_process else RemoteEngine(plan, name=served_name(model))
            self._model = ServedModel((served_name(model),), plan, engine, ServerOptions(max_queue=UNBOUNDED_QUEUE))
            self._run_blocking(self._model.load_engine())
        except BaseException:
            self.close()
            raise

    @property
    def model(self) -> ServedModel:
        """The loaded model, for reading: its ``model_info``, ``engine.stats`` and ``text_pipeline.tokenizer``."""
        assert self._model is not None, "loaded in __init__"
        return self._model

    def generate(self, prompt: PromptInput | Sequence[PromptInput], **options: Any) -> Any:
        """Continue one prompt (returns an Answer) or several at once (returns a list); each is text or token ids."""
        return self._run_blocking(self._generate_answers(prompt, options))

    def chat(self, messages: Sequence[ChatMessage], **options: Any) -> Answer:
        """Answer a conversation. ``chat_template_kwargs={"enable_thinking": True}`` goes to the chat template.

        ``images``, ``audio``, ``videos``: for a model that reads them, paths, bytes of files or images of Pillow; they
        stand before the text of the last message of a user. Parts of a message may have them as well, for example
        ``{"type": "image", "image": "cat.png"}``.
        """
        return self._run_blocking(self._answer_request(self._build_request(messages, options)))

    def embed(self, texts: Sequence[PromptInput], **options: Any) -> list[list[float]]:
        """Return an embedding for each text or list of token ids.

        ``dimensions=256`` shortens the vectors, ``prompt_name="query"`` puts one of the model's own prompts before the
        texts, ``truncate_prompt_tokens=-1`` truncates texts that are too long.
        """
        return self._run_blocking(self._embed_texts(texts, options))

    def stream(self, prompt: PromptInput | Sequence[ChatMessage], **options: Any) -> Iterator[str]:
        """Yield pieces of the first completion's text as they are generated.

        ``prompt`` is text, token ids or a conversation. Leaving the loop early cancels the request.
        """
        pieces = self._stream_pieces(self._build_request(prompt, options))
        try:
            while (piece := self._run_blocking(_next_piece(pieces))) is not None:
                yield piece
        finally:
            if not self._closed:
                self._run_blocking(pieces.aclose())

    async def agenerate(self, prompt: PromptInput | Sequence[PromptInput], **options: Any) -> Any:
        """Do the same as ``generate``, as a coroutine."""
        return await self._run_awaited(self._generate_answers(prompt, options))

    async def achat(self, messages: Sequence[ChatMessage], **options: Any) -> Answer:
        """Do the same as ``chat``, as a coroutine."""
        return await self._run_awaited(self._answer_request(self._build_request(messages, options)))

    async def aembed(self, texts: Sequence[PromptInput], **options: Any) -> list[list[float]]:
        """Do the same as ``embed``, as a coroutine."""
        return await self._run_awaited(self._embed_texts(texts, options))

    async def astream(self, prompt: PromptInput | Sequence[ChatMessage], **options: Any) -> AsyncIterator[str]:
        """Do the same as ``stream``, as an async generator."""
        pieces = self._stream_pieces(self._build_request(prompt, options))
        try:
            while (piece := await self._run_awaited(_next_piece(pieces))) is not None:
                yield piece
        finally:
            if not self._closed:
                await self._run_awaited(pieces.aclose())

    def close(self) -> None:
        """Stop the engine and free its memory. Requests that are still running end with an error."""
        if self._closed:
            return
        if self._model is not None:
            self._run_blocking(self._model.close_engine())
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _run_blocking(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in our event loop and block until it ends. An interrupted caller cancels it."""
        future = self._submit_coroutine(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def _run_awaited(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in our event loop, awaited from another loop."""
        return await asyncio.wrap_future(self._submit_coroutine(work))

    def _submit_coroutine(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if self._closed:
            work.close()
            raise RuntimeError("This LLM was closed.")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    # The methods below run in our event loop.

    async def _generate_answers(
        self, prompt: PromptInput | Sequence[PromptInput], options: dict[str, Any]
    ) -> Answer | list[Answer]:
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            return await self._answer_request(self._build_request(prompt, options))
        requests = [self._build_request(prompt_input, options) for prompt_input in prompt]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._answer_request(request)) for request in requests]
        return [task.result() for task in tasks]

    def _build_request(self, prompt: Any, options: dict[str, Any]) -> Request:
        """Build a Request for text, token ids or a conversation. Raises BadRequest for a wrong option or value."""
        grammar = _read_grammar(options)
        options = {name: value for name, value in options.items() if name not in ("schema", "grammar")}
        request = self._read_prompt(prompt, options)
        if grammar is not None:
            request.grammar = grammar
        return request

    def _read_prompt(self, prompt: Any, options: dict[str, Any]) -> Request:
        if not (isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], dict)):
            if name := next((name for name in MEDIA_OPTIONS if options.get(name) is not None), None):
                raise InvalidValue(f"{name} needs a conversation: use chat, or stream with messages.", field=name)
            return _read_with_dialect(CompletionReply, {**options, "prompt": prompt})
        media = {name: options.pop(name) for name in MEDIA_OPTIONS if options.get(name) is not None}
        messages = with_media_parts(prompt, media)
        media_limits = dict.fromkeys(self.model.model_info.media_kinds, UNBOUNDED_MEDIA)
        return _read_with_dialect(
            ChatReply, {**options, "messages": messages}, media_limits=media_limits, own_options=MEDIA_OPTIONS
        )

    async def _answer_request(self, request: Request) -> Answer:
        answer = Answer([Completion() for _ in range(request.n)], Usage())
        async with open_generation(self.model, request) as generation:
            while events := await generation.next_events():
                for event in events:
                    _add_event(answer, event)
            answer.usage = generation.usage
        return answer

    async def _embed_texts(self, texts: Sequence[PromptInput], options: dict[str, Any]) -> list[list[float]]:
        if not texts:
            return []
        embeddings: dict[int, bytes] = {}
        context = self.model.model_info.max_model_len
        request = _read_with_dialect(EmbeddingReply, {"input": list(texts), **options}, context)
        async with open_generation(self.model, request) as generation:
            while events := await generation.next_events():
                embeddings |= {event.prompt: event.values for event in events if isinstance(event, PromptVector)}
        return [vectors.vector_numbers(embeddings[number]) for number in range(len(texts))]

    async def _stream_pieces(self, request: Request) -> AsyncGenerator[str, None]:
        async with open_generation(self.model, request) as generation:
            while events := await generation.next_events():
                for event in events:
                    if (
                        isinstance(event, ChoiceDelta)
                        and event.index == 0
                        and event.output_part == "content"
                        and event.text
                    ):
                        yield event.text


async def _next_piece(pieces: AsyncGenerator[str, None]) -> str | None:
    return await anext(pieces, None)


class _OptionMembers(dict[str, Any]):
    """The options as members of a body. Records the names that were read; all others are reported as unknown."""

    def __init__(self, members: dict[str, Any]):
        super().__init__(members)
        self.names_read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.names_read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.names_read.add(name)
        return super().get(name, default)

    def __contains__(self, name: object) -> bool:
        self.names_read.add(str(name))
        return super().__contains__(name)


def _read_grammar(options: dict[str, Any]) -> Grammar | None:
    """Return the grammar that ``schema`` or ``grammar`` asks for. Raises InvalidValue, WrongType."""
    schema, grammar = options.get("schema"), options.get("grammar")
    if schema is not None and grammar is not None:
        raise InvalidValue("schema and grammar cannot both be given.", field="grammar")
    if isinstance(grammar, str):
        return Grammar("lark", grammar, field="grammar")
    if isinstance(grammar, Grammar | None):
        return grammar if schema is None else Grammar("json", schema, field="schema")
    raise WrongType("grammar must be text or a parley.types.Grammar.", field="grammar")


def _read_with_dialect(
    reply: Callable[[Fields, RequestContext], Reply],
    body: dict[str, Any],
    context_length: int = 0,
    media_limits: Mapping[MediaKind, int] | None = None,
    own_options: Iterable[str] = (),
) -> Request:
    """Read a body with a dialect's reply class. Raises BadRequest for a wrong option or value.

    ``own_options``: names of options that the method takes and the dialect does not know.
    """
    members = _OptionMembers({"model": "", **body})
    adapter = members.pop("adapter", None)
    context = RequestContext(
        secrets.token_hex(8), int(time.time()), "", context_length=context_length, media_limits=media_limits or {}
    )
    request = reply(Fields(members), context).request
    request.adapter = adapter
    unknown = sorted(members.keys() - members.names_read)
    if unknown:
        near = get_close_matches(unknown[0], {*members.names_read, *own_options}, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise InvalidValue(f"There is no option {unknown[0]!r}.{hint}", field=unknown[0])
    return request


def _add_event(answer: Answer, event: Event) -> None:
    match event:
        case ChoiceDelta(index=index, text=text, output_part=part, tokens=tokens, tool_call=call):
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
        case PromptScored(tokens=tokens):
            answer.prompt = tokens
        case ChoiceDone(index=index, reason=reason, stop=stop):
            answer.completions[index].finish = reason
            answer.completions[index].stop = stop
