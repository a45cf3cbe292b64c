"""Checks whether an engine would load a model: ``python -m parley.worker.check``.

Reads ``ParleySettings`` as JSON from its input, prints a ``ModelCheck`` as JSON, and reads no weights. It runs in a
process of its own, because torch takes seconds to import and a broken installation of it may kill the process.
"""

from __future__ import annotations

import subprocess
import sys

import msgspec

from parley.child_process import python_command
from parley.types import ParleySettings

TIMEOUT = 120  # seconds


class ModelCheck(msgspec.Struct):
    """The result of a check. Both texts are empty if the model loads.

    * ``refusal``: the engine's sentence, if it would refuse the model.
    * ``load_caveat``: a clause about the properties that only loading can show.
    * ``memory_bytes``: the memory of its weights and encoders; None if it does not load, or if another engine loads it.
    * ``table_bytes``: the memory of its tables of positions.
    """

    refusal: str = ""
    load_caveat: str = ""
    memory_bytes: int | None = None
    table_bytes: int = 0


def check_in_process(settings: ParleySettings) -> ModelCheck:
    """Check the model that the settings name, in a process of its own."""
    command = python_command("-m", "parley.worker.check")
    try:
        done = subprocess.run(command, input=msgspec.json.encode(settings), capture_output=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return ModelCheck(f"The check of the model did not end within {TIMEOUT} seconds.")
    if done.returncode:
        return ModelCheck(f"The check of the model ended with code {done.returncode}.")
    return msgspec.json.decode(done.stdout, type=ModelCheck)


def main() -> None:
    """Check the model that the settings on standard input name."""
    from parley.model.checkpoint.files import LoadError
    from parley.model.load.check import check_model

    try:
        model_facts = check_model(msgspec.json.decode(sys.stdin.buffer.read(), type=ParleySettings))
        checked = ModelCheck(
            load_caveat=model_facts.load_caveat,
            memory_bytes=model_facts.memory_bytes,
            table_bytes=model_facts.table_bytes,
        )
    except LoadError as error:
        checked = ModelCheck(str(error))
    sys.stdout.buffer.write(msgspec.json.encode(checked))


if __name__ == "__main__":
    main()
