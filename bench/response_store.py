"""Measures the store of responses: its memory, and the time to find a response and an item.

    python bench/response_store.py [--records 10000] [--characters 2000] [--file FILE]

Each record is a response as the server keeps it, with its input and an answer of this many characters. The memory is
the growth of the process, of which the store has all unless it is in a file. Looks up records and items at random, as
the routes do: from the database to the decoded response. Prints Markdown.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path

from parley.dialects.openai.responses import stored
from parley.dialects.request_context import RequestContext
from parley.serving.records.background import BackgroundRunner, tenant_records
from parley.serving.records.open_store import open_record_store

LOOKUPS = 2000


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def keep_responses(context: RequestContext, count: int, characters: int) -> None:
    for number in range(count):
        part = {"type": "output_text", "annotations": [], "logprobs": [], "text": "a" * characters}
        answer = {"id": f"msg_{number}", "type": "message", "status": "completed", "content": [part]}
        question = {"id": f"msg_q{number}", "type": "message", "status": "completed", "role": "user"}
        question["content"] = [{"type": "input_text", "text": "a" * (characters // 4)}]
        response = {"id": f"resp_{number}", "object": "response", "status": "completed", "output": [answer]}
        stored.StoredResponse(response, [question]).keep(context.records, [question])


def milliseconds(look_up: Callable[[int], object], count: int) -> list[float]:
    """Return the sorted times of look-ups of random numbers."""
    times = []
    for number in random.Random(0).choices(range(count), k=LOOKUPS):
        began = time.perf_counter()
        assert look_up(number)
        times.append(1000 * (time.perf_counter() - began))
    return sorted(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=10_000)
    parser.add_argument("--characters", type=int, default=2000, help="of each answer")
    parser.add_argument("--file", help="of the store, as with --response-store-file")
    options = parser.parse_args()
    store = open_record_store(1 << 30, 3600.0, options.file)
    context = RequestContext("0" * 32, 0, "", records=tenant_records(store, BackgroundRunner(store), "tenant"))
    before = resident_bytes()
    keep_responses(context, options.records, options.characters)
    grown = (resident_bytes() - before) / 1e6
    sizes = f"{grown:.0f} MB of memory"
    if options.file:
        sizes += f", {Path(options.file).stat().st_size / 1e6:.0f} MB in the file"
    print(f"{options.records} responses of {options.characters} characters: {sizes}\n")
    print("| Look-up | median ms | 99th percentile ms |\n|---|---|---|")
    for name, look_up in (
        ("a response by its id", lambda number: stored.load_response(context, f"resp_{number}")),
        ("an item by its id", lambda number: stored.find_item(context, f"msg_{number}")),
    ):
        times = milliseconds(look_up, options.records)
        print(f"| {name} | {times[LOOKUPS // 2]:.3f} | {times[LOOKUPS * 99 // 100]:.3f} |")


if __name__ == "__main__":
    main()
