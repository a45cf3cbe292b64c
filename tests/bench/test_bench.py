"""The comparison's arithmetic: pending loads after an interruption, medians, targets, bounds, page and chart."""

from __future__ import annotations

import os
import random
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from bar_chart import Bar, Panel, draw_chart, format_number
from load_mixes import LOADS, START, WHOLE, draw_prompts
from machine_limits import Limits, ModelSize
from machine_usage import CpuClock, process_tree, tree_memory
from peer_servers import PEERS
from performance_page import PAGE, PARTS, fill_part, markdown_table
from quantization_quality import VariantResult, compare_results
from random_model import write_model
from results_file import Results, append_record, nested_number, plan_turns, read_records
from speed_targets import RATE, TPOT, TTFT, best_possible, extra_bytes, list_targets

SIZE = ModelSize(body=1000, head=100, query_width=8, layers=2, kv=64)
LIMITS = {"bandwidth": 1000.0, "bf16": 4000.0, "int8": 8000.0}
PLANNED_LOADS = {"a": ("x", "y"), "b": ("x",), "c": ("y",)}


def load_record(peer="a", turn=0, load="x", errors=0, **result):
    result = {"errors": errors, "prompt_tokens": 0, "cached_tokens": 0, "output_tokens": 0, **result}
    return {
        "kind": "load", "peer": peer, "turn": turn, "load": load, "before": LIMITS, "after": LIMITS, "result": result
    }  # fmt: skip


@given(st.integers(1, 5), st.integers(0, 2**32))
def test_interrupted_bench_run_plans_only_missing_loads(turns, seed):
    all_loads = [(turn.number, turn.peer, load) for turn in plan_turns([], PLANNED_LOADS, turns) for load in turn.loads]
    assert sorted(all_loads) == sorted(
        (t, p, load) for t in range(turns) for p in PLANNED_LOADS for load in PLANNED_LOADS[p]
    )
    done = [entry for entry in all_loads if random.Random(f"{seed} {entry}").random() < 0.5]
    records = [load_record(peer, turn, load) for turn, peer, load in done]
    pending = [
        (turn.number, turn.peer, load) for turn in plan_turns(records, PLANNED_LOADS, turns) for load in turn.loads
    ]
    assert pending == [entry for entry in all_loads if entry not in done]


def test_bench_turns_rotate_and_failed_loads_repeat():
    assert [turn.peer for turn in plan_turns([], PLANNED_LOADS, 3)] == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]
    assert plan_turns([load_record("b", errors=1)], {"b": ("x",)}, 1)
    assert not plan_turns([load_record("b", errors=1), load_record("b")], {"b": ("x",)}, 1)


def test_bench_results_skip_truncated_line(tmp_path):
    path = tmp_path / "folder" / "results.jsonl"
    assert read_records(path) == []
    append_record(path, {"kind": "one"})
    with path.open("a") as file:
        file.write('{"kind": "tw')
    append_record(path, {"kind": "three"})
    assert [record["kind"] for record in read_records(path)] == ["one", "three"]


def test_bench_medians_are_over_turns_without_failures():
    records = [
        load_record(turn=0, rate=1.0),
        load_record(turn=1, rate=5.0),
        load_record(turn=2, rate=9.0, errors=1),
        load_record(turn=0, rate=3.0),
    ]
    results = Results(records)
    assert results.values("a", "x", "rate") == [3.0, 5.0]  # the first turn was repeated
    assert results.median("a", "x", "rate") == 4.0
    assert results.median("a", "y", "rate") is None
    assert nested_number({"a": {"b": 2}}, "a.b") == 2 and nested_number({"a": 1}, "a.b") is None


def test_hardware_bound_is_larger_of_bytes_and_operations():
    limits = Limits(**LIMITS)
    assert SIZE.weight_bytes("bf16") == 2200 and SIZE.weight_bytes("w8a8") == 1200
    assert SIZE.decode_seconds(limits, "bf16", 1, 0) == pytest.approx(2.2)  # bytes
    assert SIZE.decode_seconds(limits, "bf16", 100, 0) == pytest.approx(100 * 2200 / 4000)  # operations
    assert SIZE.prefill_seconds(limits, "w8a8", 100) < SIZE.prefill_seconds(limits, "bf16", 100)
    assert SIZE.prefill_seconds(limits, "bf16", 1) >= 2.2
    results = Results([load_record("p", load="c1"), load_record("p", load="c32")])
    assert best_possible(results, SIZE, "p", "c1", TPOT, "bf16") == pytest.approx(
        1e3 * SIZE.decode_seconds(limits, "bf16", 1, 288)
    )
    assert best_possible(results, SIZE, "p", "c1", TTFT, "bf16") == pytest.approx(
        1e3 * SIZE.prefill_seconds(limits, "bf16", 256)
    )
    alone = SIZE.prefill_seconds(limits, "bf16", 256)
    assert 0 < best_possible(results, SIZE, "p", "c32", RATE, "bf16") < 1 / alone
    assert best_possible(results, SIZE, "q", "c32", RATE, "bf16") is None


def test_bench_model_size_matches_its_file(tmp_path):
    from random_model import SHAPES
    from safetensors import safe_open

    write_model(tmp_path, SHAPES["tiny"])
    size = ModelSize.from_config(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        counts = {name: file.get_tensor(name).numel() for name in file.keys()}  # noqa: SIM118
    assert size.head == counts["model.embed_tokens.weight"]
    assert size.body == sum(count for name, count in counts.items() if name.endswith("_proj.weight"))


def test_bench_targets_name_measured_servers_and_loads():
    nothing = Results([])
    assert all(target.value(nothing) is None for target in list_targets({"0.5b": SIZE}))
    numbers = {"p50": 100.0, "p99": 200.0}
    result = {RATE: 2.0, "output_tokens_per_second": 2.0, "ttft_ms": numbers, "tpot_ms": numbers, "itl_ms": numbers}
    records = [
        load_record(peer, 0, load, **result, visitor={"p99_ms": 300.0}) for peer, p in PEERS.items() for load in p.loads
    ]
    for peer in PEERS:
        records += [
            {"kind": kind, "peer": peer, "turn": 0, "seconds": 2.0, "memory": 3000} for kind in ("ready", "end")
        ]
    all_targets = list_targets({"0.5b": SIZE})
    assert None not in [target.value(Results(records)) for target in all_targets]
    met = {target.what: target.meets_goal(target.value(Results(records))) for target in all_targets}
    assert not met["c32 req/s, bf16 over vLLM bf16"]  # the ratio is 1, the target 1.15
    assert met["c1 TPOT, bf16 over llama.cpp bf16"]  # the ratio is 1, the target at most 1


def test_memory_beyond_weights_excludes_kv_of_loads():
    records = [load_record(load="c1", prompt_tokens=10, cached_tokens=4, output_tokens=2, visitor={"tokens": 5})]
    records += [{"kind": "ready", "peer": "a", "memory": 5000}, {"kind": "end", "peer": "a", "memory": 600_000}]
    kv = (13 + START.requests * (START.own + START.output)) * SIZE.kv
    assert extra_bytes(Results(records), "a", SIZE, "bf16") == 600_000 - kv - SIZE.weight_bytes("bf16")
    records[-1]["memory"] = 100  # less than the KV cache: the value at the end is not usable
    assert extra_bytes(Results(records), "a", SIZE, "bf16") == 5000 - SIZE.weight_bytes("bf16")


def test_bench_prompts_have_set_lengths_and_shared_prefix():
    mix = LOADS["prefix"]
    warm, counted = draw_prompts(mix, list(range(1000)), "seed")
    assert (warm, len(counted)) == ([], mix.requests)
    assert {len(prompt) for prompt in counted} == {mix.shared + mix.own}
    assert len({tuple(prompt[: mix.shared]) for prompt in counted}) == 1
    assert len({tuple(prompt[mix.shared :]) for prompt in counted}) == mix.requests
    assert draw_prompts(mix, list(range(1000)), "seed")[1] == counted


def test_bench_reads_unstreamed_answer_as_one_event():
    assert list(WHOLE.split_events([(1.0, b'{"a"'), (2.0, b": 1}")])) == [(2.0, b'{"a": 1}'), (2.0, b"[DONE]")]
    assert list(WHOLE.split_events([])) == []


def test_agreement_counts_positions_and_common_prefix():
    before = VariantResult([[1, 2, 3, 4], [5, 6]], [[-1.0, -2.0], [-3.0]], 0)
    assert compare_results(before, before)["agreement"] == 1
    after = VariantResult([[1, 9, 3, 4], [5]], [[-1.5, -2.0], [-3.25]], 0)
    comparison = compare_results(before, after)
    assert (comparison["tokens"], comparison["agreement"], comparison["prefix"]) == (6, 4 / 6, 2 / 6)
    assert (comparison["difference"], comparison["worst"]) == (0.25, 0.5)


def test_report_replaces_only_the_named_part():
    page = "a\n<!-- bench:x -->\nold\n<!-- /bench:x -->\nb\n"
    assert fill_part(page, "x", r"new \1") == "a\n<!-- bench:x -->\nnew \\1\n<!-- /bench:x -->\nb\n"
    with pytest.raises(ValueError, match="part y 0 times"):
        fill_part(page, "y", "new")
    assert markdown_table(["h", "i"], [["1", "2"]]) == "| h | i |\n| --- | --- |\n| 1 | 2 |"


def test_report_page_has_every_part():
    page = PAGE.read_text("utf-8")
    for part in PARTS:
        fill_part(page, part, "")


def test_report_leaves_parts_without_results_as_they_are():
    for make in PARTS.values():
        with pytest.raises(LookupError):
            make(Results([]))


def test_report_page_shows_the_measured_tables():
    page = PAGE.read_text("utf-8")
    for part in PARTS:
        text = page.split(f"<!-- bench:{part} -->")[1].split(f"<!-- /bench:{part} -->")[0]
        assert any(character.isdigit() for line in text.splitlines()[3:] for character in line), part


def test_bench_chart_is_valid_svg_with_bars_to_scale():
    bars = [Bar("a < b & c", 10, 8, 12, True), Bar("d", 5, 5, 5, False)]
    picture = ElementTree.fromstring(draw_chart([Panel("<title>", bars), Panel("empty", [])]))
    widths = [float(rect.get("width")) for rect in picture.iter("{http://www.w3.org/2000/svg}rect")]
    assert widths[0] == pytest.approx(2 * widths[1], abs=0.2)
    words = [text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert words == ["<title>", "a < b & c", "10", "d", "5"]
    ElementTree.fromstring(draw_chart([]))
    assert [format_number(value) for value in (1234.5, 12.345, 0.01234)] == ["1,234", "12.3", "0.0123"]


def test_bench_clock_separates_own_cpu_time_from_others():
    assert os.getpid() in process_tree(os.getpid()) and tree_memory(os.getpid()) > 1 << 20
    a, b = CpuClock(0, 10, 4, 0), CpuClock(2, 13, 6, 1)
    assert (a.others_cores(b), a.stolen_cores(b)) == (0.5, 0.5)
