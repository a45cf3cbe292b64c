"""What llguidance may spend on a grammar: one table for who checks it (API process) and who follows it (engine).

Its lexer does some 14,000 steps of fuel and its parser 20,000 items in a millisecond, so a token of the worst grammar
costs 10 ms. A lexer state takes 1 to 2 kB. All is far more than the schemas of real tools take. Knows nothing.
"""

from __future__ import annotations

from typing import Any

SIZE = 128 << 10  # characters of a grammar's text
BUDGET = 0.5  # seconds of processor time to prepare it
SLOW = "it takes too long to prepare"

# While a grammar is followed, for each token.
FOLLOWING: dict[str, Any] = {
    "max_items_in_row": 20_000,  # what may follow at one place: an object's properties, each of them some items
    "step_lexer_fuel": 100_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "verbose_errors": False,
}

# When it is read for the first time as well: what passed that is read again without these.
READING: dict[str, Any] = FOLLOWING | {"initial_lexer_fuel": 1_000_000, "max_grammar_size": 250_000}
