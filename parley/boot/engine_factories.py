"""The kinds of engine that can run a model, with a factory for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from parley.engine.protocol import Engine
from parley.engine.remote_engine import RemoteEngine
from parley.engine.scripted_engine import SCRIPTED_MODEL, ScriptedEngine
from parley.engine.vllm_engine import VLLMEngine
from parley.serving.server_options import EngineKind, OfferedModel
from parley.types import AttachedSettings, EngineSettings, ParleySettings, VLLMSettings
from parley.worker.attached.attached_engine import AttachedEngine
from parley.worker.thread_engine import ThreadEngine

# The arguments are settings of the kind that the engine needs, and the model's name in the log.
EngineFactory = Callable[[Any, str], Engine]


def remote_engine(settings: ParleySettings, name: str) -> Engine:
    """Return an engine in a process of its own."""
    return RemoteEngine(settings, name=name)


def thread_engine(settings: ParleySettings, name: str) -> Engine:
    """Return an engine in a thread of this process."""
    return ThreadEngine(settings)


def scripted_engine(settings: EngineSettings, name: str) -> Engine:
    """Return an engine without a model, for the token ids of any tokenizer."""
    return ScriptedEngine(info=msgspec.structs.replace(SCRIPTED_MODEL, vocab_size=1 << 24))


def vllm_engine(settings: VLLMSettings, name: str) -> Engine:
    """Return vLLM, in processes of its own."""
    return VLLMEngine(settings, name=name)


def attached_engine(settings: AttachedSettings, name: str) -> Engine:
    """Return an engine that computes on a vLLM server that runs already."""
    return AttachedEngine(settings, name=name)


ENGINE_FACTORIES: dict[EngineKind, EngineFactory] = {
    "process": remote_engine,
    "thread": thread_engine,
    "scripted": scripted_engine,
    "vllm": vllm_engine,
    "attached": attached_engine,
}


def make_engine(offered_model: OfferedModel) -> Engine:
    """Return an engine of the kind that the offer names."""
    if offered_model.early_process is not None:
        return RemoteEngine(
            offered_model.settings, name=offered_model.names[0], early_process=offered_model.early_process
        )
    return ENGINE_FACTORIES[offered_model.engine](offered_model.settings, offered_model.names[0])
