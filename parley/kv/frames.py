"""What the two ends of a link say to each other: msgspec structs in the frames of ``parley.wire``, each with its tag.

A giver computed a prompt and has its pages; a taker wants them. Nothing here knows how pages travel. Every field has a
type that decoding checks, and a list a length; what numbers mean is checked where they are used.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

VERSION = 1
MAX_FRAME = 256 << 20  # bytes of a message between peers that know each other: a request's body and its outputs
FIRST_FRAME = 64 << 10  # bytes of the first one

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
Name = Annotated[str, msgspec.Meta(max_length=1024)]
Lease = Annotated[float, msgspec.Meta(ge=0.1, le=3600)]
Reason = Annotated[str, msgspec.Meta(max_length=4096)]


class Frame(msgspec.Struct, array_like=True):
    pass


class Beat(Frame, tag="beat"):
    """Says that its sender lives: number ``sent``, and that it has read number ``heard`` of the other side."""

    sent: Count
    heard: Count


class Refuse(Frame, tag="refuse"):
    """The taker will not: the link (in answer to Hello), or this hand-over (in answer to Begin)."""

    reason: Reason


# ----------------------------------------------------------------------------------------------- from the giver


class Hello(Frame, tag="hello"):
    """The first frame of a link. All its hand-overs are from the arena ``name``.

    ``sizes``: bytes of a page in each region. ``offers``: by transport, what the taker needs to know to use it.
    ``lease``: seconds of silence after which the other side is dead; the shorter one of both sides holds.
    """

    name: Name
    layout: Annotated[str, msgspec.Meta(max_length=8192)]
    sizes: Annotated[list[Count], msgspec.Meta(max_length=4096)]
    offers: Annotated[dict[Name, bytes], msgspec.Meta(max_length=16)]
    lease: Lease
    checksum: bool = False


class Begin(Frame, tag="begin"):
    """A hand-over of so many prompts. ``body`` is for those who use links."""

    body: bytes
    parts: Annotated[int, msgspec.Meta(ge=0, le=65536)]


class Pages(Frame, tag="pages"):
    """The next pages of a prompt that the taker wants, in order; the transport has them or is about to get them."""

    part: Count
    pages: Annotated[list[Count], msgspec.Meta(min_length=1, max_length=1 << 20)]


class Held(Frame, tag="held"):
    """The answer to Read: the giver had not let go of these pages until now."""


class Give(Frame, tag="give"):
    """What goes with the pages, for those who use links."""

    body: bytes


class End(Frame, tag="end"):
    """No more pages come, and no Give."""


# ----------------------------------------------------------------------------------------------- from the taker


class Welcome(Frame, tag="welcome"):
    """The answer to Hello: which of the offers is taken, and what holds for both. ``checksum``: Read has one."""

    transport: Name
    lease: Lease
    checksum: bool = False


class Accept(Frame, tag="accept"):
    """For each prompt: how many pages at its beginning are not wanted, and how many behind them are."""

    wants: Annotated[list[tuple[Count, Count]], msgspec.Meta(max_length=65536)]


class Read(Frame, tag="read"):
    """All pages of one Pages have been read; ``checksum`` of them where the link has it."""

    checksum: Count | None = None


class Got(Frame, tag="got"):
    """The answer to Give."""


class Settled(Frame, tag="settled"):
    """The answer to End: the hand-over is over on the taker's side, and the link free for the next."""


FromGiver = Hello | Begin | Pages | Held | Give | End | Beat
FromTaker = Welcome | Refuse | Accept | Read | Got | Settled | Beat
