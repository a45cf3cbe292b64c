"""One choice of an answer: turns the engine's token outputs into the events that a dialect renders.

Each token is handled in one pass: count it, detokenize it, scan for stop strings, parse the parts of the answer. Stop
strings are therefore matched in everything the model writes, including reasoning and the arguments of tool calls. The
texts, tokens and usage do not depend on how the tokens are divided into outputs. This module knows neither sockets nor
the engine; its caller checks ``finished``.
"""

from __future__ import annotations

from collections.abc import Sequence

from parley.text.context_edits import asks_for_summary
from parley.text.media_prompt import count_media_tokens
from parley.text.parsing.harmony_parser import HarmonyParser, make_output_parser
from parley.text.parsing.markup import UNMARKED
from parley.text.parsing.output_parser import AnswerPart, OutputParser
from parley.text.prepared_prompt import PreparedPrompt
from parley.text.tokens.detokenizer import Detokenizer
from parley.text.tokens.prediction import PredictionFollower
from parley.text.tokens.repetition import RepetitionDetector
from parley.text.tokens.stop_strings import StopAutomaton, StopScanner
from parley.text.tokens.tokenizer import Tokenizer
from parley.types import (
    ChoiceDelta,
    ChoiceDone,
    DeltaPart,
    EngineOutput,
    Event,
    FinishReason,
    PromptScored,
    Request,
    TokenCost,
    TokenInfo,
    TokenScore,
    ToolCallDelta,
    Usage,
)


class AnswerChoice:
    """The choice number ``index`` of a request, counted over all its prompts.

    * ``stops``: the request's stop strings, compiled once for all choices.
    * ``details``: deltas have their tokens (``TokenInfo``) even if no log-probabilities were requested.
    * ``finished``: no more events follow. If the engine has not finished the choice by then, a stop string or a
      repetition did, and the caller must cancel it in the engine.
    """

    def __init__(
        self,
        request: Request,
        index: int,
        tokenizer: Tokenizer,
        prepared: PreparedPrompt,
        stops: StopAutomaton | None = None,
        details: bool = False,
    ):
        options = request.output_options
        self.index = index
        self.finished = False
        self.usage = Usage(prompt_tokens=len(prepared.token_ids), media_tokens=count_media_tokens(prepared.media))
        self.logprob_sum = 0.0  # sum of the log-probabilities of its tokens, as far as known
        self._tokenizer = tokenizer
        self._stop_conditions = request.stop_conditions
        self._details = details or options.token_costs or options.logprobs is not None
        self._alternatives = -1 if options.logprob_ids else options.logprobs or 0
        self._lists_requested = bool(options.logprob_ids)
        markup = UNMARKED if options.unparsed else prepared.markup
        ids = markup.call_id_source(f"{request.id} {index}")
        self._parser = make_output_parser(markup, prepared.starts_in_reasoning, prepared.tools, ids) if markup else None
        self._single_call = prepared.single_call
        self._call_complete = False  # the single call allowed is complete: drop all further text
        keep = tokenizer.special_ids_in(markup.all_marks) if markup else ()
        self._detokenizer = Detokenizer(tokenizer, prepared.token_ids, options.skip_special, keep)
        if asks_for_summary(prepared.applied_edits):
            stops = None  # stop strings are for the answer, and would cut off a summary that stands for all before it
        elif stops is None and request.stop_conditions.strings:
            stops = StopAutomaton(request.stop_conditions.strings)
        self._scanner = StopScanner(stops, request.stop_conditions.include_in_output) if stops is not None else None
        self._repeats = (
            RepetitionDetector(request.stop_conditions.repetition)
            if request.stop_conditions.repetition is not None
            else None
        )
        self._follower = PredictionFollower(prepared.predicted) if prepared.predicted is not None else None
        self._interval = options.stream_interval
        self._tokens_at_once = options.tokens_at_once
        self._reported_tokens = -options.stream_interval  # number of tokens whose events were returned
        special = (
            self._details or self._repeats is not None or request.best_of is not None or options.stream_interval > 1
        )
        self._is_plain = self._scanner is None and prepared.predicted is None and not special
        self._token_ids: list[int] | None = [] if options.whole_ids else None
        self._undecided_tokens = 0  # tokens of reasoning that may turn out to be a mark
        self._pending_tokens: list[TokenInfo] = []  # not attached to a delta yet
        self._deltas: list[ChoiceDelta] = []  # not returned yet, or returned by the last call

    def push_output(self, output: EngineOutput) -> list[Event]:
        """Return the events of one output: deltas, then ChoiceDone if the output ends the choice here or in the
        engine."""
        if self.finished:
            return []
        usage = self.usage
        if output.cached_tokens > usage.cached_tokens:
            usage.cached_tokens = output.cached_tokens
        pieces: list[str] | None = None
        if self._is_plain and output.finish_reason is None:
            pieces = [self._detokenizer.decode_token(token_id) for token_id in output.token_ids]
            text = pieces[0] if len(pieces) == 1 else "".join(pieces)
            part = "content" if self._parser is None else self._parser.plain_part(text)
            if part is not None:  # the path of nearly every output
                usage.completion_tokens += len(pieces)
                if part == "reasoning":
                    usage.reasoning_tokens += len(pieces)
                self._reported_tokens = usage.completion_tokens
                if self._token_ids is not None:
                    self._token_ids += output.token_ids
                return [ChoiceDelta(self.index, text, part)] if text else []
        self._drop_returned_deltas()
        hidden_position = self._find_hidden_token(output)
        for number, token_id in enumerate(output.token_ids):
            score = output.scores[number] if output.scores else None
            if pieces is not None:
                piece = pieces[number]
            else:
                piece = "" if number == hidden_position else self._detokenizer.decode_token(token_id)
            self._add_token(token_id, piece, score, output.token_costs[number] if output.token_costs else None)
            if self._scanner is not None and self._scanner.matched is not None:
                return self._finish_choice("stop", self._scanner.matched)
            if self._call_complete:
                return self._finish_choice("stop", None)
            repeats = self._repeats is not None and self._repeats.add_token_id(token_id)
            if repeats and usage.completion_tokens >= self._stop_conditions.min_tokens:
                return self._finish_choice("repetition", None)
        if output.finish_reason is None:
            if usage.completion_tokens - self._reported_tokens < self._interval:
                return []
            self._reported_tokens = usage.completion_tokens
            if self._tokens_at_once:
                self._emit_pending_tokens()
            return list(self._deltas)
        stop = output.stop_id if output.stop_id in self._stop_conditions.ids else None
        return self._finish_choice(output.finish_reason, stop)

    def finish_early(self, reason: FinishReason) -> list[Event]:
        """Finish the choice early for ``reason`` and return the text held back; nothing if it has finished already."""
        if self.finished:
            return []
        self._drop_returned_deltas()
        return self._finish_choice(reason, None)

    def _drop_returned_deltas(self) -> None:
        """Start a new list of deltas if the current ones were returned."""
        if self._reported_tokens == self.usage.completion_tokens:
            self._deltas = []

    def _find_hidden_token(self, output: EngineOutput) -> int:
        """Return the position of the token that ended the choice and is not shown, or -1 if there is none."""
        is_shown = self._stop_conditions.include_in_output and output.stop_id in self._stop_conditions.ids
        return -1 if output.stop_id is None or is_shown else len(output.token_ids) - 1

    def _add_token(self, token_id: int, piece: str, score: TokenScore | None, cost: TokenCost | None) -> None:
        """Count one token and emit ``piece``, the text that it adds; "" if it ends the choice and is not shown."""
        self.usage.completion_tokens += 1
        if self._token_ids is not None:
            self._token_ids.append(token_id)
        if self._follower is not None:
            self._follower.follow_token(token_id)
        if score is not None:
            self.logprob_sum += score.logprob
        if self._details:
            self._pending_tokens.append(describe_token(self._tokenizer, token_id, score, self._alternatives, cost))
            if self._lists_requested and score is not None:
                _put_itself_first(self._pending_tokens[-1])
        reasoning_part = self._reasoning_part
        if piece and self._scanner is not None:
            may_stop = self.usage.completion_tokens >= self._stop_conditions.min_tokens
            piece = self._scanner.scan_piece(piece, may_stop)
        self._add_text(piece)
        self._count_reasoning_token(reasoning_part)

    @property
    def _reasoning_part(self) -> int | None:
        """The number of the part being read if it is reasoning, else None."""
        parser = self._parser
        return parser.part_count if parser is not None and parser.in_reasoning else None

    def _count_reasoning_token(self, part_before: int | None) -> None:
        """Count a token if it belongs to reasoning; ``part_before``: the part of reasoning that was read before it.

        Tokens of marks do not count, so those of a text that may become a mark wait until that is clear.
        """
        if part_before is None or part_before != self._reasoning_part:
            self._undecided_tokens = 0
            return
        self._undecided_tokens += 1
        if self._parser is not None and not self._parser.unread_length:
            self.usage.reasoning_tokens += self._undecided_tokens
            self._undecided_tokens = 0

    def _add_text(self, text: str) -> None:
        if not text or self._call_complete:
            return
        if self._parser is None:
            self._emit_delta("content", text)
            return
        self._emit_parts(self._parser.parse_piece(text), self._parser)

    def _emit_parts(self, parts: list[AnswerPart], parser: OutputParser | HarmonyParser) -> None:
        if self._single_call and parser.has_complete_call:
            self._call_complete = True
            first_call_places = (
                number for number, (_, _, call) in enumerate(parts) if call is not None and call.index == 0
            )
            parts = parts[: max(first_call_places, default=-1) + 1]
        for part, piece, call in parts:
            self._emit_delta(part, piece, call)

    def _emit_delta(self, part: DeltaPart, text: str, call: ToolCallDelta | None = None) -> None:
        """Append to the last delta if it has the same part or call, else start a new one."""
        last = self._deltas[-1] if self._deltas else None
        if last is None or not _extends_delta(last, part, call):
            last = ChoiceDelta(self.index, text, part, tool_call=call)
            self._deltas.append(last)
        else:
            last.text += text
            if call is not None and last.tool_call is not None:
                last.tool_call.arguments += call.arguments
        if self._pending_tokens:
            last.tokens += self._pending_tokens
            self._pending_tokens = []

    def _emit_pending_tokens(self) -> None:
        """Attach the tokens whose text is not complete to the last delta, or to one without text."""
        if self._pending_tokens:
            self._emit_delta(self._deltas[-1].output_part if self._deltas else "content", "")

    def _finish_choice(self, reason: FinishReason, stop: str | int | None) -> list[Event]:
        self.finished = True
        if self._follower is not None:
            self.usage.accepted_tokens = self._follower.accepted_count
            self.usage.rejected_tokens = self._follower.rejected_count
        if self._scanner is None:
            self._add_text(self._detokenizer.flush_text())
        elif self._scanner.matched is None:
            self._add_text(self._scanner.scan_piece(self._detokenizer.flush_text()))
            if self._scanner.matched is not None:
                reason, stop = "stop", self._scanner.matched
            self._add_text(self._scanner.release_held())
        self.usage.reasoning_tokens += self._undecided_tokens
        has_calls = False
        if self._parser is not None:
            if not self._call_complete:
                self._emit_parts(self._parser.finish_parsing(), self._parser)
            has_calls = self._parser.call_count > 0
        self._emit_pending_tokens()
        if reason == "stop" and stop is None and has_calls:
            reason = "tool"
        return [*self._deltas, ChoiceDone(self.index, reason, self.usage, stop, self._token_ids or [])]


def _extends_delta(last: ChoiceDelta, part: DeltaPart, call: ToolCallDelta | None) -> bool:
    """Whether new output extends the last delta. The delta that announces a call stays on its own."""
    if last.output_part != part or call is None:
        return last.output_part == part
    return (
        call.name is None
        and last.tool_call is not None
        and last.tool_call.name is None
        and last.tool_call.index == call.index
    )


def describe_token(
    tokenizer: Tokenizer,
    token_id: int,
    score: TokenScore | None = None,
    alternatives: int = 0,
    cost: TokenCost | None = None,
) -> TokenInfo:
    """Return a token as a client sees it, with at most ``alternatives`` alternatives (-1: all known ones)."""
    described = _bare_token(tokenizer, token_id)
    described.cost = cost
    if score is not None:
        described.logprob, described.rank = score.logprob, score.rank
        top_ids = score.top_ids if alternatives < 0 else score.top_ids[:alternatives]
        described.top_tokens = [
            _bare_token(tokenizer, other, logprob, rank)
            for rank, (other, logprob) in enumerate(zip(top_ids, score.top_logprobs, strict=False), start=1)
        ]
    return described


def _put_itself_first(token: TokenInfo) -> None:
    """Put the token itself before the tokens requested by id, whose ranks are unknown."""
    itself = TokenInfo(token.id, token.text, token.raw_bytes, token.logprob, token.rank, is_special=token.is_special)
    others = [other for other in token.top_tokens if other.id != token.id]
    for other in others:
        other.rank = None
    token.top_tokens = [itself, *others]


def _bare_token(
    tokenizer: Tokenizer, token_id: int, logprob: float | None = None, rank: int | None = None
) -> TokenInfo:
    raw = tokenizer.token_bytes(token_id)
    return TokenInfo(
        token_id, raw.decode("utf-8", "replace"), raw, logprob, rank, is_special=tokenizer.is_special_token(token_id)
    )


def describe_prompt_tokens(
    tokenizer: Tokenizer,
    prompt: int,
    token_ids: Sequence[int],
    scores: Sequence[TokenScore | None] | None = None,
    alternatives: int = 0,
) -> PromptScored:
    """Return prompt number ``prompt`` as tokens, for echo and prompt log-probabilities."""
    aligned = scores if scores is not None else [None] * len(token_ids)
    return PromptScored(
        prompt,
        [
            describe_token(tokenizer, token_id, score, alternatives)
            for token_id, score in zip(token_ids, aligned, strict=True)
        ],
    )
