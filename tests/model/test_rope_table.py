"""The table of rotary angles is as long as the context that is served, and is counted where memory is."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support import tiny_models

from parley.core.sequence import PAGE_SIZE
from parley.model.checkpoint.files import read_config
from parley.model.load.check import check_model
from parley.model.load.loader import load_runner
from parley.model.load.memory import plan_cache
from parley.model.networks import position_tables
from parley.model.networks.config_reader import read_decoder_config
from parley.model.networks.rope import RopeConfig
from parley.types import ParleySettings

CPU = torch.device("cpu")
MILLIONS = 10_000_000  # tokens, as Llama 4 Scout's context
LONG_ROPE = RopeConfig(10000.0, 8, "longrope", original_length=100, short_factors=(1.0,) * 4, long_factors=(3.0,) * 4)


def load_long(**settings):
    folder = tiny_models.model_folder("llama", max_position_embeddings=MILLIONS)
    return load_runner(ParleySettings(model=str(folder), **settings), lambda stage, fraction: None)


def test_rope_table_is_as_long_as_the_context_that_the_cache_holds():
    runner, info = load_long(kv_memory=1 << 20)
    assert info.max_model_len == runner.page_count * PAGE_SIZE < 100_000
    assert runner.network.position_tables.rope_table.shape[1] == info.max_model_len


def test_rope_table_of_a_draft_model_is_as_long_as_the_context():
    folder = tiny_models.model_folder("llama", max_position_embeddings=MILLIONS)
    runner, info = load_long(kv_memory=1 << 20, speculate=f"draft={folder}")
    assert runner.proposer.network.position_tables.rope_table.shape[1] == info.max_model_len


@pytest.mark.parametrize("ropes", [(), (LONG_ROPE,)])
def test_rope_table_has_the_same_bits_at_any_length(ropes, monkeypatch):
    config = read_decoder_config(read_config(tiny_models.model_folder("llama")))
    config = dataclasses.replace(config, ropes=ropes or config.ropes)
    whole = position_tables.make_rope_table(config, 1000, CPU)
    assert position_tables.position_table_bytes(config, 1000) * 1000 == whole.nbytes
    monkeypatch.setattr(position_tables, "ROPE_TABLE_PIECE", 64)
    assert torch.equal(position_tables.make_rope_table(config, 1000, CPU), whole)
    sets = whole.shape[1] // 1000
    for length in (101, 333):
        pieces = position_tables.make_rope_table(config, length, CPU).view(sets, length, -1)
        assert torch.equal(pieces, whole.view(sets, 1000, -1)[:, :length])


def test_doctor_counts_the_rope_table_of_the_served_context():
    def loaded_bytes(context, memory):
        folder = tiny_models.model_folder("llama", max_position_embeddings=context)
        checked = check_model(ParleySettings(model=str(folder), kv_memory=memory))
        return checked.memory_bytes, checked.table_bytes

    runner, info = load_long(kv_memory=1 << 20)
    position_bytes = runner.network.position_tables.rope_table.nbytes // info.max_model_len
    assert loaded_bytes(1024, 1 << 30) == (info.weights_bytes, 1024 * position_bytes)
    assert loaded_bytes(MILLIONS, 1 << 20) == (info.weights_bytes, info.max_model_len * position_bytes)


def test_kv_cache_leaves_memory_for_the_rope_table(monkeypatch):
    monkeypatch.setattr("parley.model.load.memory.free_device_memory", lambda device: 10_000_000)
    settings = ParleySettings(model="m", max_batch=2)
    budget = plan_cache(1000, CPU, 1 << 20, settings).pages * 1000  # bytes
    for length in (1 << 20, 800):
        pages = plan_cache(1000, CPU, length, settings, 0, 100).pages
        needed = pages * 1000 + min(length, pages * PAGE_SIZE) * 100
        assert budget - 1000 - PAGE_SIZE * 100 < needed <= budget or pages == 2 * length // PAGE_SIZE
    assert plan_cache(1000, CPU, 1 << 20, ParleySettings(model="m", kv_memory=50_000), 0, 100).pages == 50
