"""``POST /v1/completions``: text or token ids in, text out, as chunks or as one answer.

A request may have several prompts; choice index = prompt number * n + k. With ``echo`` the text of a choice begins with
its prompt, and its log-probabilities with those of the prompt's tokens.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from parley.dialects import parameters
from parley.dialects.dialect import Head, Reply
from parley.dialects.fields import Fields, decode
from parley.dialects.openai import extras, prompts, shared
from parley.dialects.openai.shared import RULES, Rules
from parley.errors import ParleyError
from parley.types import Accepted, Delta, Done, Event, Prompt, Request, Scored, Token, Usage, Want

MAX_PROMPTS = 1024
DEFAULT_TOKENS = 16

PLAIN = b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":null}'


def read(body: bytes, head: Head) -> CompletionReply:
    """Read a completion request. Raises BadRequest."""
    return CompletionReply(decode(body), head)


class Logprobs:
    """The parallel lists of a choice's log-probabilities, and the current offset in its text.

    ``top``: the number of alternatives that a prompt token's map has in addition to the token itself; -1: all of them.
    ``skip_special``: special tokens are listed, but are not part of the text.
    """

    def __init__(self, top: int, id_names: bool, skip_special: bool = True):
        self._top = None if top < 0 else top
        self._id_names = id_names
        self._skip_special = skip_special
        self._characters = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.clear()

    def clear(self) -> None:
        """Empty the lists."""
        self._tokens: list[str] = []
        self._logprobs: list[float | None] = []
        self._tops: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add(self, tokens: list[Token]) -> None:
        """Append tokens of the output."""
        for token in tokens:
            self._append(token, token.top)
            if not (token.special and self._skip_special):
                self._characters += len(self._decoder.decode(token.raw))

    def echo(self, tokens: list[Token], text: str) -> None:
        """Append tokens of the prompt, whose text begins the choice's. Some of their text may be missing from it."""
        for token in tokens:
            self._append(token, token.top[: self._top])
            piece = self._decoder.decode(token.raw)
            if self._characters == 0 and not text.startswith(" "):
                piece = piece.removeprefix(" ")  # the word-start marker that the tokenizer added
            if not token.special or text.startswith(piece, self._characters):
                self._characters += len(piece)
        self._characters = len(text)

    def _append(self, token: Token, top: list[Token]) -> None:
        self._tokens.append(self._name(token))
        self._offsets.append(self._characters)
        if token.logprob is None:  # nothing precedes the first token of a prompt
            self._logprobs.append(None)
            self._tops.append(None)
        else:
            self._logprobs.append(shared.number(token.logprob))
            # The token itself is listed first, and its score wins over that of another with the same spelling.
            scored = [token, *top, token]
            self._tops.append({self._name(t): shared.number(t.logprob) for t in scored})

    def take(self) -> dict[str, Any]:
        """Return the lists since the last call, and empty them."""
        taken = {
            "tokens": self._tokens,
            "token_logprobs": self._logprobs,
            "top_logprobs": self._tops,
            "text_offset": self._offsets,
        }
        self.clear()
        return taken

    def _name(self, token: Token) -> str:
        if self._id_names:
            return f"token_id:{token.id}"
        try:
            token.raw.decode()
        except UnicodeDecodeError:  # part of a character: its bytes keep the names in a map distinct
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.raw)
        return token.text


class Choice:
    """The output of one choice so far."""

    def __init__(self, logprobs: Logprobs | None):
        self.text: list[str] = []
        self.logprobs = logprobs
        self.ids: list[int] = []
        self.given = 0  # tokens sent in the stream so far, counted only for continuous usage
        self.done: Done | None = None


class CompletionReply(Reply):
    """A completion request, answered in OpenAI's form."""

    names: ClassVar[Mapping[str, str]] = {"stop_ids": "stop_token_ids"}
    rules: ClassVar[Rules] = RULES

    def __init__(self, body: Fields, head: Head):
        given = _prompts(body)
        max_tokens = body.integer("max_tokens", DEFAULT_TOKENS, 0, shared.MAX_TOKENS)
        more = extras.read(body, head, max_tokens=max_tokens)
        if body.string("suffix", ""):
            raise shared.unsupported(body, "suffix", "Filling in before a suffix is")
        if body.boolean("return_prompt_text", False):
            raise shared.unsupported(body, "return_prompt_text", "The prompt's text in a completion, but by 'echo', is")
        stream = body.boolean("stream", False)
        echo = body.boolean("echo", False)
        logprobs = shared.alternatives(body, "logprobs", self.rules)
        wish = shared.choices(body, len(given), self.rules)
        usage, self._continuous = shared.include_usage(body, stream)
        self._ids = body.boolean("return_token_ids", False)
        if max_tokens == 0 and not echo:
            raise body.fail("max_tokens", "may only be 0 when 'echo' is true.")
        self._own_scores = scores = shared.alternatives(body, "prompt_logprobs", self.rules)
        if echo and logprobs is not None:
            scores = -1 if -1 in (logprobs, scores) else max(logprobs, scores or 0)
        self.request = Request(
            id=head.id,
            model=body.string("model", "", cap=256),
            prompts=given,
            sampling=shared.sampling(body),
            stop=shared.stop(body, max_tokens, self.rules),
            want=Want(
                logprobs=logprobs,
                named=extras.named(body, logprobs, max_tokens),
                prompt_logprobs=scores,
                echo=echo,
                usage=usage,
                skip_special=body.boolean("skip_special_tokens", True),
                interval=shared.interval(body),
                ids=self._ids or self._continuous,
            ),
            **wish._asdict(),
            stream=stream,
            banned=parameters.bad_words(body),
            grammar=more.grammar,
            **more.members,
        )
        form = body.boolean("return_tokens_as_token_ids", False), self.request.want.skip_special
        self._name = more.name or head.id
        self._head = head
        self._choices = [
            Choice(None if logprobs is None else Logprobs(logprobs, *form)) for _ in range(wish.n * len(given))
        ]
        self._prompt_ids: dict[int, list[int]] = {}
        self._scores: dict[int, list[Token]] = {}
        self._before = b""
        self._after = b'],"usage":null}\n\n' if self.request.want.usage else b"]}\n\n"

    # -- a stream

    def chunk(self, events: Sequence[Event]) -> bytes:
        parts = []
        for event in events:
            match event:
                case Delta() if event.part != "tool":
                    index, text, tokens = event.index, event.text, event.tokens
                    choice = self._choices[index]
                    choice.given += len(tokens)
                    if choice.logprobs is None and not self._ids:
                        if text:
                            parts.append(self._frame(index, PLAIN % (index, shared.encode(text))))
                    elif text or tokens:
                        parts.append(self._piece(index, text, tokens))
                case Done():
                    choice_ = self._choice(event.index, "", event) | self._extras(event.index, [])
                    parts.append(self._frame(event.index, shared.encode(choice_)))
                case Accepted():
                    self._prompt_ids[event.prompt] = event.token_ids
                case Scored() if self.request.want.echo or self._own_scores is not None:
                    parts += [self._preceded(index, event) for index in self._of(event.prompt)]
        return b"".join(parts)

    def end(self, usage: Usage) -> bytes:
        if not self.request.want.usage:
            return shared.DONE
        return shared.frame(self._envelope([], usage)) + shared.DONE

    def fail(self, error: ParleyError) -> bytes:
        return shared.failure(error)

    def _piece(self, index: int, text: str, tokens: list[Token]) -> bytes:
        logprobs = self._choices[index].logprobs
        if logprobs is not None:
            logprobs.add(tokens)
        choice = self._choice(index, text, None, logprobs) | self._extras(index, tokens)
        return self._frame(index, shared.encode(choice))

    def _preceded(self, index: int, prompt: Scored) -> bytes:
        """Return the first chunk of a choice: the requested text and scores of its prompt."""
        logprobs = self._choices[index].logprobs
        if logprobs is not None and self.request.want.echo:
            logprobs.echo(prompt.tokens, prompt.text)
        text = prompt.text if self.request.want.echo else ""
        choice = self._choice(index, text, None, logprobs) | self._extras(index, [])
        if self._own_scores is not None:
            choice["prompt_logprobs"] = shared.prompt_scores(prompt.tokens, self._own_scores)
        return self._frame(index, shared.encode(choice))

    def _frame(self, index: int, choice: bytes) -> bytes:
        if not self._before:  # the model's name is final only after the server has resolved it
            self._before = b"data: " + shared.encode(self._envelope([])).removesuffix(b"]}")
        if self._continuous:
            prompt = self._prompt_ids.get(index // self.request.n, ())
            usage = shared.encode(shared.progress(len(prompt), self._choices[index].given))
            return self._before + choice + b'],"usage":' + usage + b"}\n\n"
        return self._before + choice + self._after

    # -- one answer

    def add(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case Delta(index, text, tokens=tokens) if event.part != "tool":
                    choice = self._choices[index]
                    choice.text.append(text)
                    choice.ids += [token.id for token in tokens]
                    if choice.logprobs is not None:
                        choice.logprobs.add(tokens)
                case Done():
                    self._choices[event.index].done = event
                case Accepted():
                    self._prompt_ids[event.prompt] = event.token_ids
                case Scored():
                    self._scores[event.prompt] = event.tokens
                    if self.request.want.echo:
                        self._prepend(event)

    def _prepend(self, event: Scored) -> None:
        for index in self._of(event.prompt):
            choice = self._choices[index]
            choice.text.append(event.text)
            if choice.logprobs is not None:
                choice.logprobs.echo(event.tokens, event.text)

    def body(self, usage: Usage) -> bytes:
        choices = []
        for index, state in enumerate(self._choices):
            assert state.done is not None
            choice = self._choice(index, "".join(state.text), state.done, state.logprobs)
            scores = self._scores.get(index // self.request.n)
            if self._own_scores is not None and scores is not None:
                choice["prompt_logprobs"] = shared.prompt_scores(scores, self._own_scores)
            if self._ids:
                choice["token_ids"] = state.ids
                choice["prompt_token_ids"] = self._prompt_ids.get(index // self.request.n)
            choices.append(choice)
        return shared.encode(self._envelope(choices, usage))

    # -- both

    def _of(self, prompt: int) -> range:
        """Return the choice indices of a prompt."""
        return range(prompt * self.request.n, (prompt + 1) * self.request.n)

    def _choice(self, index: int, text: str, done: Done | None, logprobs: Logprobs | None = None) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": None if logprobs is None else logprobs.take(),
            "finish_reason": None if done is None else shared.FINISH[done.reason],
        }
        if done is not None:
            choice["stop_reason"] = done.stop
        return choice

    def _extras(self, index: int, tokens: list[Token]) -> dict[str, Any]:
        """Return the token ids of a chunk, and with the first chunk of a choice the prompt's."""
        if not self._ids:
            return {}
        extras: dict[str, Any] = {"token_ids": [token.id for token in tokens]}
        choice = self._choices[index]
        if not choice.ids:
            choice.ids = [-1]  # marks that the prompt's ids were sent
            extras["prompt_token_ids"] = self._prompt_ids.get(index // self.request.n)
        return extras

    def _envelope(self, choices: list[Any], usage: Usage | None = None) -> dict[str, Any]:
        envelope: dict[str, Any] = {
            "id": f"cmpl-{self._name}",
            "object": "text_completion",
            "created": self._head.created,
            "model": self.request.model,
            "system_fingerprint": self._head.fingerprint,
            "choices": choices,
        }
        if usage is not None:
            envelope["usage"] = shared.usage(usage)
        return envelope


def _prompts(body: Fields) -> list[Prompt]:
    if body.has("prompt_embeds") and not body.has("prompt"):
        raise shared.unsupported(body, "prompt_embeds", "Embeddings as a prompt are")
    return prompts.read(body, "prompt", cap=MAX_PROMPTS)
