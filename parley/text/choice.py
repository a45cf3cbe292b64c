"""One choice of an answer: turns the engine's token outputs into the events that a dialect renders.

Each token is handled in one pass: count it, detokenize it, scan for stop strings, parse the parts of the answer. Stop
strings are therefore matched in everything the model writes, including reasoning and the arguments of tool calls. The
texts, tokens and usage do not depend on how the tokens are divided into outputs. This module knows neither sockets nor
the engine; its caller checks ``finished``.
"""

from __future__ import annotations

from collections.abc import Sequence

from parley.text.parsing.harmony_parser import Channels, reader
from parley.text.parsing.markup import PLAIN
from parley.text.parsing.output_parser import Region, Regions
from parley.text.prompt import Prepared
from parley.text.tokens.detokenizer import Detokenizer
from parley.text.tokens.prediction import Follower
from parley.text.tokens.repetition import Repeats
from parley.text.tokens.stop_strings import Scanner, Stops
from parley.text.tokens.tokenizer import Tokenizer
from parley.types import CallDelta, Cost, Delta, Done, Event, Output, Part, Reason, Request, Score, Scored, Token, Usage


class Choice:
    """The choice number ``index`` of a request, counted over all its prompts.

    ``stops``: the request's stop strings, compiled once for all choices. ``details``: make Token objects even if no
    log-probabilities were requested. No events follow once ``finished`` is set. If the engine has not finished the
    choice by then, a stop string did, and the caller must cancel it in the engine.
    """

    def __init__(
        self,
        request: Request,
        index: int,
        tokenizer: Tokenizer,
        prepared: Prepared,
        stops: Stops | None = None,
        details: bool = False,
    ):
        want = request.want
        self.index = index
        self.ended = False
        self.usage = Usage(prompt_tokens=len(prepared.token_ids))
        self.likelihood = 0.0  # sum of the log-probabilities of its tokens, as far as known
        self._tokenizer = tokenizer
        self._stop = request.stop
        self._details = details or want.costs or want.logprobs is not None
        self._alternatives = -1 if want.named else want.logprobs or 0
        self._named = bool(want.named)
        markup = PLAIN if want.plain else prepared.markup
        ids = markup.ids(f"{request.id} {index}")
        self._regions = reader(markup, prepared.thinking, prepared.tools, ids) if markup else None
        self._single = prepared.single
        self._called = False  # the single call allowed is complete: drop all further text
        keep = tokenizer.special_within(markup.marks) if markup else ()
        self._text = Detokenizer(tokenizer, prepared.token_ids, want.skip_special, keep)
        if stops is None and request.stop.strings:
            stops = Stops(request.stop.strings)
        self._scanner = Scanner(stops, request.stop.include) if stops is not None else None
        unread = self._regions is None and self._scanner is None and prepared.predicted is None
        self._repeats = Repeats(request.stop.repetition) if request.stop.repetition is not None else None
        self._follower = Follower(prepared.predicted) if prepared.predicted is not None else None
        self._interval = want.interval
        self._told = -want.interval  # number of tokens whose events were returned
        special = self._details or self._repeats is not None or request.best_of is not None or want.interval > 1
        self._plain = unread and not special
        self._tokens: list[Token] = []  # not attached to a delta yet
        self._deltas: list[Delta] = []  # not returned yet, or returned by the last call

    def push(self, output: Output) -> list[Event]:
        """Return the events of one output: deltas, then Done if it is the last one or completes a stop string."""
        if self.ended:
            return []
        usage = self.usage
        if output.cached_tokens > usage.cached_tokens:
            usage.cached_tokens = output.cached_tokens
        if self._plain and output.finish is None:  # the path of nearly every output
            text = "".join(map(self._text.one, output.token_ids))
            usage.completion_tokens += len(output.token_ids)
            return [Delta(self.index, text)] if text else []
        self._begin()
        silent = self._silent(output)
        for number, id in enumerate(output.token_ids):
            score = output.scores[number] if output.scores else None
            self._add(id, score, output.costs[number] if output.costs else None, number == silent)
            if self._scanner is not None and self._scanner.matched is not None:
                return self._end("stop", self._scanner.matched)
            if self._called:
                return self._end("stop", None)
            repeats = self._repeats is not None and self._repeats.push(id)
            if repeats and usage.completion_tokens >= self._stop.min_tokens:
                return self._end("repetition", None)
        if output.finish is None:
            if usage.completion_tokens - self._told < self._interval:
                return []
            self._told = usage.completion_tokens
            return list(self._deltas)
        stop = output.stop_id if output.stop_id in self._stop.ids else None
        return self._end(output.finish, stop)

    def close(self, reason: Reason) -> list[Event]:
        """Finish the choice early for ``reason`` and return the text held back; nothing if it has finished already."""
        if self.ended:
            return []
        self._begin()
        return self._end(reason, None)

    def _begin(self) -> None:
        """Start a new list of deltas if the current ones were returned."""
        if self._told == self.usage.completion_tokens:
            self._deltas = []

    def _silent(self, output: Output) -> int:
        """Return the position of the token that ended the choice and is not shown, or -1 if there is none."""
        shown = self._stop.include and output.stop_id in self._stop.ids
        return -1 if output.stop_id is None or shown else len(output.token_ids) - 1

    def _add(self, id: int, score: Score | None, cost: Cost | None, silent: bool) -> None:
        """Count one token and emit its text. ``hidden``: it ends the choice, and its text is not shown."""
        self.usage.completion_tokens += 1
        if self._follower is not None:
            self._follower.push(id)
        if score is not None:
            self.likelihood += score.logprob
        if self._details:
            self._tokens.append(token(self._tokenizer, id, score, self._alternatives, cost))
            if self._named and score is not None:
                _lead(self._tokens[-1])
        thinking = self._regions is not None and self._regions.thinking
        piece = "" if silent else self._text.one(id)
        if piece and self._scanner is not None:
            armed = self.usage.completion_tokens >= self._stop.min_tokens
            piece = self._scanner.push(piece, armed)
        self._say(piece)
        if thinking or (self._regions is not None and self._regions.thinking):
            self.usage.reasoning_tokens += 1

    def _say(self, text: str) -> None:
        if not text or self._called:
            return
        if self._regions is None:
            self._emit("content", text)
            return
        self._tell(self._regions.push(text), self._regions)

    def _tell(self, found: list[Region], regions: Regions | Channels) -> None:
        if self._single and regions.called:
            self._called = True
            belong = (number for number, (_, _, call) in enumerate(found) if call is not None and call.index == 0)
            found = found[: max(belong, default=-1) + 1]
        for part, piece, call in found:
            self._emit(part, piece, call)

    def _emit(self, part: Part, text: str, call: CallDelta | None = None) -> None:
        """Append to the last delta if it has the same part or call, else start a new one."""
        last = self._deltas[-1] if self._deltas else None
        if last is None or not _joins(last, part, call):
            last = Delta(self.index, text, part, call=call)
            self._deltas.append(last)
        else:
            last.text += text
            if call is not None and last.call is not None:
                last.call.arguments += call.arguments
        if self._tokens:
            last.tokens += self._tokens
            self._tokens = []

    def _end(self, reason: Reason, stop: str | int | None) -> list[Event]:
        self.ended = True
        if self._follower is not None:
            self.usage.accepted_tokens, self.usage.rejected_tokens = self._follower.accepted, self._follower.rejected
        if self._scanner is None:
            self._say(self._text.flush())
        elif self._scanner.matched is None:
            self._say(self._scanner.push(self._text.flush()))
            if self._scanner.matched is not None:
                reason, stop = "stop", self._scanner.matched
            self._say(self._scanner.flush())
        called = False
        if self._regions is not None:
            if not self._called:
                self._tell(self._regions.flush(), self._regions)
            called = self._regions.calls > 0
        if self._tokens:
            self._emit(self._deltas[-1].part if self._deltas else "content", "")
        if reason == "stop" and stop is None and called:
            reason = "tool"
        return [*self._deltas, Done(self.index, reason, self.usage, stop)]


def _joins(last: Delta, part: Part, call: CallDelta | None) -> bool:
    """Whether new output extends the last delta. The delta that announces a call stays on its own."""
    if last.part != part or call is None:
        return last.part == part
    return call.name is None and last.call is not None and last.call.name is None and last.call.index == call.index


def token(
    tokenizer: Tokenizer, id: int, score: Score | None = None, alternatives: int = 0, cost: Cost | None = None
) -> Token:
    """Return a token as a client sees it, with at most ``alternatives`` alternatives (-1: all known ones)."""
    made = _token(tokenizer, id)
    made.cost = cost
    if score is not None:
        made.logprob, made.rank = score.logprob, score.rank
        others = score.top_ids if alternatives < 0 else score.top_ids[:alternatives]
        made.top = [
            _token(tokenizer, other, logprob, place)
            for place, (other, logprob) in enumerate(zip(others, score.top, strict=False), start=1)
        ]
    return made


def _lead(token: Token) -> None:
    """Put the token itself before the tokens requested by id, whose ranks are unknown."""
    itself = Token(token.id, token.text, token.raw, token.logprob, token.rank, special=token.special)
    others = [other for other in token.top if other.id != token.id]
    for other in others:
        other.rank = None
    token.top = [itself, *others]


def _token(tokenizer: Tokenizer, id: int, logprob: float | None = None, rank: int | None = None) -> Token:
    raw = tokenizer.token_bytes(id)
    return Token(id, raw.decode("utf-8", "replace"), raw, logprob, rank, special=tokenizer.is_special(id))


def scored(
    tokenizer: Tokenizer,
    prompt: int,
    token_ids: Sequence[int],
    scores: Sequence[Score | None] | None = None,
    alternatives: int = 0,
) -> Scored:
    """Return prompt number ``prompt`` as tokens, for echo and prompt log-probabilities."""
    aligned = scores if scores is not None else [None] * len(token_ids)
    return Scored(
        prompt, [token(tokenizer, id, score, alternatives) for id, score in zip(token_ids, aligned, strict=True)]
    )
