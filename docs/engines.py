"""Writes docs/engines.md, whose tables follow from the features and bounds of each engine: ``make docs``."""

from __future__ import annotations

from math import inf
from pathlib import Path

from parley.engine.vllm import TESTED_VERSIONS
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

parley has an engine of its own, and can use vLLM instead: it starts vLLM, or uses vLLM servers that run already. The
APIs, their errors, limits, tools, grammars and the coordinator are the same with all of them.

| | parley's engine | vLLM | a vLLM server |
|---|---|---|---|
| Use it for | CPUs; answers whose bits depend on nothing else | GPUs and \
other accelerators; models that need several of them (tensor, pipeline, expert, data parallel) | servers that run \
already |
| Starts in | seconds | a minute or more | seconds |
| Needs | nothing else | an environment with vLLM {FIRST} to {LAST} | the address of vLLM {FIRST} to {LAST}, and the \
model's tokenizer |

## Start

vLLM has libraries of its own, so it lives in an environment of its own:

```sh
python3 -m venv vllm && vllm/bin/pip install vllm av
parley serve Qwen/Qwen3-8B --engine vllm --engine-python vllm/bin/python -- --tensor-parallel-size 2
```

Everything after `--` goes to vLLM's own parser. In a file or a variable the same flags are `engine-args`. Flags that
follow from parley's options are refused there, with the option to use instead. For development, `make engines` installs
vLLM's build for CPUs in `.engines`, and `python bench/engines.py` compares parley in front of vLLM with vLLM's own
server: processor time in front of the engine, requests and tokens per second.

parley starts a host process with vLLM's Python. The host sees parley's modules, but none of its libraries, and starts
vLLM's processes. While they load, `/health/ready` reports the last line of vLLM's log. vLLM's warnings and errors
appear in parley's log. All of these processes are one process group: if one of them dies or hangs, running requests get
an error, and the group is ended and started again. They hang if they have choices to compute, but send no step and use
no processor time for `--engine-timeout`.

**Pictures, video and sound** are fetched, checked and decoded by parley, within the same limits and with the same
errors as for its own engine ([media.md](media.md)). A media process, run by vLLM's Python, then has vLLM's own
processor make tokens and tensors of an item, before the request is queued. So an item has as many tokens as in vLLM,
and its pages and embeddings are found again by its content. This works for the families of [media.md](media.md) that
vLLM has too. For video and sound that Python needs PyAV (`pip install av`); without it the model reads pictures only.

## Prefill and decode apart

Instances with this engine separate prefill from decode as those with parley's own engine do, behind the same
coordinator ([coordinator.md](coordinator.md)). vLLM's connector moves the KV pages from one vLLM to the other:

```sh
vllm/bin/pip install nixl
parley serve Qwen/Qwen3-8B --engine vllm --engine-python vllm/bin/python --role prefill --host 10.0.0.1 --port 8000
parley serve Qwen/Qwen3-8B --engine vllm --engine-python vllm/bin/python --role decode --host 10.0.0.2 --port 8000
```

* **The connector** is NIXL's, which works on GPUs and CPUs, unless vLLM's flag `--kv-transfer-config` names another.
  Connectors that tell where pages are (NIXL, Mooncake) and those that find them by their content in a store work
  alike. NIXL answers other instances at the address of `--host` (`VLLM_NIXL_SIDE_CHANNEL_HOST` for another one), at a
  free port or `VLLM_NIXL_SIDE_CHANNEL_PORT`, without authentication: put instances into a network of their own. Its
  thread that watches for progress takes up to one processor for each worker, also while nothing is moved.
* **Both sides** must have the same version of vLLM, connector, model, types and size of a page; numbers of GPUs may
  differ, as far as the connector allows. Otherwise the instances refuse the link, and name the difference.
* **The first token** is drawn by both instances. vLLM computes the last token of a prompt in any case, and so
  penalties, grammars and random numbers continue as on one server.
* **If an instance is lost**, another one computes its tokens again. Prefill instances keep pages for 30 s
  (`kv_lease_duration` of vLLM) until a decode instance asks for them. Pages that are older by the clock of the
  decode instance are computed again, so clocks of machines should differ by less than ten seconds. Pages that a
  decode instance does not use, because the request ends first for example, are free as soon as it knows that. A vLLM
  server that runs already keeps them until their time ends.
* Role `flex` needs parley's own engine. **Media** are sent along, because vLLM's scheduler wants to see every item.

## A vLLM server that runs already

```sh
vllm serve Qwen/Qwen3-8B --port 8000 --enable-scale-out          # perhaps on another machine
parley serve Qwen/Qwen3-8B --port 9000 --engine http://localhost:8000
```

parley then needs no accelerator, and reads no weights: of the model it needs `config.json`, the tokenizer and the chat
template, and of a name on the hub it downloads only these. Tokens go to the server's `/inference/v1/generate` and come
back from there, one request for each choice; vLLM opens this route with `--enable-scale-out`. `--engine-key-file` names
a file with the server's API key. An address may have a path: a parley server is one of vLLM's kind below `/vllm`
(`--engine http://localhost:8000/vllm`).

* **Before it serves**, parley asks for the server's version, its model, the context length and the limit of
  log-probabilities (vLLM's `--max-logprobs`, {DEFAULT_MAX_LOGPROBS} by default), and with a token each whether it takes
  grammars and what speculation excludes. It compares the two tokenizers by a text. If the server lists several models,
  the name chooses: `--model NAME=MODEL`. A server that cannot be used ends the start with a sentence; `parley doctor`
  with the same options asks it, too.
* **Readiness follows the server.** parley waits for a server that is still away, and asks every two seconds for its
  health, its model and its metrics. A server that does not answer within `--engine-timeout` is away: running requests
  get an error, `/health/ready` and new requests a 503, until it answers again. Then parley asks everything anew.
* **A client that leaves** ends the connections of its choices, and so their work on the server.
* **The queue is parley's.** The server gets at most `--max-batch` choices at once, of which tenants get equal shares.
  Its other clients do not count. The use of the KV cache, the waiting requests and the hits of the prefix cache in
  parley's metrics and status are those of the server's metrics.
* **Several replicas**: one parley for each, and the coordinator in front of them ([coordinator.md](coordinator.md)).

## What vLLM does not do

A request that needs a missing feature, or a value out of bounds, is refused before it is queued, in the form of its
API, with the field and the engine: `'adapter' is not available with the engine vllm 0.32.0.`

"""
DIFFERENCES = """
## What differs

* **Random numbers** are vLLM's: a seed gives the same answer again, but another one than parley's engine gives. Choice
  k of a request equals a single request whose seed is k higher. A temperature between 0 and 0.01 counts as 0.01.
* **Log-probabilities under a grammar** are those of the tokens that the grammar allows, and only these are
  alternatives; parley's engine reports those of the model.
* **Log-probabilities of the prompt** are refused on CPUs if adapters are enabled, because vLLM's engine ends when it
  computes them among other requests.
* **White space in JSON** may stand after commas and colons only: vLLM's version of llguidance has no finer limit.
* **The end of a grammar** is an end token, which counts as a token of the answer if the request stops at end tokens.
* **A grammar together with allowed tokens** is refused ("limited grammar" above), because it may leave no token at all.
  A grammar that allows only banned sequences ends the request with an error.
* **Tenants** get equal shares: vLLM holds no more choices than it computes at once, and the others wait in the host.
* **Answers that another instance began**: vLLM takes tokens that were drawn elsewhere only as part of a prompt, where
  they do not count as output. Greedy answers are continued in this way. If a temperature, penalties that count output,
  banned sequences, a grammar or a thinking budget need the output, vLLM draws it again, with the known tokens forced by
  the plugin below. Without the plugin the same tokens come out nearly always; an answer that comes out different ends
  with an error, or with a temperature alone goes on with other random numbers.
* **typical_p, no_repeat_ngram, the window of penalties (Ollama's `repeat_last_n`), the watermark and the thinking
  budget** are parley's own: vLLM's workers load a plugin with the rules of parley's engine. It costs processor time for
  each token of a choice that uses one of them. With `typical_p` the plugin applies min_p, top_k and top_p as well. vLLM
  loads no such plugin if it speculates, and workers that Ray starts do not see it: then these options are refused.
* **Beam search** is done by parley: a round of vLLM for each token. It takes no options that change logits.
* **Predictions** of the output have no effect. Speculation is configured with vLLM's `--speculative-config`.
* **Frames of a video** are taken at equal distances, 32 of them unless the request says how many. **Embeddings in place
  of media** are refused.
* **If a version of vLLM has another inner interface**, its public one is used: a warning says so. It takes more
  processor time, has no banned tokens, and does not tell the use of the KV cache.
* `--exact` (GPUs only) asks vLLM for its batch-invariant kernels.

With a server that runs already, also these:

* **Cached tokens** are reported if the server tells them, with `--enable-prompt-tokens-details`. In streams it does so
  at the end, too late for parley's counters of the prefix cache, which then count the prompt as computed.
* **Log-probabilities** have one alternative less if as many as the server allows are wanted, and another token was
  drawn.
* **Adapters** are those that the server lists in `/v1/models`, under their names there, also if it loads or unloads
  them later. None can be loaded from here, and its prefix cache cannot be cleared.
  Instances that exchange KV pages compare the path of an adapter in that list (`root`), because its content is not
  visible: give all servers the same path.
* **Embeddings** come from the server's `/pooling`, if it makes vectors. **Pictures, video and sound** are refused.
* **Prefill and decode apart**: each server with a connector gets a parley with a role. Whether both servers
  have the same weights is not visible; the configurations in the local folders are compared.
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
