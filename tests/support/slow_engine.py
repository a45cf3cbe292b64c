"""A simulated engine whose second step takes long, in one of several ways: ``slow_engine.py WAY FD``."""

import sys
import threading
import time

from parley.worker.process import serve_engine_socket
from parley.worker.simulated_engine import SimulatedRunner

LONG_SECONDS = 3.5


def compute() -> None:
    """Uses processor time and sends nothing."""
    ends_at = time.monotonic() + LONG_SECONDS
    while time.monotonic() < ends_at:
        pass


def wait_for_ever() -> None:
    """Waits like a thread in a deadlock."""
    threading.Event().wait()


if __name__ == "__main__":
    long_work = {"computes": compute, "deadlocks": wait_for_ever}[sys.argv[1]]
    run_step, step_count = SimulatedRunner.run_step, 0

    def run_slow_step(self, step):
        global step_count
        step_count += 1
        if step_count == 2:
            long_work()
        return run_step(self, step)

    SimulatedRunner.run_step = run_slow_step  # type: ignore[method-assign]
    serve_engine_socket(int(sys.argv[2]))
