"""The earlier outputs of a request, which another member of the cluster sends: they name its prompts and choices."""

from __future__ import annotations

import pytest

from parley.disagg.wire.handover import collect_prior_tokens
from parley.errors import MalformedBody
from parley.types import EngineOutput, EngineRequest


def test_tokens_belong_to_the_prompts_and_choices_that_exist():
    requests = [EngineRequest("a", [1], 9, n=2), EngineRequest("b", [1], 9, n=2)]
    outputs = [[(0, EngineOutput("", 1, [5])), (1, EngineOutput("", 0, [6]))], [(0, EngineOutput("", 1, [7]))]]
    assert collect_prior_tokens(outputs, requests) == [[[], [5, 7]], [[6], []]]
    for number, choice in ((2, 0), (0, 2), (-2, 0), (0, -1)):
        with pytest.raises(MalformedBody, match="belong to another request"):
            collect_prior_tokens([[(number, EngineOutput("", choice, [5]))]], requests)
