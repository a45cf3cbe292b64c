"""The settings of MindIE's configuration file that change how a server of its API reads and answers.

Data only. Defaults are those of the original's file, or None if the server itself knows a better value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from parley.types import KeptSide

MindieProfile = Literal["strict-old", "strict", "extended"]


@dataclass(frozen=True, slots=True)
class MindieRules:
    """How MindIE's dialect differs between servers.

    * ``profile``: like the manual's servers (strict-old), like today's (strict), or without refusals (extended).
    * ``vllm``: the server has vLLM's OpenAI interface rather than its own.
    * ``full_text``: each event of a stream repeats the text so far.
    * ``token_costs``: usage reports the cost of each token.
    * ``body_megabytes``: the largest body.
    * ``max_n``: the most choices of an answer.
    * ``truncation``: the part of a too long prompt that is kept; None: it is refused.
    * ``is_separated``: the server is an instance of a cluster with separated prefill and decode (``inferMode`` is dmi).

    The other settings are only reported, by routes about the server itself.
    """

    profile: MindieProfile = "strict"
    vllm: bool = True
    full_text: bool = False
    token_costs: bool = True
    has_metrics_port: bool = True  # the metrics port is on
    body_megabytes: int = 40
    truncation: KeptSide | None = None
    is_separated: bool = False
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
    model_folder_name: str = ""  # last part of the model folder's path
    instance_type: str = "Standard"

    @property
    def strict(self) -> bool:
        """True for both strict profiles."""
        return self.profile != "extended"

    @property
    def old(self) -> bool:
        """True for the old manual's profile."""
        return self.profile == "strict-old"
