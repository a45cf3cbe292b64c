"""Messages on a link: msgspec structs in the frames of ``parley.wire``, each with its tag.

The sender has computed a prompt and holds its pages; the receiver requests them. This module knows no transports.
Decoding checks the type of every field and the length of every list; the code that uses a number checks its range.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

MAX_FRAME_BYTES = 256 << 20  # bytes of a message between authenticated peers: a request body and its outputs
MAX_HELLO_BYTES = 64 << 10  # bytes of the first message

FrameCount = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
FrameName = Annotated[str, msgspec.Meta(max_length=1024)]
LeaseSeconds = Annotated[float, msgspec.Meta(ge=0.1, le=3600)]
FrameReason = Annotated[str, msgspec.Meta(max_length=4096)]


class KVFrame(msgspec.Struct, array_like=True):
    """Base of all messages; encoded as arrays."""


class HeartbeatFrame(KVFrame, tag="beat"):
    """Heartbeat number ``sent``. ``heard``: the number of the last heartbeat from the other side."""

    sent: FrameCount
    heard: FrameCount


class RefuseFrame(KVFrame, tag="refuse"):
    """The receiver refuses the link (in answer to HelloFrame) or the handover (in answer to BeginFrame)."""

    reason: FrameReason


# ---------------------------------------------------------------------------------------------- from the sender


class HelloFrame(KVFrame, tag="hello"):
    """First message of a link. All its handovers are from the arena ``name``.

    ``sizes``: bytes of a page in each region. ``offers``: for each transport, the data that the receiver needs to use
    it. ``lease``: seconds; a side that is silent for longer counts as dead. The shorter lease of both sides holds.
    """

    name: FrameName
    layout: Annotated[str, msgspec.Meta(max_length=8192)]
    sizes: Annotated[list[FrameCount], msgspec.Meta(max_length=4096)]
    offers: Annotated[dict[FrameName, bytes], msgspec.Meta(max_length=16)]
    lease: LeaseSeconds
    checksum: bool = False


class BeginFrame(KVFrame, tag="begin"):
    """Start a handover of ``parts`` prompts. ``body`` belongs to the user of the link."""

    body: bytes
    parts: Annotated[int, msgspec.Meta(ge=0, le=65536)]


class PagesFrame(KVFrame, tag="pages"):
    """The next pages of a prompt that the receiver wants, in order. The transport sends their bytes in the same
    order."""

    part: FrameCount
    pages: Annotated[list[FrameCount], msgspec.Meta(min_length=1, max_length=1 << 20)]


class HeldFrame(KVFrame, tag="held"):
    """Answer to ReadFrame: the sender still held the pages when it got that message, so what was read is valid."""


class OutputsFrame(KVFrame, tag="give"):
    """Outputs that go with the pages. ``body`` belongs to the user of the link."""

    body: bytes


class EndFrame(KVFrame, tag="end"):
    """No more pages or outputs follow."""


# -------------------------------------------------------------------------------------------- from the receiver


class WelcomeFrame(KVFrame, tag="welcome"):
    """Answer to HelloFrame: the chosen transport and the agreed settings. ``checksum``: each ReadFrame has one."""

    transport: FrameName
    lease: LeaseSeconds
    checksum: bool = False


class AcceptFrame(KVFrame, tag="accept"):
    """For each prompt: how many leading pages to skip, and how many pages after them the receiver wants."""

    wants: Annotated[list[tuple[FrameCount, FrameCount]], msgspec.Meta(max_length=65536)]


class ReadFrame(KVFrame, tag="read"):
    """All pages of one PagesFrame have been read. ``checksum``: of their bytes, if the link has checksums."""

    checksum: FrameCount | None = None


class GotOutputsFrame(KVFrame, tag="got"):
    """Answer to OutputsFrame: the outputs have arrived."""


class SettledFrame(KVFrame, tag="settled"):
    """Answer to EndFrame: the receiver has finished the handover, and the link is free for the next one."""


SenderFrame = HelloFrame | BeginFrame | PagesFrame | HeldFrame | OutputsFrame | EndFrame | HeartbeatFrame
ReceiverFrame = WelcomeFrame | RefuseFrame | AcceptFrame | ReadFrame | GotOutputsFrame | SettledFrame | HeartbeatFrame
