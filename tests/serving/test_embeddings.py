"""Embeddings through a running server, with the scripted engine and OpenAI's client."""

import base64
import struct
import threading

import pytest
from huggingface_hub import AsyncInferenceClient
from openai import AsyncOpenAI, BadRequestError
from support.http_client import MODEL_INFO

from parley.dialects import vectors
from parley.types import ModelInfo

TEXTS = ["The quick brown fox", "jumps", "over the lazy dog"]


def model_info(**changes) -> ModelInfo:
    import msgspec

    return msgspec.structs.replace(MODEL_INFO, **changes)


@pytest.mark.parametrize("prefix", ["", "/openai"])
async def test_texts_and_their_token_ids_give_the_same_embeddings(serve, prefix):
    server = await serve()
    body = {"model": "tiny", "input": TEXTS}
    whole = (await server.post(prefix + "/v1/embeddings", body)).json
    ids = [(await server.post("/tokenize", {"prompt": text})).json["tokens"] for text in TEXTS]
    again = (await server.post(prefix + "/v1/embeddings", body | {"input": ids})).json
    if not prefix:  # each answer has an id of its own at the root
        assert whole.pop("id") != again.pop("id")
    assert whole == again and whole["usage"]["total_tokens"] == sum(map(len, ids))
    assert [entry["index"] for entry in whole["data"]] == [0, 1, 2]
    coded = (await server.post(prefix + "/v1/embeddings", body | {"encoding_format": "base64", "dimensions": 5})).json
    for entry, other in zip(whole["data"], coded["data"], strict=True):
        assert struct.unpack("<5f", base64.b64decode(other["embedding"])) == tuple(entry["embedding"][:5])
    one = (await server.post(prefix + "/v1/embeddings", body | {"input": ids[1]})).json
    assert one["data"][0]["embedding"] == whole["data"][1]["embedding"]
    await server.wait_until_idle()


async def test_two_thousand_embeddings_come_back_in_order(serve):
    server = await serve(max_batch=7)
    answer = await server.post("/v1/embeddings", {"input": [[i % 8, i // 8 % 8] for i in range(2048)]})
    for i, entry in enumerate(answer.json["data"]):
        expected = [0.5 * (i % 8 == k) + 0.5 * (i // 8 % 8 == k) for k in range(8)]
        assert entry["index"] == i and entry["embedding"] == expected
    assert answer.json["usage"]["prompt_tokens"] == 4096
    await server.wait_until_idle()


@pytest.mark.parametrize("prefix", ["", "/vllm"])
async def test_late_interaction_compares_tokens(serve, prefix):
    """The scripted engine's vector of a token has a one at the token's residue."""
    info = model_info(generates=False, dimensions=0, token_vectors=True, token_dimensions=5)
    server = await serve(info=info)
    residues = [[1, 7, 3], [6, 2, 3], [4]]  # as they are, and modulo 5: 1 2 3, 1 2 3, 4
    pooled = await server.post(prefix + "/pooling", {"model": "tiny", "input": residues})
    assert [len(entry["data"]) for entry in pooled.json["data"]] == [3, 3, 1]
    assert pooled.json["data"][2]["data"] == [[0, 0, 0, 0, 1]]
    query, *documents = TEXTS
    ids = [{token % 5 for token in (await server.post("/tokenize", {"prompt": text})).json["tokens"]} for text in TEXTS]
    tokens = (await server.post("/tokenize", {"prompt": query})).json["tokens"]
    expected = [sum(token % 5 in document_ids for token in tokens) for document_ids in ids[1:]]
    scored = await server.post(prefix + "/score", {"queries": query, "documents": documents})
    assert [entry["score"] for entry in scored.json["data"]] == expected
    ranked = (await server.post(prefix + "/rerank", {"query": query, "documents": documents})).json["results"]
    assert [entry["relevance_score"] for entry in ranked] == sorted(expected, reverse=True)
    refused = await server.post(prefix + "/v1/embeddings", {"input": "a"})
    assert refused.status == (404 if prefix else 400)  # the original has no such route then
    await server.wait_until_idle()


async def test_event_loop_goes_on_while_many_vectors_are_compared(serve, monkeypatch):
    threads, compare = [], vectors.max_similarity

    def compare_and_note(one, other):
        threads.append(threading.current_thread())
        return compare(one, other)

    monkeypatch.setattr(vectors, "max_similarity", compare_and_note)
    server = await serve(info=model_info(generates=False, dimensions=0, token_dimensions=5, token_vectors=True))
    for documents, in_loop in ((2, True), (1000, False)):
        scored = (await server.post("/score", {"queries": "a", "documents": ["b"] * documents})).json
        assert len(scored["data"]) == len(threads) == documents
        assert {thread is threading.current_thread() for thread in threads} == {in_loop}
        threads.clear()
    await server.wait_until_idle()


@pytest.mark.parametrize("prefix", ["", "/vllm"])
async def test_rerank_and_score_agree(serve, prefix):
    server = await serve(max_batch=2)
    documents = ["river", TEXTS[0], "dog"]
    ranked = []
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        answer = await server.post(prefix + path, {"model": "tiny", "query": TEXTS[0], "documents": documents})
        ranked.append(answer.json["results"])
    scored = {result["index"]: result["relevance_score"] for result in ranked[0]}
    assert ranked[0] == ranked[1] == ranked[2] and sorted(scored.values(), reverse=True) == list(scored.values())
    for path in ("/score", "/v1/score"):
        scores = (await server.post(prefix + path, {"text_1": TEXTS[0], "text_2": documents})).json
        assert {entry["index"]: entry["score"] for entry in scores["data"]} == scored
    long = await server.post(prefix + "/rerank", {"query": "b " * 9000, "documents": documents})
    assert long.status == 400 and "Please reduce the length of the input prompt" in long.error["message"]
    unknown = await server.post(prefix + "/score", {"model": "nope", "text_1": "a", "text_2": "b"})
    assert (unknown.status, unknown.error["type"]) == (404, "NotFoundError")
    await server.wait_until_idle()


@pytest.mark.parametrize("prefix", ["", "/vllm"])
async def test_rerank_cuts_documents_to_their_token_limit(serve, prefix):
    server = await serve()
    query, long = TEXTS[0], f"{TEXTS[0]} {TEXTS[2]}"
    plain = (await server.post("/tokenize", {"prompt": query, "add_special_tokens": False})).json["count"]
    whole = (await server.post("/tokenize", {"prompt": query})).json["count"]
    body = {"query": query, "documents": [long, query]}
    for members in ({"max_tokens_per_doc": plain}, {"max_tokens_per_doc": plain, "truncation_side": "left"}):
        cut = (await server.post(prefix + "/rerank", body | members)).json
        assert cut["results"][0]["relevance_score"] == cut["results"][1]["relevance_score"]
        assert cut["usage"]["prompt_tokens"] == 3 * whole
    uncut = (await server.post(prefix + "/rerank", body | {"max_tokens_per_doc": 0})).json
    assert uncut["usage"]["prompt_tokens"] > 3 * whole
    shorter = (await server.post(prefix + "/rerank", body | {"max_tokens_per_query": plain - 1})).json
    assert shorter["usage"]["prompt_tokens"] == uncut["usage"]["prompt_tokens"] - 1
    refused = await server.post(prefix + "/rerank", body | {"max_tokens_per_doc": 1 << 20})
    assert refused.status == 400 and "must be less than max_model_len" in refused.error["message"]
    await server.wait_until_idle()


@pytest.mark.parametrize("prefix", ["", "/vllm"])
async def test_classifier_scores_texts_and_refuses_all_else(serve, prefix):
    server = await serve(info=model_info(generates=False, dimensions=0, labels=["a", "b", "c"]))
    answer = (await server.post(prefix + "/classify", {"input": TEXTS})).json
    assert [len(item["probs"]) for item in answer["data"]] == [3, 3, 3]
    pooled = (await server.post(prefix + "/pooling", {"input": TEXTS})).json["data"]
    assert [item["data"] for item in pooled] == [item["probs"] for item in answer["data"]]
    for path, body in (
        ("/rerank", {"query": "a", "documents": ["b"]}),
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/completions", {"model": "tiny", "prompt": "a"}),
    ):
        refused = await server.post(prefix + path, body)
        assert refused.status in (400, 404)  # the original has no such routes for this model
    await server.wait_until_idle()


async def test_encoder_has_vectors_of_tokens_within_a_limit(serve):
    server = await serve(info=model_info(generates=False, token_vectors=True))
    (item,) = (await server.post("/pooling", {"input": TEXTS[0], "task": "token_embed"})).json["data"]
    count = (await server.post("/tokenize", {"prompt": TEXTS[0]})).json["count"]
    assert len(item["data"]) == count and {len(row) for row in item["data"]} == {MODEL_INFO.dimensions}
    many = {"input": [[1] * 4000] * 300, "task": "token_embed"}
    refused = await server.post("/pooling", many)
    assert refused.status == 400 and "at most 1048576 tokens" in refused.error["message"]
    without = await serve(info=model_info(generates=False))
    refused = await without.post("/pooling", {"input": "a", "task": "token_embed"})
    assert refused.status == 400 and "Supported tasks: ['embed']" in refused.error["message"]


async def test_encoder_answers_bodies_of_hugging_face_clients_with_vectors(serve):
    server = await serve(info=model_info(generates=False))
    expected = [entry["embedding"] for entry in (await server.post("/v1/embeddings", {"input": TEXTS})).json["data"]]
    assert (await server.post("/", {"inputs": TEXTS[0]})).json == expected[0]
    assert (await server.post("/", {"inputs": TEXTS, "normalize": True})).json == expected
    assert (await server.post("/", {"inputs": TEXTS[:1], "dimensions": 3})).json == [expected[0][:3]]
    (coded,) = (await server.post("/", {"inputs": TEXTS[:1], "encoding_format": "base64"})).json
    assert list(struct.unpack(f"<{len(expected[0])}f", base64.b64decode(coded))) == expected[0]
    sentences = {"source_sentence": TEXTS[0], "sentences": TEXTS}
    scores = (await server.post("/score", {"text_1": TEXTS[0], "text_2": TEXTS})).json["data"]
    cosines = (await server.post("/", {"inputs": sentences})).json
    assert cosines == pytest.approx([entry["score"] for entry in scores], abs=1e-7)
    assert (await server.post("/tgi/", {"inputs": "a"})).status != 200  # TGI has no encoders
    await server.wait_until_idle()


async def test_encoder_cuts_long_texts_only_if_asked(serve):
    server = await serve(info=model_info(generates=False))
    long = {"inputs": "start " + "b " * 9000 + "end"}
    refused = await server.post("/", long)
    assert refused.status == 422 and "must have less than" in refused.json["error"]
    heads, tails = [
        (await server.post("/", long | {"truncate": True, "truncation_direction": direction})).json
        for direction in ("Right", "left")
    ]
    assert heads != tails and len(heads) == len(tails)


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"inputs": []}, "inputs"),
        ({"inputs": None}, "inputs"),
        ({"inputs": {"sentences": ["a"]}}, "source_sentence"),
        ({"inputs": {"source_sentence": "a", "sentences": []}}, "inputs.sentences"),
        ({"inputs": "a", "truncation_direction": "up"}, "truncation_direction"),
        ({"inputs": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"inputs": "a", "dimensions": 0}, "dimensions"),
    ],
)
async def test_encoder_refuses_hugging_face_bodies_by_member(serve, body, name):
    server = await serve(info=model_info(generates=False))
    answer = await server.post("/", body)
    assert answer.status == (400 if b"cannot be empty" in answer.body else 422) and name.encode() in answer.body


async def test_hugging_faces_client_extracts_features_and_compares_sentences(serve):
    server = await serve(info=model_info(generates=False))
    expected = [entry["embedding"] for entry in (await server.post("/v1/embeddings", {"input": TEXTS})).json["data"]]

    async with AsyncInferenceClient(model=server.url) as client:
        one = await client.feature_extraction(TEXTS[0])
        several = await client.feature_extraction(TEXTS, normalize=True, truncate=True, truncation_direction="left")
        similarities = await client.sentence_similarity(TEXTS[0], other_sentences=TEXTS)
    assert one.tolist() == pytest.approx(expected[0]) and several.tolist() == [pytest.approx(row) for row in expected]
    assert len(similarities) == 3 and similarities[0] == max(similarities)


@pytest.mark.parametrize("path", ["/vllm/v1/embeddings", "/vllm/pooling", "/pooling"])
async def test_vllm_finds_unknown_ids_out_of_vocabulary(serve, path):
    server = await serve()
    for ids, wrong in ([1, -1], -1), ([[1], [-7]], -7), ([641], 641), ([2**40], 2**40):
        answer = await server.post(path, {"input": ids})
        found = answer.status, answer.error["message"], answer.error["param"]
        assert found == (400, f"Token id {wrong} is out of vocabulary", None)


@pytest.mark.parametrize("prefix", ["", "/vllm"])
async def test_cohere_embed_route_gives_the_same_vectors(serve, prefix):
    server = await serve()
    plain = (await server.post(prefix + "/v1/embeddings", {"input": TEXTS})).json
    embedded = (await server.post(prefix + "/v2/embed", {"model": "tiny", "texts": TEXTS})).json
    assert embedded["embeddings"]["float"] == [entry["embedding"] for entry in plain["data"]]
    assert embedded["meta"]["billed_units"]["input_tokens"] == plain["usage"]["prompt_tokens"]
    long = {"texts": ["b " * 9000]}
    assert (await server.post(prefix + "/v2/embed", long)).json["meta"]["billed_units"]["input_tokens"] == 4096
    assert (await server.post(prefix + "/v2/embed", long | {"truncate": "NONE"})).status == 400
    wrong = await server.post(prefix + "/v2/embed", {"texts": TEXTS, "output_dimension": 9})
    assert (wrong.status, wrong.error["param"]) == (400, "output_dimension")
    await server.wait_until_idle()


async def test_cohere_input_types_need_no_prompts_except_at_vllms_mount(serve):
    server = await serve()
    body = {"model": "tiny", "texts": TEXTS}
    for prefix in ("", "/cohere"):
        plain = (await server.post(prefix + "/v2/embed", body)).json["embeddings"]
        for name in ("search_query", "search_document", "classification", "clustering", "image"):
            assert (await server.post(prefix + "/v2/embed", body | {"input_type": name})).json["embeddings"] == plain
        unknown = await server.post(prefix + "/v2/embed", body | {"input_type": "query"})
        sentence = (
            "invalid request: input_type must be one of 'search_document' or 'search_query' or 'classification' or "
            "'clustering' or 'image', but got 'query'."
        )
        assert (unknown.status, unknown.json["message"]) == (400, sentence)
    strict = await server.post("/vllm/v2/embed", body | {"input_type": "search_query"})
    sentence = "Unsupported input_type 'search_query'. This model does not define any input_type task instructions."
    assert (strict.status, strict.error["message"]) == (400, sentence)
    await server.wait_until_idle()


@pytest.mark.parametrize("path", ["/v1/embeddings", "/vllm/v1/embeddings", "/vllm/v1/chat/completions/batch"])
async def test_errors_name_the_conversation_of_several(serve, path):
    server = await serve(info=model_info(max_model_len=64))
    good, long = ([{"role": "user", "content": text}] for text in ("a", "b " * 90))
    refused = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    for conversations in ([good, long], [good, refused]):
        answer = await server.post(path, {"messages": conversations})
        assert answer.status == 400 and "messages[1]" in answer.body.decode(), answer.body
    single = await server.post(path, {"messages": [long] if path.endswith("batch") else long})
    assert single.status == 400 and "messages[1]" not in single.body.decode()
    await server.wait_until_idle()


async def test_openai_client_creates_embeddings(serve):
    server = await serve()
    async with AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        plain = await client.embeddings.create(model="tiny", input=TEXTS, encoding_format="float")
        coded = await client.embeddings.create(model="tiny", input=TEXTS)
        assert plain.data == coded.data and len(plain.data[0].embedding) == 8
        with pytest.raises(BadRequestError, match="have 8, but 9 were requested") as caught:
            await client.embeddings.create(model="tiny", input="a", dimensions=9)
        assert caught.value.param == "dimensions"
        with pytest.raises(BadRequestError, match="maximum context length is 4096") as caught:
            await client.embeddings.create(model="tiny", input=["a", "b " * 9000])
        assert (caught.value.param, caught.value.code) == ("input", "context_length_exceeded")
        cut = await client.embeddings.create(model="tiny", input="b " * 9000, extra_body={"truncate_prompt_tokens": -1})
        assert cut.usage.prompt_tokens == 4096
    await server.wait_until_idle()


async def test_rejects_generation_or_embedding_the_model_does_not_support(serve):
    """The error has each API's own form, and no request reaches the engine."""
    embedder = await serve(info=model_info(generates=False))
    calls = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
        "/v1/completions": {"prompt": "a"},
        "/generate": {"inputs": "a"},
        "/generate_stream": {"inputs": "a"},
        "/v2/models/tiny/generate": {"text_input": "a", "max_tokens": 1},
        "/mindie/generate": {"inputs": "a"},
    }
    embedder.engine.step_gate.clear()
    for path, body in calls.items():
        answer = await embedder.post(path, body)
        assert 400 <= answer.status < 500 and b"does not generate text" in answer.body, (path, answer.body)
        assert not embedder.engine.open_stream_count
    answer = await embedder.post("/vllm/v1/chat/completions", calls["/v1/chat/completions"])
    assert (answer.status, answer.body) == (404, b'{"detail":"Not Found"}')
    embedder.engine.step_gate.set()
    assert (await embedder.post("/v1/embeddings", {"input": "a"})).status == 200
    generator = await serve(info=model_info(dimensions=0))
    answer = await generator.post("/v1/embeddings", {"input": "a"})
    assert (answer.status, answer.error["param"], answer.error["code"]) == (400, "model", "unsupported_model")
    await embedder.wait_until_idle()
    await generator.wait_until_idle()


async def test_embedding_requests_end_with_their_client_or_the_engine(serve):
    """A disconnect cancels all texts of a request; an engine crash is an error in the API's form."""
    server = await serve()
    server.engine.step_gate.clear()
    connection = await server.connect()
    from support.http_client import build_request

    await connection.send(build_request("POST", "/v1/embeddings", {"input": TEXTS}))
    await server.until(lambda: server.engine.open_stream_count == 3)
    connection.close()
    await server.wait_until_idle()
    connection = await server.connect()
    await connection.send(build_request("POST", "/v1/embeddings", {"input": TEXTS}))
    await server.until(lambda: server.engine.open_stream_count == 3)
    server.engine.crash_engine()
    answer = await connection.answer()
    assert answer.status == 503 and answer.error["type"] == "service_unavailable"
    connection.close()


async def test_vllm_embeddings_and_pooling_have_its_members(serve):
    server = await serve()
    answer = await server.post("/vllm/v1/embeddings", {"input": [[1, 2], [3]]}, **{"x-request-id": "mine"})
    usage = {"prompt_tokens": 3, "total_tokens": 3, "completion_tokens": 0, "prompt_tokens_details": None,
             "completion_tokens_details": None}  # fmt: skip
    body = answer.json
    assert body.pop("created") > 0 and [entry.pop("embedding")[:4] for entry in body["data"]] == [
        [0.0, 0.5, 0.5, 0.0],
        [0.0, 0.0, 0.0, 1.0],
    ]
    data = [{"object": "embedding", "index": 0}, {"object": "embedding", "index": 1}]
    assert body == {"id": "embd-mine", "object": "list", "model": "tiny", "data": data, "usage": usage}
    assert (await server.post("/vllm/invocations", {"input": "a"})).json["id"].startswith("embd-")
    for path in ("/pooling", "/vllm/pooling"):
        (pooled,) = (await server.post(path, {"input": [3]})).json["data"]
        assert pooled == {"index": 0, "object": "pooling", "data": [0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]}
        assert (await server.post(path, {"input": "a", "task": "classify"})).status == 400
    for prompt, message in (("", "The decoder prompt cannot be empty"), ([], "You must pass at least one prompt")):
        answer = await server.post("/vllm/v1/embeddings", {"input": prompt})
        assert (answer.status, answer.error["message"]) == (400, message)
    answer = await server.post("/vllm/v1/embeddings", {"input": "a", "encoding_format": "bytes"})
    assert answer.headers["content-type"] == "application/octet-stream" and len(answer.body) == 32
    assert '"shape":[8]' in answer.headers["metadata"]
    chat = await server.post("/vllm/v1/embeddings", {"messages": [{"role": "user", "content": "a"}]})
    assert chat.json["usage"]["prompt_tokens"] > 1
    await server.wait_until_idle()


async def test_pooling_scores_the_classes_of_each_token(serve):
    labels = [f"class {number}" for number in range(300)]
    server = await serve(info=model_info(labels=labels, token_classes=True, dimensions=0, generates=False))
    ids = (await server.post("/tokenize", {"prompt": TEXTS[0]})).json["tokens"]
    answer = (await server.post("/pooling", {"input": TEXTS[0], "task": "token_classify"})).json
    assert answer["data"][0]["data"] == [[float(token % 300 == place) for place in range(300)] for token in ids]
    assert (answer["data"][0]["object"], answer["usage"]["prompt_tokens"]) == ("pooling", len(ids))
    assert (await server.post("/pooling", {"input": TEXTS[0]})).json["data"] == answer["data"]  # its only task
    other = await server.post("/pooling", {"input": "a", "task": "classify"})
    assert other.error["message"] == "Unsupported task: 'classify' Supported tasks: ['token_classify']"
    many = await server.post("/pooling", {"input": [[1] * 4000] * 60})
    assert many.status == 400 and "Scores of single tokens can be made for at most" in many.error["message"]
    for path, body in (
        ("/classify", {"input": "a"}),
        ("/score", {"text_1": "a", "text_2": "b"}),
        ("/v1/embeddings", {"input": "a"}),
        ("/predict", {"inputs": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        refused = await server.post(path, body | {"model": "tiny"})
        assert 400 <= refused.status < 500, (path, refused.body)
    await server.wait_until_idle()
