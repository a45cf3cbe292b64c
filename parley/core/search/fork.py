"""Fork the sequences of a beam search from one step to the next; forks share pages.

The first child of each parent continues in the parent's sequence. Other children take sequences of dropped beams,
which already have a slot, or sequences that do not run. The scheduler owns the pages and slots of a sequence, the model
runner the token state of its slot. This module only fixes the order of the calls to them.
"""

from __future__ import annotations

from parley.core.scheduler import Scheduler
from parley.core.search.beam import Beam, Move, Search
from parley.core.sequence import Runner, Sequence, Status


def branch(search: Search, moves: list[Move], scheduler: Scheduler, runner: Runner) -> None:
    """Replace the beams of the search by ``moves``. Raises any exception of the model runner."""
    parents = {move.parent.sequence for move in moves}
    spare = [member for member in search.members if member not in parents]
    spare.sort(key=lambda member: member.status is not Status.RUNNING)  # those with slots first
    forks: list[tuple[Sequence, Sequence]] = []
    grown: list[tuple[Sequence, int]] = []
    beams: list[Beam] = []
    for move in moves:
        parent, candidate = move.parent.sequence, move.candidate
        if parent in parents:
            parents.remove(parent)
            sequence = parent
            grown.append((parent, candidate.token))  # appended after all other children have forked from it
        else:
            sequence = spare.pop(0)
            sequence.tokens = [*parent.tokens, candidate.token]
            sequence.since, sequence.computing = parent.since, parent.computing
        forks.append((sequence, parent))
        scores = move.parent.scores if candidate.score is None else [*move.parent.scores, candidate.score]
        beams.append(Beam(sequence, move.total, scores))
    search.beams = beams
    for sequence, token in grown:
        sequence.tokens.append(token)
    placed = [fork for fork in forks if fork[0].status is Status.RUNNING]
    for sequence, parent in placed:
        if sequence is not parent:
            scheduler.fork(sequence, parent)
    runner.follow(placed)
    for member in spare:
        if member.status is Status.RUNNING:
            scheduler.remove(member)
    for sequence, parent in forks:  # last, because spawning may take slots from others of this search
        if sequence.status is Status.FINISHED:
            sequence.turn = search.root.turn + sequence.index
            scheduler.spawn(sequence, parent)
