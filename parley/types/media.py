"""Images, videos and audio in a prompt: as clients send them, and as the engine reads them.

A dialect reads ``Media`` from a body. A media process turns each into a ``ProcessedMedia``: the text that stands for it
in the prompt, and a file of tensors for the model's encoder. The engine gets ``MediaItem``: where its embeddings belong
among the prompt's tokens, and the same file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import msgspec

MediaKind = Literal["image", "video", "audio"]
MEDIA_KINDS: tuple[MediaKind, ...] = get_args(MediaKind)
KIND_NAMES: Mapping[MediaKind, str] = {"image": "image", "video": "video", "audio": "audio clip"}  # in sentences
ImageDetail = Literal["auto", "low", "high", "original"]
LEAD_UNIT = 16  # tokens that lead a prompt are filled up to a multiple of it, which has whole pages of the KV cache


class EncodedMedia(msgspec.Struct, frozen=True, tag=True):
    """A file in base64, as the client sent it. ``media_type``: the client's name for the format, such as
    "image/png", or "". ``field`` of the ``Media`` names it; nothing has been decoded yet."""

    base64: str
    media_type: str = ""


class UploadedMedia(msgspec.Struct, frozen=True, tag=True):
    """A file as the client uploaded it, in bytes."""

    content: bytes


class MediaAddress(msgspec.Struct, frozen=True, tag=True):
    """An http or https URL, as the client sent it."""

    url: str


class MediaPath(msgspec.Struct, frozen=True, tag=True):
    """A path on the server's disk, from a ``file:`` URL or, in MindIE's API, a bare path."""

    path: str


class CachedMedia(msgspec.Struct, frozen=True, tag=True):
    """Nothing but ``Media.uuid``: an item that the same tenant sent before under this name."""


class MediaEmbeddings(msgspec.Struct, frozen=True, tag=True):
    """Embeddings that the client computed, as base64 of a safetensors file."""

    base64: str


MediaSource = EncodedMedia | UploadedMedia | MediaAddress | MediaPath | CachedMedia | MediaEmbeddings


class Media(msgspec.Struct, frozen=True):
    """One image, video or clip of a request.

    * ``field``: its place in the body, for error messages.
    * ``detail``: "low" shrinks an image to 512 x 512 pixels.
    * ``uuid``: the client's name for it.
    * ``loading_options``: how a video or clip is sampled (``num_frames``, ``fps``).
    * ``processor_options``: passed to the model's processor, such as ``max_pixels``.
    """

    kind: MediaKind
    source: MediaSource
    field: str
    detail: ImageDetail = "auto"
    uuid: str | None = None
    loading_options: dict[str, Any] = {}
    processor_options: dict[str, Any] = {}


class PlacedMedia(msgspec.Struct, frozen=True):
    """An item within a text: it stands before the character at ``position``, after earlier items at that position.

    ``tool_call_id``: the call whose result it belongs to, if it stands in a message after that result.
    """

    position: int
    media: Media
    tool_call_id: str | None = None


class FeatureFile(msgspec.Struct, array_like=True, frozen=True):
    """The encoder's input, as a safetensors file of ``size`` bytes in memory, opened at ``/proc/{pid}/fd/{fd}``.

    It holds the processor's tensors for one item, by the names of the encoder's arguments. The process ``pid`` keeps
    it until all requests that use it have ended.
    """

    pid: int
    fd: int
    size: int


class EmbeddingRun(msgspec.Struct, array_like=True, frozen=True):
    """``count`` consecutive tokens whose embeddings an encoder computes.

    * ``offset``: distance from the item's first such token.
    * ``grid``: the frames, rows and columns of the tokens, for models whose positions have three axes (M-RoPE); None:
      positions continue as in text.
    * ``frame_step``: the difference in position between two frames.
    * ``text_follows_time``: the positions of the text after it continue after those of its last frame, not only after
      those of its rows and columns.
    * ``is_numbered``: positions have four axes (HunyuanOCR). Those of a token of the grid are its index in the prompt,
      its column, its row, and how many such grids are before it.
    """

    offset: int
    count: int
    grid: tuple[int, int, int] | None = None
    frame_step: float = 1.0
    text_follows_time: bool = False
    is_numbered: bool = False


class CanvasMarks(msgspec.Struct, array_like=True, frozen=True):
    """The tokens around the parts of an image whose positions lie on a canvas (MiniCPM-V 4.7): ``others`` are those
    around the image, after a slice, and the line break between rows of slices."""

    slice_start: int
    others: list[int]

    @property
    def all(self) -> frozenset[int]:
        """All of these tokens."""
        return frozenset([self.slice_start, *self.others])


class TokenPositions(msgspec.Struct, array_like=True, frozen=True):
    """The positions of the tokens from ``start`` on, on three axes, relative to the position of a text token there.
    ``advance``: that of the token after them. A position below 0 counts as 0."""

    start: int
    times: list[int]
    rows: list[int]
    columns: list[int]
    advance: int

    @property
    def end(self) -> int:
        """The index of the token after them."""
        return self.start + len(self.times)


class ProcessedMedia(msgspec.Struct, frozen=True):
    """An item after the model's processor. It is the same for the same bytes and options.

    * ``digest``: SHA-256 of everything that decides the embeddings.
    * ``replacement``: the text that stands for the item in the prompt, instead of the template's placeholder.
    * ``placeholder``: the mark in it that each embedding replaces; embeddings also replace ``other_placeholders``.
    * ``number``: the beginning of the replacement, with the item's number written as 0, which stands for the number of
      any item of this kind; empty if items have no numbers.
    * ``shared_edge``: the mark at both ends of the replacement; adjacent items have one between them; empty if each
      item has its own marks.
    * ``grids`` and ``frame_steps``: one for each run of placeholders in the replacement, empty for models without
      M-RoPE.
    * ``text_follows_time``: as in ``EmbeddingRun``.
    * ``has_numbered_grid``: it has one run, of a grid that ``is_numbered`` with one more embedding before and after it.
    * ``sees_both_ways``: its tokens attend to later ones of the same run of embeddings.
    * ``prompt_sees_both_ways``: all tokens of its prompt attend to each other.
    * ``seconds``: the length of a clip or video.
    * ``text_edges``: the texts that the model reads between the last item and the text after it, and at the end of the
      prompt.
    * ``leads_prompt``: its embeddings stand before the prompt's first token, not in place of marks (``lead_length``);
      ``replacement`` is the mark alone.
    * ``canvas_marks``: of models that lay the runs' grids on a canvas, else None.
    """

    kind: MediaKind
    digest: bytes
    replacement: str
    placeholder: str
    embedding_count: int
    grids: list[tuple[int, int, int]] = []
    frame_steps: list[float] = []
    text_follows_time: bool = False
    sees_both_ways: bool = False
    seconds: float = 0.0
    other_placeholders: list[str] = []
    number: str = ""
    shared_edge: str = ""
    prompt_sees_both_ways: bool = False
    text_edges: tuple[str, str] = ("", "")
    has_numbered_grid: bool = False
    leads_prompt: bool = False
    canvas_marks: CanvasMarks | None = None
    features: FeatureFile | None = None  # None: on an instance that gets the KV pages from another one


class MediaItem(msgspec.Struct, array_like=True, frozen=True):
    """An item among a prompt's tokens: it covers ``start .. start + count``, from its first embedding to its last.

    Tokens between ``runs`` are text, such as line breaks between rows of tiles. ``digest``, ``sees_both_ways`` and
    ``prompt_sees_both_ways`` as in ``ProcessedMedia``: pages that overlap the item are found by its digest as well.
    ``seen_from``: of an item that leads its prompt, the position of its mark in the text; else -1. ``positions``: those
    of the item's tokens, of the marks around it and of items that follow at once, where grids of runs do not give them.
    """

    kind: MediaKind
    digest: bytes
    start: int
    count: int
    runs: list[EmbeddingRun]
    sees_both_ways: bool = False
    features: FeatureFile | None = None
    prompt_sees_both_ways: bool = False
    seen_from: int = -1
    positions: TokenPositions | None = None

    @property
    def end(self) -> int:
        """The position after its last embedding."""
        return self.start + self.count

    @property
    def embedding_count(self) -> int:
        """Number of embeddings, which is at most ``count``."""
        return sum(run.count for run in self.runs)


def lead_length(media: Sequence[MediaItem]) -> int:
    """Return how many tokens stand before the first token of a prompt's text: those of embeddings that only layers with
    cross-attention read (Llama 3.2 Vision), filled up to whole pages.

    They have keys and values in these layers alone, and no positions: the first token of the text has position 0.
    """
    end = max((item.end for item in media if item.seen_from >= 0), default=0)
    return -(-end // LEAD_UNIT) * LEAD_UNIT
