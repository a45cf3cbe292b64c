"""Options of ``parley serve`` about answers: which APIs and members, the queue, and the end of the server."""

from __future__ import annotations

from parley.settings.option_kinds import (
    choice_kind,
    duration_kind,
    integer_kind,
    switch_kind,
    text_kind,
)
from parley.settings.options import Option

ANSWER_OPTIONS: list[Option] = [
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
        "max-queue",
        integer_kind(0),
        "Requests that may wait before others are refused with 429; keys below their share are still accepted.",
        1024,
        section="server",
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
        "OpenAI's and vLLM's APIs: the most alternatives per token that a request may ask for. With -1, or with at "
        "least the vocabulary's size, requests may also ask for the whole vocabulary (-1).",
        section="server",
        unset_text="20; APIs that are not strict also accept -1",
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
]
