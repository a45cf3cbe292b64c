"""How one server of MindIE's API reads and answers: what its configuration file says that a client can tell.

Data only. Defaults are those of the original's file, or None where the server itself knows better.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from parley.types import Keep

Profile = Literal["strict-old", "strict", "extended"]


@dataclass(frozen=True, slots=True)
class Rules:
    """``profile``: the manual's servers (strict-old), those of today (strict), or without their refusals (extended).

    ``vllm``: which of the two OpenAI interfaces it has, vLLM's or its own. ``full_text``: each event of a stream
    repeats the text so far. ``figures``: usage tells what each token took. ``limit``: MB that a body may have.
    ``max_n`` is the most choices of an answer. ``truncation``: which part of a prompt that is too long is kept; none:
    it is refused. The rest is only told, by routes about the server itself.
    """

    profile: Profile = "strict"
    vllm: bool = True
    full_text: bool = False
    figures: bool = True
    monitored: bool = True  # the metrics plane tells metrics
    limit: int = 40
    truncation: Keep | None = None
    max_seq_len: int | None = None
    max_input_token_len: int | None = None
    max_iter_times: int | None = None
    max_n: int = 128
    max_batch_size: int | None = None
    max_prefill_batch_size: int = 50
    max_prefill_tokens: int = 8192
    prefill_policy: int = 0
    decode_policy: int = 0
    npu_mem_size: int = -1
    cpu_mem_size: int = 5
    world_size: int = 1
    cache_block_size: int | None = None
    weights: str = ""  # the last part of the folder's path
    instance: str = "Standard"

    @property
    def strict(self) -> bool:
        return self.profile != "extended"

    @property
    def old(self) -> bool:
        return self.profile == "strict-old"
