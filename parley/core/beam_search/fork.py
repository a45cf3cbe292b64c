"""Fork the sequences of a beam search from one step to the next; forks share pages.

The first child of each parent continues in the parent's sequence. Other children take sequences of dropped beams,
which already have a slot, or sequences that do not run. The scheduler owns the pages and slots of a sequence, the model
runner the token state of its slot. This module only fixes the order of the calls to them.
"""

from __future__ import annotations

from parley.core.beam_search.beam import BeamExtension, BeamSearch, LiveBeam
from parley.core.scheduler import Scheduler
from parley.core.sequence import ModelRunner, Sequence, SequenceStatus


def fork_beams(search: BeamSearch, moves: list[BeamExtension], scheduler: Scheduler, runner: ModelRunner) -> None:
    """Replace the beams of the search by ``moves``. Raises any exception of the model runner."""
    parents = {move.parent.sequence for move in moves}
    spare_sequences = [member for member in search.beam_sequences if member not in parents]
    spare_sequences.sort(key=lambda member: member.status is not SequenceStatus.RUNNING)  # those with slots first
    forks: list[tuple[Sequence, Sequence]] = []
    continued: list[tuple[Sequence, int]] = []
    beams: list[LiveBeam] = []
    for move in moves:
        parent, candidate = move.parent.sequence, move.candidate
        if parent in parents:
            parents.remove(parent)
            sequence = parent
            continued.append((parent, candidate.token))  # appended after all other children have forked from it
        else:
            sequence = spare_sequences.pop(0)
            sequence.tokens = [*parent.tokens, candidate.token]
            sequence.last_token_at, sequence.compute_seconds = parent.last_token_at, parent.compute_seconds
        forks.append((sequence, parent))
        scores = move.parent.scores if candidate.score is None else [*move.parent.scores, candidate.score]
        beams.append(LiveBeam(sequence, move.total_logprob, scores))
    search.live_beams = beams
    for sequence, token in continued:
        sequence.tokens.append(token)
    running_forks = [fork for fork in forks if fork[0].status is SequenceStatus.RUNNING]
    for sequence, parent in running_forks:
        if sequence is not parent:
            scheduler.fork_sequence(sequence, parent)
    runner.fork_slots(running_forks)
    for member in spare_sequences:
        if member.status is SequenceStatus.RUNNING:
            scheduler.remove_sequence(member)
    for sequence, parent in forks:  # last, because spawning may take slots from others of this search
        if sequence.status is SequenceStatus.FINISHED:
            sequence.admission_number = search.root_sequence.admission_number + sequence.index
            scheduler.spawn_sequence(sequence, parent)
