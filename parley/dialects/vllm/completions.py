"""``POST /v1/completions`` as vLLM answers it: OpenAI's members, its own form of chunks and answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from parley.dialects.dialect import Answer, Head
from parley.dialects.fields import Fields
from parley.dialects.openai import completions
from parley.dialects.openai.completions import Logprobs
from parley.dialects.openai.shared import FINISH, Rules, prompt_scores
from parley.dialects.vllm import requests, shared
from parley.types import Accepted, Delta, Done, Event, Scored, Token, Usage

PLAIN = (
    b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,'
    b'"token_ids":null}'
)


def read(body: bytes, head: Head) -> CompletionReply | Answer:
    """Read a completion request. Raises BadRequest."""
    return requests.read(CompletionReply, body, head)


class CompletionReply(shared.Streamed, completions.CompletionReply):
    """A completion request, answered in vLLM's form."""

    rules: ClassVar[Rules] = requests.RULES

    def __init__(self, body: Fields, head: Head):
        requests.check_prompt(body)
        requests.check(body, head)
        super().__init__(requests.formed(body), head)
        self.request.stop = requests.cap(self.request.stop, head)
        self.request.sampling = requests.sampling(self.request)
        self._name = requests.name(head, self._name)
        self._plain = not (self._ids or self._continuous) and self.request.want.logprobs is None
        self._opened: set[int] = set()

    # -- a stream

    def chunk(self, events: Sequence[Event]) -> bytes:
        parts: list[bytes] = []
        pieces: list[tuple[Delta | None, Done | None]] = []
        for event in events:
            match event:
                case Delta() if event.part != "tool":
                    pieces.append((event, None))
                case Done():
                    shared.finish(pieces, event)
                case Accepted():
                    self._prompt_ids[event.prompt] = event.token_ids
                case Scored() if self.request.want.echo:
                    parts += [self._echo(index, event) for index in self._of(event.prompt)]
        return b"".join(parts + [self._say(delta, done) for delta, done in pieces])

    def _say(self, delta: Delta | None, done: Done | None) -> bytes:
        if delta is None:
            return b"" if done is None else self._chunk(done.index, "", None, [], done)
        if done is None and self._plain:
            if not delta.text:
                return b""
            return self._before_chunk() + PLAIN % (delta.index, shared.encode(delta.text)) + b"]}\n\n"
        if done is None and not delta.text and not delta.tokens:
            return b""
        logprobs = self._choices[delta.index].logprobs
        if logprobs is not None:
            logprobs.add(delta.tokens)
        return self._chunk(delta.index, delta.text, logprobs if delta.tokens else None, delta.tokens, done)

    def _echo(self, index: int, event: Scored) -> bytes:
        logprobs = self._choices[index].logprobs
        if logprobs is not None:
            logprobs.echo(event.tokens, event.text)
        return self._chunk(index, event.text, logprobs, [])

    def _chunk(
        self, index: int, text: str, logprobs: Logprobs | None, fresh: list[Token], done: Done | None = None
    ) -> bytes:
        """Return a chunk. ``logprobs`` are written now; ``fresh`` are the choice's own new tokens."""
        state = self._choices[index]
        state.given += len(fresh)
        prompt = None
        if self._ids and index not in self._opened:
            self._opened.add(index)
            prompt = self._prompt_ids.get(index // self.request.n)
        choice = {
            "index": index,
            "text": text,
            "logprobs": None if logprobs is None else _ordered(logprobs.take()),
            "finish_reason": None if done is None else FINISH[done.reason],
            "stop_reason": None if done is None else done.stop,
            "prompt_token_ids": prompt,
            "token_ids": [token.id for token in fresh] if self._ids else None,
        }
        told = self._wrap([choice])
        if self._continuous:
            told["usage"] = shared.progress(len(self._prompt_ids.get(index // self.request.n, ())), state.given)
        return shared.frame(told)

    def _wrap(self, choices: list[Any]) -> dict[str, Any]:
        return shared.envelope(f"cmpl-{self._name}", "text_completion", self._head, self.request, choices)

    # -- one answer

    def body(self, usage: Usage) -> bytes:
        choices = [self._whole(index, state) for index, state in enumerate(self._choices)]
        return shared.encode(
            self._wrap(choices)
            | {
                "service_tier": None,
                "system_fingerprint": self._head.fingerprint,
                "usage": shared.usage(usage),
                "kv_transfer_params": None,
                "ec_transfer_params": None,
                "metrics": None,
            }
        )

    def _whole(self, index: int, state: completions.Choice) -> dict[str, Any]:
        assert state.done is not None
        prompt = index // self.request.n
        scores, top = self._scores.get(prompt), self._own_scores
        return {
            "index": index,
            "text": "".join(state.text),
            "logprobs": None if state.logprobs is None else _ordered(state.logprobs.take()),
            "finish_reason": FINISH[state.done.reason],
            "stop_reason": state.done.stop,
            "token_ids": state.ids if self._ids else None,
            "prompt_logprobs": None if scores is None or top is None else prompt_scores(scores, top),
            "prompt_token_ids": self._prompt_ids.get(prompt) if self._ids else None,
            "routed_experts": None,
        }


def _ordered(lists: dict[str, Any]) -> dict[str, Any]:
    return {name: lists[name] for name in ("text_offset", "token_logprobs", "tokens", "top_logprobs")}
