"""vLLM's scores of labels after a prompt: the request, the answer's bytes, and refusals."""

import json

import pytest

from parley.dialects.request_context import RequestContext
from parley.dialects.vllm import generative_scoring
from parley.dialects.vllm.error_answers import vllm_error_answer
from parley.errors import ParleyError
from parley.types import ChoiceDelta, JoinedPrompt, TextPrompt, TokenInfo, TokensPrompt, Usage

CONTEXT = RequestContext("0f", 1700000000, "fp_1", vocabulary_size=640, headers={b"content-type": b"application/json"})
BODY = {"model": "m", "query": "q", "items": ["a", "b"], "label_token_ids": [7, 9, 7]}


def read_scoring(**members):
    return generative_scoring.read_scoring_request(json.dumps(BODY | members).encode(), CONTEXT)


def answer_events(index, seven, nine):
    labels = [TokenInfo(token_id, "", b"", logprob) for token_id, logprob in ((7, seven), (9, nine))]
    return [ChoiceDelta(index, "x", "content", [TokenInfo(5, "x", b"x", -0.5, top_tokens=labels)])]


def test_generative_scoring_writes_a_score_for_each_item():
    for softmax, scores in ((True, b"1.0 0.5"), (False, b"1.0 0.36787944117144233")):
        reply = read_scoring(apply_softmax=softmax, request_id="r")
        reply.add_events([*answer_events(1, -1.0, -1.0), *answer_events(0, 0.0, None)])
        answer = reply.render_body(Usage(prompt_tokens=6, completion_tokens=2))
        first, second = scores.split()
        assert answer == (
            b'{"id":"generative-scoring-r","object":"list","created":1700000000,"model":"m","data":['
            b'{"index":0,"object":"score","score":%b},{"index":1,"object":"score","score":%b}],"usage":'
            b'{"prompt_tokens":6,"total_tokens":8,"completion_tokens":2,"prompt_tokens_details":null,'
            b'"completion_tokens_details":null}}' % (first, second)
        )


def test_generative_scoring_joins_query_and_item():
    request = read_scoring(cache_salt="s", priority=3).request
    query = TextPrompt("q")
    assert request.prompts == [
        JoinedPrompt([query, TextPrompt("a", False)]),
        JoinedPrompt([query, TextPrompt("b", False)]),
    ]
    assert (request.stop_conditions.max_tokens, request.output_options.logprob_ids) == (1, [7, 9])
    assert (request.cache_salt, request.priority, request.on_overflow) == ("s", 3, "head")
    request = read_scoring(query=[1, 2], items=[[3], []], item_first=True).request
    assert request.prompts == [
        JoinedPrompt([TokensPrompt([3]), TokensPrompt([1, 2])]),
        JoinedPrompt([TokensPrompt([]), TokensPrompt([1, 2])]),
    ]
    assert read_scoring(add_special_tokens=False).request.prompts[0].parts[0] == TextPrompt("q", False)


@pytest.mark.parametrize(
    ("members", "sentence"),
    [
        ({"label_token_ids": []}, "label_token_ids must contain at least one token ID."),
        ({"items": []}, "items must contain at least one item."),
        ({"label_token_ids": [7, 640]}, "label_token_id 640 is out of vocabulary range [0, 640). Please provide valid"),
        ({"label_token_ids": [-1]}, "label_token_id -1 is out of vocabulary range [0, 640). Please provide valid"),
        ({"label_token_ids": None}, "'loc': 'body.label_token_ids', 'msg': 'Field required'"),
        ({"query": None}, "'loc': 'body.query', 'msg': 'Field required'"),
        ({"items": None}, "'loc': 'body.items', 'msg': 'Field required'"),
        ({"items": ["a", [5]]}, "body.items.1"),
        ({"items": [[5], "a"]}, "body.items.1"),
        ({"items": [{}]}, "body.items.0"),
        ({"query": {}}, "body.query"),
        ({"apply_softmax": "perhaps"}, "body.apply_softmax"),
        ({"cache_salt": ""}, "cache_salt"),
    ],
)
def test_generative_scoring_refuses_wrong_members(members, sentence):
    with pytest.raises(ParleyError) as caught:
        read_scoring(**members)
    answer = vllm_error_answer(caught.value)
    assert answer.status == 400 and sentence in json.loads(answer.body)["error"]["message"]
