"""``parley bench``: measures latency and throughput of a running server. The load generator is in ``load``.

Prompts are random tokens of exact length, drawn from the tokens that the server's ``/tokenize`` returns for a text.
They differ in every request, so the prefix cache hits only on ``--shared-prefix``.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from parley.cli.bench_images import add_random_images
from parley.cli.client import ClientError, OpenAIClient, client_from_options
from parley.settings.config import CLIENT_OPTIONS
from parley.settings.kinds import choice_kind, duration_kind, integer_kind, switch_kind, text_kind
from parley.settings.options import ConfigError, Option, ResolvedOptions, did_you_mean

if TYPE_CHECKING:
    from parley.dialects.bench import BenchApi

# Named here because --help must not import the dialects; a test compares this with the APIs that declare a bench.
BENCH_APIS = ("openai", "chat", "tgi", "triton", "vllm", "mindie", "ollama", "messages", "responses")

USAGE = """\
usage: parley bench [options]

Sends streaming requests to a running server and prints latencies and rates. Exit code 1 if any request failed."""

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
        unset_text="4 for each at once, 16 or more",
    ),
    Option("prompt-len", integer_kind(1), "Prompt length in tokens.", 256, section="load"),
    Option("output-len", integer_kind(1), "Output length in tokens.", 64, section="load"),
    Option("shared-prefix", integer_kind(0), "Leading tokens that all prompts share.", 0, section="load"),
    Option(
        "warm-up",
        integer_kind(0),
        "Requests before the measurement.",
        section="load",
        unset_text="one for each at once",
    ),
    Option("images", integer_kind(0), "Pictures per request, all different; needs --api chat.", 0, section="load"),
    Option("image-size", integer_kind(1, 8192), "Width and height of a picture in pixels.", 448, section="load"),
    Option("same-images", switch_kind(), "All requests have the same pictures.", False, section="load"),
    Option("seed", integer_kind(0), "The same seed gives the same prompts.", 0, section="load"),
    Option("timeout", duration_kind(), "Time limit of one request.", 600.0, section="load"),
    Option("json", switch_kind(), "Print JSON, one line per concurrency.", False, section="output"),
    *CLIENT_OPTIONS,
]

SAMPLE_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information "
    "back parent face others level office door health person art war history party result change morning reason"
)
WORD_SPACES = ("Ġ", "▁")  # the space before a word, in vocabularies
WARM_OUTPUT = 8  # tokens: enough to run every kind of step once


def run(config: ResolvedOptions) -> int:
    """Measure the server at each concurrency and print a row for each. Return 1 if any request failed."""
    if config["shared-prefix"] > config["prompt-len"]:
        raise ConfigError(f"--shared-prefix must be at most --prompt-len, which is {config['prompt-len']}.")
    if config["images"] and config["api"] != "chat":
        raise ConfigError("--images needs --api chat.")
    client = client_from_options(config)
    try:
        names = client.list_models()
        name = config["model"] or (names[0] if names else "")
        if name not in names:
            raise ClientError(f"The server has no model {name}.{did_you_mean(name, names)}")
        pool = _fetch_token_pool(client, name, bench_api(config))
        if (
            config["shared-prefix"] > config["prompt-len"] - pool.added_tokens
            or pool.added_tokens >= config["prompt-len"]
        ):
            raise ClientError(f"This API adds {pool.added_tokens} tokens to every prompt: increase --prompt-len.")
    except ClientError as error:
        print(f"parley: {error}", file=sys.stderr)
        return 1
    failed = 0
    if not config["json"]:
        print(TABLE_HEADER)
    for result in _measure_loads(config, client, name, pool):
        failed += result["errors"]
        print(json.dumps(result) if config["json"] else format_row(result), flush=True)
        for line in result_warnings(result, config):
            print(f"parley: {line}", file=sys.stderr)
    return 1 if failed else 0


@dataclass(frozen=True)
class TokenPool:
    """The tokens that prompts are made of: ids of ordinary words, with their texts if the API takes only text.

    ``added_tokens``: number of tokens that the server adds around such a text.
    """

    pieces: dict[int, str]
    added_tokens: int = 0

    def make_prompt(self, ids: list[int], api: BenchApi) -> list[int] | str:
        """Return a prompt of these tokens: ids, or their text if the API takes only text."""
        return ids if api.takes_token_ids else "".join(self.pieces[token_id] for token_id in ids)


def _fetch_token_pool(client: OpenAIClient, model: str, api: BenchApi) -> TokenPool:
    """Ask the server for usable tokens. Raises ClientError if its ``/tokenize`` does not return enough."""
    words = {"model": model, "prompt": SAMPLE_WORDS, "add_special_tokens": False, "return_token_strs": True}
    answer = _tokenize(client, words)
    pieces = dict(zip(answer["tokens"], answer.get("token_strs") or [""] * len(answer["tokens"]), strict=False))
    if not api.takes_token_ids:  # a piece that begins a word is the same token in any context
        pieces = {
            token_id: " " + piece[1:]
            for token_id, piece in pieces.items()
            if piece[:1] in WORD_SPACES and len(piece) > 1
        }
    if len(pieces) < 2:
        raise ClientError(f"{client.address} has no /tokenize that gives token ids; prompts of exact length need it.")
    pool = TokenPool(dict(sorted(pieces.items())))
    if api.takes_token_ids:
        return pool
    sample = list(pool.pieces) * 8
    text = pool.make_prompt(sample, api)
    prompt_body = {"messages": [{"role": "user", "content": text}]} if api.is_chat else {"prompt": text}
    return TokenPool(pool.pieces, len(_tokenize(client, {"model": model, **prompt_body})["tokens"]) - len(sample))


def _tokenize(client: OpenAIClient, body: dict[str, Any]) -> dict[str, Any]:
    try:
        answer = client.call_json("POST", "/tokenize", body)
        result: dict[str, Any] = answer | {"tokens": [int(token) for token in answer["tokens"]]}
        return result
    except ClientError as error:
        if error.status != 404:
            raise
    except (KeyError, TypeError, ValueError):
        pass
    return {"tokens": []}


def _measure_loads(
    config: ResolvedOptions, client: OpenAIClient, model: str, pool: TokenPool
) -> Iterator[dict[str, Any]]:
    import asyncio

    import uvloop

    from parley.cli.load import LoadGenerator, summarize_load
    from parley.dialects.bench import LoadShape

    keys = config["api-key"]
    lengths = {name.replace("-", "_"): config[name] for name in ("prompt-len", "output-len", "shared-prefix", "seed")}

    def make_load(output: int) -> LoadGenerator:
        shape = LoadShape(model, output, config["timeout"])
        return LoadGenerator(client.address, keys[0] if keys else None, shape, bench_api(config))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for concurrency in config["concurrency"]:
            count = config["requests"] or max(16, 4 * concurrency)
            warm = concurrency if config["warm-up"] is None else config["warm-up"]
            if warm:  # with another prefix, so that the first measured request has no prefix hit
                warming = random_prompts(pool, config, warm, f"warm {config['seed']} {concurrency}")
                runner.run(make_load(min(WARM_OUTPUT, config["output-len"])).run_load(warming, concurrency))
            measured = make_load(config["output-len"])
            batch = random_prompts(pool, config, count, f"{config['seed']} {concurrency}")
            samples, wall = runner.run(measured.run_load(batch, concurrency))
            yield {
                "model": model,
                "api": config["api"],
                **lengths,
                **summarize_load(samples, wall, concurrency, measured.shape),
            }


def bench_api(config: ResolvedOptions) -> BenchApi:
    """Return the API that the option ``api`` names."""
    from parley.cli.apis import BENCHED_APIS

    return BENCHED_APIS[config["api"]]


def random_prompts(pool: TokenPool, config: ResolvedOptions, count: int, seed: str) -> list[Any]:
    """Return random prompts of exactly ``prompt-len`` tokens. All share the first ``shared-prefix`` tokens.

    Pictures come before the text and in addition to its length.
    """
    random_, api, ids = random.Random(seed), bench_api(config), list(pool.pieces)
    shared = random_.choices(ids, k=config["shared-prefix"])
    own = config["prompt-len"] - len(shared) - pool.added_tokens
    prompts = [pool.make_prompt(shared + random_.choices(ids, k=own), api) for _ in range(count)]
    if not config["images"]:
        return prompts
    picture_seeds = [seed if config["same-images"] else f"{seed} {number}" for number in range(count)]
    return [
        add_random_images(str(prompt), config["images"], config["image-size"], random.Random(picture_seed))
        for prompt, picture_seed in zip(prompts, picture_seeds, strict=True)
    ]


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
    head = f"{result['concurrency']:>7} {result['requests']:>8} {result['errors']:>6}"
    rate_quantiles = result["each_tokens_per_second"]
    rates = (
        f"{_format_number(rate_quantiles['p50']):>14} {_format_number(rate_quantiles['p99']):>7}  "
        f"{result['output_tokens_per_second']:>8.1f}"
    )
    return f"{head}  {times}  {rates} {result['requests_per_second']:>7.2f}"


def _format_number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def result_warnings(result: dict[str, Any], config: ResolvedOptions) -> list[str]:
    """Return the reasons to distrust a result: failures, short answers, unexpected prompt lengths."""
    lines = [f"{count} requests failed: {reason}" for reason, count in result["reasons"].items()]
    good = result["requests"] - result["errors"]
    if result["short"]:
        lines.append(f"{result['short']} answers had fewer than {config['output-len']} tokens.")
    if good and not config["images"] and result["prompt_tokens"] != good * config["prompt-len"]:
        lines.append(f"The server counted {result['prompt_tokens']} prompt tokens, not {good * config['prompt-len']}.")
    return lines
