"""Options of ``parley serve`` about the engine: which one, its memory, its steps, and its cache events."""

from __future__ import annotations

from parley.settings.option_kinds import (
    choice_kind,
    engine_kind,
    integer_kind,
    number_kind,
    pattern_kind,
    size_kind,
    switch_kind,
    text_kind,
    words_kind,
)
from parley.settings.options import Option

ENGINE_OPTIONS: list[Option] = [
    Option(
        "engine",
        engine_kind("parley", "vllm"),
        "What computes: parley's own engine, vLLM from an environment of its own, or a vLLM server that runs already, "
        "by its address (docs/engines.md).",
        "parley",
        section="engine",
        configurable=True,
    ),
    Option(
        "engine-python",
        text_kind("PATH"),
        "Python interpreter that vLLM is installed for.",
        section="engine",
        unset_text="the one that runs parley",
        configurable=True,
    ),
    Option(
        "engine-args",
        words_kind("FLAGS"),
        "vLLM's own flags, as one text; on the command line everything after `--` "
        "(`parley serve MODEL --engine vllm -- --tensor-parallel-size 4`).",
        section="engine",
        unset_text="none",
        configurable=True,
        takes_rest=True,
    ),
    Option(
        "engine-key-file",
        text_kind("FILE"),
        "File with the API key of the server that --engine names.",
        section="engine",
        unset_text="none",
        configurable=True,
    ),
    Option(
        "exact",
        switch_kind(),
        "vLLM on a GPU: the bits of an answer do not depend on other requests, at the price of speed. parley's own "
        "engine on a CPU is always exact.",
        False,
        section="engine",
        configurable=True,
    ),
    Option(
        "kv-memory",
        size_kind(1 << 20),
        "Memory for the KV cache of a model.",
        section="engine",
        unset_text="a share of the free memory",
        configurable=True,
    ),
    Option(
        "kv-staging",
        size_kind(1),
        "Host memory through which KV pages pass to and from other instances, in roles other than mixed. Not needed on "
        "the CPU, but used there too if set.",
        section="engine",
        unset_text="with an accelerator an eighth of the free memory, at most the size of the KV cache",
        configurable=True,
    ),
    Option(
        "state-cache",
        size_kind(0),
        "Memory for states besides those of running sequences, in models with layers that keep a state: for the prefix "
        "cache, drafts, and hand-overs to other instances. A part of `kv-memory`.",
        section="engine",
        unset_text="half of the memory for states, which get at most half of `kv-memory` unless all useful pages fit",
        configurable=True,
    ),
    Option(
        "kv-dtype",
        choice_kind("auto", "int8"),
        "Stored type of keys and values; int8 takes about half the memory of bf16, auto is the same as dtype.",
        "auto",
        section="engine",
        configurable=True,
    ),
    Option(
        "max-batch",
        integer_kind(1, 4096),
        "Sequences of a model that run at the same time.",
        256,
        section="engine",
        configurable=True,
    ),
    Option(
        "step-ms",
        number_kind(1, 60_000),
        "CPU: time limit of a step with prefill, in milliseconds; four times that while no request is decoding.",
        250.0,
        section="engine",
        configurable=True,
    ),
    Option(
        "step-tokens",
        integer_kind(16, 1 << 20),
        "Accelerator: token limit of a step.",
        8192,
        section="engine",
        configurable=True,
    ),
    Option(
        "threads",
        integer_kind(1, 1024),
        "CPU threads.",
        section="engine",
        unset_text="all cores that the process may use",
        configurable=True,
    ),
    Option(
        "prefix-cache",
        switch_kind(),
        "Reuse the KV cache of equal prefixes.",
        True,
        section="engine",
        configurable=True,
    ),
    Option(
        "pack-cache",
        switch_kind(),
        "Keep packed weights in .parley next to the model's files, for faster starts.",
        False,
        section="engine",
        configurable=True,
    ),
    Option(
        "lowering", switch_kind(), "Run known layers on the fused decoder.", True, section="engine", configurable=True
    ),
    Option(
        "kv-events",
        pattern_kind(r"(tcp|ipc)://.+", "ADDRESS", "tcp://HOST:PORT or ipc://FILE"),
        "Publish what happens to the prefix cache over ZeroMQ, in vLLM's format, for routers that choose instances by "
        "cached prefixes: tcp://*:5557 waits for subscribers, tcp://HOST:PORT connects to one. The events contain the "
        "tokens of all prompts. Needs `pip install 'parley-llm[kv-events]'`.",
        section="engine",
        unset_text="none",
        configurable=True,
    ),
    Option(
        "kv-events-replay",
        pattern_kind(r"(tcp|ipc)://.+", "ADDRESS", "tcp://HOST:PORT or ipc://FILE"),
        "Address for subscribers that ask for the events that they missed, such as tcp://*:5558.",
        section="engine",
        unset_text="none",
        configurable=True,
    ),
    Option(
        "kv-events-topic",
        text_kind("TOPIC"),
        "Topic of the events. Routers expect kv@POD@MODEL.",
        section="engine",
        unset_text="empty",
        configurable=True,
    ),
    Option(
        "kv-events-form",
        choice_kind("map", "array"),
        "Form of an event: a map with names, as of vLLM 0.32, or an array, as of older versions.",
        "map",
        section="engine",
        configurable=True,
    ),
    Option(
        "kv-events-buffer",
        integer_kind(1, 1 << 24),
        "Steps whose events are kept for those who ask for them again.",
        10_000,
        section="engine",
        configurable=True,
    ),
    Option(
        "kv-events-hwm",
        integer_kind(0, 1 << 30),
        "Steps whose events may wait for a slow subscriber, which misses further ones; 0: any number.",
        100_000,
        section="engine",
        configurable=True,
    ),
    Option(
        "speculate",
        pattern_kind(r"none|ngram|draft=.+", "none|ngram|draft=MODEL", "none, ngram or draft=MODEL"),
        "Draft several tokens ahead and verify them in one step: drafts come from the text so far, or from a small "
        "model with the same tokenizer, named as MODEL is. Answers stay the same, and come sooner where drafts are "
        "right.",
        "none",
        section="engine",
        configurable=True,
    ),
    Option(
        "speculate-tokens",
        integer_kind(1, 64),
        "Most draft tokens at a time; fewer are used where drafts turn out wrong or the batch is large.",
        15,
        section="engine",
        configurable=True,
    ),
    Option(
        "max-loras",
        integer_kind(1, 4096),
        "Adapters of a model in memory at once; others are loaded again on use.",
        8,
        section="engine",
        configurable=True,
    ),
    Option(
        "max-lora-rank", integer_kind(1, 512), "Highest rank of an adapter.", 256, section="engine", configurable=True
    ),
    Option(
        "in-process",
        switch_kind(),
        "Run the engine inside the server's process.",
        False,
        section="engine",
        configurable=True,
    ),
    Option(
        "scripted-engine",
        switch_kind(),
        "Answer without a model.",
        False,
        section="engine",
        hidden=True,
        configurable=True,
    ),
    Option(
        "cost-model",
        text_kind("FILE"),
        "Compute nothing, but take the time that a model would.",
        section="engine",
        hidden=True,
        configurable=True,
    ),
]
