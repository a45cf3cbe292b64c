"""One prompt of a request in the engine's hands: its outputs in, events out, of all choices that are made for it.

Knows a request's wishes and one stream of outputs; nothing of who waits for them, of other prompts, or of the end.
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
    """Prompt ``number`` of the request, as ``work``. ``finished`` is called with the last event of each choice that is
    given, ``clock`` told of all that comes.

    Where the prompt's scores are wanted, outputs are held until these are there, for they come first.
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
        self._due = request.want.prompt_logprobs is not None  # scores that come before all else
        self._held: list[Output] = []
        self._length = len(work.token_ids)  # of the prompt, until it has been counted how much of it was found
        self.stream = self._engine.submit(work)

    def accepted(self, work: Work) -> list[Event]:
        """What is given at once."""
        want = self._request.want
        text = self._tokenizer.decode(work.token_ids, False) if want.text else None
        events: list[Event] = [Accepted(self.number, work.token_ids, work.seed, text)]
        if want.echo and not self._due:
            events.append(self._scored(None))
        return events

    @property
    def given(self) -> list[Choice] | list[Pooled]:
        """The choices that are given: where several are ranked, the best, once they are known."""
        return self._ranking.best if self._ranking else self.choices

    def count(self, outputs: list[Output]) -> None:
        """Count how much of the prompt was in the prefix cache, which the first outputs tell."""
        if self._length and outputs and outputs[0].finish != "error":
            self._tally.found(outputs[0].cached_tokens, self._length)
            self._length = 0

    def render(self, outputs: list[Output]) -> list[Event]:
        """What the outputs make. Raises EngineError, where they say so."""
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
                self.stream.cancel(output.index)  # a stop string was found, of which the engine knows nothing
            events += self._give(output.index, made)
        return events

    def stop(self, reason: Reason) -> list[Event]:
        """End all choices here: what is left of them. Those of a search come with the engine's next step."""
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
        """What is given of the events of a choice, now that they are there."""
        given = made if self._ranking is None else self._ranking.add(index, made)
        for event in given:
            if isinstance(event, Done):
                self._finished(self, event)
        return given

    def _scored(self, scores: list[Score | None] | None) -> Scored:
        want, ids = self._request.want, self._prepared.token_ids
        event = scored(self._tokenizer, self.number, ids, scores, want.prompt_logprobs or 0)
        if want.echo:
            prompt = self._request.prompts[self.number]
            event.text = prompt.text if isinstance(prompt, Text) else self._tokenizer.decode(ids, want.skip_special)
        return event

    def _failure(self, output: Output) -> ParleyError:
        message = output.error or "The engine failed this request."
        return EngineError(message) if self._engine.state == "ready" else EngineDied(message)
