"""The unfinished choices of all requests: ends them, and collects the outputs that are emitted after the step."""

from __future__ import annotations

from collections.abc import Iterable

from parley.core.admission import Admission
from parley.core.beam_search.beam_searches import BeamSearches
from parley.core.encoder_scheduler import EncoderScheduler
from parley.core.scheduler import Scheduler
from parley.core.sequence import Sequence
from parley.core.shared_pages.pinned import PinnedPages
from parley.core.speculative.speculation import Speculation
from parley.types import EngineFinishReason, EngineOutput, EngineRequest


class OpenChoices:
    """Choices from the start of their request to their last output, except those of beam searches (``BeamSearches``).

    ``has_changes``: something has changed since the loop last emitted outputs and statistics.
    """

    def __init__(
        self,
        scheduler: Scheduler | EncoderScheduler,
        admission: Admission,
        pinned_pages: PinnedPages,
        beam_searches: BeamSearches,
    ):
        self._scheduler, self._admission, self._pinned_pages = scheduler, admission, pinned_pages
        self._beam_searches = beam_searches
        self._choices: dict[str, dict[int, Sequence]] = {}  # by request and index
        self._outputs: list[EngineOutput] = []
        self.has_changes = False

    def __len__(self) -> int:
        """Return the number of requests with unfinished choices."""
        return len(self._choices)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._choices

    @property
    def _speculation(self) -> Speculation | None:
        return self._scheduler.speculation if isinstance(self._scheduler, Scheduler) else None

    def add_request(self, request: EngineRequest, sequences: Iterable[Sequence]) -> None:
        """Add the choices of a request that starts."""
        self._choices[request.id] = dict(enumerate(sequences))
        if request.prediction and self._speculation is not None:
            self._speculation.add_prediction(request.id)

    def add_output(self, output: EngineOutput) -> None:
        """Emit an output after the step."""
        self._outputs.append(output)

    def add_outputs(self, outputs: Iterable[EngineOutput]) -> None:
        """Emit outputs after the step."""
        self._outputs += outputs

    def take_outputs(self) -> list[EngineOutput]:
        """Return the outputs collected in this step, and clear the list."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def cancel_request(self, request_id: str, index: int = -1) -> None:
        """Close the choice ``index`` of a request, or (-1) all, and drop its outputs. Unknown ids are ignored."""
        for sequence in list(self._choices.get(request_id, {}).values()):
            if index < 0 or sequence.index == index:
                self.close_sequence(sequence)
                self.has_changes = True
        # Between steps, only outputs of rejected choices are in this list.
        self._outputs = [
            output for output in self._outputs if output.id != request_id or (index >= 0 and output.index != index)
        ]

    def finish_waiting(self, request_id: str, choices: set[int], reason: EngineFinishReason) -> None:
        """Report the end of choices that have not started, for ``reason``."""
        self.add_outputs(EngineOutput(request_id, index, finish_reason=reason) for index in sorted(choices))

    def reject_request(self, request: EngineRequest, choices: set[int], error: str) -> None:
        """End the wanted choices of a request with an error before it starts."""
        self._outputs += [
            EngineOutput(request.id, index, finish_reason="error", error=error) for index in sorted(choices)
        ]
        self.has_changes = True

    def fail_sequence(self, sequence: Sequence, reason: str) -> None:
        """End a choice, or the whole beam search that it belongs to, with an error."""
        if sequence.request_id in self._beam_searches:
            self._beam_searches.fail_search(sequence.request_id, reason)
        else:
            self.finish_sequence(
                sequence, EngineOutput(sequence.request_id, sequence.index, finish_reason="error", error=reason)
            )

    def finish_sequence(self, sequence: Sequence, output: EngineOutput) -> None:
        """Close a choice; ``output`` is its last one."""
        self._outputs.append(output)
        self.close_sequence(sequence)

    def close_sequence(self, sequence: Sequence) -> None:
        """Remove a choice from the scheduler, pinned pages and open requests."""
        self._pinned_pages.mark_first_result(sequence)
        self._scheduler.remove_sequence(sequence)
        if self._speculation is not None:
            self._speculation.forget_sequence(sequence)
        choices = self._choices[sequence.request_id]
        del choices[sequence.index]
        if not choices:
            del self._choices[sequence.request_id]
            self._admission.finish_request(sequence.request_id)
            if self._speculation is not None:
                self._speculation.remove_prediction(sequence.request_id)
