"""best_of: the most likely of the sampled choices are returned in order, unchanged, both streamed and whole."""

from dataclasses import dataclass, field

import pytest
from support import tiny_models
from support.loaded_models import completion_request, loaded_model

from parley import LLM, ParleyError
from parley.serving.best_of import BestOfRanking
from parley.serving.generation import open_generation
from parley.types import ChoiceDelta, ChoiceDone, PromptAccepted, Usage


@pytest.fixture(scope="module")
def llm():
    with LLM(str(tiny_models.model_folder("qwen3")), threads=1, kv_memory=8 << 20) as llm:
        yield llm


def mean_logprobs(completions):
    return [sum(t.logprob for t in c.tokens) / len(c.tokens) for c in completions]


@pytest.mark.parametrize("more", [{}, {"stop": ["e", "o"]}, {"min_p": 0.1, "presence_penalty": 1.0}], ids=str)
def test_best_of_returns_most_likely_choices_first(llm, more):
    options = {"seed": 3, "max_tokens": 12, "temperature": 1.5, **more}
    sampled = llm.generate("the quick brown", n=6, logprobs=0, **options).completions
    order = sorted(range(6), key=lambda k: (-mean_logprobs(sampled)[k], k))
    best = llm.generate("the quick brown", n=2, best_of=6, logprobs=0, **options)
    assert [c.text for c in best.completions] == [sampled[k].text for k in order[:2]]
    assert mean_logprobs(best.completions) == [mean_logprobs(sampled)[k] for k in order[:2]]
    bare = llm.generate("the quick brown", n=2, best_of=6, **options)
    assert [c.text for c in bare.completions] == [c.text for c in best.completions]
    assert not bare.completions[0].tokens
    assert best.usage.completion_tokens == sum(len(c.tokens) for c in best.completions)
    if not more:
        assert "".join(llm.stream("the quick brown", best_of=6, **options)) == best.completions[0].text


async def test_best_of_ranks_each_prompt_after_its_last_choice(llm):
    body = {"prompt": ["the quick", "brown fox"], "n": 2, "best_of": 3, "seed": 5, "max_tokens": 6, "logprobs": 0}
    async with loaded_model() as model:
        events = []
        async with open_generation(model, completion_request(model, body)) as generation:
            assert model.used_slots == 6
            while batch := await generation.next_events():
                events.append(batch)
        assert model.used_slots == 0
    usage = generation.usage
    flat = [event for batch in events for event in batch]
    assert [event.index for event in flat if isinstance(event, ChoiceDone)] in ([0, 1, 2, 3], [2, 3, 0, 1])
    for batch in events:
        for event in batch:
            assert isinstance(event, PromptAccepted) or any(isinstance(e, ChoiceDone) for e in batch), (
                "a stream before the ranking"
            )
    singles = [await llm.agenerate(p, n=2, best_of=3, seed=5, max_tokens=6) for p in body["prompt"]]
    for k, single in enumerate(c for answer in singles for c in answer.completions):
        assert "".join(e.text for e in flat if isinstance(e, ChoiceDelta) and e.index == k) == single.text
    assert usage.completion_tokens == sum(answer.usage.completion_tokens for answer in singles)
    assert usage.cached_tokens <= usage.prompt_tokens


@dataclass
class FinishedChoice:
    logprob_sum: float
    tokens: int
    finished: bool = True
    usage: Usage = field(init=False)

    def __post_init__(self):
        self.usage = Usage(completion_tokens=self.tokens)


def test_ranking_uses_mean_logprob_and_keeps_order_of_ties():
    choices = [FinishedChoice(-4.0, 4), FinishedChoice(-2.0, 2), FinishedChoice(0.0, 0), FinishedChoice(-9.0, 10)]
    ranking = BestOfRanking(choices, 8, 3)  # type: ignore[arg-type]
    choices[1].finished = False
    for k in (0, 2, 3):
        assert ranking.rank_events(k, [ChoiceDelta(8 + k, str(k)), ChoiceDone(8 + k, "stop", Usage())]) == []
    choices[1].finished = True
    ranked_events = ranking.rank_events(1, [ChoiceDelta(9, "1"), ChoiceDone(9, "stop", Usage())])
    assert [(e.index, e.text) for e in ranked_events if isinstance(e, ChoiceDelta)] == [(8, "3"), (9, "0"), (10, "1")]
    assert ranking.rank_events(1, []) == []


def test_full_vocabulary_logprobs_are_sorted_and_limited(llm):
    size = llm.model.model_info.vocab_size
    answer = llm.generate("the quick", max_tokens=2, logprobs=-1, echo=True, temperature=0)
    for token in [*answer.prompt[1:], *answer.completions[0].tokens]:
        assert len(token.top_tokens) == size and sorted(t.id for t in token.top_tokens) == list(range(size))
        assert [t.rank for t in token.top_tokens] == list(range(1, size + 1))
        logprobs = [t.logprob for t in token.top_tokens]
        assert logprobs == sorted(logprobs, reverse=True) and token.top_tokens[token.rank - 1].logprob == token.logprob
    with pytest.raises(ParleyError, match="can be returned for at most"):
        llm.generate("the quick", max_tokens=1000, n=64, logprobs=-1)
