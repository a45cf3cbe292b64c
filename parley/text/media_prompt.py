"""Images, videos and audio in the text of a prompt: their positions, before and after their replacement.

A chat template writes one mark for each item of a turn's content, such as ``<|image_pad|>``. The processor's
replacement, with one placeholder token for each embedding, replaces the mark, and then the whole text is tokenized at
once: other tokens would come out at its edges otherwise. Marks that clients write are text: they are hidden while the
marks are counted (``parsing/client_special_tokens.py``), and refused where that is off.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod

import msgspec

from parley.errors import BadMedia, InvalidValue
from parley.text.media_canvas import place_on_canvas
from parley.text.media_family import MediaMarks
from parley.text.parsing.content_parts import PromptMarks
from parley.types import EmbeddingRun, MediaItem, MediaKind, PlacedMedia, ProcessedMedia
from parley.types.media import LEAD_UNIT


def template_marks(marks: Mapping[MediaKind, MediaMarks]) -> dict[MediaKind, str]:
    """Return the marks that chat templates write for each kind of media."""
    return {kind: media_marks.prompt_mark for kind, media_marks in marks.items()}


def replace_marks(text: str, items: Sequence[ProcessedMedia], marks: PromptMarks) -> tuple[str, list[ProcessedMedia]]:
    """Put the items' replacements in place of the marks of a rendered text, kind by kind in their order.

    Also returns the items in the order of the text: a template may write images before videos. Raises BadMedia if
    there are not as many marks as items.
    """
    if not items:
        return text, []
    kinds = dict.fromkeys(item.kind for item in items)
    waiting = {marks[kind]: [item for item in items if item.kind == kind] for kind in kinds}
    placed: list[ProcessedMedia] = []
    numbers = Counter[MediaKind]()

    def next_replacement(match: re.Match[str]) -> str:
        if not waiting[match[0]]:
            raise _surplus_error(match[0])
        item = waiting[match[0]].pop(0)
        placed.append(item)
        return _write_replacement(item, numbers)

    pattern = "|".join(map(re.escape, sorted(waiting, key=len, reverse=True)))
    replaced = re.sub(pattern, next_replacement, text)
    for mark, marks_left in waiting.items():
        if marks_left:
            raise _missing_mark_error(mark, marks_left[0].kind)
    return _write_edges(replaced, placed), placed


def _write_replacement(item: ProcessedMedia, numbers: Counter[MediaKind]) -> str:
    """Return the text of the next item of its kind. ``numbers``: how many of each kind are before it; is counted up."""
    number = numbers[item.kind]
    numbers[item.kind] += 1
    return item.number.replace("0", str(number)) + item.replacement.removeprefix(item.number)


def _write_edges(text: str, items: Sequence[ProcessedMedia]) -> str:
    """Write the separators that some models' processors put between items and text.

    Idefics2's writes the mark between two items once, and a blank between the mark and a word. PaliGemma's writes BOS
    after the last item, and a line break at the end.
    """
    for edge in {item.shared_edge for item in items if item.shared_edge}:
        text = text.replace(edge * 2, edge)
        text = re.sub(rf"{re.escape(edge)}(?=[^\s<])", f"{edge} ", text)
    if items and any(items[-1].text_edges):
        before, after = items[-1].text_edges
        end = text.rindex(items[-1].placeholder) + len(items[-1].placeholder)
        text = text[:end] + before + text[end:] + after
    return text


def has_own_bos(items: Sequence[ProcessedMedia]) -> bool:
    """Return whether BOS stands after the items, so that the tokenizer must not write one before them."""
    return any(item.text_edges[0] for item in items)


def insert_replacements(
    text: str, media: Sequence[PlacedMedia], items: Sequence[ProcessedMedia], marks: Mapping[MediaKind, MediaMarks]
) -> tuple[str, list[ProcessedMedia]]:
    """Return a plain text with the replacements of its items, and the items in the order of the text.

    A client may write the model's marks itself. If the text has one for each item, the items replace them; if it
    has none, each stands where the client put it, between the tokens that a template would write.
    """
    counts = Counter(item.kind for item in items)
    if items and all(text.count(marks[kind].prompt_mark) == count for kind, count in counts.items()):
        return replace_marks(text, items, template_marks(marks))
    pieces: list[str] = []
    numbers = Counter[MediaKind]()
    start = 0
    for placed, item in zip(media, items, strict=True):
        edges = marks[item.kind]
        pieces += (text[start : placed.position], edges.opening, _write_replacement(item, numbers), edges.closing)
        start = max(start, placed.position)
    return _write_edges("".join((*pieces, text[start:])), items), list(items)


def find_media_items(
    token_ids: Sequence[int], items: Sequence[ProcessedMedia], find_token: Callable[[str], int | None]
) -> list[MediaItem]:
    """Return where the embeddings of the items belong in a prompt that has their replacements, in order.

    ``find_token`` returns the id of a mark. Raises InvalidValue if the prompt has other placeholder tokens than the
    items'.
    """
    placeholder_ids = {mark: find_token(mark) for item in items for mark in _placeholders(item)}
    known_ids = {token_id for token_id in placeholder_ids.values() if token_id is not None}
    placeholders = [(position, token_id) for position, token_id in enumerate(token_ids) if token_id in known_ids]
    placed_items: list[MediaItem] = []
    first = 0
    for item in items:
        last = first + item.embedding_count
        item_placeholders = placeholders[first:last]
        own_ids = {placeholder_ids[mark] for mark in _placeholders(item)}
        if len(item_placeholders) < item.embedding_count or any(
            token_id not in own_ids for _, token_id in item_placeholders
        ):
            raise _missing_mark_error(item.placeholder, item.kind)
        placed_items.append(_place_item(item, [position for position, _ in item_placeholders]))
        first = last
    if first < len(placeholders):
        raise _surplus_error(items[-1].placeholder)
    if items and (marks := items[0].canvas_marks) is not None:
        return place_on_canvas(token_ids, items, placed_items, marks)
    return placed_items


def begin_after_marks(
    token_ids: list[int], items: Sequence[ProcessedMedia], find_token: Callable[[str], int | None], bos: str
) -> list[int]:
    """Return the tokens of a plain text with BOS after the marks that it begins with, as the processor of Llama 3.2
    Vision writes it; other models' tokens as they are."""
    if not any(item.leads_prompt for item in items) or not token_ids or token_ids[0] != find_token(bos):
        return token_ids
    mark, end = find_token(items[0].placeholder), 1
    while end < len(token_ids) and token_ids[end] == mark:
        end += 1
    return [*token_ids[1:end], token_ids[0], *token_ids[end:]]


def place_leading_items(
    token_ids: Sequence[int], items: Sequence[ProcessedMedia], find_token: Callable[[str], int | None]
) -> tuple[list[int], list[MediaItem]]:
    """Return the tokens of a prompt with those of its items before them (``ProcessedMedia.leads_prompt``), and where
    the items' embeddings belong.

    The embeddings of items whose marks are next to each other are next to each other as well; those of others begin
    with a page. Raises InvalidValue if the prompt has more marks than items.
    """
    mark = find_token(items[0].placeholder)
    marks = [position for position, token_id in enumerate(token_ids) if token_id == mark]
    if mark is None or len(marks) < len(items):
        raise _missing_mark_error(items[0].placeholder, items[0].kind)
    if len(marks) > len(items):
        raise _surplus_error(items[0].placeholder)
    placed: list[MediaItem] = []
    lead: list[int] = []
    for item, position in zip(items, marks, strict=True):
        if position - 1 not in marks:
            lead += [0] * (-len(lead) % LEAD_UNIT)
        count = item.embedding_count
        placed.append(
            MediaItem(
                item.kind,
                item.digest,
                len(lead),
                count,
                [EmbeddingRun(0, count)],
                features=item.features,
                seen_from=position,
            )
        )
        lead += [mark] * count
    lead += [0] * (-len(lead) % LEAD_UNIT)
    placed = [msgspec.structs.replace(item, seen_from=item.seen_from + len(lead)) for item in placed]
    return [*lead, *token_ids], placed


def _placeholders(item: ProcessedMedia) -> list[str]:
    """Return the marks in an item's replacement that embeddings replace."""
    return [item.placeholder, *item.other_placeholders]


def _place_item(item: ProcessedMedia, positions: list[int]) -> MediaItem:
    """Return an item whose embeddings belong at ``positions``."""
    runs = list(_embedding_runs(item, positions))
    count = positions[-1] + 1 - positions[0]
    return MediaItem(
        item.kind,
        item.digest,
        positions[0],
        count,
        runs,
        item.sees_both_ways,
        item.features,
        item.prompt_sees_both_ways,
    )


def _embedding_runs(item: ProcessedMedia, positions: list[int]) -> Iterator[EmbeddingRun]:
    """Divide an item's positions into runs: one for each of its grids, or wherever other tokens stand between them."""
    if item.has_numbered_grid:
        size = prod(item.grids[0])
        yield EmbeddingRun(0, 1)
        yield EmbeddingRun(1, size, item.grids[0], is_numbered=True)
        yield EmbeddingRun(1 + size, 1)
        return
    if item.grids and item.canvas_marks is None:
        first = 0
        steps = item.frame_steps or [1.0] * len(item.grids)
        for grid, step in zip(item.grids, steps, strict=True):
            yield EmbeddingRun(positions[first] - positions[0], prod(grid), grid, step, item.text_follows_time)
            first += prod(grid)
        return
    start = 0
    for index in range(1, len(positions) + 1):
        if index == len(positions) or positions[index] != positions[index - 1] + 1:
            yield EmbeddingRun(positions[start] - positions[0], index - start)
            start = index


def count_media_tokens(media: Sequence[MediaItem]) -> dict[MediaKind, int]:
    """Return how many tokens of a prompt stand for embeddings, by kind of media."""
    counts: dict[MediaKind, int] = {}
    for item in media:
        counts[item.kind] = counts.get(item.kind, 0) + item.embedding_count
    return counts


def _surplus_error(mark: str) -> InvalidValue:
    return InvalidValue(
        f"Found more '{mark}' placeholders in input prompt than actual multimodal data items.", field="prompt"
    )


def _missing_mark_error(mark: str, kind: MediaKind) -> BadMedia:
    message = f"The model's chat template does not place every item: it wrote too few '{mark}' marks."
    return BadMedia(message, reason="refused_by_model", kind=kind, field="prompt")
