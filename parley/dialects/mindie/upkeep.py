"""MindIE's management and metrics ports: health, server information, statistics, shutdown.

Health is reported from present knowledge: a dead engine is noticed at once, so no periodic test is needed. ``timed``
health actually generates one token. There are no accelerators to recover from faults: the commands for that stop and
resume the intake of new requests.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import msgspec

from parley.dialects.dialect import Answer, Head
from parley.dialects.facts import Facts
from parley.dialects.mindie import shared
from parley.dialects.mindie.rules import Rules
from parley.dialects.mindie.shared import encode
from parley.dialects.wishes import Adapt, Command, Told
from parley.errors import Invalid, NotFound, ParleyError, UnknownModel

LONGEST = 600  # seconds that a timed health check may take
USUAL = 10  # seconds by default
TEXT = b"text/plain"
STOPPED = "The service has been stopped."
MONITOR = "The environment variable MIES_SERVICE_MONITOR_MODE is not set to 1."
COMMAND = encode(
    {"Error": "cmd_type must be necessary and data type must be integer.", "error_type": "validation"}
).decode()

# -- health


def live(rules: Rules, body: bytes, head: Head, facts: Facts) -> Answer:
    """Return whether the server is alive; a busy one is."""
    return _health(facts, 200, "Service is alive but busy")


def ready(rules: Rules, body: bytes, head: Head, facts: Facts) -> Answer:
    """Return whether the server takes requests; a busy one does not. Raises UnknownModel."""
    if "model" in head.path:
        known(head, facts)
    return _health(facts, 503, "Service is alive but busy. Consider reducing request frequency")


def _health(facts: Facts, busy: int, told: str) -> Answer:
    now = facts.vitals
    if now.phase == "draining":
        return shared.answer(503, STOPPED, "Service Unavailable")
    if now.phase in ("idle", "loading"):
        return Answer(503, b"")
    if now.phase not in ("ready", "held", "prepared"):
        return Answer(500, encode({"message": "Service is abnormal"}))
    if now.held >= now.places:
        return Answer(busy, encode({"message": told}))
    return Answer(200, b"")


def wait(head: Head) -> float:
    """Return how many seconds a timed health check may take. Raises NotFound."""
    given = head.path.get("seconds", str(USUAL))
    if not re.fullmatch(r"[0-9]{1,3}", given):
        long = given.isdigit() and len(given) > 3
        raise NotFound("Max wait time is 600, input is invalid or too long" if long else _range())
    if not 1 <= int(given) <= LONGEST:
        raise NotFound(_range())
    return int(given)


def _range() -> str:
    return f"Wait time should be in range of [1, {LONGEST}], input is not valid"


def tried(good: bool) -> Answer:
    """Return the result of a timed health check."""
    return Answer(200, encode({"status": "healthy"})) if good else Answer(500, encode({"status": "abnormal"}))


# -- information and statistics


def info(rules: Rules, body: bytes, head: Head, facts: Facts) -> Answer:
    """Return the server's information in TGI's format."""
    now = facts.vitals
    length = rules.max_seq_len or head.context
    made = now.info
    return _told(
        {
            "docker_label": None,
            "max_batch_total_tokens": rules.max_prefill_tokens,
            "max_best_of": 1 if rules.strict else rules.max_n,
            "max_concurrent_requests": now.batch,
            "max_stop_sequences": None,
            "max_waiting_tokens": None,
            "sha": None,
            "validation_workers": None,
            "version": facts.version,
            "waiting_served_ratio": None,
            "models": [
                {
                    "model_device_type": "npu" if rules.strict or made is None else made.device,
                    "model_dtype": made.dtype if made is not None else "float16",
                    "model_id": card.name,
                    "model_pipeline_tag": "text-generation",
                    "model_sha": None,
                    "max_total_tokens": length,
                }
                for card in facts.cards
            ],
            "max_input_length": rules.max_input_token_len or max(0, length - 1),
        }
    )


def config(rules: Rules, body: bytes, head: Head, facts: Facts) -> Answer:
    """Return the main model's configuration."""
    length = rules.max_seq_len or head.context
    made = facts.vitals.info
    return _told(
        {
            "modelName": facts.cards[0].name,
            "maxSeqLen": length,
            "npuMemSize": rules.npu_mem_size,
            "cpuMemSize": rules.cpu_mem_size,
            "worldSize": rules.world_size,
            "maxOutputLen": rules.max_iter_times or length,
            "cacheBlockSize": rules.cache_block_size or (made.block_size if made is not None else 0),
        }
    )


def slots(rules: Rules, body: bytes, head: Head, facts: Facts) -> Answer:
    """Return the free sequences and cache tokens of the path's model. Raises UnknownModel."""
    known(head, facts)
    now = facts.vitals
    return _told(
        {
            "total_slots": now.batch,
            "free_slots": max(0, now.batch - now.stats.running - now.stats.waiting),
            "available_tokens_length": max(0, head.capacity - head.cached),
        }
    )


def statistics(rules: Rules, body: bytes, head: Head, facts: Facts) -> Answer:
    """Return load and latency; times are in milliseconds, means of the last thousand requests or tokens."""
    now = facts.vitals
    values = {
        "TTFT": round(1000 * now.first_token),
        "TBT": round(1000 * now.between_tokens),
        "waitingInferRequestNum": now.stats.waiting,
        "processingInferRequestNum": now.stats.running,
        "remainBlocks": now.stats.blocks_total - now.stats.blocks_used,
    }
    instance = head.headers.get(b"host", b"").decode("latin-1")
    result = [
        {"metric": [{"__name__": name, "job": "node", "instance": instance}], "value": str(value)}
        for name, value in values.items()
    ]
    return _told({"resultType": "vector", "result": result})


def unmonitored(body: bytes, head: Head, facts: Facts) -> Answer:
    """Answer the metrics route if the original's metrics are off."""
    return shared.answer(500, MONITOR, "Incomplete Generation")


# -- shutdown


def force(head: Head) -> bool:
    """True if the server should stop at once."""
    return b"mode=Force" in head.query.split(b"&")


def stopped(first: bool) -> Answer:
    """Return the answer to a shutdown request, the first and later ones."""
    if first:
        return Answer(200, b"")
    return shared.answer(500, STOPPED, "Incomplete Generation")


# -- the state of the engine

READY, NORMAL, ABNORMAL, PAUSE, INIT, BUSY = range(6)
PHASES = {"ready": NORMAL, "held": PAUSE, "prepared": READY, "idle": INIT, "loading": INIT}
FITTING = {0: (NORMAL, ABNORMAL, BUSY), 1: (PAUSE,), 2: (READY, PAUSE), 3: (NORMAL, ABNORMAL, BUSY)}
ORDERS: dict[int, Command] = {0: "hold", 1: "prepare", 2: "release", 3: "hold"}


def status(rules: Rules, body: bytes, head: Head, facts: Facts) -> Answer:
    """Return the engine's state."""
    return _told({"status": _state(facts), "errors": []})


def command(rules: Rules, body: bytes, head: Head, facts: Facts) -> Told:
    """Return the answer to a command, and the pause command it stands for, if any. Raises Invalid."""
    try:
        given = msgspec.json.decode(body)
        number = given.get("cmd") if isinstance(given, dict) else None
    except (ValueError, RecursionError):
        number = None
    if type(number) is not int:
        raise Invalid(COMMAND)
    if number not in FITTING or _state(facts) not in FITTING[number]:
        return Told(shared.answer(400, "Command is not consistent with current status.", "Bad Request"))
    done = {"device_id": 0, "result": True, "message": "success"}
    return Told(_told({"status": True, "message": "success", "reason": [done]}), ORDERS[number])


def _state(facts: Facts) -> int:
    now = facts.vitals
    if now.phase == "ready" and now.held >= now.places:
        return BUSY
    return PHASES.get(now.phase, ABNORMAL)


# -- adapters


def adapter(rules: Rules, load: bool, body: bytes, head: Head) -> Adapt | Answer:
    """Read a request to load or unload an adapter. The original answers 200 even on failure; its text says so."""
    fields: dict[str, Any] = {}
    try:
        given = msgspec.json.decode(body)
        fields = given if isinstance(given, dict) else {}
    except (ValueError, RecursionError):
        pass
    name, path, model = (fields.get(member) for member in ("lora_name", "lora_path", "master_model"))
    if fields and not (isinstance(name, str) and re.fullmatch(r"[a-zA-Z0-9_-]{1,256}", name)):
        return shared.answer(503, "Input invalid lora name", "Service Unavailable")
    if path is not None and not (isinstance(path, str) and re.fullmatch(r"[\w./-]+", path) and ".." not in path):
        return shared.answer(503, "Input invalid lora path", "Service Unavailable")
    model = model if isinstance(model, str) else ""
    if not isinstance(name, str) or (load and path is None):
        return _refused(rules, Invalid("lora_name and lora_path are wanted." if load else "lora_name is wanted."))
    done = Answer(200, f"{'Load' if load else 'Unload'} lora adapter {name} success.".encode(), TEXT)
    return Adapt(name, path if load else None, done, model=model, failed=partial(_refused, rules))


def _refused(rules: Rules, error: ParleyError) -> Answer:
    return Answer(200 if rules.strict else error.status, error.message.encode(), TEXT)


def known(head: Head, facts: Facts) -> str:
    """Return the name of the path's model. Raises UnknownModel."""
    name = head.path["model"]
    if all(card.name != name for card in facts.cards):
        raise UnknownModel("", name=name)
    return name


def _told(value: dict[str, Any]) -> Answer:
    return Answer(200, encode(value))
