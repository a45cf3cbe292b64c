"""What a dialect is told of the server: names, models, counts, endpoints. Data only, under no API's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from parley.metrics.totals import Totals
from parley.types import ModelInfo, Stats


@dataclass(frozen=True, slots=True)
class Card:
    """A name that the server offers, and the model behind it, whose main name is ``root``.

    ``max_model_len`` is None until it is loaded. ``phase``: loading, ready, restarting, draining, failed, closed; held
    or prepared after such a ``wishes.Command``. ``folder``: where an adapter lies, if the name is one's; ``root`` is
    then the model that it changes. ``totals``: what was done with it, under all its names. ``purpose``: what it is for,
    as far as that is known: conversations and text, text alone, vectors alone.
    """

    name: str
    created: int
    max_model_len: int | None
    root: str = ""
    phase: str = "ready"
    totals: Totals = field(default_factory=Totals)
    purpose: Literal["chat", "text", "vectors"] = "chat"
    folder: str = ""


@dataclass(frozen=True, slots=True)
class Vitals:
    """How the main model does at this moment.

    ``phase``: idle, loading, ready, restarting, draining, failed, closed; held or prepared after such a
    ``wishes.Command``. ``held`` of ``places`` are taken, of which ``batch`` run at once. Times are seconds, means of
    the last thousand.
    """

    phase: str = "ready"
    places: int = 1
    held: int = 0
    batch: int = 1
    stats: Stats = field(default_factory=Stats)
    info: ModelInfo | None = None
    first_token: float = 0.0
    between_tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class Facts:
    """What the server knows of itself. ``cards``: every name it serves, the main one first. ``ready``: do all its
    models take requests?"""

    version: str
    cards: Sequence[Card]
    ready: bool
    vitals: Vitals = Vitals()


@dataclass(frozen=True, slots=True)
class About:
    """The server in one card: its main model, how many answers it makes or queues at once, its version, and what the
    model computes with and on."""

    card: Card
    places: int
    version: str
    dtype: str = "bfloat16"
    device: str = "cpu"


class Share(msgspec.Struct, frozen=True):
    """One of an endpoint's models: ``name`` there, the server's ``model``, and how many of 100 requests it answers."""

    name: str
    model: str
    percent: int


class Endpoint(msgspec.Struct, frozen=True):
    """A name behind which models share the requests. ``about``: what else its API keeps of it, as JSON can hold it."""

    name: str
    shares: list[Share]
    about: dict[str, Any] = {}
