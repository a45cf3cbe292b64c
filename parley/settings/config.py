"""The options of a server, as one table. Flags, environment variables, file, help and documentation derive from it.

To add an option: add a row here, then a field and a line that copies it, in ``engine_settings`` (options of the engine)
or in the server's own options. ``CLIENT_OPTIONS`` holds the two options shared by all commands that talk to a running
server. ``options`` determines the value of an option. Imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from parley.settings.kinds import (
    OptionKind,
    adapter_kind,
    choice_kind,
    duration_kind,
    endpoint_kind,
    engine_kind,
    family_kind,
    integer_kind,
    json_object_kind,
    media_host_kind,
    media_limit_kind,
    named_model_kind,
    network_kind,
    number_kind,
    otlp_endpoint_kind,
    parse_socket_path,
    pattern_kind,
    proxy_kind,
    root_path_kind,
    size_kind,
    switch_kind,
    text_kind,
    words_kind,
)
from parley.settings.options import Option

if TYPE_CHECKING:
    from parley.types import AttachedSettings, CacheEventSettings, ModelOverrides, Settings, VLLMSettings

# The names of number types, those of vLLM included.
DTYPE_NAMES = {
    "bf16": "bfloat16",
    "fp32": "float32",
    "fp16": "float16",
    "auto": "auto",
    "bfloat16": "bfloat16",
    "float32": "float32",
    "float": "float32",
    "float16": "float16",
    "half": "float16",
}

# Engine options that each of several models may set for itself.
PER_MODEL_OPTIONS = (
    "revision", "tokenizer", "chat-template", "hf-overrides", "dtype", "quantization", "device", "max-model-len",
    "kv-memory", "kv-staging", "kv-dtype", "state-cache", "max-batch", "step-ms", "step-tokens", "threads",
    "prefix-cache", "pack-cache", "lowering", "speculate", "speculate-tokens", "lora", "max-loras", "max-lora-rank",
    "media-cache", "tool-parser", "reasoning-parser", "trust-marks", "kv-events", "kv-events-replay", "kv-events-topic",
)  # fmt: skip

SERVE_OPTIONS: list[Option] = [
    Option(
        "model",
        named_model_kind("MODEL", PER_MODEL_OPTIONS),
        "Folder in Hugging Face format, a GGUF file, or a name on the Hugging Face hub (`owner/name`, and for GGUF "
        "`owner/name:QUANT` or `owner/name/FILE.gguf`). `--model NAME=MODEL` serves several: each "
        "with names (`chat,assistant=./m`) and, after commas, options of its own (`chat=./m,threads=1`).",
        section="model",
        unset_text="the built-in parley-demo",
        repeatable=True,
        separator=";",
        configurable=True,
        positional=True,
    ),
    Option(
        "name",
        text_kind("NAME"),
        "Name of the first model in the API.",
        section="model",
        unset_text="from MODEL",
        repeatable=True,
        configurable=True,
    ),
    Option(
        "revision",
        text_kind("REV"),
        "Branch, tag or commit of MODEL on the hub, as in `owner/name@REV`.",
        section="model",
        unset_text="main",
        configurable=True,
    ),
    Option(
        "tokenizer",
        text_kind("FOLDER|REPO"),
        "Folder or name on the hub (`owner/name` or `owner/name@REV`) whose tokenizer and chat template to use.",
        section="model",
        unset_text="from MODEL",
        configurable=True,
    ),
    Option(
        "chat-template",
        text_kind("FILE|TEXT"),
        "Jinja file with the chat template, or the template itself, which has a brace or a line break.",
        section="model",
        unset_text="from the tokenizer",
        configurable=True,
    ),
    Option(
        "hf-overrides",
        json_object_kind(),
        "Members of config.json that replace those of MODEL; objects within it are merged.",
        section="model",
        unset_text="none",
        configurable=True,
    ),
    Option(
        "dtype",
        choice_kind(*DTYPE_NAMES),
        "Number type to compute with; auto uses fp32 if the model was saved in it. On the CPU, fp16 is computed in "
        "bf16, which rounds weights saved in fp16 from 11 to 8 bits; fp32 does not.",
        "bf16",
        section="model",
        configurable=True,
    ),
    Option(
        "quantization",
        choice_kind("none", "int8", "int4"),
        "Quantise plain weights while loading; none keeps them as they are, int4 uses int8 for the head. Of a "
        "quantised checkpoint, only a plain head becomes int8.",
        "none",
        section="model",
        configurable=True,
    ),
    Option(
        "device",
        pattern_kind(r"auto|cpu|cuda(:\d{1,3})?", "DEVICE", "auto, cpu, cuda or cuda:N"),
        "cpu, cuda, cuda:N, or auto: cuda if torch can use a GPU of compute capability 8.0 or newer, else cpu.",
        "cpu",
        section="model",
        configurable=True,
    ),
    Option(
        "max-model-len",
        integer_kind(1),
        "Maximum length of prompt plus output, in tokens.",
        section="model",
        unset_text="from the model",
        configurable=True,
    ),
    Option(
        "tool-parser",
        family_kind("calls"),
        "Model family whose tool calls are parsed and written; auto: by the chat template, none: calls stay text.",
        "auto",
        section="model",
        configurable=True,
    ),
    Option(
        "reasoning-parser",
        family_kind("thoughts"),
        "Model family whose marks separate reasoning from the answer; auto: by the chat template, none: it stays text.",
        "auto",
        section="model",
        configurable=True,
    ),
    Option(
        "trust-marks",
        switch_kind(),
        "Special tokens that clients write in conversations stay special tokens, so the writer of a message or of a "
        "tool's result can end that turn and begin one of the system. Otherwise they are text.",
        False,
        section="model",
        configurable=True,
    ),
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
        pattern_kind(r"none|ngram|draft=.+", "none|ngram|draft=FOLDER", "none, ngram or draft=FOLDER"),
        "Draft several tokens ahead and verify them in one step: drafts come from the text so far, or from a small "
        "model with the same tokenizer. Answers stay the same, and come sooner where drafts are right.",
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
        "lora",
        adapter_kind(),
        "LoRA adapter of the first model, in PEFT's format, with its name in the API.",
        section="model",
        repeatable=True,
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
        "max-lora-rank", integer_kind(1, 256), "Highest rank of an adapter.", 256, section="engine", configurable=True
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
        "fake-engine", switch_kind(), "Answer without a model.", False, section="engine", hidden=True, configurable=True
    ),
    Option(
        "cost-model",
        text_kind("FILE"),
        "Compute nothing, but take the time that a model would.",
        section="engine",
        hidden=True,
        configurable=True,
    ),
    Option(
        "tls-cert",
        text_kind("FILE"),
        "Certificate (PEM, with its chain) of all ports, gRPC's as well, which then speak TLS alone. It is read again "
        "when it changes, and at SIGHUP.",
        section="server",
        unset_text="no encryption",
        configurable=True,
    ),
    Option("tls-key", text_kind("FILE"), "Key of that certificate (PEM).", section="server", configurable=True),
    Option(
        "tls-key-password-file",
        text_kind("FILE"),
        "File with the key's password; without it, an encrypted key is asked for at the terminal. Not for gRPC.",
        section="server",
        configurable=True,
    ),
    Option(
        "tls-client-ca",
        text_kind("FILE"),
        "CA certificates (PEM), one of which must have signed the certificate that a client presents. For probes and "
        "metrics, too.",
        section="server",
        unset_text="clients need no certificate",
        configurable=True,
    ),
    Option("host", text_kind("ADDRESS"), "Address to listen on.", "127.0.0.1", section="server", configurable=True),
    Option(
        "port",
        integer_kind(0, 65_535, "PORT"),
        "Port to listen on; 0 takes a free one.",
        8000,
        section="server",
        configurable=True,
    ),
    Option(
        "listen",
        endpoint_kind(),
        "An additional port that serves one API (a prefix that `parley routes` lists, without its slash) at the root, "
        "like the original server; port 0 takes a free one.",
        section="server",
        repeatable=True,
        configurable=True,
    ),
    Option(
        "uds",
        OptionKind("PATH", parse_socket_path),
        "Listen on a Unix socket instead of --host and --port. For one API: `--listen NAME=unix:PATH`.",
        section="server",
        configurable=True,
    ),
    Option(
        "root-path",
        root_path_kind(),
        "Path below which a proxy shows this server, whether or not the proxy removes it from requests.",
        section="server",
        configurable=True,
    ),
    Option(
        "trusted-proxy",
        proxy_kind(),
        "Proxies whose headers Forwarded, X-Forwarded-For and X-Forwarded-Proto say who the client is: a network, or "
        "`unix` for those at a Unix socket. Such headers of others are ignored.",
        section="server",
        repeatable=True,
        configurable=True,
    ),
    Option(
        "metrics-port",
        integer_kind(0, 65_535, "PORT"),
        "Port for /metrics alone, on the same address; other ports then have no /metrics. 0 takes a free one.",
        section="server",
        configurable=True,
    ),
    Option(
        "admin-port",
        integer_kind(0, 65_535, "PORT"),
        "Port for the routes that change the server, on 127.0.0.1 unless --admin-host says otherwise; other ports then "
        "do not have them. 0 takes a free one.",
        section="server",
        configurable=True,
    ),
    Option(
        "admin-host",
        text_kind("ADDRESS"),
        "Address of --admin-port.",
        "127.0.0.1",
        section="server",
        configurable=True,
    ),
    Option(
        "grpc-port",
        integer_kind(0, 65_535, "PORT"),
        "Port for Triton's API over gRPC, on the same address; needs `pip install 'parley-llm[grpc]'`. For another "
        "address: `--listen grpc=HOST:PORT`.",
        section="server",
        unset_text="none",
        configurable=True,
    ),
    Option(
        "strict",
        switch_kind(),
        "Apply the limits and refusals of the original servers also on the port that all APIs share.",
        False,
        section="server",
        configurable=True,
    ),
    Option(
        "tgi-compat",
        choice_kind("3", "0.9.4"),
        "TGI version whose framing and defaults apply on the port that all APIs share.",
        "3",
        section="server",
        configurable=True,
    ),
    Option(
        "endpoints",
        text_kind("FILE"),
        "File that stores the endpoints created over Databricks' API.",
        section="server",
        unset_text="kept until the server stops",
        configurable=True,
    ),
    Option(
        "inference-tables",
        text_kind("FOLDER"),
        "Folder for inference tables: the requests and answers of endpoints whose recording is switched on over "
        "Databricks' API.",
        section="server",
        unset_text="endpoints record nothing",
        configurable=True,
    ),
    Option(
        "response-store",
        size_kind(),
        "Room for the responses and conversations that clients of the Responses API refer to later; 0: none are kept.",
        64 << 20,
        section="server",
        configurable=True,
    ),
    Option(
        "response-store-file",
        text_kind("FILE"),
        "Database that keeps them across restarts, and for all servers that use the same file.",
        section="server",
        unset_text="kept in memory until the server stops",
        configurable=True,
    ),
    Option(
        "response-lifetime",
        duration_kind(1.0),
        "How long they are kept at most.",
        7 * 24 * 3600.0,
        section="server",
        configurable=True,
    ),
    Option(
        "api-key",
        text_kind("KEY"),
        "Key that clients must send.",
        section="server",
        repeatable=True,
        configurable=True,
        secret=True,
    ),
    Option(
        "api-key-file",
        text_kind("FILE"),
        "File with one key per line, or, if its name ends in .toml, with hashes of keys that `parley key` makes and "
        "their limits; it is read again when it changes. In the plain form, a key with the word `priority` after it, "
        "and every admin key, may overtake the requests of other keys by `priority`; those of any other key reorder "
        "only its own requests. "
        "`name=NAME` and `groups=NAME,NAME` say who has the key: endpoints have permissions for them.",
        section="server",
        configurable=True,
    ),
    Option(
        "admin-key-file",
        text_kind("FILE"),
        "File with keys, one per line. Only these, and keys with `admin` in a TOML file, may change the server: "
        "adapters, endpoints, caches, pauses, roles, shutdown.",
        section="server",
        unset_text="no client; without API keys, the clients on this machine",
        configurable=True,
    ),
    Option(
        "audit-log",
        text_kind("FILE"),
        "File that a JSON line is appended to for each call that may change the server.",
        section="server",
        unset_text="such calls are only in the access log",
        configurable=True,
    ),
    Option(
        "usage-db",
        text_kind("FILE"),
        "Database of the requests and tokens of each key, day and model, which admins read at /v1/usage.",
        section="server",
        unset_text="usage is not kept",
        configurable=True,
    ),
    Option(
        "share-prefixes",
        switch_kind(),
        "Let requests with different API keys share cached prefixes. A key then learns from `cached_tokens` and from "
        "response times which prompts other keys have sent.",
        False,
        section="server",
        configurable=True,
    ),
    Option(
        "max-queue",
        integer_kind(0),
        "Requests that may wait before others are refused with 429; keys below their share are still accepted.",
        1024,
        section="server",
        configurable=True,
    ),
    Option(
        "max-connections",
        integer_kind(1),
        "Connections of clients over HTTP, and as many over gRPC; further ones replace idle ones, or get 429.",
        section="server",
        unset_text="as many as `ulimit -n` allows",
        configurable=True,
    ),
    Option(
        "header-timeout",
        duration_kind(0.001),
        "Limit for a request's headers, and for the handshakes of TLS and gRPC.",
        15.0,
        section="server",
        configurable=True,
    ),
    Option(
        "idle-timeout",
        duration_kind(0.001),
        "How long a connection without a request is kept open, over HTTP and gRPC.",
        75.0,
        section="server",
        configurable=True,
    ),
    Option(
        "http2",
        switch_kind(),
        "Speak HTTP/2 with clients that offer it: over TLS, and without TLS to those that begin with it; needs "
        "`pip install 'parley-llm[http2]'`.",
        True,
        section="server",
        configurable=True,
    ),
    Option("body-limit", size_kind(1024), "Largest request body.", 32 << 20, section="server", configurable=True),
    Option(
        "body-memory",
        size_kind(1024),
        "Memory for the bodies of requests that are still arriving or being read; above it they get 429.",
        256 << 20,
        section="server",
        configurable=True,
    ),
    Option(
        "body-rate",
        size_kind(1),
        "Bytes per second that an unfinished body has to bring; a slower one gets 408.",
        1024,
        section="server",
        configurable=True,
    ),
    Option(
        "media-hosts",
        media_host_kind(),
        "Host that pictures, videos and sound may be fetched from: `example.com`, `*.example.com` for all hosts below "
        "it, `any-public` for all whose addresses are public. Ports are 80 and 443, or the one that is written "
        "(`example.com:8443`). With `internal:` before it, its address may be private.",
        section="media",
        unset_text="nothing is fetched",
        repeatable=True,
        configurable=True,
    ),
    Option(
        "media-path",
        text_kind("FOLDER"),
        "Folder below which requests may name files with pictures, videos and sound.",
        section="media",
        unset_text="no file is read",
        configurable=True,
    ),
    Option(
        "media-limit",
        media_limit_kind(integer_kind(0, 4096)),
        "Most pictures, videos or clips of sound in a request. Kinds that are not named keep their limit.",
        [("image", 16), ("video", 2), ("audio", 4)],
        section="media",
        repeatable=True,
        configurable=True,
    ),
    Option(
        "media-size",
        media_limit_kind(size_kind(1)),
        "Largest file of a kind, as it comes. Kinds that are not named keep their limit.",
        [("image", 20 << 20), ("video", 256 << 20), ("audio", 25 << 20)],
        section="media",
        repeatable=True,
        configurable=True,
    ),
    Option(
        "media-request-size",
        size_kind(1),
        "Largest size of all pictures, videos and sound of a request together.",
        512 << 20,
        section="media",
        configurable=True,
    ),
    Option(
        "media-memory",
        size_kind(1 << 20),
        "Memory for what is being fetched, and as much for what has been processed for running requests; above it "
        "requests get 429.",
        1 << 30,
        section="media",
        configurable=True,
    ),
    Option(
        "media-pixels",
        integer_kind(1, 1 << 30),
        "Most pixels of a picture, or of a frame of a video, before it is made smaller for the model.",
        50_000_000,
        section="media",
        configurable=True,
    ),
    Option(
        "media-workers",
        integer_kind(1, 64),
        "Processes that decode pictures, videos and sound for a model, each for one at a time.",
        1,
        section="media",
        configurable=True,
    ),
    Option(
        "media-eager",
        switch_kind(),
        "Start such a process with the server, and load the encoders with the model, not with the first request that "
        "needs them. A checkpoint whose encoders lack a tensor is then refused at the start, as by `parley doctor`.",
        False,
        section="media",
        configurable=True,
    ),
    Option(
        "media-feature-cache",
        size_kind(),
        "Memory for pictures, videos and sound that have been processed for a model, to use them again.",
        256 << 20,
        section="media",
        configurable=True,
    ),
    Option(
        "media-cache",
        size_kind(),
        "Memory for the embeddings of pictures, videos and sound that a model has encoded, to use them again. Requests "
        "that are being computed may need more.",
        256 << 20,
        section="media",
        configurable=True,
    ),
    Option(
        "enable-mm-embeds",
        switch_kind(),
        "OpenAI's and vLLM's APIs: take embeddings of pictures, videos and sound that clients computed.",
        False,
        section="media",
        configurable=True,
    ),
    Option(
        "trust-request-mm-kwargs",
        switch_kind(),
        "OpenAI's and vLLM's APIs: take media_io_kwargs and mm_processor_kwargs, with which a request decides how much "
        "work its media are.",
        False,
        section="media",
        configurable=True,
    ),
    Option(
        "media-body-limit",
        size_kind(1024),
        "Largest request body if a model reads pictures, videos or sound, which are in the body in base64; at most "
        "body-memory. The text of a request is limited by body-limit all the same.",
        64 << 20,
        section="media",
        configurable=True,
    ),
    Option(
        "engine-timeout",
        duration_kind(2.0, or_zero=True),
        "How long an engine process may show no sign of life until it is killed and restarted; 0: no limit. One that "
        "uses processor time has 20 times as long.",
        8.0,
        section="server",
        configurable=True,
    ),
    Option(
        "drain",
        duration_kind(),
        "Time for running answers to finish after SIGTERM.",
        30.0,
        section="server",
        configurable=True,
    ),
    Option(
        "cors-origin",
        text_kind("ORIGIN"),
        "Web origin that may call the server; * allows all.",
        section="server",
        repeatable=True,
        configurable=True,
    ),
    Option(
        "allow-host",
        text_kind("NAME"),
        "Further host name to answer to, besides those of this machine, while listening on this machine only.",
        section="server",
        repeatable=True,
        configurable=True,
    ),
    Option(
        "ping",
        duration_kind(),
        "Silence in a stream after which a comment keeps the connection open.",
        section="server",
        unset_text="never",
        configurable=True,
    ),
    Option(
        "lora-root",
        text_kind("FOLDER"),
        "Folder from which clients may load adapters at run time, with /v1/load_lora_adapter.",
        section="server",
        unset_text="clients may load none",
        configurable=True,
    ),
    Option(
        "pull",
        switch_kind(),
        "Download models from the hub when clients of Ollama's API pull them. They are served from the next start on.",
        False,
        section="server",
        configurable=True,
    ),
    Option(
        "tokenizer-info",
        switch_kind(),
        "Serve the tokenizer's configuration at /tokenizer_info.",
        False,
        section="server",
        configurable=True,
    ),
    Option(
        "ui",
        switch_kind(),
        "Serve the web page (`/` in a browser, `/ui`, `/ui/status`, `/docs`) on the port of all APIs.",
        True,
        section="server",
        configurable=True,
    ),
    Option(
        "max-logprobs",
        integer_kind(-1, 2**31 - 1),
        "OpenAI's and vLLM's APIs: alternatives that a request may ask for per token; -1: the whole vocabulary.",
        section="server",
        unset_text="20; -1 is granted as well, except by strict APIs",
        configurable=True,
    ),
    Option(
        "enable-force-include-usage",
        switch_kind(),
        "OpenAI's and vLLM's APIs: report the usage in every chunk of every stream.",
        False,
        section="server",
        configurable=True,
    ),
    Option(
        "return-tokens-as-token-ids",
        switch_kind(),
        "OpenAI's and vLLM's APIs: name tokens in log-probabilities as token_id:N, unless a request says otherwise.",
        False,
        section="server",
        configurable=True,
    ),
    Option(
        "enable-per-request-metrics",
        switch_kind(),
        "OpenAI's and vLLM's APIs: say in the member metrics of an answer where its time went.",
        False,
        section="server",
        configurable=True,
    ),
    Option(
        "role",
        choice_kind("mixed", "prefill", "decode", "flex"),
        "Role in a cluster. mixed answers any client; the others serve a coordinator: prefill begins requests, decode "
        "continues them, flex does both. The role API can change the role.",
        "mixed",
        section="cluster",
        configurable=True,
    ),
    Option(
        "peer-port",
        integer_kind(0, 65_535, "PORT"),
        "Port for handovers from other instances, for roles other than mixed; 0 takes a free one. If it is not given, "
        "the first free one from 1121 on is taken.",
        1121,
        section="cluster",
        configurable=True,
    ),
    Option(
        "peer-lease",
        duration_kind(1, 3600),
        "Silence after which an instance that sends or receives pages counts as dead; the shorter of both values wins.",
        30.0,
        section="cluster",
        configurable=True,
    ),
    Option(
        "peer-checksum",
        switch_kind(),
        "Verify checksums of handed-over pages; active if one of the two sides asks for it.",
        False,
        section="cluster",
        configurable=True,
    ),
    Option(
        "p-percentage",
        integer_kind(0, 100),
        "Share of a flex instance for prefill, in percent: of its engine's time during decode, and of its slots.",
        50,
        section="cluster",
        configurable=True,
    ),
    Option(
        "cluster-secret",
        text_kind("SECRET"),
        "Secret by which the instances and coordinators of a cluster recognise each other. Roles other than mixed need "
        "it, unless they listen on this machine only, without API keys.",
        section="cluster",
        unset_text="none",
        configurable=True,
        secret=True,
    ),
    Option(
        "cluster-secret-file",
        text_kind("FILE"),
        "File whose first line is the cluster secret.",
        section="cluster",
        configurable=True,
    ),
    Option(
        "cluster-network",
        network_kind(),
        "Network whose hosts are trusted as members of the cluster without the secret, for coordinators that know "
        "none, such as MindIE's; handovers may go there, too.",
        section="cluster",
        unset_text="none is trusted",
        repeatable=True,
        configurable=True,
    ),
    Option(
        "cluster-cert",
        text_kind("FILE"),
        "Certificate (PEM) that an instance presents to others; handovers are then encrypted.",
        section="cluster",
        unset_text="no encryption",
        configurable=True,
    ),
    Option(
        "cluster-key", text_kind("FILE"), "Key of the certificate, unencrypted.", section="cluster", configurable=True
    ),
    Option(
        "cluster-ca",
        text_kind("FILE"),
        "CA certificate that must have signed the certificates of others.",
        section="cluster",
        configurable=True,
    ),
    Option(
        "mindie-config",
        text_kind("FILE"),
        "MindIE's config.json: serve its three planes as it says, with its models, limits and certificates. Options "
        "set explicitly win; the port of all APIs exists only with --port.",
        section="server",
        configurable=True,
    ),
    Option(
        "mindie-profile",
        choice_kind("strict-old", "strict", "extended"),
        "Refusals of MindIE's APIs: as in its manual (strict-old), as in its current servers (strict), or neither.",
        "extended",
        section="server",
        configurable=True,
    ),
    Option("quiet", switch_kind(), "Do not log a line for each request.", False, section="output", configurable=True),
    Option(
        "log-format",
        choice_kind("text", "json"),
        "Format of log lines. With json, the lines at the start are log lines as well.",
        "text",
        section="output",
        configurable=True,
    ),
    Option(
        "log-level",
        choice_kind("debug", "info", "warning", "error"),
        "The least level of messages that are logged. A line for each request has the level info.",
        "info",
        section="output",
        configurable=True,
    ),
    Option(
        "log-bodies",
        switch_kind(),
        "Log the first 2,000 characters of the bodies of requests and answers. They contain what users write.",
        False,
        section="output",
        configurable=True,
    ),
    Option(
        "otlp-traces-endpoint",
        otlp_endpoint_kind(),
        "Where traces of requests are sent over OTLP: grpc(s)://HOST:PORT, or http(s)://HOST:PORT, which means gRPC "
        "with port 4317.",
        unset_text="OTEL_EXPORTER_OTLP_ENDPOINT, or nowhere",
        section="output",
        configurable=True,
    ),
    Option(
        "config", text_kind("FILE"), "TOML file with any of these options as keys.", section="output", configurable=True
    ),
    Option("show-config", switch_kind(), "Print every value with its source, then exit.", False, section="output"),
]

CLIENT_OPTIONS: list[Option] = [
    Option(
        "url",
        text_kind("URL"),
        "Address of the server.",
        unset_text="http://127.0.0.1:8000",
        section="server",
        configurable=True,
    ),
    Option(
        "api-key",
        text_kind("KEY"),
        "Key to send.",
        section="server",
        repeatable=True,
        configurable=True,
        secret=True,
    ),
]

KNOWN_VARIABLES = sorted(
    {option.variable_name for option in SERVE_OPTIONS + CLIENT_OPTIONS if option.configurable} | {"PARLEY_NATIVE"}
)


def model_overrides(config: Mapping[str, Any]) -> ModelOverrides:
    """Return the parts of a model that the options replace, instead of its own folder's."""
    from parley.types import ModelOverrides

    return ModelOverrides(
        config["revision"] or "",
        config["tokenizer"] or "",
        config["chat-template"] or "",
        config["hf-overrides"] or {},
    )


def engine_settings(config: Mapping[str, Any], folder: str) -> Settings:
    """Return the engine settings for the model in ``folder``, taken from the options."""
    from parley.types import Settings

    return Settings(
        model=folder,
        overrides=model_overrides(config),
        dtype=DTYPE_NAMES[config["dtype"]],
        device=config["device"],
        max_model_len=config["max-model-len"],
        kv_memory=config["kv-memory"],
        kv_dtype=config["kv-dtype"],
        staging=config["kv-staging"],
        state_cache=config["state-cache"],
        max_batch=config["max-batch"],
        step_ms=config["step-ms"],
        step_tokens=config["step-tokens"],
        prefix_cache=config["prefix-cache"],
        threads=config["threads"],
        lowering=config["lowering"],
        engine_timeout=config["engine-timeout"],
        tool_parser=config["tool-parser"],
        reasoning_parser=config["reasoning-parser"],
        trust_marks=config["trust-marks"],
        pack_cache=config["pack-cache"],
        quantization=config["quantization"],
        adapters=dict(config["lora"]),
        max_adapters=config["max-loras"],
        max_rank=config["max-lora-rank"],
        media_cache=config["media-cache"],
        media_eager=config["media-eager"],
        speculate=config["speculate"],
        speculate_tokens=config["speculate-tokens"],
        shared=config["role"] != "mixed",
        costs=config["cost-model"] or "",
        cache_events=_cache_event_settings(config),
    )


def _cache_event_settings(config: Mapping[str, Any]) -> CacheEventSettings | None:
    """Return where the engine publishes events of its prefix cache; None for nowhere."""
    from parley.types import CacheEventSettings

    if config["kv-events"] is None:
        return None
    return CacheEventSettings(
        config["kv-events"],
        config["kv-events-replay"] or "",
        config["kv-events-topic"] or "",
        config["kv-events-form"],
        config["kv-events-buffer"],
        config["kv-events-hwm"],
    )


def vllm_settings(config: Mapping[str, Any], folder: str, *, max_rank: int = 0) -> VLLMSettings:
    """Return vLLM's settings for the model in ``folder``, taken from the options. ``max_rank`` 0: from the adapters."""
    from parley.types import VLLMSettings

    return VLLMSettings(
        model=folder,
        overrides=model_overrides(config),
        dtype=DTYPE_NAMES[config["dtype"]],
        max_model_len=config["max-model-len"],
        kv_memory=config["kv-memory"],
        max_batch=config["max-batch"],
        prefix_cache=config["prefix-cache"],
        engine_timeout=config["engine-timeout"],
        tool_parser=config["tool-parser"],
        reasoning_parser=config["reasoning-parser"],
        trust_marks=config["trust-marks"],
        adapters=dict(config["lora"]),
        max_adapters=config["max-loras"],
        max_rank=max_rank,
        loads_adapters=bool(config["lora"] or config["lora-root"]),
        python=config["engine-python"] or "",
        arguments=list(config["engine-args"] or []),
        exact=config["exact"],
        transfer_host=config["host"] if config["role"] != "mixed" else "",
    )


def attached_settings(config: Mapping[str, Any], folder: str, *, key: str) -> AttachedSettings:
    """Return the settings of a vLLM server that runs already, for the model whose tokenizer is in ``folder``."""
    from parley.types import AttachedSettings

    return AttachedSettings(
        model=folder,
        overrides=model_overrides(config),
        max_model_len=config["max-model-len"],
        max_batch=config["max-batch"],
        engine_timeout=config["engine-timeout"],
        tool_parser=config["tool-parser"],
        reasoning_parser=config["reasoning-parser"],
        trust_marks=config["trust-marks"],
        url=config["engine"],
        key=key,
        exchanges_pages=config["role"] != "mixed",
    )
