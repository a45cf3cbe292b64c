"""best_of: the most likely of the sampled choices are returned in order, unchanged, both streamed and whole."""

import json
from dataclasses import dataclass, field

import pytest
from support import tiny_models

from parley import LLM, ParleyError
from parley.dialects.dialect import Head
from parley.dialects.fields import decode
from parley.dialects.openai.completions import CompletionReply
from parley.serving.best_of import Ranking
from parley.types import Accepted, Delta, Done, Usage


@pytest.fixture(scope="module")
def llm():
    with LLM(str(tiny_models.model("qwen3")), threads=1, kv_memory=8 << 20) as llm:
        yield llm


async def collect(llm, **body):
    reply = CompletionReply(decode(json.dumps(body).encode()), Head("1", 0, "", llm._model.info.max_model_len))
    events = []
    async with llm._generation(reply.request) as generation:
        held = llm._model.held
        while made := await generation.next():
            events.append(made)
        return events, generation.usage, held


def means(completions):
    return [sum(t.logprob for t in c.tokens) / len(c.tokens) for c in completions]


@pytest.mark.parametrize("more", [{}, {"stop": ["e", "o"]}, {"min_p": 0.1, "presence_penalty": 1.0}], ids=str)
def test_best_of_returns_most_likely_choices_first(llm, more):
    wish = {"seed": 3, "max_tokens": 12, "temperature": 1.5, **more}
    drawn = llm.generate("the quick brown", n=6, logprobs=0, **wish).completions
    order = sorted(range(6), key=lambda k: (-means(drawn)[k], k))
    best = llm.generate("the quick brown", n=2, best_of=6, logprobs=0, **wish)
    assert [c.text for c in best.completions] == [drawn[k].text for k in order[:2]]
    assert means(best.completions) == [means(drawn)[k] for k in order[:2]]
    bare = llm.generate("the quick brown", n=2, best_of=6, **wish)
    assert [c.text for c in bare.completions] == [c.text for c in best.completions]
    assert not bare.completions[0].tokens
    assert best.usage.completion_tokens == sum(len(c.tokens) for c in best.completions)
    if not more:
        assert "".join(llm.stream("the quick brown", best_of=6, **wish)) == best.completions[0].text


def test_best_of_ranks_each_prompt_after_its_last_choice(llm):
    body = {"prompt": ["the quick", "brown fox"], "n": 2, "best_of": 3, "seed": 5, "max_tokens": 6, "logprobs": 0}
    events, usage, held = llm._wait(collect(llm, **body))
    assert held == 6 and llm._model.held == 0
    flat = [event for made in events for event in made]
    assert [event.index for event in flat if isinstance(event, Done)] in ([0, 1, 2, 3], [2, 3, 0, 1])
    for made in events:
        for event in made:
            assert isinstance(event, Accepted) or any(isinstance(e, Done) for e in made), "a stream before the ranking"
    singles = [llm.generate(p, n=2, best_of=3, seed=5, max_tokens=6) for p in body["prompt"]]
    for k, single in enumerate(c for answer in singles for c in answer.completions):
        assert "".join(e.text for e in flat if isinstance(e, Delta) and e.index == k) == single.text
    assert usage.completion_tokens == sum(answer.usage.completion_tokens for answer in singles)
    assert usage.cached_tokens <= usage.prompt_tokens


@dataclass
class Made:
    likelihood: float
    tokens: int
    ended: bool = True
    usage: Usage = field(init=False)

    def __post_init__(self):
        self.usage = Usage(completion_tokens=self.tokens)


def test_ranking_uses_mean_logprob_and_keeps_order_of_ties():
    choices = [Made(-4.0, 4), Made(-2.0, 2), Made(0.0, 0), Made(-9.0, 10)]
    ranking = Ranking(choices, 8, 3)  # type: ignore[arg-type]
    choices[1].ended = False
    for k in (0, 2, 3):
        assert ranking.add(k, [Delta(8 + k, str(k)), Done(8 + k, "stop", Usage())]) == []
    choices[1].ended = True
    given = ranking.add(1, [Delta(9, "1"), Done(9, "stop", Usage())])
    assert [(e.index, e.text) for e in given if isinstance(e, Delta)] == [(8, "3"), (9, "0"), (10, "1")]
    assert ranking.add(1, []) == []


def test_full_vocabulary_logprobs_are_sorted_and_limited(llm):
    size = llm._model.info.vocab_size
    answer = llm.generate("the quick", max_tokens=2, logprobs=-1, echo=True, temperature=0)
    for token in [*answer.prompt[1:], *answer.completions[0].tokens]:
        assert len(token.top) == size and sorted(t.id for t in token.top) == list(range(size))
        assert [t.rank for t in token.top] == list(range(1, size + 1))
        logprobs = [t.logprob for t in token.top]
        assert logprobs == sorted(logprobs, reverse=True) and token.top[token.rank - 1].logprob == token.logprob
    with pytest.raises(ParleyError, match="can be returned for at most"):
        llm.generate("the quick", max_tokens=1000, n=64, logprobs=-1)
