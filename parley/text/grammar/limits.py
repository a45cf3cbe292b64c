"""Limits on llguidance's work: one table for the API process, which checks grammars, and the engine, which runs them.

Its lexer uses about 14,000 units of fuel per millisecond and its parser processes 20,000 items, so one token of the
worst grammar costs 10 ms. A lexer state takes 1 to 2 kB. Schemas of real tools stay far below all of these limits.
"""

from __future__ import annotations

from typing import Any

MAX_GRAMMAR_CHARS = 128 << 10  # characters of a compiled grammar
MAX_QUESTION_CHARS = 4 << 20  # characters of everything that a grammar is compiled from, tools included
COMPILE_SECONDS = 0.5  # seconds of processor time to compile it
KILL_SECONDS = 3  # seconds of processor time; then the kernel ends a worker that compiles an answer's grammar
WORKER_MEMORY = 2 << 30  # bytes of address space of a worker
TOO_SLOW = "it takes too long to prepare"
CRASHED = "the grammar library crashed on it"
TOO_LARGE = "it is too large"
TOO_DEEP = "it is nested too deeply"

# Errors of an engine's output. Only the first is the client's fault.
GRAMMAR_TOO_COMPLEX = "The answer's grammar became too complex to continue."
GRAMMAR_NOT_FOLLOWED = "The engine could not follow the answer's grammar."

# For each generated token.
MATCHER_LIMITS: dict[str, Any] = {
    "max_items_in_row": 20_000,  # alternatives at one position: each property of an object takes a few items
    "step_lexer_fuel": 100_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "verbose_errors": False,
}

# For the first compilation as well. A grammar that passed is compiled again without the additional limits.
COMPILE_LIMITS: dict[str, Any] = MATCHER_LIMITS | {"initial_lexer_fuel": 1_000_000, "max_grammar_size": 250_000}
