"""The positions of media items in a prompt, which has a placeholder token for each embedding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from parley.types import MediaItem, TokenPositions
from parley.types.media import lead_length

MAX_PLACEHOLDER_ID = 2**32 - 1  # may be outside of the vocabulary: the token itself is never read


def placement_fault(media: Sequence[MediaItem], prompt_length: int) -> str | None:
    """Return why items cannot be at these positions in a prompt of ``prompt_length`` tokens, or None if they can."""
    end, listed_end, lead = 0, 0, lead_length(media)
    lists_positions = any(item.positions is not None for item in media)
    for item in media:
        if not end <= item.start < item.end <= prompt_length:
            return f"The {item.kind} at token {item.start} overlaps another item, or is not within the prompt."
        if lead and not lead <= item.seen_from < prompt_length:
            return f"The mark of the {item.kind} at token {item.start} is not within the prompt's text."
        if not _are_runs_within(item):
            return f"The embeddings of the {item.kind} at token {item.start} overlap, or are not within it."
        if lists_positions and any(run.grid is not None for run in item.runs):
            return f"The {item.kind} at token {item.start} has a grid, but this prompt lists positions."
        if item.positions is not None:
            if not _are_positions_possible(item, item.positions, max(end, listed_end), prompt_length):
                return f"The positions of the {item.kind} at token {item.start} are not those of its tokens."
            listed_end = item.positions.end
        end = item.end
    return None


def are_known_tokens(token_ids: Sequence[int], media: Sequence[MediaItem], vocab_size: int) -> bool:
    """Whether all tokens that no embedding replaces are in the vocabulary. ``media`` must have no
    ``placement_fault``."""
    if not token_ids:
        return True
    if marks := {item.seen_from for item in media if item.seen_from >= 0}:  # they may lie beyond the vocabulary
        token_ids = [0 if position in marks else token_id for position, token_id in enumerate(token_ids)]
    if set(map(type, token_ids)) != {int} or not 0 <= min(token_ids) <= max(token_ids) <= MAX_PLACEHOLDER_ID:
        return False
    return max(token_ids) < vocab_size or all(
        max(text_tokens, default=0) < vocab_size for text_tokens in _tokens_between_runs(token_ids, media)
    )


def end_outside_items(media: Sequence[MediaItem], prompt_length: int, start: int, end: int) -> int:
    """Return the end of a chunk that starts at token ``start``. If ``end`` is within an item whose tokens attend to
    later ones of the same item, it is moved to the item's start, or to its end if the chunk starts at or within the
    item. A prompt whose tokens all attend to each other is a single chunk. So are the tokens that lead a prompt, with
    at least one of its text."""
    if start < (lead := lead_length(media)):
        return max(end, lead + 1)
    if start < prompt_length and any(item.prompt_sees_both_ways for item in media):
        return prompt_length
    for item in media:
        if item.sees_both_ways and item.start < end < item.end:
            return item.start if start < item.start else item.end
    return end


def _are_runs_within(item: MediaItem) -> bool:
    end = 0
    for run in item.runs:
        if not end <= run.offset < run.offset + run.count <= item.count:
            return False
        end = run.offset + run.count
    return end > 0


def _are_positions_possible(item: MediaItem, listed: TokenPositions, first: int, prompt_length: int) -> bool:
    """Whether positions cover an item, within the prompt from token ``first`` on, on all axes."""
    axes = (listed.times, listed.rows, listed.columns)
    return (
        first <= listed.start <= item.start
        and item.end <= listed.end <= prompt_length
        and all(len(axis) == len(listed.times) and min(axis, default=0) >= -1 for axis in axes)
        and listed.advance > 0
    )


def _tokens_between_runs(token_ids: Sequence[int], media: Sequence[MediaItem]) -> Iterator[Sequence[int]]:
    """Yield the tokens between the runs of embeddings."""
    end = 0
    for item in media:
        for run in item.runs:
            yield token_ids[end : item.start + run.offset]
            end = item.start + run.offset + run.count
    yield token_ids[end:]
