"""Runs OpenVINO GenAI's engine in process, because it has no server. Its own environment contains nothing of parley.

    python openvino_worker.py MODEL THREADS CACHE_GB

Prints a line of JSON when ready. For each input line ``{"prompts": …, "clients": …, "output": …}`` it prints one
with each request's times of start, tokens and end, and the total seconds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import numpy
import openvino
import openvino_genai as genai


def pipeline(model: str, threads: int, cache: int) -> Any:
    """Return the engine with ``cache`` GB of KV cache."""
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = cache
    scheduler.max_num_batched_tokens = 2048
    scheduler.max_num_seqs = 64
    scheduler.enable_prefix_caching = True
    scheduler.dynamic_split_fuse = True
    hints = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
    return genai.ContinuousBatchingPipeline(model, scheduler, "CPU", hints)


def carry_out(engine: Any, order: dict[str, Any], number: int) -> dict[str, Any]:
    """Run one load, at most ``clients`` requests at once. ``number`` is the id of its first request."""
    generation_config = genai.GenerationConfig()
    generation_config.max_new_tokens, generation_config.ignore_eos, generation_config.do_sample = (
        order["output"],
        True,
        False,
    )
    waiting = [(number + i, ids) for i, ids in enumerate(order["prompts"])]
    requests: list[dict[str, Any]] = []
    live: list[tuple[Any, dict[str, Any]]] = []
    began = time.perf_counter()
    while waiting or live:
        while waiting and len(live) < order["clients"]:
            request, ids = waiting.pop(0)
            handle = engine.add_request(
                request, openvino.Tensor(numpy.array([ids], dtype=numpy.int64)), generation_config
            )
            requests.append({"start": time.perf_counter(), "end": 0.0, "arrivals": []})
            live.append((handle, requests[-1]))
        engine.step()
        now = time.perf_counter()
        for handle, record in live:
            while handle.can_read():
                if sum(len(output.generated_ids) for output in handle.read().values()):
                    record["arrivals"].append(now)
            if handle.get_status() == genai.GenerationStatus.FINISHED:
                record["end"] = now
        live = [(handle, record) for handle, record in live if not record["end"]]
    return {"requests": requests, "seconds": time.perf_counter() - began}


if __name__ == "__main__":
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the library prints to stdout; keep that out of the answers
    engine = pipeline(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    print(json.dumps({"ready": openvino.__version__}), file=out, flush=True)
    done = 0
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(carry_out(engine, order, done)), file=out, flush=True)
        done += len(order["prompts"])
