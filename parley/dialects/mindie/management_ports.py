"""MindIE's management and metrics ports: health, server information, statistics, shutdown.

The server notices at once when its engine dies, so health needs no periodic test; only the ``timed`` health check
generates a token. The original's commands for faults of accelerators stop and resume the intake of new requests here.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from parley.dialects.admin_requests import AdapterChange, PauseAnswer, PauseCommand
from parley.dialects.facts import ServerFacts
from parley.dialects.json_answer import encode_json, json_answer
from parley.dialects.json_body import decode_json
from parley.dialects.mindie.api_rules import MindieRules
from parley.dialects.mindie.error_answers import mindie_json_error_answer
from parley.dialects.reply import Answer
from parley.dialects.request_context import RequestContext
from parley.errors import InvalidValue, NotFound, ParleyError, UnknownModel

MAX_WAIT = 600  # seconds that a timed health check may take
DEFAULT_WAIT = 10  # seconds by default
PLAIN_TEXT = b"text/plain"
STOPPED_MESSAGE = "The service has been stopped."
MONITOR_OFF_MESSAGE = "The environment variable MIES_SERVICE_MONITOR_MODE is not set to 1."
WRONG_COMMAND_MESSAGE = encode_json(
    {"Error": "cmd_type must be necessary and data type must be integer.", "error_type": "validation"}
).decode()

# -- health


def check_live(rules: MindieRules, body: bytes, context: RequestContext, facts: ServerFacts) -> Answer:
    """Return whether the server is alive; a busy one is."""
    return _health_answer(facts, 200, "Service is alive but busy")


def check_ready(rules: MindieRules, body: bytes, context: RequestContext, facts: ServerFacts) -> Answer:
    """Return whether the server takes requests; a busy one does not. Raises UnknownModel."""
    if "model" in context.path_parts:
        model_of_path(context, facts)
    return _health_answer(facts, 503, "Service is alive but busy. Consider reducing request frequency")


def _health_answer(facts: ServerFacts, busy_status: int, busy_message: str) -> Answer:
    status = facts.status
    if status.phase == "draining":
        return stopped_answer()
    if status.phase in ("idle", "loading"):
        return Answer(503, b"")
    if status.phase not in ("ready", "held", "prepared"):
        return Answer(500, encode_json({"message": "Service is abnormal"}))
    if status.used_slots >= status.slots:
        return Answer(busy_status, encode_json({"message": busy_message}))
    return Answer(200, b"")


def stopped_answer() -> Answer:
    """Return the answer of routes for health and status once a stop was asked for."""
    return mindie_json_error_answer(503, STOPPED_MESSAGE, "Service Unavailable")


def read_wait_seconds(context: RequestContext) -> float:
    """Return how many seconds a timed health check may take. Raises NotFound."""
    seconds = context.path_parts.get("seconds", str(DEFAULT_WAIT))
    if not re.fullmatch(r"[0-9]{1,3}", seconds):
        too_long = seconds.isdigit() and len(seconds) > 3
        raise NotFound("Max wait time is 600, input is invalid or too long" if too_long else _wait_range_message())
    if not 1 <= int(seconds) <= MAX_WAIT:
        raise NotFound(_wait_range_message())
    return int(seconds)


def _wait_range_message() -> str:
    return f"Wait time should be in range of [1, {MAX_WAIT}], input is not valid"


def write_health_check(good: bool) -> Answer:
    """Return the result of a timed health check."""
    return Answer(200, encode_json({"status": "healthy"})) if good else Answer(500, encode_json({"status": "abnormal"}))


# -- information and statistics


def mindie_info(rules: MindieRules, body: bytes, context: RequestContext, facts: ServerFacts) -> Answer:
    """Return the server's information in TGI's format."""
    status = facts.status
    max_length = rules.max_seq_len or context.context_length
    model_info = status.info
    return json_answer(
        {
            "docker_label": None,
            "max_batch_total_tokens": rules.max_prefill_tokens,
            "max_best_of": 1 if rules.strict else rules.max_n,
            "max_concurrent_requests": status.max_batch,
            "max_stop_sequences": None,
            "max_waiting_tokens": None,
            "sha": None,
            "validation_workers": None,
            "version": facts.version,
            "waiting_served_ratio": None,
            "models": [
                {
                    "model_device_type": "npu" if rules.strict or model_info is None else model_info.device,
                    "model_dtype": model_info.dtype if model_info is not None else "float16",
                    "model_id": card.name,
                    "model_pipeline_tag": "text-generation",
                    "model_sha": None,
                    "max_total_tokens": max_length,
                }
                for card in facts.cards
            ],
            "max_input_length": rules.max_input_token_len or max(0, max_length - 1),
        }
    )


def mindie_config(rules: MindieRules, body: bytes, context: RequestContext, facts: ServerFacts) -> Answer:
    """Return the main model's configuration."""
    max_length = rules.max_seq_len or context.context_length
    model_info = facts.status.info
    return json_answer(
        {
            "modelName": facts.cards[0].name,
            "maxSeqLen": max_length,
            "npuMemSize": rules.npu_mem_size,
            "cpuMemSize": rules.cpu_mem_size,
            "worldSize": rules.world_size,
            "maxOutputLen": rules.max_iter_times or max_length,
            "cacheBlockSize": rules.cache_block_size or (model_info.page_tokens if model_info is not None else 0),
        }
    )


def count_slots(rules: MindieRules, body: bytes, context: RequestContext, facts: ServerFacts) -> Answer:
    """Return the free sequences and cache tokens of the path's model. Raises UnknownModel."""
    model_of_path(context, facts)
    status = facts.status
    return json_answer(
        {
            "total_slots": status.max_batch,
            "free_slots": max(0, status.max_batch - status.stats.running - status.stats.waiting),
            "available_tokens_length": max(0, context.cache_capacity - context.cached_tokens),
        }
    )


def mindie_statistics(rules: MindieRules, body: bytes, context: RequestContext, facts: ServerFacts) -> Answer:
    """Return load and latency; times are in milliseconds, means of the last thousand requests or tokens."""
    status = facts.status
    values = {
        "TTFT": round(1000 * status.mean_ttft),
        "TBT": round(1000 * status.mean_tpot),
        "waitingInferRequestNum": status.stats.waiting,
        "processingInferRequestNum": status.stats.running,
        "remainBlocks": status.stats.total_pages - status.stats.used_pages,
    }
    instance = context.headers.get(b"host", b"").decode("latin-1")
    result = [
        {"metric": [{"__name__": name, "job": "node", "instance": instance}], "value": str(value)}
        for name, value in values.items()
    ]
    return json_answer({"resultType": "vector", "result": result})


def refuse_metrics(body: bytes, context: RequestContext, facts: ServerFacts) -> Answer:
    """Answer the metrics route if the original's metrics are off."""
    return mindie_json_error_answer(500, MONITOR_OFF_MESSAGE, "Incomplete Generation")


# -- shutdown


def is_forced_stop(context: RequestContext) -> bool:
    """True if the server should stop at once."""
    return b"mode=Force" in context.query_string.split(b"&")


def write_stop_answer(first: bool) -> Answer:
    """Return the answer to a shutdown request, the first and later ones."""
    if first:
        return Answer(200, b"")
    return mindie_json_error_answer(500, STOPPED_MESSAGE, "Incomplete Generation")


# -- the state of the engine

READY, NORMAL, ABNORMAL, PAUSE, INIT, BUSY = range(6)
STATE_OF_PHASE = {"ready": NORMAL, "held": PAUSE, "prepared": READY, "idle": INIT, "loading": INIT}
ALLOWED_STATES = {0: (NORMAL, ABNORMAL, BUSY), 1: (PAUSE,), 2: (READY, PAUSE), 3: (NORMAL, ABNORMAL, BUSY)}
PAUSE_COMMANDS: dict[int, PauseCommand] = {0: "hold", 1: "prepare", 2: "release", 3: "hold"}


def running_status(rules: MindieRules, body: bytes, context: RequestContext, facts: ServerFacts) -> Answer:
    """Return the engine's state."""
    return json_answer({"status": _engine_state(facts), "errors": []})


def read_fault_command(rules: MindieRules, body: bytes, context: RequestContext, facts: ServerFacts) -> PauseAnswer:
    """Return the answer to a command, and the pause command it stands for, if any. Raises InvalidValue."""
    try:
        members = decode_json(body)
        number = members.get("cmd") if isinstance(members, dict) else None
    except (ValueError, RecursionError):
        number = None
    if type(number) is not int:
        raise InvalidValue(WRONG_COMMAND_MESSAGE)
    if number not in ALLOWED_STATES or _engine_state(facts) not in ALLOWED_STATES[number]:
        return PauseAnswer(
            mindie_json_error_answer(400, "Command is not consistent with current status.", "Bad Request")
        )
    device_result = {"device_id": 0, "result": True, "message": "success"}
    return PauseAnswer(
        json_answer({"status": True, "message": "success", "reason": [device_result]}), PAUSE_COMMANDS[number]
    )


def _engine_state(facts: ServerFacts) -> int:
    status = facts.status
    if status.phase == "ready" and status.used_slots >= status.slots:
        return BUSY
    return STATE_OF_PHASE.get(status.phase, ABNORMAL)


# -- adapters


def read_adapter_change(rules: MindieRules, load: bool, body: bytes, context: RequestContext) -> AdapterChange | Answer:
    """Read a request to load or unload an adapter. The original answers 200 even on failure; its text says so."""
    fields: dict[str, Any] = {}
    try:
        members = decode_json(body)
        fields = members if isinstance(members, dict) else {}
    except (ValueError, RecursionError):
        pass
    name, path, model = (fields.get(member) for member in ("lora_name", "lora_path", "master_model"))
    if fields and not (isinstance(name, str) and re.fullmatch(r"[a-zA-Z0-9_-]{1,256}", name)):
        return mindie_json_error_answer(503, "Input invalid lora name", "Service Unavailable")
    if path is not None and not (isinstance(path, str) and re.fullmatch(r"[\w./-]+", path) and ".." not in path):
        return mindie_json_error_answer(503, "Input invalid lora path", "Service Unavailable")
    model = model if isinstance(model, str) else ""
    if not isinstance(name, str) or (load and path is None):
        return _adapter_failure(
            rules, InvalidValue("lora_name and lora_path are wanted." if load else "lora_name is wanted.")
        )
    success = Answer(200, f"{'Load' if load else 'Unload'} lora adapter {name} success.".encode(), PLAIN_TEXT)
    return AdapterChange(
        name, path if load else None, success, model=model, render_failure=partial(_adapter_failure, rules)
    )


def _adapter_failure(rules: MindieRules, error: ParleyError) -> Answer:
    return Answer(200 if rules.strict else error.status, error.message.encode(), PLAIN_TEXT)


def model_of_path(context: RequestContext, facts: ServerFacts) -> str:
    """Return the name of the path's model. Raises UnknownModel."""
    name = context.path_parts["model"]
    if all(card.name != name for card in facts.cards):
        raise UnknownModel("", name=name)
    return name
