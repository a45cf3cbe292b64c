"""TEI's routes: each member's effect, the bytes of answers, and the forms of errors."""

import json
import struct
from dataclasses import replace

import pytest

from parley.dialects import tei
from parley.dialects.facts import ModelCard, ServerFacts, ServerStatus
from parley.dialects.reply import RequestTimings
from parley.dialects.request_context import RequestContext
from parley.dialects.tei import embed, info, predict, tokens
from parley.dialects.tei.api_rules import EXTENDED_TEI_RULES, STRICT_TEI_RULES
from parley.dialects.tei.error_answers import tei_error_answer
from parley.errors import (
    BadRequest,
    ContextLength,
    EngineError,
    MalformedBody,
    NotReady,
    Overloaded,
    TooLarge,
    Unauthorized,
    UnknownPromptName,
    UnsuitableModel,
)
from parley.types import ModelInfo, PoolingOptions, PromptVector, TextPair, TextPrompt, TokensPrompt, Usage

ENCODER = RequestContext("0f", 1700000000, "fp", context_length=100, device="cpu", generates=False, model_names=("m",))
SPARSE = replace(ENCODER, pooling_tasks=frozenset({"embed", "embed_sparse"}))
RERANKER = replace(ENCODER, labels=["LABEL_0"])
CLASSIFIER = replace(ENCODER, labels=["bad", "good"])
USAGE = Usage(prompt_tokens=9)
TIMINGS = RequestTimings(total=0.25, validation=0.001, queue=0.002, inference=0.2)


def pack(*numbers):
    return struct.pack(f"<{len(numbers)}f", *numbers)


def finish(reply, *vectors):
    for place, (rows, numbers) in enumerate(vectors):
        reply.add_events([PromptVector(place, pack(*numbers), rows)])
    return reply.render_body(USAGE)


def read(reader, body, context=ENCODER, rules=STRICT_TEI_RULES):
    return reader(rules, json.dumps(body).encode(), context)


def test_tei_embeds_a_text_its_ids_or_a_batch():
    reply = read(embed.read_tei_embed, {"inputs": "abc", "normalize": False, "dimensions": 2, "prompt_name": "query"})
    assert reply.request.prompts == [TextPrompt("abc")]
    assert reply.request.pooling == PoolingOptions(2, False, "query")
    assert finish(reply, (1, (0.5, -0.25))) == b"[[0.5,-0.25]]"
    assert reply.answer_headers(TIMINGS) == [
        (b"x-compute-type", b"cpu+optimized"),
        (b"x-compute-time", b"250"),
        (b"x-compute-characters", b"3"),
        (b"x-compute-tokens", b"9"),
        (b"x-total-time", b"250"),
        (b"x-tokenization-time", b"1"),
        (b"x-queue-time", b"2"),
        (b"x-inference-time", b"200"),
    ]
    assert read(embed.read_tei_embed, {"inputs": [5, 6]}).request.prompts == [TokensPrompt([5, 6])]
    assert read(embed.read_tei_embed, {"inputs": ["a", [7]]}).request.prompts == [TextPrompt("a"), TokensPrompt([7])]
    assert read(embed.read_tei_embed, {"inputs": "a"}).request.pooling == PoolingOptions(normalize=True)


def test_tei_cuts_texts_by_request_or_by_the_servers_default():
    def cut(rules, **members):
        request = read(embed.read_tei_embed, {"inputs": "a"} | members, rules=rules).request
        return request.max_prompt_tokens, request.kept_side

    assert cut(STRICT_TEI_RULES) == (100, "head") and cut(EXTENDED_TEI_RULES) == (None, "head")
    assert cut(STRICT_TEI_RULES, truncate=False) == (None, "head")
    assert cut(EXTENDED_TEI_RULES, truncate=True, truncation_direction="Left") == (100, "tail")
    assert cut(EXTENDED_TEI_RULES, truncate=True, truncation_direction="right") == (100, "head")


def test_tei_embeds_all_tokens_without_normalization():
    reply = read(embed.read_embed_all, {"inputs": ["a", "b"], "prompt_name": "query"})
    assert reply.request.pooling == PoolingOptions(normalize=False, prompt="query", task="token_embed")
    assert finish(reply, (2, (1.0, 2.0, 3.0, 4.0)), (1, (5.0, 6.0))) == b"[[[1.0,2.0],[3.0,4.0]],[[5.0,6.0]]]"


def test_tei_embeds_sparsely():
    body = {"inputs": ["a", [7]], "truncate": True, "truncation_direction": "Left"}
    reply = read(embed.read_embed_sparse, body, SPARSE)
    assert reply.request.prompts == [TextPrompt("a"), TokensPrompt([7])]
    assert reply.request.pooling == PoolingOptions(task="embed_sparse")
    assert (reply.request.max_prompt_tokens, reply.request.kept_side) == (100, "tail")
    pairs = struct.pack("<IfIf", 5, 1.1, 30521, 0.25)
    reply.add_events([PromptVector(0, pairs), PromptVector(1, b"")])
    assert reply.render_body(USAGE) == b'[[{"index":5,"value":1.1},{"index":30521,"value":0.25}],[]]'
    assert (b"x-compute-characters", b"2") in reply.answer_headers(TIMINGS)
    single = read(embed.read_embed_sparse, {"inputs": "a", "prompt_name": "query"}, SPARSE)
    assert single.request.pooling == PoolingOptions(prompt="query", task="embed_sparse")
    single.add_events([PromptVector(0, pairs[:8])])
    assert single.render_body(USAGE) == b'[[{"index":5,"value":1.1}]]'


def test_tei_refuses_sparse_vectors_by_name():
    for context in (ENCODER, CLASSIFIER):
        with pytest.raises(BadRequest) as caught:
            read(embed.read_embed_sparse, {"inputs": "a"}, context)
        answer = tei_error_answer(caught.value)
        assert answer.status == 424
        assert answer.body == (
            b'{"error":"Backend error: Model is not an embedding model with SPLADE pooling","error_type":"Backend"}'
        )


def test_tei_embeds_densely_with_a_sparse_model():
    """Its vectors have a number for each token of the vocabulary, and are never normalized but for cosines."""
    reply = read(embed.read_tei_embed, {"inputs": "a", "normalize": False}, SPARSE)
    assert reply.request.pooling == PoolingOptions(normalize=False)
    sentences = {"inputs": {"source_sentence": "a", "sentences": ["b"]}}
    assert read(embed.read_similarity, sentences, SPARSE).request.pooling == PoolingOptions(normalize=True)
    refused = read(embed.read_openai_embedding, {"input": "a"}, SPARSE)
    assert (refused.status, refused.body) == (
        424,
        b'{"message":"Backend error: `normalize` is not available for SPLADE models","code":424,"type":"Backend"}',
    )


def test_tei_compares_sentences():
    body = {
        "inputs": {"source_sentence": "a", "sentences": ["b", "c"]},
        "parameters": {"truncate": False, "truncation_direction": "left", "prompt_name": "query"},
    }
    reply = read(embed.read_similarity, body)
    assert reply.request.prompts == [TextPrompt("a"), TextPrompt("b"), TextPrompt("c")]
    assert reply.request.pooling == PoolingOptions(normalize=True, prompt="query")
    assert (reply.request.max_prompt_tokens, reply.request.kept_side) == (None, "tail")
    assert finish(reply, (1, (1.0, 0.0)), (1, (0.6, 0.8)), (1, (-1.0, 0.0))) == b"[0.6,-1.0]"


def test_tei_answers_openai_embeddings():
    reply = read(embed.read_openai_embedding, {"input": ["a", "b"], "dimensions": 1, "user": "u"})
    assert finish(reply, (1, (0.5,)), (1, (-0.5,))) == (
        b'{"object":"list","data":[{"object":"embedding","embedding":[0.5],"index":0},'
        b'{"object":"embedding","embedding":[-0.5],"index":1}],"model":"m",'
        b'"usage":{"prompt_tokens":9,"total_tokens":9}}'
    )
    reply = read(embed.read_openai_embedding, {"input": "a", "encoding_format": "base64", "model": "x"})
    assert b'"embedding":"AAAAPw=="' in finish(reply, (1, (0.5,)))
    refused = read(embed.read_openai_embedding, {"input": ""})
    assert refused.status == 400 and json.loads(refused.body)["type"] == "Empty"
    refused = reply.render_refusal(ContextLength("long", field="prompt", limit=100, prompt=101))
    assert refused.body == (
        b'{"message":"Input validation error: `inputs` must have less than 100 tokens. Given: 101","code":422,'
        b'"type":"Validation"}'
    )


def test_tei_predicts_classes_of_texts_and_pairs():
    reply = read(predict.read_predict, {"inputs": "a"}, CLASSIFIER)
    assert reply.request.pooling == PoolingOptions(normalize=False, task="classify")
    assert finish(reply, (1, (0.0, 0.0))) == b'[{"score":0.5,"label":"good"},{"score":0.5,"label":"bad"}]'
    reply = read(predict.read_predict, {"inputs": [["a"], ["b", "c"]], "raw_scores": True}, CLASSIFIER)
    assert reply.request.prompts == [TextPrompt("a"), TextPair(TextPrompt("b"), TextPrompt("c"))]
    assert finish(reply, (1, (-1.5, 2.0)), (1, (0.1, 0.0))) == (
        b'[[{"score":2.0,"label":"good"},{"score":-1.5,"label":"bad"}],'
        b'[{"score":0.1,"label":"bad"},{"score":0.0,"label":"good"}]]'
    )
    assert read(predict.read_predict, {"inputs": ["a"]}, CLASSIFIER).request.prompts == [TextPrompt("a")]
    pair = read(predict.read_predict, {"inputs": ["a", "b"]}, RERANKER)
    assert pair.request.prompts == [TextPair(TextPrompt("a"), TextPrompt("b"))]
    assert json.loads(finish(pair, (1, (-800.0,)))) == [{"score": 0.0, "label": "LABEL_0"}]


def test_tei_reranks_texts():
    body = {"query": "q", "texts": ["a", "b", "c"]}
    reply = read(predict.read_tei_rerank, body | {"return_text": True}, RERANKER)
    assert reply.request.prompts == [TextPair(TextPrompt("q"), TextPrompt(text)) for text in "abc"]
    assert finish(reply, (1, (0.0,)), (1, (1.0,)), (1, (-1.0,))) == (
        b'[{"index":1,"text":"b","score":0.7310586},{"index":0,"text":"a","score":0.5},'
        b'{"index":2,"text":"c","score":0.26894143}]'
    )
    reply = read(predict.read_tei_rerank, body | {"raw_scores": True}, RERANKER)
    assert finish(reply, (1, (2.0,)), (1, (2.0,)), (1, (3.0,))) == (
        b'[{"index":2,"score":3.0},{"index":1,"score":2.0},{"index":0,"score":2.0}]'
    )


@pytest.mark.parametrize(
    ("reader", "context", "body", "status", "message"),
    [
        (embed.read_tei_embed, ENCODER, {}, 422, "missing field `inputs`"),
        (embed.read_tei_embed, ENCODER, {"inputs": ""}, 400, "Input validation error: `inputs` cannot be empty"),
        (embed.read_tei_embed, ENCODER, {"inputs": []}, 400, "Input validation error: `inputs` cannot be empty"),
        (embed.read_tei_embed, ENCODER, {"inputs": ["a", 5]}, 422, "untagged enum Input"),
        (embed.read_tei_embed, ENCODER, {"inputs": [1.5]}, 422, "untagged enum Input"),
        (embed.read_tei_embed, ENCODER, {"inputs": ["a"] * 33}, 422, "batch size 33 > maximum allowed batch size 32"),
        (embed.read_tei_embed, ENCODER, {"inputs": "a", "truncate": 1}, 422, "expected a boolean"),
        (embed.read_tei_embed, ENCODER, {"inputs": "a", "truncation_direction": "up"}, 422, "unknown variant `up`"),
        (
            embed.read_tei_embed,
            ENCODER,
            {"inputs": "a", "dimensions": 0},
            422,
            "error: `dimensions` should be positive",
        ),
        (embed.read_tei_embed, ENCODER, {"inputs": "a", "dimensions": -1}, 422, "integer `-1`, expected usize"),
        (
            embed.read_tei_embed,
            ENCODER,
            {"inputs": "a", "dimensions": 2.0},
            422,
            "floating point `2.0`, expected usize",
        ),
        (embed.read_tei_embed, CLASSIFIER, {"inputs": "a"}, 424, "Backend error: Model is not an embedding model"),
        (embed.read_embed_all, CLASSIFIER, {"inputs": "a"}, 424, "Backend error: Model is not an embedding model"),
        (embed.read_embed_sparse, ENCODER, {"inputs": []}, 400, "Input validation error: `inputs` cannot be empty"),
        (embed.read_embed_sparse, ENCODER, {}, 422, "missing field `inputs`"),
        (embed.read_tei_embed, SPARSE, {"inputs": "a"}, 424, "error: `normalize` is not available for SPLADE models"),
        (embed.read_embed_all, SPARSE, {"inputs": "a"}, 424, "error: `embed_all` is not available for SPLADE models"),
        (embed.read_tei_embed, ENCODER, {"inputs": [5], "prompt_name": "x"}, 422, "prompt_name"),
        (embed.read_similarity, ENCODER, {"inputs": {"sentences": ["a"]}}, 422, "missing field `source_sentence`"),
        (
            embed.read_similarity,
            ENCODER,
            {"inputs": {"source_sentence": "a", "sentences": []}},
            400,
            "`inputs.sentences` cannot be empty",
        ),
        (predict.read_predict, ENCODER, {"inputs": "a"}, 424, "Backend error: Model is not a classifier model"),
        (predict.read_predict, CLASSIFIER, {"inputs": ["a", "b", "c"]}, 422, "invalid length 3"),
        (predict.read_predict, CLASSIFIER, {"inputs": [["a"], "b"]}, 422, "expected a string, a pair of strings"),
        (predict.read_tei_rerank, CLASSIFIER, {"query": "a", "texts": ["b"]}, 424, "model is not a re-ranker model"),
        (predict.read_tei_rerank, RERANKER, {"query": "a", "texts": []}, 400, "`texts` cannot be empty"),
        (predict.read_tei_rerank, RERANKER, {"texts": ["b"]}, 422, "missing field `query`"),
    ],
)
def test_tei_refusals_use_original_wording(reader, context, body, status, message):
    with pytest.raises(BadRequest) as caught:
        read(reader, body, context)
    answer = tei_error_answer(caught.value)
    assert answer.status == status and message in answer.body.decode()


@pytest.mark.parametrize(
    ("error", "status", "body"),
    [
        (Overloaded("full"), 429, b'{"error":"Model is overloaded","error_type":"Overloaded"}'),
        (NotReady("loading", retry_after=1), 503, b'{"error":"unhealthy","error_type":"Unhealthy"}'),
        (EngineError("NaN"), 424, b'{"error":"Backend error: NaN","error_type":"Backend"}'),
        (
            UnsuitableModel("No vectors.", field="model"),
            424,
            b'{"error":"Backend error: No vectors.","error_type":"Backend"}',
        ),
        (
            UnknownPromptName("no", name="x", known=["a"], field="prompt_name"),
            422,
            b'{"error":"Input validation error: `default-prompt-name` is set to `x` but it was not found in the '
            b'Sentence Transformers prompts. Available prompts: [\\"a\\"]","error_type":"Validation"}',
        ),
        (Unauthorized("key"), 401, b""),
        (TooLarge("big", size=3, limit=2), 413, b"Failed to buffer the request body: length limit exceeded"),
        (MalformedBody("EOF"), 400, b"Failed to parse the request body as JSON: EOF"),
    ],
)
def test_tei_errors_have_the_originals_types_and_statuses(error, status, body):
    answer = tei_error_answer(error)
    assert (answer.status, answer.body) == (status, body)


def test_tei_decode_reads_one_text_or_a_batch():
    request = tokens.read_decode(STRICT_TEI_RULES, b'{"ids":[5,6],"skip_special_tokens":false}')
    assert (request.token_ids, request.further_ids, request.skip_special) == ([5, 6], [], False)
    request = tokens.read_decode(STRICT_TEI_RULES, b'{"ids":[[5],[6,7]]}')
    assert (request.token_ids, request.further_ids, request.skip_special) == ([5], [[6, 7]], True)
    assert tokens.write_texts("a", "b") == b'["a","b"]'
    for body, error in ((b'{"ids":[]}', "`input_ids` cannot be empty"), (b'{"ids":[[5],6]}', "enum InputIds")):
        with pytest.raises(BadRequest, match=error):
            tokens.read_decode(STRICT_TEI_RULES, body)


@pytest.mark.parametrize(
    ("members", "kind"),
    [
        ({"dimensions": 8, "pooling": "lasttoken"}, {"embedding": {"pooling": "last_token"}}),
        ({"dimensions": 9, "pooling": "splade"}, {"embedding": {"pooling": "splade"}}),
        ({"labels": ["a"]}, {"reranker": {"id2label": {"0": "a"}, "label2id": {"a": 0}}}),
        ({"labels": ["a", "b"]}, {"classifier": {"id2label": {"0": "a", "1": "b"}, "label2id": {"a": 0, "b": 1}}}),
    ],
)
def test_tei_info_describes_the_kind_of_model(members, kind):
    model = ModelInfo(
        architecture="BertModel", dtype="float32", device="cpu", parameters=1, vocab_size=9, max_model_len=100,
        weights_bytes=1, kv_bytes=0, kv_pages=0, page_tokens=16, fused=True, generates=False, **members,
    )  # fmt: skip
    facts = ServerFacts("1.0", [ModelCard("m", 0, 100)], True, ServerStatus(slots=512, max_batch=8, info=model))
    assert json.loads(info.answer_info(STRICT_TEI_RULES, b"", ENCODER, facts).body) == {
        "model_id": "m",
        "model_sha": None,
        "model_dtype": "float32",
        "served_model_name": "m",
        "model_type": kind,
        "max_concurrent_requests": 512,
        "max_input_length": 100,
        "max_batch_tokens": 800,
        "max_batch_requests": 8,
        "max_client_batch_size": 32,
        "auto_truncate": True,
        "tokenization_workers": 1,
        "version": "1.9.3",
        "sha": None,
        "docker_label": "parley-1.0",
    }


@pytest.mark.parametrize(
    ("context", "strict_reply", "extended_reply"),
    [
        (ENCODER, embed.EmbedReply, embed.FeatureReply),
        (SPARSE, embed.SparseReply, embed.SparseReply),
        (CLASSIFIER, predict.PredictReply, predict.TextClassificationReply),
        (RERANKER, BadRequest, predict.TextClassificationReply),
    ],
)
def test_tei_root_does_the_task_of_the_model(context, strict_reply, extended_reply):
    for rules, expected in ((STRICT_TEI_RULES, strict_reply), (EXTENDED_TEI_RULES, extended_reply)):
        if expected is BadRequest:
            with pytest.raises(BadRequest, match="missing field `query`"):
                read(tei.read_main_task, {"inputs": "a"}, context, rules)
        else:
            assert type(read(tei.read_main_task, {"inputs": "a"}, context, rules)) is expected
        if context is RERANKER:
            reply = read(tei.read_main_task, {"query": "a", "texts": ["b"]}, context, rules)
            assert type(reply) is predict.TeiRerankReply


def test_single_texts_have_the_forms_of_hugging_faces_clients_at_the_shared_root():
    reply = read(tei.read_main_task, {"inputs": "a"}, CLASSIFIER, EXTENDED_TEI_RULES)
    assert finish(reply, (1, (0.0, 0.0))) == b'[[{"score":0.5,"label":"good"},{"score":0.5,"label":"bad"}]]'
    reply = read(tei.read_main_task, {"inputs": "a"}, ENCODER, EXTENDED_TEI_RULES)
    assert finish(reply, (1, (0.5,))) == b"[0.5]"


@pytest.mark.parametrize(
    ("members", "name"),
    [
        ({"generates": False, "pooling": "mean"}, "mean"),
        ({"generates": False, "pooling": "splade"}, "splade"),
        ({"generates": False, "token_vectors": True}, "cls"),  # ColBERT
        ({"generates": False, "pooling": "lasttoken"}, "last_token"),
        ({"generates": True, "dimensions": 8}, "last_token"),
    ],
)
def test_tei_info_names_the_pooling_as_the_original(members, name):
    sizes = dict.fromkeys(
        ("parameters", "vocab_size", "max_model_len", "weights_bytes", "kv_bytes", "kv_pages", "page_tokens"), 0
    )
    model = ModelInfo(architecture="a", dtype="float32", device="cpu", fused=True, **sizes, **members)
    facts = ServerFacts("1", [ModelCard("m", 0, 100)], True, status=ServerStatus(info=model))
    answer = info.answer_info(STRICT_TEI_RULES, b"", ENCODER, facts)
    assert json.loads(answer.body)["model_type"] == {"embedding": {"pooling": name}}
