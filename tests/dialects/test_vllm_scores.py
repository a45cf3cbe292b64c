"""vLLM's score and rerank routes: pairing of texts, and the exact bytes of answers."""

import json
import struct
from dataclasses import replace

import numpy as np
import pytest

from parley.dialects import vectors
from parley.dialects.request_context import RequestContext
from parley.dialects.vllm import control
from parley.dialects.vllm.pooling import classify, embeddings, scores
from parley.errors import BadRequest, UnsuitableModel, Unsupported
from parley.types import EncodedMedia, Media, PlacedMedia, PoolingOptions, PromptVector, TextPair, TextPrompt, Usage

CROSS_ENCODER = {"generates": False, "labels": ["LABEL_0"], "pooling_tasks": frozenset({"classify"})}
CONTEXT = RequestContext("0f", 1700000000, "fp_1", context_length=100, headers={b"content-type": b"application/json"})
VECTORS = [(1.0, 0.0), (0.0, 1.0), (0.6, 0.8), (-1.0, 0.0)]
USAGE = Usage(prompt_tokens=9)


def finished_reply(read, **body):
    pending = read(json.dumps(body).encode(), CONTEXT)
    for place in reversed(range(len(pending.request.prompts))):  # vectors may arrive in any order
        pending.add_events([PromptVector(place, struct.pack("<2f", *VECTORS[place % len(VECTORS)]))])
    return pending


@pytest.mark.parametrize(
    ("one", "other"),
    [("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2")],
)
def test_vllm_score_pairs_texts_of_both_sides(one, other):
    scored = finished_reply(scores.read_score_request, model="m", **{one: "a", other: ["b", "c", "d"]})
    assert scored.request.prompts == [TextPrompt(text, True) for text in "abcd"] and scored.request.pooling.normalize
    assert scored.render_body(USAGE) == (
        b'{"id":"score-0f","object":"list","created":1700000000,"model":"m","data":['
        b'{"index":0,"object":"score","score":0.0},{"index":1,"object":"score","score":0.6000000238418579},'
        b'{"index":2,"object":"score","score":-1.0}],"usage":{"prompt_tokens":9,"total_tokens":9,'
        b'"completion_tokens":0,"prompt_tokens_details":null,"completion_tokens_details":null}}'
    )
    scored = finished_reply(scores.read_score_request, **{one: ["a", "b"], other: ["c", "d"]})
    assert [entry["score"] for entry in json.loads(scored.render_body(USAGE))["data"]] == [pytest.approx(0.6), 0]
    scored = finished_reply(
        scores.read_score_request, **{one: "a", other: "b"}, truncate_prompt_tokens=9, priority=3, cache_salt="s"
    )
    assert len(json.loads(scored.render_body(USAGE))["data"]) == 1
    assert (scored.request.max_prompt_tokens, scored.request.priority, scored.request.cache_salt) == (9, 3, "s")


def test_vllm_score_is_clamped_to_cosine_range():
    """Guards against scores beyond 1 caused by rounding of normalized vectors."""
    scored = scores.read_score_request(b'{"text_1":"a","text_2":["a","b"]}', CONTEXT)
    scored.add_events(
        [
            PromptVector(place, struct.pack("<2f", sign * 0.8, sign * 0.60000004))
            for place, sign in enumerate((1, 1, -1))
        ]
    )
    assert [entry["score"] for entry in json.loads(scored.render_body(USAGE))["data"]] == [1.0, -1.0]


def test_vllm_rerank_orders_by_similarity():
    ranked = finished_reply(scores.read_rerank_request, model="m", query="a", documents=["b", "c", "d"], top_n=2)
    assert ranked.render_body(USAGE) == (
        b'{"id":"score-0f","model":"m","usage":{"prompt_tokens":9,"total_tokens":9},"results":['
        b'{"index":1,"document":{"text":"c","multi_modal":null},"relevance_score":0.6000000238418579},'
        b'{"index":0,"document":{"text":"b","multi_modal":null},"relevance_score":0.0}]}'
    )
    for top in (0, 3, 9):
        ranked = finished_reply(scores.read_rerank_request, query="a", documents=["b", "c", "d"], top_n=top)
        assert [result["index"] for result in json.loads(ranked.render_body(USAGE))["results"]] == [1, 0, 2]


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"queries": ["a", "b"], "documents": ["c", "d", "e"]}, "Input lengths must be either 1:1, 1:N or N:N"),
        ({"queries": ["a", "b"], "documents": "c"}, "Input lengths must be either 1:1, 1:N or N:N"),
        ({"queries": "a"}, "body.documents"),
        ({"text_1": "a", "documents": "b"}, "body.text_2"),
        ({}, "body.queries"),
        ({"queries": "a", "documents": []}, "documents must not be empty"),
        ({"queries": "a", "documents": [""]}, "The decoder prompt cannot be empty"),
        ({"queries": "a", "documents": [5]}, "'loc': 'body.documents.0', 'msg': 'Input should be a valid string'"),
        ({"queries": "a", "documents": "b", "truncate_prompt_tokens": 101}, "Please request a smaller truncation size"),
    ],
)
def test_vllm_score_refuses_wrong_body(body, sentence):
    with pytest.raises(BadRequest) as caught:
        scores.read_score_request(json.dumps(body).encode(), CONTEXT)
    assert sentence in caught.value.message


@pytest.mark.parametrize(
    ("reader", "members", "sentence"),
    [
        (embeddings.read_vllm_embedding, {"normalize": True}, "Parameter `normalize` was removed; use `use_activation` "
         "instead. (parameter=normalize)"),
        (embeddings.read_pooling_request, {"normalize": None}, "Parameter `normalize` was removed; use "
         "`use_activation` instead. (parameter=normalize)"),
        (embeddings.read_pooling_request, {"task": "encode"}, "`encode` task was removed; use `token_embed` or "
         "`token_classify` instead. (parameter=task)"),
        (classify.read_classification, {"task": "score"}, "`score` task was removed; use `classify` instead. "
         "(parameter=task)"),
        (embeddings.read_vllm_embedding, {"cache_salt": ""}, "Parameter 'cache_salt' must be a non-empty string if "
         "provided. (parameter=cache_salt)"),
        (scores.read_rerank_request, {"query": "a", "documents": ["b"], "top_n": -1}, "1 validation error:\n  {'type': "
         "'greater_than_equal', 'loc': 'body.top_n', 'msg': 'Input should be greater than or equal to 0', 'input': "
         "'-1', 'ctx': {'ge': 0}}"),
    ],
)  # fmt: skip
def test_vllm_vectors_refuse_what_the_original_removed(reader, members, sentence):
    with pytest.raises(BadRequest) as caught:
        reader(json.dumps({"input": "a"} | members).encode(), CONTEXT)
    assert caught.value.message == sentence


def test_vllm_embeddings_have_their_members_in_the_originals_order():
    reply = finished_reply(embeddings.read_vllm_embedding, input="a")
    assert b'"data":[{"index":0,"object":"embedding","embedding":[' in reply.render_body(USAGE)


@pytest.mark.parametrize("body", [{"query": ["a"], "documents": ["b"]}, {"query": "a"}, {"documents": ["b"]}])
def test_vllm_rerank_refuses_missing_query_or_documents(body):
    with pytest.raises(BadRequest):
        scores.read_rerank_request(json.dumps(body).encode(), CONTEXT)


@pytest.mark.parametrize(
    ("members", "field"),
    [({"query": "", "documents": ["b"]}, "query"), ({"query": "a", "documents": [""]}, "documents")],
)
def test_vllm_rerank_names_the_member_with_an_empty_text(members, field):
    with pytest.raises(BadRequest) as caught:
        scores.read_rerank_request(json.dumps({"model": "m"} | members).encode(), CONTEXT)
    assert caught.value.field == field


def test_vllm_rerank_refuses_cross_encoder_members():
    texts = {"query": "a", "documents": ["b"]}
    with pytest.raises(Unsupported) as caught:
        finished_reply(scores.read_rerank_request, **texts, instruction="Judge")
    assert caught.value.field == "instruction"
    finished_reply(scores.read_rerank_request, **texts, instruction=None)


def test_vllm_rerank_limits_the_tokens_of_each_side():
    texts = {"query": "a", "documents": ["b", "c"]}
    reply = finished_reply(scores.read_rerank_request, **texts, max_tokens_per_query=3, max_tokens_per_doc=5)
    assert [prompt.max_tokens for prompt in reply.request.prompts] == [3, 5, 5]
    for nothing in ({}, {"max_tokens_per_doc": 0, "max_tokens_per_query": None}):
        reply = finished_reply(scores.read_rerank_request, **texts, **nothing)
        assert [prompt.max_tokens for prompt in reply.request.prompts] == [None] * 3


@pytest.mark.parametrize("name", ["max_tokens_per_query", "max_tokens_per_doc"])
def test_vllm_rerank_refuses_negative_limits_in_the_words_of_the_original(name):
    with pytest.raises(BadRequest) as caught:
        finished_reply(scores.read_rerank_request, query="a", documents=["b"], **{name: -5})
    assert caught.value.message == f"{name} must be a non-negative integer"


def test_vllm_invocations_score_and_rerank():
    assert isinstance(finished_reply(control.read_vllm_invocation, query="a", documents=["b"]), scores.RerankReply)
    assert isinstance(finished_reply(control.read_vllm_invocation, text_1="a", text_2="b"), scores.ScoreReply)


@pytest.mark.parametrize("members", [{"input": "a"}, {"messages": [{"role": "user", "content": "a"}]}])
def test_vllm_invocations_ask_models_without_text_for_what_they_compute(members):
    body = json.dumps(members).encode()
    classifier, encoder = replace(CONTEXT, **CROSS_ENCODER), replace(CONTEXT, generates=False)
    assert isinstance(control.read_vllm_invocation(body, classifier), classify.ClassificationReply)
    assert isinstance(control.read_vllm_invocation(body, encoder), embeddings.VllmEmbeddingReply)


def vector_reply(read, context, vectors, **body):
    pending = read(json.dumps(body).encode(), context)
    for place, (rows, numbers) in enumerate(vectors):
        pending.add_events([PromptVector(place, struct.pack(f"<{len(numbers)}f", *numbers), rows)])
    return pending


def test_cross_encoder_reads_both_texts_of_a_pair():
    context = replace(CONTEXT, **CROSS_ENCODER)
    scores_of_pairs = [(1, (0.25,)), (1, (0.5,))]
    members = {"query": "a", "documents": ["b", "c"], "max_tokens_per_doc": 7}
    ranked = vector_reply(scores.read_rerank_request, context, scores_of_pairs, **members)
    assert ranked.request.prompts == [TextPair(TextPrompt("a"), TextPrompt(text, max_tokens=7)) for text in "bc"]
    assert ranked.request.pooling == PoolingOptions(task="classify")
    assert [
        (result["index"], result["relevance_score"]) for result in json.loads(ranked.render_body(USAGE))["results"]
    ] == [
        (1, 0.5),
        (0, 0.25),
    ]
    members = {"text_1": ["a", "b"], "text_2": ["c", "d"], "use_activation": False}
    scored = vector_reply(scores.read_score_request, context, scores_of_pairs, **members)
    assert scored.request.prompts == [TextPair(TextPrompt(one), TextPrompt(other)) for one, other in ("ac", "bd")]
    assert scored.request.pooling.normalize is False
    assert [entry["score"] for entry in json.loads(scored.render_body(USAGE))["data"]] == [0.25, 0.5]
    with pytest.raises(UnsuitableModel, match="3 classes"):
        scores.read_score_request(b'{"text_1":"a","text_2":"b"}', replace(CONTEXT, labels=["a", "b", "c"]))


def test_late_interaction_sums_the_largest_cosines_of_tokens():
    context = replace(CONTEXT, generates=False, pooling_tasks=frozenset({"token_embed"}))
    query, one, other = (2, (1.0, 0.0, 0.0, 1.0)), (3, (0.6, 0.8, -1.0, 0.0, 0.8, 0.6)), (1, (0.0, -1.0))
    ranked = vector_reply(scores.read_rerank_request, context, [query, one, other], query="a", documents=["b", "c"])
    assert ranked.request.prompts == [TextPrompt("a"), TextPrompt("b"), TextPrompt("c")]
    assert ranked.request.pooling == PoolingOptions(normalize=True, task="token_embed")
    assert ranked.render_body(USAGE) == (
        b'{"id":"score-0f","model":"","usage":{"prompt_tokens":9,"total_tokens":9},"results":['
        b'{"index":0,"document":{"text":"b","multi_modal":null},"relevance_score":1.600000023841858},'
        b'{"index":1,"document":{"text":"c","multi_modal":null},"relevance_score":-1.0}]}'
    )
    members = {"text_1": ["a", "b"], "text_2": ["c", "d"]}
    scored = vector_reply(scores.read_score_request, context, [query, other, one, query], **members)
    assert [entry["score"] for entry in json.loads(scored.render_body(USAGE))["data"]] == [pytest.approx(1.6), 0.0]
    pooled = embeddings.read_pooling_request(b'{"input":"a"}', context)
    assert pooled.request.pooling == PoolingOptions(normalize=True, task="token_embed")


def test_vllm_classifies_texts():
    context = replace(CONTEXT, generates=False, labels=["bad", "good"])
    reply = vector_reply(
        classify.read_classification, context, [(1, (0.25, 0.75)), (1, (1.0, 0.0))], model="m", input=["a", "b"]
    )
    assert reply.request.pooling == PoolingOptions(task="classify")
    assert reply.render_body(USAGE) == (
        b'{"id":"classify-0f","object":"list","created":1700000000,"model":"m","data":['
        b'{"index":0,"label":"good","probs":[0.25,0.75],"num_classes":2},'
        b'{"index":1,"label":"bad","probs":[1.0,0.0],"num_classes":2}],'
        b'"usage":{"prompt_tokens":9,"total_tokens":9,"completion_tokens":0,"prompt_tokens_details":null,'
        b'"completion_tokens_details":null}}'
    )
    raw = classify.read_classification(b'{"input":"a","use_activation":false,"encoding_format":"bytes"}', context)
    assert raw.request.pooling.normalize is False and raw.content_type == b"application/json"


def test_vllm_pooling_has_the_tasks_of_the_model():
    encoder = replace(CONTEXT, generates=False, pooling_tasks=frozenset({"token_embed", "embed"}))
    classifier = replace(CONTEXT, **CROSS_ENCODER)
    rows = [(2, (1.0, 0.0, 0.0, 1.0)), (1, (0.5, 0.5))]
    reply = vector_reply(embeddings.read_pooling_request, encoder, rows, input=["a", "b"], task="token_embed")
    assert reply.request.pooling == PoolingOptions(normalize=True, task="token_embed")
    data = json.loads(reply.render_body(USAGE))["data"]
    assert [item["data"] for item in data] == [[[1.0, 0.0], [0.0, 1.0]], [[0.5, 0.5]]]
    coded = {"input": ["a", "b"], "task": "token_embed", "encoding_format": "bytes"}
    reply = vector_reply(embeddings.read_pooling_request, encoder, rows, **coded)
    assert reply.render_body(USAGE) == struct.pack("<6f", 1, 0, 0, 1, 0.5, 0.5)
    assert b'"shape":[2,2]' in dict(reply.answer_headers(None))[b"metadata"]
    assert embeddings.read_pooling_request(b'{"input":"a"}', classifier).request.pooling.task == "classify"
    for context, task in (
        (CONTEXT, "token_embed"),
        (CONTEXT, "classify"),
        (encoder, "classify"),
        (classifier, "embed"),
    ):
        with pytest.raises(Unsupported, match="Supported tasks"):
            embeddings.read_pooling_request(json.dumps({"input": "a", "task": task}).encode(), context)


@pytest.mark.parametrize(("rows", "others"), [(1, 1), (600, 3), (257, 400)])
def test_late_interaction_compares_each_token_with_all_of_the_other_text(rows, others):
    numbers = np.random.default_rng(0).standard_normal((rows + others, 7)).astype("<f4")
    first, second = numbers[:rows], numbers[rows:]
    score = vectors.max_similarity(*(PromptVector(0, rows.tobytes(), len(rows)) for rows in (first, second)))
    expected = sum(max(float(one.astype(float) @ other) for other in second) for one in first)
    assert score == pytest.approx(expected, rel=1e-5)


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
SIGHTED = replace(CONTEXT, media_limits={"image": 1})


def test_vllm_rerank_reads_content_parts():
    documents = ["b", {"content": [{"type": "text", "text": "c"}, IMAGE, {"type": "text", "text": "d"}]}]
    body = {"query": {"content": [{"type": "text", "text": "a"}]}, "documents": documents}
    reply = scores.read_rerank_request(json.dumps(body).encode(), SIGHTED)
    image = Media("image", EncodedMedia("AAAA", "image/png"), "documents[1].content[1].image_url")
    assert reply.request.prompts == [
        TextPrompt("a"),
        TextPrompt("b"),
        TextPrompt("cd", media=[PlacedMedia(1, image)]),
    ]
    for place in range(3):
        reply.add_events([PromptVector(place, struct.pack("<2f", *VECTORS[place]))])
    results = json.loads(reply.render_body(USAGE))["results"]
    assert [result["document"] for result in sorted(results, key=lambda result: result["index"])] == [
        {"text": "b", "multi_modal": None},
        {"text": None, "multi_modal": documents[1]["content"]},
    ]


def test_vllm_score_reads_content_parts_for_a_cross_encoder():
    parts = {"content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]}
    context = replace(CONTEXT, **CROSS_ENCODER)
    reply = scores.read_score_request(json.dumps({"text_1": "a", "text_2": [parts, "d"]}).encode(), context)
    assert reply.request.prompts == [
        TextPair(TextPrompt("a"), TextPrompt("b\nc")),
        TextPair(TextPrompt("a"), TextPrompt("d")),
    ]


@pytest.mark.parametrize(
    ("documents", "context", "sentence"),
    [
        ([{"content": [IMAGE]}], CONTEXT, "this model reads text only"),
        ([{"content": [IMAGE]}], replace(SIGHTED, **CROSS_ENCODER), "a cross-encoder"),
        ([{"content": [IMAGE, IMAGE]}], SIGHTED, "at most 1 image"),
        ([{"content": []}], SIGHTED, "cannot be empty"),
        ([{}], SIGHTED, "content"),
        ([{"content": [{"type": "text"}]}], SIGHTED, "text"),
        (["a", 5, {"content": [{"type": "text", "text": "a"}]}], SIGHTED, "documents"),
    ],
)
def test_vllm_score_refuses_wrong_content_parts(documents, context, sentence):
    with pytest.raises(BadRequest, match=sentence):
        scores.read_rerank_request(json.dumps({"query": "a", "documents": documents}).encode(), context)
    body = {"query": "a", "documents": [{"content": [IMAGE]}], "max_tokens_per_doc": 5}
    with pytest.raises(Unsupported, match="limit of tokens"):
        scores.read_rerank_request(json.dumps(body).encode(), SIGHTED)


@pytest.mark.parametrize("reader", [embeddings.read_vllm_embedding, embeddings.read_pooling_request])
def test_vllm_refuses_chunks_of_a_document_by_name(reader):
    body = {"input": "a", "late_chunking_params": {"chunk_size": 4}}
    with pytest.raises(Unsupported) as caught:
        reader(json.dumps(body).encode(), CONTEXT)
    assert caught.value.field == "late_chunking_params"


def test_vllm_pooling_writes_scores_of_classes_for_each_token():
    context = replace(CONTEXT, generates=False, labels=["a", "b"], pooling_tasks=frozenset({"token_classify"}))
    body = {"input": "a", "task": "token_classify", "model": "m", "use_activation": False}
    reply = embeddings.read_pooling_request(json.dumps(body).encode(), context)
    assert reply.request.pooling == PoolingOptions(normalize=False, task="token_classify")
    reply.add_events([PromptVector(0, struct.pack("<4f", 0.25, 0.75, 0.5, -0.5), 2)])
    assert b'"data":[{"index":0,"object":"pooling","data":[[0.25,0.75],[0.5,-0.5]]}]' in reply.render_body(USAGE)
