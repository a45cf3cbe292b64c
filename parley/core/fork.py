"""From one step of a search to the next: its beams' sequences fork, and go on in pages that they share.

Every parent's first child goes on in the parent's sequence. The others take sequences whose beams are dropped, which
have a slot already, or such as do not run. What a sequence holds of pages and slots is the scheduler's affair, what
its slot knows of its tokens the runner's; in which order they are told matters, and is all that this file knows.
"""

from __future__ import annotations

from parley.core.beam import Beam, Move, Search
from parley.core.scheduler import Scheduler
from parley.core.sequence import Runner, Sequence, Status


def branch(search: Search, moves: list[Move], scheduler: Scheduler, runner: Runner) -> None:
    """Give the search the beams that ``moves`` say. Raises what the runner raises."""
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
            grown.append((parent, candidate.token))  # when nobody forks from it any more
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
    for sequence, parent in forks:  # last, for they may cost others of the search their slots
        if sequence.status is Status.FINISHED:
            sequence.turn = search.root.turn + sequence.index
            scheduler.spawn(sequence, parent)
