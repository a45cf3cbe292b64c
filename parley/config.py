"""The options of a server, as one table. Flags, environment, file, help and documentation are made from it.

Add a row here and read it where it is needed, through ``settings`` (the engine's part) or the server's own options;
nothing else has to change. ``CLIENT`` holds the two that every command against a running server shares. How a value
is found is in ``options``. Imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from parley.kinds import (
    adapter,
    choice,
    duration,
    endpoint,
    family,
    integer,
    named,
    number,
    pattern,
    size,
    switch,
    text,
)
from parley.options import Option

if TYPE_CHECKING:
    from parley.types import Settings

DTYPES = {"bf16": "bfloat16", "fp32": "float32", "auto": "auto"}

# Options of the engine, which one of several models may have for itself.
OWN = (
    "dtype", "quantization", "device", "max-model-len", "kv-memory", "kv-dtype", "max-batch", "step-ms", "step-tokens",
    "threads", "prefix-cache", "pack-cache", "lowering", "speculate", "speculate-tokens", "lora", "max-loras",
    "max-lora-rank", "tool-parser", "reasoning-parser",
)  # fmt: skip

SERVE: list[Option] = [
    Option(
        "model",
        named("MODEL", OWN),
        "Folder in Hugging Face format, or a name on the Hugging Face hub. `--model NAME=MODEL` serves several: each "
        "with names (`chat,assistant=./m`) and, behind commas, options of its own (`chat=./m,threads=1`).",
        section="model",
        unset="the built-in parley-demo",
        many=True,
        separator=";",
        variable=True,
        positional=True,
    ),
    Option(
        "name",
        text("NAME"),
        "Name under which the API knows the first model.",
        section="model",
        unset="from MODEL",
        many=True,
        variable=True,
    ),
    Option(
        "dtype",
        choice(*DTYPES),
        "Numbers to compute with; auto takes fp32 if the model was saved in it.",
        "bf16",
        section="model",
        variable=True,
    ),
    Option(
        "quantization",
        choice("none", "int8", "int4"),
        "What plain weights become while they are loaded; none leaves them as they are, int4 makes the head int8.",
        "none",
        section="model",
        variable=True,
    ),
    Option(
        "device",
        pattern(r"cpu|cuda(:\d{1,3})?", "DEVICE", "cpu, cuda or cuda:N"),
        "cpu, cuda or cuda:N.",
        "cpu",
        section="model",
        variable=True,
    ),
    Option(
        "max-model-len",
        integer(1),
        "Longest prompt plus output, in tokens.",
        section="model",
        unset="from the model",
        variable=True,
    ),
    Option(
        "tool-parser",
        family("CALLS"),
        "Family whose tool calls are read and written; auto: by the chat template, none: calls stay text.",
        "auto",
        section="model",
        variable=True,
    ),
    Option(
        "reasoning-parser",
        family("THOUGHTS"),
        "Family whose marks tell reasoning from the answer; auto: by the chat template, none: it stays text.",
        "auto",
        section="model",
        variable=True,
    ),
    Option(
        "kv-memory",
        size(1 << 20),
        "Memory for the KV cache of a model.",
        section="engine",
        unset="a share of what is free",
        variable=True,
    ),
    Option(
        "kv-dtype",
        choice("auto", "int8"),
        "What keys and values are stored as; int8 takes about half of bf16, auto is as dtype.",
        "auto",
        section="engine",
        variable=True,
    ),
    Option(
        "max-batch",
        integer(1, 4096),
        "Sequences of a model that run at the same time.",
        256,
        section="engine",
        variable=True,
    ),
    Option(
        "step-ms",
        number(1, 60_000),
        "CPU: milliseconds that a step with prompts may take; four times as many while nobody waits for a next token.",
        250.0,
        section="engine",
        variable=True,
    ),
    Option(
        "step-tokens",
        integer(16, 1 << 20),
        "Accelerator: tokens that one step may hold.",
        8192,
        section="engine",
        variable=True,
    ),
    Option("threads", integer(1, 1024), "CPU threads.", section="engine", unset="all cores", variable=True),
    Option("prefix-cache", switch(), "Share the KV cache of equal beginnings.", True, section="engine", variable=True),
    Option(
        "pack-cache",
        switch(),
        "Keep packed weights in .parley beside the model's files, for quicker starts.",
        False,
        section="engine",
        variable=True,
    ),
    Option("lowering", switch(), "Run known layers on the fused decoder.", True, section="engine", variable=True),
    Option(
        "speculate",
        pattern(r"none|ngram|draft=.+", "none|ngram|draft=FOLDER", "none, ngram or draft=FOLDER"),
        "Guess several tokens ahead and compute them in one step: from what stands in the text already, or by a small "
        "model with the same tokenizer. Answers are the same, sooner where guesses are right.",
        "none",
        section="engine",
        variable=True,
    ),
    Option(
        "speculate-tokens",
        integer(1, 64),
        "Tokens guessed at a time, at most; fewer where guesses turn out wrong or the batch is large.",
        7,
        section="engine",
        variable=True,
    ),
    Option(
        "lora",
        adapter(),
        "Adapter of the first model in PEFT's format, and the name under which the API knows it.",
        section="model",
        many=True,
        variable=True,
    ),
    Option(
        "max-loras",
        integer(1, 4096),
        "Adapters of a model in memory at once; others are read again when they are wanted.",
        8,
        section="engine",
        variable=True,
    ),
    Option("max-lora-rank", integer(1, 256), "Highest rank of an adapter.", 256, section="engine", variable=True),
    Option(
        "in-process",
        switch(),
        "Run the engine inside the server's process.",
        False,
        section="engine",
        variable=True,
    ),
    Option("fake-engine", switch(), "Answer without a model.", False, section="engine", hidden=True, variable=True),
    Option("host", text("ADDRESS"), "Address to listen on.", "127.0.0.1", section="server", variable=True),
    Option(
        "port",
        integer(0, 65_535, "PORT"),
        "Port to listen on; 0 takes a free one.",
        8000,
        section="server",
        variable=True,
    ),
    Option(
        "listen",
        endpoint(),
        "A further port where one API (a prefix that `parley routes` lists, without its stroke) is alone at the root, "
        "as the original; port 0 takes a free one.",
        section="server",
        many=True,
        variable=True,
    ),
    Option(
        "grpc-port",
        integer(0, 65_535, "PORT"),
        "Port for Triton's API over gRPC, on the same address; needs `pip install 'parley[grpc]'`. Another address: "
        "`--listen grpc=HOST:PORT`.",
        section="server",
        unset="none",
        variable=True,
    ),
    Option(
        "strict",
        switch(),
        "Keep the limits and refusals of the originals also on the port that all APIs share.",
        False,
        section="server",
        variable=True,
    ),
    Option(
        "tgi-compat",
        choice("3", "0.9.4"),
        "Version of TGI whose framing and defaults its routes have on the port that all APIs share.",
        "3",
        section="server",
        variable=True,
    ),
    Option(
        "endpoints",
        text("FILE"),
        "File in which endpoints are kept that clients make over Databricks' API.",
        section="server",
        unset="kept until the server ends",
        variable=True,
    ),
    Option(
        "api-key",
        text("KEY"),
        "Key that clients must send.",
        section="server",
        many=True,
        variable=True,
        secret=True,
    ),
    Option(
        "api-key-file",
        text("FILE"),
        "File with one key per line.",
        section="server",
        variable=True,
    ),
    Option(
        "admin-key-file",
        text("FILE"),
        "File with keys, one per line, that alone may change the server: adapters, endpoints, caches, orders, its end.",
        section="server",
        unset="every client may",
        variable=True,
    ),
    Option(
        "max-queue",
        integer(0),
        "Requests that may wait before others are turned away with 429; keys with less than their share still get in.",
        1024,
        section="server",
        variable=True,
    ),
    Option("body-limit", size(1024), "Largest request body.", 32 << 20, section="server", variable=True),
    Option(
        "drain",
        duration(),
        "How long running answers may go on after SIGTERM.",
        30.0,
        section="server",
        variable=True,
    ),
    Option(
        "cors-origin",
        text("ORIGIN"),
        "Web origin that may call the server; * allows all.",
        section="server",
        many=True,
        variable=True,
    ),
    Option(
        "allow-host",
        text("NAME"),
        "Host name to answer to, beside those of this machine, while listening on it alone.",
        section="server",
        many=True,
        variable=True,
    ),
    Option(
        "ping",
        duration(),
        "Silence in a stream after which a comment keeps the connection open.",
        section="server",
        unset="never",
        variable=True,
    ),
    Option(
        "lora-root",
        text("FOLDER"),
        "Folder below which clients may load adapters while the server runs, at /v1/load_lora_adapter.",
        section="server",
        unset="they may not",
        variable=True,
    ),
    Option(
        "tokenizer-info",
        switch(),
        "Give the tokenizer's configuration at /tokenizer_info.",
        False,
        section="server",
        variable=True,
    ),
    Option(
        "role",
        choice("mixed", "prefill", "decode", "flex"),
        "What the server does in a cluster: mixed answers any client; others what a coordinator sends, prefill "
        "beginning requests and decode going on with them. The role API can change it.",
        "mixed",
        section="cluster",
        variable=True,
    ),
    Option(
        "peer-port",
        integer(0, 65_535, "PORT"),
        "Port where other instances hand requests over, for roles other than mixed; 0 takes a free one.",
        1121,
        section="cluster",
        variable=True,
    ),
    Option(
        "p-percentage",
        integer(0, 100),
        "How much of a flex instance is for prefill: coordinators divide its places by it.",
        50,
        section="cluster",
        variable=True,
    ),
    Option(
        "cluster-secret",
        text("SECRET"),
        "What instances and coordinators of a cluster know each other by.",
        section="cluster",
        unset="nobody is asked for it",
        variable=True,
        secret=True,
    ),
    Option(
        "cluster-secret-file",
        text("FILE"),
        "File whose first line is that secret.",
        section="cluster",
        variable=True,
    ),
    Option(
        "mindie-config",
        text("FILE"),
        "MindIE's config.json: its three planes are listened on as it says, with its models, limits and certificates. "
        "Options given beside it win; the port of all APIs is there only with --port.",
        section="server",
        variable=True,
    ),
    Option(
        "mindie-profile",
        choice("strict-old", "strict", "extended"),
        "Whose refusals MindIE's interfaces have there: of its manual, of its servers today, or neither.",
        "extended",
        section="server",
        variable=True,
    ),
    Option("quiet", switch(), "Log no line for each request.", False, section="output", variable=True),
    Option("log-format", choice("text", "json"), "How log lines look.", "text", section="output", variable=True),
    Option("config", text("FILE"), "TOML file with any of these options as keys.", section="output", variable=True),
    Option("show-config", switch(), "Print every value and where it came from, then end.", False, section="output"),
]

CLIENT: list[Option] = [
    Option(
        "url",
        text("URL"),
        "Where the server is.",
        unset="http://127.0.0.1:8000",
        section="server",
        variable=True,
    ),
    Option(
        "api-key",
        text("KEY"),
        "Key to send.",
        section="server",
        many=True,
        variable=True,
        secret=True,
    ),
]

VARIABLES = sorted({option.key for option in SERVE + CLIENT if option.variable} | {"PARLEY_NATIVE"})


def settings(config: Mapping[str, Any], folder: str) -> Settings:
    """The engine's part of the options, for the model in ``folder``."""
    from parley.types import Settings

    return Settings(
        model=folder,
        dtype=DTYPES[config["dtype"]],
        device=config["device"],
        max_model_len=config["max-model-len"],
        kv_memory=config["kv-memory"],
        kv_dtype=config["kv-dtype"],
        max_batch=config["max-batch"],
        step_ms=config["step-ms"],
        step_tokens=config["step-tokens"],
        prefix_cache=config["prefix-cache"],
        threads=config["threads"],
        lowering=config["lowering"],
        tool_parser=config["tool-parser"],
        reasoning_parser=config["reasoning-parser"],
        pack_cache=config["pack-cache"],
        quantization=config["quantization"],
        adapters=dict(config["lora"]),
        max_adapters=config["max-loras"],
        max_rank=config["max-lora-rank"],
        speculate=config["speculate"],
        speculate_tokens=config["speculate-tokens"],
        shared=config["role"] != "mixed",
    )
