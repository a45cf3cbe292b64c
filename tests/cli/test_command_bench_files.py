"""``parley bench`` and files: data sets that it reads, charts that it draws, results that it compares."""

from __future__ import annotations

import json
import random
from xml.etree import ElementTree

import pytest

from parley.cli.load.chart import MeasuredLoad, draw_loads, draw_page
from parley.cli.load.compare import FEW_RUNS, UNKNOWN, WITHIN, CompareError, compare_files, noise_limit
from parley.cli.load.datasets import DatasetError, DatasetOrder, DatasetRow, output_length, read_dataset
from parley.cli.load.generator import RequestSample
from parley.cli.load.prompts import TokenPool, random_prompts
from parley.cli.load.summary import PARTS, summarize_load, summarize_parts, token_rates
from parley.cli.main import main
from parley.dialects.bench import BenchApi, LoadShape

TURNS = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "the lazy dog"}]
SHAREGPT = [
    {"id": "1", "conversations": [{"from": "system", "value": "s"}, {"from": "gpt", "value": "An answer first."}]},
    {"conversations": [{"from": "human", "value": "the dog"}, {"from": "gpt", "value": "the lazy fox jumps"}]},
]


def write_lines(path, *entries) -> str:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), "utf-8")
    return str(path)


def test_datasets_of_both_forms_are_read(tmp_path):
    sharegpt = tmp_path / "sharegpt.json"
    sharegpt.write_text(json.dumps(SHAREGPT, indent=1))
    assert read_dataset(str(sharegpt)) == [DatasetRow("the dog", answer="the lazy fox jumps")]
    lines = write_lines(
        tmp_path / "lines", {"prompt": "a\u2028b", "output_tokens": 7}, {"messages": TURNS, "max_tokens": 3}
    )
    assert read_dataset(lines) == [DatasetRow("a\u2028b", output_tokens=7), DatasetRow(messages=TURNS, output_tokens=3)]
    lengths = [output_length(row, 64, len) for row in (*read_dataset(str(sharegpt)), *read_dataset(lines))]
    assert lengths == [len("the lazy fox jumps"), 7, 3]
    assert output_length(DatasetRow("a"), 64, len) == 64


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "has no request"),
        ("[]", "has no request"),
        (json.dumps(SHAREGPT[:1]), "has no request"),
        ('{"prompt": "a"}\n{"prompt"', "line 2: this is not JSON"),
        ('[{"prompt": "a"}', "this is not JSON"),
        ("7", 'line 1: an entry is an object with one of "prompt"'),
        ('{"text": "a"}', "an entry is an object with one of"),
        ('{"prompt": "a", "messages": []}', "an entry is an object with one of"),
        ('[{"prompt": "a"}, {"prompt": [1]}]', 'entry 2: "prompt" must be a text'),
        ('{"prompt": ""}', '"prompt" must be a text that is not empty'),
        ('{"prompt": "a", "output_tokens": 0}', '"output_tokens" must be a whole number of at least 1'),
        ('{"prompt": "a", "max_tokens": true}', '"max_tokens" must be a whole number'),
        ('{"messages": []}', '"messages" must be a list of objects'),
        ('{"messages": [{"role": "user"}]}', '"messages" must be a list of objects'),
        ('[{"conversations": [{"from": "human"}]}]', '"conversations" must be a list of objects'),
        ("[" * 100_000, "this is not JSON"),
    ],
)
def test_malformed_datasets_are_refused_in_one_sentence(tmp_path, content, why):
    path = tmp_path / "set"
    path.write_text(content)
    with pytest.raises(DatasetError) as refused:
        read_dataset(str(path))
    assert why in str(refused.value) and "\n" not in str(refused.value)
    assert str(refused.value).startswith(str(path))


def test_dataset_order_has_every_row_before_any_again():
    rows = [DatasetRow(str(number)) for number in range(9)]
    order = DatasetOrder(rows, 3)
    drawn = order.draw_rows(4) + order.draw_rows(5)
    assert sorted(row.text for row in drawn) == [row.text for row in rows] and drawn != rows and not order.repeats
    assert order.draw_rows(4) == drawn[:4] and order.repeats
    assert DatasetOrder(rows, 3).draw_rows(9) == drawn


def test_prefixes_take_turns_in_random_prompts():
    config = {"prompt-len": 12, "shared-prefix": 8, "num-prefixes": 3, "images": 0}
    api = BenchApi("/", lambda shape, prompt: {}, lambda data: None)
    prompts = random_prompts(TokenPool(dict.fromkeys(range(1000), "")), config, api, 7, "seed")
    assert {len(prompt) for prompt in prompts} == {12}
    assert len({tuple(prompt[:8]) for prompt in prompts}) == 3 and len({tuple(prompt) for prompt in prompts}) == 7
    assert prompts[0][:8] == prompts[3][:8] == prompts[6][:8]


def test_bench_sends_a_dataset_and_draws_a_chart(parley, url, tmp_path):
    lines = write_lines(
        tmp_path / "set.jsonl",
        {"messages": TURNS, "output_tokens": 3},
        {"prompt": "the fox"},
        {"conversations": [{"from": "human", "value": "the dog"}, {"from": "gpt", "value": "the lazy fox"}]},
    )
    page = tmp_path / "chart.html"
    load = ("--concurrency", "1", "--requests", "3", "--warm-up", "0", "--json", "--plot", str(page))
    done = parley("bench", "--url", url, "--api", "chat", "--dataset", lines, *load)
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    assert (result["dataset"], result["requests"], result["errors"], result["short"]) == ("set.jsonl", 3, 0, 0)
    answer = result["output_tokens"] - 3 - 64  # of the row without a length, 64
    assert 3 <= answer <= len("the lazy fox")
    assert "1 at once" in page.read_text() and page.read_text().count("<polyline") >= 4


@pytest.mark.parametrize(
    ("flags", "code", "why"),
    [
        (("--dataset", "absent.json"), 1, "absent.json cannot be read"),
        (("--dataset", "a", "--prompt-len", "3"), 2, "--prompt-len and --dataset cannot be combined."),
        (("--num-prefixes", "2"), 2, "--num-prefixes needs --shared-prefix"),
        (("--plot", "chart.png"), 2, "must end in .svg or .html"),
        (("--plot", "/absent/chart.svg"), 2, "the folder of '/absent/chart.svg' does not exist"),
        (("--compare", "absent.json"), 2, "Name two files"),
        (("absent.json",), 2, "Name two files"),
        (("--compare", "absent.json", "b.json"), 1, "absent.json cannot be read"),
        (("--compare", "a", "b", "--output-len", "3"), 2, "--output-len and --compare cannot be combined."),
    ],
)
def test_bench_refuses_files_and_options_that_it_cannot_use(capsys, flags, code, why):
    assert main(["bench", *flags]) == code
    shown = capsys.readouterr()
    assert why in shown.err and not shown.out


# -- charts


def make_samples(count: int, seed: int, step: float = 0.01) -> list[RequestSample]:
    """Requests one after the other, of five tokens with about ``step`` seconds between them."""
    random_, now, samples = random.Random(seed), 100.0, []
    for _ in range(count):
        arrivals = [now := now + step * random_.uniform(0.9, 1.1) for _ in range(5)]
        start = samples[-1].end if samples else 100.0
        samples.append(RequestSample(start, now, 200, arrivals=arrivals, prompt_tokens=4, tokens=5))
    return samples


def make_result(seed: int, step: float = 0.01, count: int = 40, **members) -> dict:
    samples = make_samples(count, seed, step)
    wall = samples[-1].end - samples[0].start
    summary = summarize_load(samples, wall, 1, LoadShape("m", 5, 1.0))
    return summary | {"prompt_len": 4, "output_len": 5, "parts": summarize_parts(samples, wall)} | members


def test_charts_are_valid_and_escape_names():
    samples = make_samples(30, 1)
    loads = [MeasuredLoad(f"<{number}>", samples, 1.6) for number in range(10)]
    svg = draw_loads(loads)
    root = ElementTree.fromstring(svg)
    lines = root.findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 10 * 5 and len({line.get("stroke") + line.get("stroke-dasharray", "") for line in lines}) == 10
    width, height = map(float, root.get("viewBox").split()[2:])
    for line in lines:
        points = [tuple(map(float, point.split(","))) for point in line.get("points").split()]
        assert all(0 <= x <= width and 0 <= y <= height for x, y in points)
        assert [x for x, _ in points] == sorted(x for x, _ in points)
    assert "&lt;0&gt;" in svg and "<0>" not in svg
    assert "&lt;table&gt;" in draw_page(loads, "<table>")
    failed = MeasuredLoad("failed", [RequestSample(0.0, 1.0, error="no")], 1.0)
    ElementTree.fromstring(draw_loads([failed]))
    same = MeasuredLoad("same", [RequestSample(0.0, 0.5, arrivals=[0.5, 0.5], tokens=2)], 0.5)
    ElementTree.fromstring(draw_loads([same]))


def test_rates_count_every_token_once():
    samples = make_samples(30, 2)
    wall = samples[-1].end - samples[0].start
    for count in (1, 7, 50):
        rates = token_rates(samples, samples[0].start, wall, count)
        assert sum(rates) * wall / count == pytest.approx(150)


# -- comparisons


def test_comparison_tells_differences_from_noise(tmp_path, capsys):
    same = write_lines(tmp_path / "a.json", make_result(1))
    again = write_lines(tmp_path / "b.json", make_result(2))
    slower = write_lines(tmp_path / "c.json", make_result(3, step=0.02))
    (comparison,) = compare_files(same, again)
    assert (comparison.load, comparison.runs) == ("1 at once, prompt 4, output 5", (1, 1))
    assert {difference.verdict for difference in comparison.differences} == {WITHIN}
    verdicts = {difference.measure: difference.verdict for difference in compare_files(same, slower)[0].differences}
    assert set(verdicts.values()) == {"worse"} and {"TTFT p99, ms", "output tokens/s"} <= verdicts.keys()
    assert {difference.verdict for difference in compare_files(slower, same)[0].differences} == {"better"}
    (ratio,) = [
        difference.ratio
        for difference in compare_files(same, slower)[0].differences
        if difference.measure == "TPOT p50, ms"
    ]
    assert ratio == pytest.approx(2, rel=0.05)
    assert main(["bench", "--compare", same, slower]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[:2] == [f"A: {same}", f"B: {slower}"] and sum(line.endswith(" worse") for line in table) == 10
    assert FEW_RUNS in "\n".join(table)
    assert main(["bench", "--compare", same, slower, "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0])["verdict"] == "worse"


def test_comparison_prefers_the_spread_of_three_runs(tmp_path):
    steady = [make_result(seed) for seed in (1, 2, 3)]
    varying = [make_result(seed, step) for seed, step in ((4, 0.008), (5, 0.02), (6, 0.013))]
    files = [write_lines(tmp_path / name, *runs) for name, runs in (("a", steady), ("b", varying), ("c", varying[2:]))]
    assert {difference.verdict for difference in compare_files(files[0], files[1])[0].differences} == {WITHIN}
    assert "worse" in {difference.verdict for difference in compare_files(files[0], files[2])[0].differences}
    few = write_lines(tmp_path / "d", make_result(7, count=PARTS))
    assert {difference.verdict for difference in compare_files(files[0], few)[0].differences} == {UNKNOWN}


def test_noise_limit_follows_welch():
    assert noise_limit([1.0, 2.0], [1.0, 2.0, 3.0]) is None
    assert noise_limit([1.0, 2.0, 3.0], [5.0, 5.0, 5.0]) == pytest.approx(9.925 * (1 / 3) ** 0.5)
    assert noise_limit([2.0] * 3, [2.0] * 3) == 0


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ([], "has no result"),
        ([{"concurrency": 1}], "line 1: this is not a result of"),
        ([make_result(1), [1]], "line 2: this is not a result of"),
        ([make_result(1, parts=7)], "this is not a result of"),
        ([make_result(1, ttft_ms={"p50": "fast"})], "this is not a result of"),
        ([make_result(1, concurrency=[1])], "this is not a result of"),
        ([make_result(1, concurrency=8)], "a load that"),
        ([make_result(1), make_result(1, dataset="x")], "does not have: 1 at once, x."),
        ([make_result(1, slo={"ttft": 0.5})], "within different limits"),
    ],
)
def test_unequal_results_are_refused_in_one_sentence(tmp_path, other, why):
    first, second = write_lines(tmp_path / "a", make_result(1)), write_lines(tmp_path / "b", *other)
    with pytest.raises(CompareError) as refused:
        compare_files(first, second)
    assert why in str(refused.value) and "\n" not in str(refused.value)
