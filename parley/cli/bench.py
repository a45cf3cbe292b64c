"""``parley bench``: measures latency and throughput of a running server. The parts of a load are in ``load``.

Prompts are random tokens of exact length, which differ in every request, so that the prefix cache hits only on
``--shared-prefix``; or they come from a data set.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from parley.cli.client import ClientError, OpenAIClient, client_from_options
from parley.cli.load.compare import CompareError, compare_files, format_comparison
from parley.cli.load.datasets import DatasetError, DatasetOrder, DatasetRow, output_length, read_dataset
from parley.cli.load.prompts import fetch_token_pool, random_prompts, request_tokens
from parley.settings.config import CLIENT_OPTIONS
from parley.settings.option_kinds import (
    choice_kind,
    duration_kind,
    integer_kind,
    number_kind,
    pattern_kind,
    switch_kind,
    text_kind,
)
from parley.settings.options import ConfigError, Option, ResolvedOptions, did_you_mean

if TYPE_CHECKING:
    from parley.cli.load.chart import MeasuredLoad
    from parley.cli.load.generator import PromptRow, RequestSample
    from parley.dialects.bench import BenchApi

T = TypeVar("T")
TakePrompts = Callable[[int, str], Sequence[Any]]  # a count and a seed: that many prompts
Measurement = tuple[dict[str, Any], "MeasuredLoad"]

# Named here because --help must not import the dialects; a test compares this with the APIs that declare a bench.
BENCH_APIS = ("openai", "chat", "tgi", "triton", "vllm", "mindie", "ollama", "messages", "responses", "cohere")

DEFAULT_OUTPUT = 64  # tokens
WARM_OUTPUT = 8  # tokens: enough to run every kind of step once
LENGTHS = ("prompt-len", "output-len", "shared-prefix", "num-prefixes")
RANDOM_ONLY = ("prompt-len", "shared-prefix", "num-prefixes", "images", "image-size", "same-images")

USAGE = """\
usage: parley bench [options]
       parley bench --compare A.json B.json

Sends streaming requests to a running server and prints latencies and rates. Exit code 1 if any request failed.
With --compare it sends nothing, and compares the results that --json printed into two files."""

OPTIONS = [
    Option("model", text_kind("NAME"), "The server's model to measure.", unset_text="its first", section="load"),
    Option("api", choice_kind(*BENCH_APIS), "API to speak.", "openai", section="load"),
    Option(
        "concurrency",
        integer_kind(1, 10_000),
        "Concurrent requests; a list, as 1,8,32.",
        [1, 8],
        section="load",
        repeatable=True,
    ),
    Option(
        "requests",
        integer_kind(1),
        "Requests per concurrency.",
        section="load",
        unset_text="4 per concurrent request, at least 16",
    ),
    Option(
        "request-rate",
        number_kind(0.001, 1_000_000),
        "Send requests at random times (a Poisson process), this many per second, however many are under way; instead "
        "of --concurrency.",
        section="load",
    ),
    Option("prompt-len", integer_kind(1), "Prompt length in tokens.", 256, section="load"),
    Option("output-len", integer_kind(1), "Output length in tokens.", DEFAULT_OUTPUT, section="load"),
    Option("shared-prefix", integer_kind(0), "Leading tokens that prompts share.", 0, section="load"),
    Option(
        "num-prefixes",
        integer_kind(1),
        "Number of such prefixes, which take turns in the prompts.",
        1,
        section="load",
    ),
    Option(
        "dataset",
        text_kind("FILE"),
        "Prompts from a file in random order: ShareGPT's JSON, or lines of JSON with prompt or messages and, if you "
        "like, output_tokens. --output-len overrides its lengths.",
        section="load",
        unset_text="random prompts",
    ),
    Option(
        "warm-up",
        integer_kind(0),
        "Requests before the measurement.",
        section="load",
        unset_text="one per concurrent request",
    ),
    Option("images", integer_kind(0), "Images per request, all different; needs --api chat.", 0, section="load"),
    Option("image-size", integer_kind(1, 8192), "Width and height of an image, in pixels.", 448, section="load"),
    Option("same-images", switch_kind(), "All requests have the same images.", False, section="load"),
    Option("seed", integer_kind(0), "The same seed gives the same prompts.", 0, section="load"),
    Option("timeout", duration_kind(), "Time limit of one request.", 600.0, section="load"),
    Option(
        "slo",
        pattern_kind(r"(ttft|tpot|latency)=\d+(\.\d+)?(ms|s)", "NAME=TIME", "ttft=TIME, tpot=TIME or latency=TIME"),
        "Count the requests that keep limits: time to the first token, time per token after it, time of the whole "
        "request; a list, as ttft=500ms,tpot=50ms.",
        section="output",
        repeatable=True,
    ),
    Option("json", switch_kind(), "Print JSON, one line per concurrency.", False, section="output"),
    Option(
        "plot",
        text_kind("FILE"),
        "Draw the distributions of latencies, and tokens per second over time, into FILE.svg or FILE.html.",
        section="output",
    ),
    Option(
        "compare",
        text_kind("A.json"),
        "Compare the results of two files, and say which differences are within the noise.",
        section="output",
    ),
    Option("b.json", text_kind("B.json"), "The file to compare with.", positional=True, section="output"),
    *CLIENT_OPTIONS,
]


def run_command(config: ResolvedOptions) -> int:
    """Measure the server at each concurrency and print a row for each, or compare results.

    Return 1 if any request failed, or if a file or the server cannot be used.
    """
    if config["compare"] or config["b.json"]:
        return _compare_results(config)
    _check_options(config)
    client = client_from_options(config)
    try:
        rows = read_dataset(config["dataset"]) if config["dataset"] else None
        names = client.list_models()
        name = config["model"] or (names[0] if names else "")
        if name not in names:
            raise ClientError(f"The server has no model {name}.{did_you_mean(name, names)}")
        if rows is None:
            return _report_loads(config, client, name, _random_source(config, client, name))
        if any(row.messages for row in rows) and not bench_api(config).is_chat:
            raise DatasetError(f"{config['dataset']} has messages: they need an API of conversations, as --api chat.")
        order = DatasetOrder(rows, config["seed"])
        failed = _report_loads(config, client, name, _dataset_source(config, client, name, order))
        if order.repeats:
            text = (
                f"The data set has {len(rows)} requests, fewer than were sent: repeated ones may hit the prefix cache."
            )
            print(f"parley: {text}", file=sys.stderr)
        return failed
    except (ClientError, DatasetError) as error:
        print(f"parley: {error}", file=sys.stderr)
        return 1


def _check_options(config: ResolvedOptions) -> None:
    """Raise ConfigError for options that do not go together."""
    for name in RANDOM_ONLY if config["dataset"] else ():
        if config.is_set(name):
            raise ConfigError(f"--{name} and --dataset cannot be combined.")
    if config["shared-prefix"] > config["prompt-len"]:
        raise ConfigError(f"--shared-prefix must be at most --prompt-len, which is {config['prompt-len']}.")
    if config["num-prefixes"] > 1 and not config["shared-prefix"]:
        raise ConfigError("--num-prefixes needs --shared-prefix, the length of each in tokens.")
    if config["images"] and config["api"] != "chat":
        raise ConfigError("--images needs --api chat.")
    if plot := config["plot"]:
        if not plot.endswith((".svg", ".html")):
            raise ConfigError(f"--plot: {plot!r} must end in .svg or .html.")
        if not Path(plot).absolute().parent.is_dir():
            raise ConfigError(f"--plot: the folder of {plot!r} does not exist.")


def _compare_results(config: ResolvedOptions) -> int:
    first, second = config["compare"], config["b.json"]
    if not first or not second:
        raise ConfigError("Name two files, as in --compare A.json B.json.")
    for name in config:
        if config.is_set(name) and name not in ("compare", "b.json", "json"):
            raise ConfigError(f"--{name} and --compare cannot be combined.")
    try:
        loads = compare_files(first, second)
    except CompareError as error:
        print(f"parley: {error}", file=sys.stderr)
        return 1
    if not config["json"]:
        print(format_comparison(first, second, loads))
        return 0
    for comparison in loads:
        for difference in comparison.differences:
            print(json.dumps({"load": comparison.load, "runs": comparison.runs, **vars(difference)}))
    return 0


def _report_loads(config: ResolvedOptions, client: OpenAIClient, model: str, take_prompts: TakePrompts) -> int:
    """Measure all loads and print their results. Return 1 if any request failed. Raises ClientError."""
    lines = [TABLE_HEADER]
    loads = []
    failed = 0
    if not config["json"]:
        print(TABLE_HEADER)
    for result, load in _measure_loads(config, client, model, take_prompts):
        failed += result["errors"]
        loads.append(load)
        lines.append(format_row(result))
        print(json.dumps(result) if config["json"] else lines[-1], flush=True)
        for line in result_warnings(result, config["images"]):
            print(f"parley: {line}", file=sys.stderr)
    if config["plot"]:
        _write_chart(config["plot"], loads, "\n".join(lines))
    return 1 if failed else 0


def _write_chart(path: str, loads: Sequence[MeasuredLoad], table: str) -> None:
    from parley.cli.load.chart import draw_loads, draw_page

    try:
        Path(path).write_text(draw_page(loads, table) if path.endswith(".html") else draw_loads(loads), "utf-8")
    except OSError as error:
        raise ClientError(f"{path} cannot be written: {error.strerror}.") from None


def _random_source(config: ResolvedOptions, client: OpenAIClient, model: str) -> TakePrompts:
    """Return a source of random prompts. Raises ClientError if the server cannot tell tokens."""
    api = bench_api(config)
    pool = fetch_token_pool(client, model, api)
    if config["shared-prefix"] > config["prompt-len"] - pool.added_tokens or pool.added_tokens >= config["prompt-len"]:
        raise ClientError(f"This API adds {pool.added_tokens} tokens to every prompt: increase --prompt-len.")
    return lambda count, seed: random_prompts(pool, config, api, count, seed)


def _dataset_source(config: ResolvedOptions, client: OpenAIClient, model: str, order: DatasetOrder) -> TakePrompts:
    """Return a source of the prompts of a data set, which ignores the seed. It raises ClientError."""
    from parley.cli.load.generator import PromptRow

    def count_tokens(text: str) -> int:
        tokens = request_tokens(client, {"model": model, "prompt": text, "add_special_tokens": False})["tokens"]
        if not tokens:
            raise ClientError(f"{client.address} has no /tokenize that gives the length of answers: set --output-len.")
        return len(tokens)

    def prepare_row(row: DatasetRow) -> PromptRow:
        fixed = config["output-len"] if config.is_set("output-len") else None
        return PromptRow(fixed or output_length(row, DEFAULT_OUTPUT, count_tokens), row.text, row.messages)

    return lambda count, _: [prepare_row(row) for row in order.draw_rows(count)]


def _measure_loads(
    config: ResolvedOptions, client: OpenAIClient, model: str, take_prompts: TakePrompts
) -> Iterator[Measurement]:
    import asyncio

    import uvloop

    from parley.cli.load.chart import MeasuredLoad
    from parley.cli.load.generator import LoadGenerator, poisson_starts
    from parley.cli.load.summary import summarize_load
    from parley.dialects.bench import LoadShape

    keys = config["api-key"]
    dataset = Path(config["dataset"]).name if config["dataset"] else None
    lengths = {name.replace("-", "_"): None if dataset else config[name] for name in LENGTHS}
    if dataset and config.is_set("output-len"):
        lengths["output_len"] = config["output-len"]
    limits = dict(_read_limit(text) for text in config["slo"])

    def make_load(output: int) -> LoadGenerator:
        shape = LoadShape(model, output, config["timeout"])
        return LoadGenerator(client.address, keys[0] if keys else None, shape, bench_api(config))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        rate = config["request-rate"]
        for concurrency in config["concurrency"] if rate is None else [1]:
            count = config["requests"] or max(16 if rate is None else 64, 4 * concurrency)
            warm = concurrency if config["warm-up"] is None else config["warm-up"]
            if warm:  # with another prefix, so that the first measured request has no prefix hit
                warming = _shorten_outputs(take_prompts(warm, f"warm {config['seed']} {concurrency}"))
                runner.run(make_load(min(WARM_OUTPUT, config["output-len"])).run_load(warming, concurrency))
            measured = make_load(config["output-len"])
            batch = take_prompts(count, f"{config['seed']} {concurrency}")
            samples: list[RequestSample] = []
            if rate is None:
                load = measured.run_load(batch, concurrency, samples)
            else:
                load = measured.run_arrivals(batch, poisson_starts(count, rate, str(config["seed"])), samples)
            _, wall = runner.run(_with_progress(load, samples, count))
            result = {
                "model": model,
                "api": config["api"],
                "dataset": dataset,
                **lengths,
                "seed": config["seed"],
                **summarize_load(samples, wall, concurrency, measured.shape),
            }
            if rate is not None:
                result |= {"request_rate": rate, "concurrency": None}
            result |= _goodput_members(samples, wall, limits)
            load_name = f"{concurrency} at once" if rate is None else f"{rate:g} requests/s"
            yield result, MeasuredLoad(load_name, samples, wall)


def _goodput_members(samples: Sequence[RequestSample], wall: float, limits: Mapping[str, float]) -> dict[str, Any]:
    """Return how many requests of a load of ``wall`` seconds met the limits, and the same for its parts."""
    from parley.cli.load.summary import count_within, summarize_parts

    parts = {"parts": summarize_parts(samples, wall, limits)}
    if not limits:
        return parts
    within = count_within(samples, limits)
    return {"slo": limits, "within_slo": within, "goodput": round(within / wall, 3), **parts}


def _shorten_outputs(prompts: Sequence[Any]) -> list[Any]:
    """Return the prompts with output lengths of a warm-up, where they have any of their own."""
    from parley.cli.load.generator import PromptRow

    return [
        replace(prompt, output_tokens=min(WARM_OUTPUT, prompt.output_tokens))
        if isinstance(prompt, PromptRow)
        else prompt
        for prompt in prompts
    ]


def _read_limit(text: str) -> tuple[str, float]:
    """Return the name and the seconds of a limit such as ttft=500ms."""
    name, _, value = text.partition("=")
    return name, float(duration_kind().parse_raw(value))


async def _with_progress(load: Coroutine[Any, Any, T], samples: Sequence[RequestSample], count: int) -> T:
    """Return the result of a load. In a terminal, show how many of its requests are done."""
    import asyncio

    if not sys.stderr.isatty():
        return await load
    task = asyncio.ensure_future(load)
    while not (await asyncio.wait({task}, timeout=0.2))[0]:
        finished_count = sum(bool(sample.end) for sample in samples)
        sys.stderr.write(
            f"\r\x1b[K  {finished_count} of {count} requests are done, {len(samples) - finished_count} under way"
        )
        sys.stderr.flush()
    sys.stderr.write("\r\x1b[K")
    return task.result()


def bench_api(config: ResolvedOptions) -> BenchApi:
    """Return the API that the option ``api`` names."""
    from parley.cli.apis import BENCHED_APIS

    return BENCHED_APIS[config["api"]]


COLUMNS = (("TTFT ms", "ttft_ms"), ("TPOT ms", "tpot_ms"), ("ITL ms", "itl_ms"))
TABLE_HEADER = (
    f"{'at once':>7} {'requests':>8} {'errors':>6}  "
    + "  ".join(f"{name + ' p50':>11} {'p99':>8}" for name, _ in COLUMNS)
    + f"  {'tok/s each p50':>14} {'p99':>7}  {'all':>8} {'req/s':>7}"
)


def format_row(result: dict[str, Any]) -> str:
    """Return one line of the table."""
    times = "  ".join(
        f"{_format_number(result[key]['p50']):>11} {_format_number(result[key]['p99']):>8}" for _, key in COLUMNS
    )
    load = f"{result['request_rate']:g}/s" if result["concurrency"] is None else result["concurrency"]
    head = f"{load:>7} {result['requests']:>8} {result['errors']:>6}"
    rate_quantiles = result["each_tokens_per_second"]
    rates = (
        f"{_format_number(rate_quantiles['p50']):>14} {_format_number(rate_quantiles['p99']):>7}  "
        f"{result['output_tokens_per_second']:>8.1f}"
    )
    goodput = f"  {result['goodput']:.2f} req/s within the SLO" if "goodput" in result else ""
    return f"{head}  {times}  {rates} {result['requests_per_second']:>7.2f}{goodput}"


def _format_number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def result_warnings(result: dict[str, Any], images: int = 0) -> list[str]:
    """Return the reasons to distrust a result: failures, short answers, unexpected prompt lengths."""
    lines = [f"{count} requests failed: {reason}" for reason, count in result["reasons"].items()]
    good = result["requests"] - result["errors"]
    if result["short"]:
        lengths = "tokens than requested" if result["output_len"] is None else f"than {result['output_len']} tokens"
        lines.append(f"{result['short']} answers had fewer {lengths}.")
    length = result["prompt_len"]
    if good and length and not images and result["prompt_tokens"] != good * length:
        lines.append(f"The server counted {result['prompt_tokens']} prompt tokens, not {good * length}.")
    return lines
