"""The rule sets of TGI's API: strict ones like the original's, those of its version 0.9.4, and extended ones."""

from __future__ import annotations

from dataclasses import dataclass

from parley.dialects.sse import DATA_START
from parley.dialects.tgi.refusal_wording import STRICT_TGI_WORDING, TGI_WORDING, TgiErrorWording

TGI_VERSION = "3.3.7"  # version of the original that this API follows; clients infer the supported members from it


@dataclass(frozen=True, slots=True)
class TgiRules:
    """The limits the original is started with, and whether its ``strict`` readings apply.

    Strict: an error of a stream is reported inside it, with status 200. Otherwise: temperature 0 is greedy; a top_p,
    typical_p or top_k that keeps every token is off; ``stop`` may be a single string; 5.0 is an integer; null means the
    default for every member.
    """

    strict: bool
    max_best_of: int
    max_stops: int
    max_top: int  # top alternatives per token
    max_prompts: int  # per completion
    max_body: int | None = None  # bytes
    old: bool = False  # like version 0.9.4: its defaults and framing, fewer members and headers

    @property
    def line_prefix(self) -> bytes:
        """The start of each line of a stream."""
        return b"data:" if self.old else DATA_START

    @property
    def wording(self) -> TgiErrorWording:
        """The wording of refusals of a body's members."""
        return STRICT_TGI_WORDING if self.strict else TGI_WORDING


STRICT_TGI_RULES = TgiRules(strict=True, max_best_of=2, max_stops=4, max_top=5, max_prompts=4, max_body=2_000_000)
OLD_TGI_RULES = TgiRules(strict=True, max_best_of=2, max_stops=4, max_top=0, max_prompts=1, max_body=2 << 20, old=True)
EXTENDED_TGI_RULES = TgiRules(strict=False, max_best_of=128, max_stops=1024, max_top=20, max_prompts=128)
