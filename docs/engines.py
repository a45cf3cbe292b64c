"""Writes docs/engines.md, whose tables follow from the features and bounds of each engine: ``make docs``."""

from __future__ import annotations

from math import inf
from pathlib import Path

from parley.engine.vllm_engine import TESTED_VERSIONS
from parley.types import ALL_ENGINE_FEATURES, EngineFeature
from parley.worker.attached.server_facts import DEFAULT_MAX_LOGPROBS, FEATURE_PROBES, MISSING_FEATURES
from parley.worker.vllm.capabilities import (
    BOUNDS,
    MISSING_WITH_CPU_ADAPTERS,
    MISSING_WITH_SPECULATION,
    PLUGIN_FEATURES,
    vllm_features,
)

PAGE = Path(__file__).with_suffix(".md")
FIRST, LAST = (f"{major}.{minor}" for major, minor in TESTED_VERSIONS)
TEXT = f"""\
# Engines: parley's own, and vLLM

<!-- Made by docs/engines.py; change it there. -->

For operators who choose an engine, or run vLLM behind parley.

parley has its own engine and can use vLLM instead. It either starts vLLM itself or connects to running vLLM servers.
The APIs, errors, limits, tools, grammars and the coordinator are the same with every engine.

| | parley's engine | vLLM | a vLLM server |
|---|---|---|---|
| Use it for | CPUs; answers whose bits depend on nothing else | GPUs and \
other accelerators; models that need several of them (tensor, pipeline, expert, data parallel) | servers that run \
already |
| Starts in | seconds | a minute or more | seconds |
| Needs | nothing else | an environment with vLLM {FIRST} to {LAST} | the address of vLLM {FIRST} to {LAST}, and the \
model's tokenizer |

## Start

vLLM needs other versions of libraries than parley, so install it into a separate environment:

```sh
python3 -m venv vllm && vllm/bin/pip install vllm av
parley serve Qwen/Qwen3-8B --engine vllm --engine-python vllm/bin/python -- --tensor-parallel-size 2
```

Everything after `--` goes to vLLM's own parser. In a configuration file or an environment variable, the same flags are
`engine-args`. Flags that parley sets itself are refused, and the error names parley's option. For development, `make
engines` installs vLLM's build for CPUs in `.engines`, and `python bench/vllm_fronts.py` compares parley in front of
vLLM with vLLM's own server: processor time in front of the engine, requests and tokens per second.

parley starts a host process with vLLM's Python. The host imports parley's modules but none of its libraries, and starts
vLLM's processes.

* While they load, `/health/ready` reports the last line of vLLM's log. vLLM's warnings and errors appear in parley's
  log.
* All of these processes form one process group. If one of them dies or hangs, running requests get an error, and the
  group is killed and started again.
* parley takes them to be hanging if they have choices to compute, but send no result of a step and use no processor
  time for `--engine-timeout`.

**Images, video and audio** are fetched, checked and decoded by parley, with the same limits and errors as for its own
engine ([media.md](media.md)). Before the request is queued, a media process with vLLM's Python runs vLLM's own
processor on each item. So an item has as many tokens as in vLLM, and its pages and embeddings are found again by its
content. This works for the families of [media.md](media.md) that vLLM supports too. Video and audio need PyAV in that
Python (`pip install av`); without it the model reads images only.

## Prefill and decode on separate instances

Instances with vLLM can separate prefill from decode as instances with parley's own engine do, behind the same
coordinator ([coordinator.md](coordinator.md)). vLLM's connector moves the KV pages from one vLLM to the other:

```sh
vllm/bin/pip install nixl
parley serve Qwen/Qwen3-8B --engine vllm --engine-python vllm/bin/python --role prefill --host 10.0.0.1 --port 8000
parley serve Qwen/Qwen3-8B --engine vllm --engine-python vllm/bin/python --role decode --host 10.0.0.2 --port 8000
```

* **The connector** is NIXL's, which works on GPUs and CPUs, unless vLLM's flag `--kv-transfer-config` names another.
  Both kinds of connectors work: those that exchange the location of pages (NIXL, Mooncake), and those that find pages
  by their content in a store. NIXL answers other instances at the address of `--host` (`VLLM_NIXL_SIDE_CHANNEL_HOST`
  for another one), at a free port or `VLLM_NIXL_SIDE_CHANNEL_PORT`, without authentication, so keep the instances on a
  private network. Its progress thread takes up to one processor for each worker, even while nothing is transferred.
* **Both sides** must have the same version of vLLM, connector, model, data types and page size. The numbers of GPUs may
  differ as far as the connector allows. Otherwise the instances refuse the link, and name the difference.
* **The first token** is drawn by both instances. vLLM computes the last token of a prompt in any case, so penalties,
  grammars and random numbers continue as on a single server.
* **If an instance is lost**, another one computes its tokens again. Prefill instances keep pages for 30 s
  (`kv_lease_duration` of vLLM) until a decode instance asks for them. Pages that are older by the clock of the decode
  instance are computed again, so the clocks of the machines should differ by less than ten seconds. Pages that a decode
  instance does not use, for example because the request ends first, are freed as soon as it knows that. A running vLLM
  server keeps them until their time is over.
* Role `flex` needs parley's own engine. **Media** are sent along, because vLLM's scheduler wants to see every item.

## A running vLLM server

```sh
vllm serve Qwen/Qwen3-8B --port 8000 --enable-scale-out          # perhaps on another machine
parley serve Qwen/Qwen3-8B --port 9000 --engine http://localhost:8000
```

parley then needs no accelerator and reads no weights. It only needs `config.json`, the tokenizer and the chat template
of the model, and downloads only these for a name on the hub. It sends tokens to the server's `/inference/v1/generate`,
one request for each choice, and gets tokens back; vLLM opens this route with `--enable-scale-out`. `--engine-key-file`
names a file with the server's API key. An address may have a path: below `/vllm`, a parley server also acts as such a
server (`--engine http://localhost:8000/vllm`).

* **Before it serves**, parley asks the server for its version, its model, the context length and the limit of
  log-probabilities (vLLM's `--max-logprobs`, {DEFAULT_MAX_LOGPROBS} by default). It sends
  requests for one token to see whether the server takes grammars, and which features its speculation excludes. It also
  compares the tokens that the two tokenizers make of a text. If the server lists several models, choose one by name:
  `--model NAME=MODEL`. If the server cannot be used, parley does not start and says why; `parley doctor` with the same
  options makes the same checks.
* **Readiness follows the server.** parley waits for a server that is not up yet, and asks every two seconds for its
  health, its model and its metrics. If the server does not answer within `--engine-timeout`, running requests get an
  error, and `/health/ready` and new requests get 503 until it answers again. Then parley repeats all checks.
* **When a client disconnects**, parley closes the connections of its choices, which ends their work on the server.
* **parley queues requests.** The server gets at most `--max-batch` choices at once, of which tenants get equal shares.
  Other clients of the server are not counted. In parley's metrics and status, KV cache usage, waiting requests and
  prefix cache hits are taken from the server's metrics.
* **Several replicas**: run one parley for each, and the coordinator in front of them
  ([coordinator.md](coordinator.md)).

## Features that vLLM lacks

A request with a missing feature or a value out of bounds is refused before it is queued. The error has the form of its
API and names the field and the engine: `'adapter' is not available with the engine vllm 0.32.0.`

"""
DIFFERENCES = """
## Differences

* **Random numbers** are vLLM's: a seed always gives the same answer, but a different one from parley's engine. Choice k
  of a request equals a single request whose seed is k higher. A temperature between 0 and 0.01 counts as 0.01.
* **Log-probabilities under a grammar** are those of the tokens that the grammar allows, and only these are
  alternatives; parley's engine reports those of the model.
* **Log-probabilities of the prompt** are refused on CPUs if adapters are enabled, because vLLM's engine crashes when it
  computes them next to other requests.
* **White space in JSON** is allowed after commas and colons only, because vLLM's version of llguidance has no finer
  limit.
* **The end of a grammar** is an end token, which counts as a token of the answer if the request stops at end tokens.
* **A grammar together with allowed tokens** is refused ("limited grammar" above), because the two together may allow no
  token at all. A grammar that allows only banned sequences ends the request with an error.
* **Tenants** get equal shares: vLLM receives only as many choices as it computes at once, and the others wait in the
  host.
* **Answers that another instance began**: vLLM takes tokens from another instance only as part of a prompt, where they
  do not count as output. Greedy answers are continued in this way. If a temperature, penalties that count output,
  banned sequences, a grammar or a thinking budget need the output, vLLM draws it again, and the plugin below forces the
  known tokens. Without the plugin, vLLM nearly always draws the same tokens. If it does not, the answer ends with an
  error, or, if only a temperature is set, continues with other random numbers.
* **typical_p, no_repeat_ngram, the window of penalties (Ollama's `repeat_last_n`), the watermark and the thinking
  budget** are implemented by a plugin that vLLM's workers load, with the rules of parley's engine. It costs processor
  time for each token of a choice that uses one of these options. With `typical_p` the plugin applies min_p, top_k and
  top_p as well. vLLM loads no such plugin together with speculation, and workers started by Ray do not see it. These
  options are then refused.
* **Beam search** is parley's, with one round of requests to vLLM for each token. It takes no options that change
  logits.
* **Predictions** of the output have no effect. Speculation is configured with vLLM's `--speculative-config`.
* **Video frames** are taken at equal distances: 32 of them, unless the request names a number.
* **Embeddings in place of media** are refused.
* **If a version of vLLM has another internal interface**, parley uses the public one and logs a warning. The public one
  takes more processor time, has no banned tokens, and does not report the use of the KV cache.
* **The first request for log-probabilities** after a start is slow on CPUs, and requests next to it wait: vLLM then
  compiles a function that ranks tokens (`torch.compile`). This took a processor 7 s, and 2 s with the files that torch
  keeps of an earlier start. `TORCHDYNAMO_DISABLE=1` in the environment keeps vLLM from compiling anything.
* `--exact` (GPUs only) asks vLLM for its batch-invariant kernels.

With a running vLLM server, there are more differences:

* **Cached tokens** are reported if the server reports them (`--enable-prompt-tokens-details`). In streams it does so at
  the end, too late for parley's counters of the prefix cache, which count the prompt as computed.
* **Log-probabilities** have one alternative less if the request asks for the server's maximum and the drawn token is
  not among them.
* **Adapters** are those that the server lists in `/v1/models`, under their names there, including those that it loads
  or unloads later. parley can neither load adapters on the server nor clear its prefix cache. Instances that exchange
  KV pages compare the path of an adapter in that list (`root`), because its content is not visible: give all servers
  the same path.
* **Embeddings** come from the server's `/pooling`, if its model makes vectors.
* **Images, video and audio** are refused.
* **Separate prefill and decode**: each server with a connector gets a parley with a role. Whether both servers have the
  same weights is not visible; the configurations in the local folders are compared.
"""


def engine_tables() -> str:
    """Return the tables of features and bounds."""
    lines = ["| Feature | parley's engine | vLLM | a vLLM server |", "|---|---|---|---|"]
    for feature in sorted(ALL_ENGINE_FEATURES):
        lines.append(f"| {feature.replace('_', ' ')} | yes | {started_note(feature)} | {attached_note(feature)} |")
    lines += ["", "| Bound of vLLM | Least | Most |", "|---|---|---|"]
    for bound, (least, most) in BOUNDS.items():
        lines.append(
            f"| {bound.replace('_', ' ')} | {'' if least == -inf else least} | {'' if most == inf else most} |"
        )
    return "\n".join(lines) + "\n"


def started_note(feature: EngineFeature) -> str:
    """Return whether vLLM has a feature if parley starts it."""
    if feature == "page_transfer":
        return "yes, with vLLM on both sides"
    if feature not in vllm_features(adapters=True, plugin=True):
        return "no"
    if feature in PLUGIN_FEATURES:
        return "yes, without speculation and Ray"
    if feature in MISSING_WITH_SPECULATION:
        return "yes, without speculation"
    if feature in MISSING_WITH_CPU_ADAPTERS:
        return "yes, but on CPUs only without adapters"
    return "yes, with `--lora` or `--lora-root`" if feature == "adapters" else "yes"


def attached_note(feature: EngineFeature) -> str:
    """Return whether a vLLM server has a feature that runs already."""
    if feature == "page_transfer":
        return "yes, if the server has a connector"
    if feature == "adapters":
        return "yes, those of the server"
    if feature not in vllm_features() - MISSING_FEATURES:
        return "no"
    return "if the server takes it" if feature in FEATURE_PROBES else "yes"


def page_text() -> str:
    """Return the page."""
    return TEXT + engine_tables() + DIFFERENCES


if __name__ == "__main__":
    PAGE.write_text(page_text(), "utf-8")
