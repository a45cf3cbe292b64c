"""The kinds of engine that can run a model, with a factory for each."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from parley.engine.fake import FAKE_MODEL, FakeEngine
from parley.engine.protocol import Engine
from parley.engine.remote import ENGINE_COMMAND, RemoteEngine
from parley.serving.options import EngineKind, OfferedModel
from parley.types import Settings
from parley.worker.thread import LocalEngine

EngineFactory = Callable[[Settings, str], Engine]  # the second argument is the model's name in the log


def remote_engine(settings: Settings, name: str) -> Engine:
    """Return an engine in a process of its own."""
    return RemoteEngine(settings, command=ENGINE_COMMAND, name=name)


def local_engine(settings: Settings, name: str) -> Engine:
    """Return an engine in a thread of this process."""
    return LocalEngine(settings)


def scripted_engine(settings: Settings, name: str) -> Engine:
    """Return an engine without a model, for the token ids of any tokenizer."""
    return FakeEngine(info=msgspec.structs.replace(FAKE_MODEL, vocab_size=1 << 24))


ENGINE_FACTORIES: dict[EngineKind, EngineFactory] = {
    "process": remote_engine,
    "thread": local_engine,
    "scripted": scripted_engine,
}


def make_engine(offer: OfferedModel) -> Engine:
    """Return an engine of the kind that the offer names."""
    return ENGINE_FACTORIES[offer.engine](offer.settings, offer.names[0])
