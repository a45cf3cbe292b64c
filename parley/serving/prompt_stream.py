"""One prompt of a request: its outputs in, the events of all its choices out.

Knows the request's options and one stream of outputs; nothing of the reader, of other prompts, or of the request's end.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from parley.errors import EngineDied, EngineError, ParleyError
from parley.serving.best_of import Ranking
from parley.serving.deadline import Clock
from parley.serving.embedding import Pooled
from parley.serving.request_metrics import Tally
from parley.serving.served_model import Model
from parley.text import Choice, Prepared, Stops, scored
from parley.types import Accepted, Done, Event, Output, Reason, Request, Score, Scored, Text, Work


class Branch:
    """Prompt ``prompt_number`` of the request, submitted as ``engine_request``.

    ``on_choice_done`` is called with the last event of each delivered choice; ``deadline`` hears of every output. If
    scores of the prompt were requested, outputs are held until the scores arrive, because their event comes first.
    """

    def __init__(
        self,
        number: int,
        request: Request,
        prepared: Prepared,
        work: Work,
        model: Model,
        stops: Stops | None,
        tally: Tally,
        clock: Clock | None,
        finished: Callable[[Branch, Done], None],
    ):
        self.number = number
        self._request = request
        self._prepared = prepared
        self._engine = model.engine
        self._tokenizer = model.language.tokenizer
        self._tally = tally
        self._clock = clock
        self._finished = finished
        first = number * request.n
        drafted = [
            Choice(request, first + k, self._tokenizer, prepared, stops, details=request.want.ids)
            for k in range(request.made)
        ]
        self.choices: list[Choice] | list[Pooled] = drafted
        if request.pooling is not None:
            self.choices = [Pooled(number, len(work.token_ids))]
        self._ranking = Ranking(drafted, first, request.n) if request.best_of is not None else None
        self._due = request.want.prompt_logprobs is not None  # waiting for prompt scores, which come first
        self._held: list[Output] = []
        self._length = len(work.token_ids)  # of the prompt; 0 once its prefix hits have been counted
        self.stream = self._engine.submit(work)

    def accepted(self, work: Work) -> list[Event]:
        """Return the events that are delivered before any output."""
        want = self._request.want
        text = self._tokenizer.decode(work.token_ids, False) if want.text else None
        events: list[Event] = [Accepted(self.number, work.token_ids, work.seed, text)]
        if want.echo and not self._due:
            events.append(self._scored(None))
        return events

    @property
    def given(self) -> list[Choice] | list[Pooled]:
        """The choices that are delivered: with ``best_of`` the best ones, once they are known."""
        return self._ranking.best if self._ranking else self.choices

    def count(self, outputs: list[Output]) -> None:
        """Record how much of the prompt was a prefix hit, which the first outputs say."""
        if self._length and outputs and outputs[0].finish != "error":
            self._tally.found(outputs[0].cached_tokens, self._length)
            self._length = 0

    def render(self, outputs: list[Output]) -> list[Event]:
        """Turn outputs into events. Raises EngineError if an output reports one."""
        events: list[Event] = []
        if self._due:
            outputs = self._held + outputs
            scores = next((output.prompt_scores for output in outputs if output.prompt_scores is not None), None)
            ended = any(output.finish == "error" or (output.finish and not output.index) for output in outputs)
            if scores is None and not ended:
                self._held = outputs
                return events
            self._due, self._held = False, []
            if scores is not None:
                events.append(self._scored(scores))
        now = time.perf_counter()
        if self._clock is not None:
            self._clock.seen()
        first = self.number * self._request.made
        for output in outputs:
            if output.finish == "error":
                raise self._failure(output)
            if output.token_ids or output.vector is not None:
                self._tally.tokens(first + output.index, len(output.token_ids), now, output.waited)
            if output.preemptions:
                self._tally.preempt(first + output.index, output.preemptions)
            made = self.choices[output.index].push(output)
            if made and isinstance(made[-1], Done) and output.finish is None:
                self.stream.cancel(output.index)  # a stop string matched, which the engine cannot see
            events += self._give(output.index, made)
        return events

    def stop(self, reason: Reason) -> list[Event]:
        """Finish all choices with the output so far. Those of a beam search arrive with the engine's next step."""
        if self._request.beam is not None:
            self.stream.conclude("cancel" if reason == "cancel" else "length")
            return []
        self.stream.cancel()
        events: list[Event] = []
        for index, choice in enumerate(self.choices):
            assert isinstance(choice, Choice)
            events += self._give(index, choice.close(reason))
        return events

    def _give(self, index: int, made: list[Event]) -> list[Event]:
        """Return the events to deliver for new events of a choice, and report choices that finish."""
        given = made if self._ranking is None else self._ranking.add(index, made)
        for event in given:
            if isinstance(event, Done):
                self._finished(self, event)
        return given

    def _scored(self, scores: list[Score | None] | None) -> Scored:
        """Return the event with the prompt's tokens, their scores if requested, and its text."""
        want, ids = self._request.want, self._prepared.token_ids
        event = scored(self._tokenizer, self.number, ids, scores, want.prompt_logprobs or 0)
        if want.echo:
            prompt = self._request.prompts[self.number]
            event.text = prompt.text if isinstance(prompt, Text) else self._tokenizer.decode(ids, want.skip_special)
        return event

    def _failure(self, output: Output) -> ParleyError:
        """Return the error that an output reports; EngineDied if the engine is gone."""
        message = output.error or "The engine failed this request."
        return EngineError(message) if self._engine.state == "ready" else EngineDied(message)
