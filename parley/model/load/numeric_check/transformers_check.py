"""The numeric check of the Transformers backend: logits over KV pages against those of unmodified Transformers.

Two sequences are run over pages, in chunks of different sizes that are packed into batches, and also each as a whole by
unmodified Transformers, with its own masks. If the model has state other than keys and values, or a mask that the
attention call does not report, or if it ignores positions, then most positions differ. Sliding windows are narrowed
during the check, because the sequences are shorter than usual windows.

For models that take media, the same is done with a random image in each sequence: embeddings in place of tokens, with
positions on three axes, embeddings for further layers, and tokens that see later ones, where the model has them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from transformers import PreTrainedModel

from parley.core.rope_positions import RopePositions
from parley.core.sequence import PAGE_SIZE
from parley.model.load.media_arguments import granite4_layers
from parley.model.networks.network import DecoderNetwork, MediaRows, PackedBatch
from parley.model.networks.paged_kv import PagedKV
from parley.native.layout import RowSpan
from parley.text.media_family import MediaFamily
from parley.types import EmbeddingRun, MediaItem

SEQUENCE_LENGTHS = (26, 23)  # tokens of the two sequences
PROBE_STEPS = (((0, 9),), ((0, 1), (1, 17)), ((1, 1), (0, 16)), ((1, 5),))  # per step: (sequence, tokens)
NARROW_WINDOW = 8
IMAGE_STARTS = (11, 4)  # of the image in each sequence; no step ends within it, where tokens see later ones
IMAGE_GRID = (1, 3, 4)
IMAGE_TOKENS = 12
DEEP_LAYERS = 2


@dataclass
class ProbeImage:
    """A random image in a sequence of T tokens. ``is_media`` bool [T]: which of them belong to it.

    ``rows`` and each of ``deepstack`` [T, hidden] hold its embeddings at its tokens. ``rope_positions`` int64 [3, T]
    and ``visible_ends`` int64 [T]: as in ``PackedBatch``.
    """

    is_media: torch.Tensor
    rows: torch.Tensor
    deepstack: list[torch.Tensor]
    rope_positions: torch.Tensor | None
    visible_ends: torch.Tensor | None


@dataclass
class ProbeSequence:
    """The token ids of a sequence, int64 [T], and its image."""

    ids: torch.Tensor
    image: ProbeImage | None = None


def body_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the part of a model that computes hidden states. ModernBERT's decoder calls its head ``decoder``."""
    body: Any = model.get_decoder()
    if not isinstance(body, PreTrainedModel):
        body = model.base_model
    result: PreTrainedModel = body
    return result


@torch.inference_mode()
def transformers_deviation(network: DecoderNetwork, model: PreTrainedModel, family: MediaFamily | None = None) -> float:
    """Return the relative error (L2) of the logits over pages, as the largest of several medians over positions.

    ``family``: that of the media which the model takes, None if it takes none. With a family, the result is the larger
    of two errors: without and with images.

    They are medians, because in a mixture of experts rounding alone may send single tokens to other experts. One is of
    positions after a sequence's first step: in the others, a model is right even if it reads nothing from pages. The
    others are of all positions of each sequence: a model that numbers the rows of a batch is right for the first one.
    """
    sequences = [
        ProbeSequence(torch.linspace(1, network.vocab_size - 1, length, device=model.device).long())
        for length in SEQUENCE_LENGTHS
    ]
    with _narrow_windows(model):
        deviation = _median_error(network, model, sequences)
        if family is not None:
            for sequence, start in zip(sequences, IMAGE_STARTS, strict=True):
                sequence.image = _random_image(model, family, sequence.ids, start)
                if "image" in family.placeholder_ids:  # ERNIE 4.5 VL has experts of its own for them
                    sequence.ids = sequence.ids.masked_fill(sequence.image.is_media, family.placeholder_ids["image"])
            deviation = max(deviation, _median_error(network, model, sequences))
    return deviation


def _random_image(model: PreTrainedModel, family: MediaFamily, ids: torch.Tensor, start: int) -> ProbeImage:
    """Return an image whose tokens begin at ``start``. Its embeddings vary as much as those of tokens."""
    embeddings, count, end = model.get_input_embeddings()(ids), len(ids), start + IMAGE_TOKENS
    generator = torch.Generator().manual_seed(start)
    rows = [
        (torch.randn(embeddings.shape, generator=generator) * embeddings.std().item()).to(embeddings)
        for _ in range(1 + _deep_layer_count(model))
    ]
    rope_positions = visible_ends = None
    if family.has_rope_grids:
        run = EmbeddingRun(0, IMAGE_TOKENS, IMAGE_GRID, is_numbered=family.numbers_grids)
        item = MediaItem("image", b"", start, IMAGE_TOKENS, [run])
        rope_positions = torch.tensor(RopePositions([item], count).axes(0, count), device=ids.device)
    if family.sees_both_ways:
        visible_ends = torch.arange(1, count + 1, device=ids.device)
        visible_ends[start:end] = end
    is_media = torch.zeros(count, dtype=torch.bool, device=ids.device)
    is_media[start:end] = True
    return ProbeImage(is_media, rows[0], rows[1:], rope_positions, visible_ends)


def _deep_layer_count(model: PreTrainedModel) -> int:
    """Return the number of layers to which the decoder adds embeddings of an image."""
    arguments = signature(type(body_of(model)).forward).parameters
    if "deepstack_features" in arguments:
        return len(granite4_layers(model.config))
    return DEEP_LAYERS if "deepstack_visual_embeds" in arguments else 0


def _median_error(network: DecoderNetwork, model: PreTrainedModel, sequences: list[ProbeSequence]) -> float:
    expected = torch.cat(_transformers_logits(network, model, sequences))
    actual = torch.cat(_paged_logits(network, sequences, model.dtype))
    errors = (actual - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-30)
    first_steps = [
        next(count for step in PROBE_STEPS for at, count in step if at == number) for number in range(len(sequences))
    ]
    parts = errors.split(SEQUENCE_LENGTHS)
    later = torch.cat([part[count:] for part, count in zip(parts, first_steps, strict=True)])
    return max(float(part.median()) for part in (later, *parts))


def _transformers_logits(
    network: DecoderNetwork, model: PreTrainedModel, sequences: list[ProbeSequence]
) -> list[torch.Tensor]:
    decoder = body_of(model)
    implementation = decoder.config._attn_implementation
    decoder.set_attn_implementation("eager")
    try:
        return [
            model(input_ids=sequence.ids[None], use_cache=False).logits[0].float()
            if sequence.image is None
            else _logits_with_image(network, model, sequence.ids, sequence.image)
            for sequence in sequences
        ]
    finally:
        decoder.set_attn_implementation(implementation)


def _logits_with_image(
    network: DecoderNetwork, model: PreTrainedModel, ids: torch.Tensor, image: ProbeImage
) -> torch.Tensor:
    """Return the logits of Transformers for a sequence with an image.

    The whole model builds the masks for tokens that see later ones; its decoder takes everything else as arguments.
    """
    known_ids = ids.masked_fill(image.is_media, 0)  # placeholders may lie beyond the table
    embeddings = torch.where(image.is_media[:, None], image.rows, model.get_input_embeddings()(known_ids))
    inputs: dict[str, Any] = {"inputs_embeds": embeddings[None], "use_cache": False}
    is_media = image.is_media[None]
    if image.visible_ends is not None:
        logits: torch.Tensor = model(**inputs, token_type_ids=is_media.long()).logits[0].float()
        return logits
    if image.rope_positions is not None:
        inputs["position_ids"] = image.rope_positions[:, None]
    rows = [features[image.is_media] for features in image.deepstack]
    if model.config.model_type == "granite4_vision":
        by_layer = dict(zip(granite4_layers(model.config), rows, strict=True))
        inputs |= {"vision_mask": is_media[..., None], "deepstack_features": by_layer}
    elif rows:
        inputs |= {"visual_pos_masks": is_media, "deepstack_visual_embeds": rows}
    if model.config.model_type == "ernie4_5_vl_moe":
        inputs["moe_mm_token_type_ids"] = is_media.long()
    return network.compute_logits(body_of(model)(**inputs).last_hidden_state[0])


def _paged_logits(network: DecoderNetwork, sequences: list[ProbeSequence], dtype: torch.dtype) -> list[torch.Tensor]:
    device = sequences[0].ids.device
    tables = [list(range(first, first + 2)) for first in range(0, 2 * len(sequences), 2)]
    pages = PagedKV(network.kv_layers, 2 * len(sequences), dtype, device)
    pages.clear_pages([page for table in tables for page in table])
    computed = [0] * len(sequences)
    logits: list[list[torch.Tensor]] = [[] for _ in sequences]
    for step in PROBE_STEPS:
        ids: list[torch.Tensor] = []
        positions: list[torch.Tensor] = []
        spans: list[RowSpan] = []
        for number, count in step:
            start, end = computed[number], computed[number] + count
            spans.append(RowSpan(sum(len(part) for part in ids), count, end, tables[number]))
            ids.append(sequences[number].ids[start:end])
            positions.append(torch.arange(start, end, device=device))
            computed[number] = end
        slots = [at + tables[number][0] * PAGE_SIZE for at, (number, _) in zip(positions, step, strict=True)]
        batch = PackedBatch(torch.cat(ids), torch.cat(positions), torch.cat(slots), spans)
        images = [sequences[number].image for number, _ in step]
        _add_images(batch, [(image, at) for image, at in zip(images, positions, strict=True) if image is not None])
        rows = network.compute_logits(network.compute_hidden(batch, pages))
        for (number, _), part in zip(step, rows.split([count for _, count in step]), strict=True):
            logits[number].append(part)
    return [torch.cat(parts) for parts in logits]


def _add_images(batch: PackedBatch, parts: list[tuple[ProbeImage, torch.Tensor]]) -> None:
    """Set the fields of media in a batch. ``parts``: the image of each sequence, and the positions to compute."""
    if not parts:
        return
    tokens = torch.cat([image.is_media[at] for image, at in parts]).nonzero()[:, 0]
    layers = [
        torch.cat(rows)
        for rows in zip(
            *([features[at] for features in (image.rows, *image.deepstack)] for image, at in parts), strict=True
        )
    ]
    if len(tokens):
        batch.media = MediaRows(tokens, layers[0][tokens], [rows[tokens] for rows in layers[1:]])
    axes = [image.rope_positions[:, at] for image, at in parts if image.rope_positions is not None]
    batch.rope_positions = torch.cat(axes, 1) if axes else None
    ends = [image.visible_ends[at] for image, at in parts if image.visible_ends is not None]
    batch.visible_ends = torch.cat(ends) if ends else None


@contextmanager
def _narrow_windows(model: PreTrainedModel) -> Iterator[None]:
    """Narrow sliding windows to NARROW_WINDOW tokens wherever the model has wider ones."""
    holders: dict[int, Any] = {}
    for module in model.modules():
        for holder in (module, getattr(module, "config", None)):
            holders[id(holder)] = holder
    wide_windows = [
        (holder, holder.sliding_window)
        for holder in holders.values()
        if isinstance(getattr(holder, "sliding_window", None), int) and holder.sliding_window > NARROW_WINDOW
    ]
    for holder, _ in wide_windows:
        holder.sliding_window = NARROW_WINDOW
    try:
        yield
    finally:
        for holder, window in wide_windows:
            holder.sliding_window = window
