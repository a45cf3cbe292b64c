"""Asks a vLLM server for its version, its model, its limits, and the features that its options exclude.

This happens before the server is used. The limit of log-probabilities is in the server's error for a request for too
many of them. A request for one token shows whether the server accepts a feature, such as grammars.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from parley.engine.vllm_engine import TESTED_VERSIONS, is_tested_version
from parley.text.tokens.json_files import BadTokenizer, read_json_object
from parley.text.tokens.tokenizer import Tokenizer
from parley.types import Arena, AttachedSettings, EngineBound, EngineFeature, ModelInfo
from parley.worker.attached.server_calls import ServerAway, ServerCalls
from parley.worker.attached.server_metrics import ServerMetrics, read_server_metrics
from parley.worker.attached.token_answers import PoolingAnswer, ServerUsage
from parley.worker.vllm.capabilities import BOUNDS, vllm_features
from parley.worker.vllm.page_moves import KEEP_PAGES

GENERATE_PATH = "/inference/v1/generate"
POOLING_PATH = "/pooling"
EXCESSIVE_LOGPROBS = 999_999_999
DEFAULT_MAX_LOGPROBS = 20  # vLLM's --max-logprobs
DEFAULT_BLOCK_SIZE = 16
ANY_CHARACTER = '%llguidance {"no_forcing": true}\nstart: /(.|\\n)+/\n'
# Requests for one token that show whether a server offers a feature.
FEATURE_PROBES: dict[EngineFeature, dict[str, Any]] = {
    "grammar": {"structured_outputs": {"grammar": ANY_CHARACTER}},
    "min_p": {"temperature": 1.0, "min_p": 0.1},
    "logit_bias": {"logit_bias": {"0": 1.0}},
}
# The route takes no sequences of banned tokens.
MISSING_FEATURES: frozenset[EngineFeature] = frozenset({"banned_tokens"})
TOKENIZER_SAMPLE = 'The 7 quick foxes: "Zwölf" 你好 {"a": [1, 2]}\n\tend'  # a text that tokenizers split differently

# Raised when an answer is decoded that is not JSON, not UTF-8 or too deep, and when its members are other ones
ODD_ANSWERS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError, KeyError)


class AttachRefused(Exception):
    """The server cannot be the engine of this model. The message is one sentence with a hint."""


class AttachedModelCard(msgspec.Struct, frozen=True):
    """A row of ``/v1/models``. ``parent``: the model of an adapter. ``root``: the folder or name."""

    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class AttachedModelList(msgspec.Struct):
    """The answer of ``/v1/models``."""

    data: list[AttachedModelCard]


class ProbeAnswer(msgspec.Struct):
    """The answer to a request for one token."""

    choices: list[dict[str, Any]] = []
    usage: ServerUsage | None = None
    kv_transfer_params: dict[str, Any] | None = None


@dataclass(frozen=True)
class AttachedServerFacts:
    """The model and limits of a server.

    * ``card``: the model there; ``adapters``: its adapters.
    * ``max_logprobs``: the most alternatives that it lists.
    * ``missing_features``: the features that it refuses.
    * ``reports_cache``: it reports how many tokens of a prompt were cached.
    * ``has_connector``: it moves KV pages.
    * ``dimensions``: numbers in its vectors; 0 if it makes none.
    * ``end_ids`` and ``vocab_size``: those of the local folder.
    """

    version: str
    card: AttachedModelCard
    adapters: dict[str, str]
    max_model_len: int
    generates: bool
    max_logprobs: int
    missing_features: frozenset[EngineFeature]
    reports_cache: bool
    has_connector: bool
    dimensions: int
    kv_pages: int
    block_size: int
    end_ids: frozenset[int]
    vocab_size: int


async def read_facts(calls: ServerCalls, settings: AttachedSettings, name: str) -> AttachedServerFacts:
    """Return the facts that the server reports. ``name``: the model's name here. Raises AttachRefused, ServerAway."""
    await check_server_health(calls)
    version = await _read_version(calls, settings)
    cards = await read_cards(calls, settings)
    card = choose_card(cards, settings, name)
    tokenizer = await _check_tokenizer(calls, settings, card)
    dimensions = await _read_dimensions(calls, card)
    plain_answer = await _probe_plain(calls, settings, card, may_pool=dimensions > 0)
    max_logprobs, missing_features = 0, set[EngineFeature]()
    if plain_answer.choices:
        max_logprobs = await _read_max_logprobs(calls, card)
        missing_features = {feature for feature in FEATURE_PROBES if not await _has_feature(calls, card, feature)}
    if settings.exchanges_pages and not plain_answer.kv_transfer_params:
        raise AttachRefused(
            f"{settings.url} moves no KV pages: start it with --kv-transfer-config, or leave out --role."
        )
    metrics = await ask_metrics(calls)
    config = read_json_object(Path(settings.model) / "config.json")
    lengths = filter(None, (settings.max_model_len, card.max_model_len))
    return AttachedServerFacts(
        version=version,
        card=card,
        adapters=list_adapters(cards, card),
        max_model_len=min(lengths),
        generates=bool(plain_answer.choices),
        max_logprobs=max_logprobs,
        missing_features=frozenset(missing_features),
        reports_cache=plain_answer.usage is not None and plain_answer.usage.prompt_tokens_details is not None,
        has_connector=bool(plain_answer.kv_transfer_params),
        dimensions=dimensions,
        kv_pages=metrics.kv_pages,
        block_size=metrics.block_size or DEFAULT_BLOCK_SIZE,
        end_ids=tokenizer.eos_ids,
        vocab_size=_vocabulary_size(config) or tokenizer.vocab_size,
    )


async def check_server_health(calls: ServerCalls) -> None:
    """Check that the server says that it is healthy. Raises ServerAway."""
    health = await calls.get("/health")
    if health.status != 200:
        raise ServerAway(f"it is not healthy (status {health.status})")


async def read_cards(calls: ServerCalls, settings: AttachedSettings) -> list[AttachedModelCard]:
    """Return the models and adapters that the server lists. Raises AttachRefused, ServerAway."""
    answer = await calls.get("/v1/models")
    if answer.status in (401, 403):
        hint = "" if settings.key else "; --engine-key-file names a file with its key"
        raise AttachRefused(f"{settings.url} wants another API key (status {answer.status}){hint}.")
    try:
        cards = msgspec.json.decode(answer.body, type=AttachedModelList).data if answer.status == 200 else []
    except ODD_ANSWERS:
        cards = []
    if not cards:
        raise AttachRefused(f"{settings.url} lists no models: GET /v1/models gave status {answer.status}.")
    return cards


def list_adapters(cards: list[AttachedModelCard], model: AttachedModelCard) -> dict[str, str]:
    """Return the adapters of a model, by name: where the server has them from.

    A model may have several names. vLLM gives the first one as the parent of its adapters, whichever is used here.
    """
    names = {card.id for card in cards if card.parent is None and card.root == model.root}
    return {card.id: card.root or "" for card in cards if card.parent in names}


def choose_card(cards: list[AttachedModelCard], settings: AttachedSettings, name: str) -> AttachedModelCard:
    """Return the model of this name, or the only one. Raises AttachRefused."""
    cards = [card for card in cards if card.parent is None]
    card = next(
        (card for card in cards if card.id == name), cards[0] if len({card.root for card in cards}) == 1 else None
    )
    if card is None:
        names = ", ".join(card.id for card in cards)
        raise AttachRefused(f"{settings.url} serves {names}, but not {name}: choose one with --model NAME=MODEL.")
    if not card.max_model_len:
        raise AttachRefused(f"{settings.url} does not tell the context length of {card.id}, so it is no vLLM server.")
    return card


def describe_attached_model(facts: AttachedServerFacts, settings: AttachedSettings) -> ModelInfo:
    """Describe the model to the API process. Sizes that only the server knows are 0."""
    config = read_json_object(Path(settings.model) / "config.json")
    architectures = config.get("architectures")
    return ModelInfo(
        architecture=str(architectures[0]) if isinstance(architectures, list) and architectures else "unknown",
        dtype="unknown",
        device="remote",
        parameters=0,
        vocab_size=facts.vocab_size,
        max_model_len=facts.max_model_len,
        weights_bytes=0,
        kv_bytes=0,
        kv_pages=facts.kv_pages,
        page_tokens=facts.block_size,
        fused=False,
        generates=facts.generates,
        dimensions=facts.dimensions,
        engine=f"vllm {facts.version}",
        features=attached_features(facts),
        bounds=attached_bounds(facts.max_logprobs, facts.vocab_size, len(facts.end_ids)),
        arena=_server_arena(facts, settings) if facts.has_connector else None,
        adapters=facts.adapters,
    )


def attached_features(facts: AttachedServerFacts) -> frozenset[EngineFeature]:
    """Return the features of a server."""
    offered = vllm_features(adapters=bool(facts.adapters), connector=facts.has_connector)
    return offered - MISSING_FEATURES - facts.missing_features


def _server_arena(facts: AttachedServerFacts, settings: AttachedSettings) -> Arena:
    """Return a digest of the facts that two servers must share to exchange pages, as far as servers report them."""
    config = (Path(settings.model) / "config.json").read_bytes()
    digest = hashlib.sha256(config).hexdigest()[:16]
    layout = f"engine=vllm {facts.version} server;model={digest};pages={facts.block_size}"
    return Arena(0, -1, facts.kv_pages, [], f"{layout};trust-marks={'on' if settings.trust_marks else 'off'}")


def attached_bounds(max_logprobs: int, vocab_size: int, end_tokens: int) -> dict[EngineBound, tuple[float, float]]:
    """Return the bounds of a server that lists ``max_logprobs`` alternatives. A beam search needs two alternatives for
    each beam, and one for each end token."""
    bounds = BOUNDS | {"named_logprobs": (0, min(BOUNDS["named_logprobs"][1], max_logprobs) - 1)}
    if max_logprobs < vocab_size:
        bounds |= {"logprobs": (0, max_logprobs), "prompt_logprobs": (0, max_logprobs)}
        bounds["beam_width"] = (1, max(1, (max_logprobs - 1 - end_tokens) // 2))
    return bounds


async def ask_metrics(calls: ServerCalls) -> ServerMetrics:
    """Return the server's metrics; zeros if it has none. Raises ServerAway."""
    answer = await calls.get("/metrics")
    return read_server_metrics(answer.body if answer.status == 200 else b"")


def error_text(status: int, body: bytes) -> str:
    """Return the message of an error answer."""
    try:
        answer = msgspec.json.decode(body)
        message = answer["error"]["message"] if "error" in answer else answer["message"]
    except ODD_ANSWERS:
        message = None
    return " ".join(str(message).split()) if message else f"status {status}"


async def _read_version(calls: ServerCalls, settings: AttachedSettings) -> str:
    answer = await calls.get("/version")
    try:
        version = str(msgspec.json.decode(answer.body)["version"]) if answer.status == 200 else ""
    except ODD_ANSWERS:
        version = ""
    first, last = (f"{major}.{minor}" for major, minor in TESTED_VERSIONS)
    if not version:
        raise AttachRefused(f"{settings.url} is no vLLM server: GET /version gave status {answer.status}.")
    if not is_tested_version(version):
        raise AttachRefused(f"{settings.url} runs vLLM {version}, but parley works with {first} to {last}.")
    return version


async def _check_tokenizer(calls: ServerCalls, settings: AttachedSettings, card: AttachedModelCard) -> Tokenizer:
    """Return the tokenizer of the local folder. Raises AttachRefused if the server splits a text into other tokens."""
    try:
        tokenizer = await asyncio.to_thread(Tokenizer.from_folder, settings.model)
    except BadTokenizer as error:
        raise AttachRefused(str(error)) from error
    body = {"model": card.id, "prompt": TOKENIZER_SAMPLE, "add_special_tokens": False}
    answer = await calls.post("/tokenize", body)
    try:
        tokens = msgspec.json.decode(answer.body)["tokens"] if answer.status == 200 else None
    except ODD_ANSWERS:
        tokens = None
    # A server may have no tokenizer, and a proxy may answer in its place.
    if isinstance(tokens, list) and tokens != tokenizer.encode(TOKENIZER_SAMPLE, add_special_tokens=False):
        raise AttachRefused(
            f"{settings.url} serves another model as {card.id}: its tokenizer is not that of {settings.model}."
        )
    return tokenizer


async def _read_max_logprobs(calls: ServerCalls, card: AttachedModelCard) -> int:
    """Return the most alternatives that the server lists."""
    answer = await calls.post(GENERATE_PATH, _probe_body(card, {"logprobs": EXCESSIVE_LOGPROBS}))
    numbers = map(int, re.findall(r"\d+", error_text(answer.status, answer.body)))
    return max((number for number in numbers if number != EXCESSIVE_LOGPROBS), default=DEFAULT_MAX_LOGPROBS)


async def _read_dimensions(calls: ServerCalls, card: AttachedModelCard) -> int:
    """Return the length of the server's vectors; 0 if it makes none."""
    answer = await calls.post(POOLING_PATH, {"model": card.id, "task": "embed", "input": [0]})
    try:
        vectors = msgspec.json.decode(answer.body, type=PoolingAnswer).data if answer.status == 200 else []
    except ODD_ANSWERS:
        vectors = []
    return len(vectors[0].data) if vectors else 0


async def _probe_plain(
    calls: ServerCalls, settings: AttachedSettings, card: AttachedModelCard, *, may_pool: bool
) -> ProbeAnswer:
    """Return the answer to a request for one token. Raises AttachRefused if the server generates none.

    With ``may_pool`` the answer is empty instead, because the server may make vectors only.
    """
    body = _probe_body(card, {}) | ({"kv_transfer_params": KEEP_PAGES} if settings.exchanges_pages else {})
    answer = await calls.post(GENERATE_PATH, body)
    try:
        probe_answer = msgspec.json.decode(answer.body, type=ProbeAnswer) if answer.status == 200 else ProbeAnswer()
    except ODD_ANSWERS:
        probe_answer = ProbeAnswer()
    if not probe_answer.choices and not may_pool:
        raise AttachRefused(
            f"{settings.url} does not continue tokens: POST {GENERATE_PATH} gave status {answer.status} "
            f"({error_text(answer.status, answer.body)})."
        )
    return probe_answer


async def _has_feature(calls: ServerCalls, card: AttachedModelCard, feature: EngineFeature) -> bool:
    answer = await calls.post(GENERATE_PATH, _probe_body(card, FEATURE_PROBES[feature]))
    return answer.status == 200


def _probe_body(card: AttachedModelCard, params: dict[str, Any]) -> dict[str, Any]:
    options = {"max_tokens": 1, "temperature": 0.0, "detokenize": False}
    return {"model": card.id, "token_ids": [0], "sampling_params": options | params, "reasoning_ended": True}


def _vocabulary_size(config: dict[str, Any]) -> int:
    """Return the number of logits, 0 if config.json does not say it."""
    text_config = config.get("text_config")
    sizes = [section.get("vocab_size") for section in (config, text_config) if isinstance(section, dict)]
    return next((size for size in sizes if isinstance(size, int)), 0)
