"""One prompt of a request: its outputs in, the events of all its choices out.

Knows the request's options and one stream of outputs; nothing of the reader, of other prompts, or of the request's end.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from parley.engine.output_stream import StreamGroup
from parley.errors import EngineDied, EngineError, InvalidValue, ParleyError
from parley.serving.best_of import BestOfRanking
from parley.serving.embedding_choice import EmbeddingChoice
from parley.serving.request_deadline import RequestDeadline
from parley.serving.request_metrics import RequestMetrics
from parley.serving.served_model import ServedModel
from parley.text.answer_choice import AnswerChoice, describe_prompt_tokens
from parley.text.grammar.limits import GRAMMAR_TOO_COMPLEX
from parley.text.prepared_prompt import PreparedPrompt
from parley.text.summary_choice import SummaryChoice
from parley.text.tokens.stop_strings import StopAutomaton
from parley.types import (
    ChoiceDone,
    EngineOutput,
    EngineRequest,
    Event,
    FinishReason,
    PromptAccepted,
    PromptScored,
    Request,
    TextPrompt,
    TokenScore,
)


class PromptStream:
    """Prompt ``prompt_number`` of the request, submitted as ``engine_request``, whose stream ``stream_group`` reads.

    ``on_choice_done`` is called with the last event of each delivered choice; ``deadline`` is notified of every output.
    If scores of the prompt were requested, outputs are held until the scores arrive, because their event comes first.
    """

    def __init__(
        self,
        *,
        prompt_number: int,
        request: Request,
        prepared: PreparedPrompt,
        engine_request: EngineRequest,
        stream_group: StreamGroup,
        model: ServedModel,
        stops: StopAutomaton | None,
        request_metrics: RequestMetrics,
        deadline: RequestDeadline | None,
        on_choice_done: Callable[[PromptStream, ChoiceDone], None],
    ):
        self.prompt_number = prompt_number
        self._request = request
        self._prepared = prepared
        self._engine = model.engine
        self._tokenizer = model.text_pipeline.tokenizer
        self._request_metrics = request_metrics
        self._deadline = deadline
        self._on_choice_done = on_choice_done
        self._first_choice = prompt_number * request.choices_per_prompt  # counted over all prompts
        first_index = prompt_number * request.n
        details = request.output_options.ids
        text_choices = [
            SummaryChoice(request, self._tokenizer, prepared)
            if prepared.answer is not None
            else AnswerChoice(request, first_index + k, self._tokenizer, prepared, stops, details)
            for k in range(request.choices_per_prompt)
        ]
        self.choices: list[AnswerChoice] | list[EmbeddingChoice] = text_choices
        if request.pooling is not None:
            self.choices = [EmbeddingChoice(prompt_number, len(engine_request.token_ids), request.pooling.task)]
        self._best_of = BestOfRanking(text_choices, first_index, request.n) if request.best_of is not None else None
        # Prompt scores come before all other outputs.
        self._awaits_scores = request.output_options.prompt_logprobs is not None
        self._held_outputs: list[EngineOutput] = []
        self.uncounted_tokens = len(engine_request.token_ids)  # the prompt's tokens; 0 once its prefix hit was counted
        self.stream = self._engine.submit_request(engine_request, stream_group)

    def accepted_events(self, engine_request: EngineRequest) -> list[Event]:
        """Return the events that are delivered before any output."""
        output_options = self._request.output_options
        text = self._tokenizer.decode(engine_request.token_ids, False) if output_options.prompt_text else None
        token_ids, seed = engine_request.token_ids, engine_request.seed
        events: list[Event] = [PromptAccepted(self.prompt_number, token_ids, seed, text, self._prepared.applied_edits)]
        if output_options.echo and not self._awaits_scores:
            events.append(self._scores_event(None))
        return events

    @property
    def delivered_choices(self) -> list[AnswerChoice] | list[EmbeddingChoice]:
        """The choices that are delivered: with ``best_of`` the best ones, once they are known."""
        return self._best_of.best_choices if self._best_of else self.choices

    def count_prefix_hit(self, outputs: list[EngineOutput]) -> None:
        """Record how much of the prompt was a prefix hit, which the first outputs say."""
        if outputs[0].finish_reason != "error":
            first = outputs[0]
            self._request_metrics.record_prefill(first.cached_tokens, self.uncounted_tokens, first.prefill_chunks)
            self.uncounted_tokens = 0

    def render_outputs(self, outputs: list[EngineOutput]) -> list[Event]:
        """Turn outputs into events. Raises EngineError if an output reports one."""
        events: list[Event] = []
        if self._awaits_scores:
            outputs = self._held_outputs + outputs
            scores = next((output.prompt_scores for output in outputs if output.prompt_scores is not None), None)
            first_choice_ended = any(
                output.finish_reason == "error" or (output.finish_reason and not output.index) for output in outputs
            )
            if scores is None and not first_choice_ended:
                self._held_outputs = outputs
                return events
            self._awaits_scores, self._held_outputs = False, []
            if scores is not None:
                events.append(self._scores_event(scores))
        now = time.perf_counter()
        if self._deadline is not None:
            self._deadline.note_output()
        for output in outputs:
            if output.finish_reason == "error":
                raise self._output_error(output)
            if output.token_ids or output.vector is not None:
                self._request_metrics.record_tokens(
                    self._first_choice + output.index, len(output.token_ids), now, output.queue_seconds
                )
            if output.preemptions:
                self._request_metrics.record_preemptions(self._first_choice + output.index, output.preemptions)
            choice_events = self.choices[output.index].push_output(output)
            has_ended = choice_events and isinstance(choice_events[-1], ChoiceDone)
            if has_ended and output.finish_reason is None:
                self.stream.cancel_choice(output.index)  # a stop string matched, which the engine cannot see
            if has_ended or self._best_of is not None:
                choice_events = self._deliver_events(output.index, choice_events)
            events += choice_events
        return events

    def finish_choices(self, reason: FinishReason) -> list[Event]:
        """Finish all choices with the output so far. Those of a beam search arrive with the engine's next step."""
        if self._request.beam is not None:
            self.stream.finish_beam_search("cancel" if reason == "cancel" else "length")
            return []
        self.stream.cancel_choice()
        events: list[Event] = []
        for index, choice in enumerate(self.choices):
            assert isinstance(choice, AnswerChoice)
            events += self._deliver_events(index, choice.finish_early(reason))
        return events

    def close_stream(self) -> None:
        """Cancel choices that still run, and report nothing more: no cycle is left to the garbage collector."""
        self.stream.cancel_choice()
        self._on_choice_done = _ignore_finish

    def _deliver_events(self, index: int, choice_events: list[Event]) -> list[Event]:
        """Return the events to deliver for new events of a choice, and report choices that finish."""
        delivered = choice_events if self._best_of is None else self._best_of.rank_events(index, choice_events)
        for event in delivered:
            if isinstance(event, ChoiceDone):
                self._on_choice_done(self, event)
        return delivered

    def _scores_event(self, scores: list[TokenScore | None] | None) -> PromptScored:
        """Return the event with the prompt's tokens, their scores if requested, and its text."""
        output_options, token_ids = self._request.output_options, self._prepared.token_ids
        event = describe_prompt_tokens(
            self._tokenizer, self.prompt_number, token_ids, scores, output_options.prompt_logprobs or 0
        )
        if output_options.echo:
            prompt = self._request.prompts[self.prompt_number]
            event.text = (
                prompt.text
                if isinstance(prompt, TextPrompt)
                else self._tokenizer.decode(token_ids, output_options.skip_special)
            )
        return event

    def _output_error(self, output: EngineOutput) -> ParleyError:
        """Return the error that an output reports: InvalidValue if the client's grammar is at fault, EngineDied if the
        engine is gone.
        """
        message = output.error or "The engine failed this request."
        if message == GRAMMAR_TOO_COMPLEX:
            grammar = self._request.grammar
            return InvalidValue(message, field="tools" if grammar is None else grammar.field)
        return EngineError(message) if self._engine.state == "ready" else EngineDied(message)


def _ignore_finish(prompt_stream: PromptStream, done: ChoiceDone) -> None:
    """Do nothing: replaces ``on_choice_done`` once the request is closed."""
