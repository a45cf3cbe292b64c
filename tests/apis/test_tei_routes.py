"""TEI's routes of a running server: beside the other APIs at the root, and strict below its prefix."""

from collections import Counter

import msgspec
from support.http_client import MODEL_INFO

from parley.engine.scripted_engine import ScriptedEngine
from parley.serving.served_model import ServedModel
from parley.serving.server_options import ServerOptions
from parley.types import ParleySettings

TEXTS = ["The quick brown fox", "über den Deich"]


def model_info(**changes):
    return msgspec.structs.replace(MODEL_INFO, **({"generates": False, "dimensions": 0} | changes))


async def test_an_encoder_has_teis_routes_and_a_generator_tgis(serve):
    encoder = await serve(info=model_info(dimensions=8, token_vectors=True, pooling="mean"))
    for prefix in ("", "/tei"):
        vectors = await encoder.post(prefix + "/embed", {"inputs": TEXTS})
        assert [len(vector) for vector in vectors.json] == [8, 8]
        assert int(vectors.headers["x-compute-characters"]) == sum(map(len, TEXTS))
        assert (await encoder.post(prefix + "/embed", {"inputs": TEXTS[0]})).json == vectors.json[:1]
        tokens = (await encoder.post(prefix + "/tokenize", {"inputs": TEXTS})).json
        assert int(vectors.headers["x-compute-tokens"]) == sum(map(len, tokens))
        rows = (await encoder.post(prefix + "/embed_all", {"inputs": TEXTS})).json
        assert [len(row) for row in rows] == [len(text_tokens) for text_tokens in tokens]
        for text, text_tokens in zip(TEXTS, tokens, strict=True):
            assert "".join(token["text"] for token in text_tokens) == text
            assert text_tokens[-1]["stop"] == len(text.encode()) and text_tokens[0]["special"] is False
        ids = [[token["id"] for token in text_tokens] for text_tokens in tokens]
        assert (await encoder.post(prefix + "/decode", {"ids": ids})).json == TEXTS
        assert (await encoder.get(prefix + "/info")).json["model_type"] == {"embedding": {"pooling": "mean"}}
        assert (await encoder.get(prefix + "/health")).status == 200
        sentences = {"inputs": {"source_sentence": TEXTS[0], "sentences": TEXTS}}
        assert len((await encoder.post(prefix + "/similarity", sentences)).json) == 2
        wide = await encoder.post(prefix + "/embed", {"inputs": "a", "dimensions": 9})
        sentence = "Input validation error: `dimensions` should be smaller than the maximum embedding dimension."
        assert (wide.status, wide.json) == (422, {"error": sentence, "error_type": "Validation"})
        for path, body in (("/embed_sparse", {"inputs": "a"}), ("/predict", {"inputs": "a"})):
            refused = await encoder.post(prefix + path, body)
            assert (refused.status, refused.json["error_type"]) == (424, "Backend")
        assert b"\nte_request_success " in (await encoder.get(prefix + "/metrics")).body
    assert "count" in (await encoder.post("/tokenize", {"prompt": "a"})).json  # vLLM's
    assert (await encoder.post("/tei/embed", {"inputs": "a"}, **{"content-type": "text/plain"})).status == 415
    await encoder.wait_until_idle()
    generator = await serve()
    assert "model_pipeline_tag" in (await generator.get("/info")).json
    assert isinstance((await generator.post("/tokenize", {"inputs": "a"})).json[0], dict)
    assert "generated_text" in (await generator.post("/", {"inputs": "a"})).json[0]
    assert (await generator.post("/tei/embed_all", {"inputs": "a"})).status == 424


async def test_a_sparse_model_answers_with_weights_of_tokens(serve):
    server = await serve(info=model_info(dimensions=MODEL_INFO.vocab_size, pooling="splade"))
    for prefix in ("", "/tei"):
        tokens = (await server.post(prefix + "/tokenize", {"inputs": TEXTS})).json
        counts = [Counter(token["id"] for token in text_tokens) for text_tokens in tokens]
        expected = [
            [{"index": token, "value": count} for token, count in sorted(token_counts.items())]
            for token_counts in counts
        ]
        assert (await server.post(prefix + "/embed_sparse", {"inputs": TEXTS})).json == expected
        assert (await server.post(prefix + "/", {"inputs": TEXTS[0]})).json == expected[:1]
        dense = (await server.post(prefix + "/embed", {"inputs": TEXTS, "normalize": False})).json
        assert [len(vector) for vector in dense] == [MODEL_INFO.vocab_size] * 2
        for path in ("/embed", "/embed_all"):
            refused = await server.post(prefix + path, {"inputs": "a"})
            assert refused.status == 424 and "not available for SPLADE models" in refused.json["error"]
        assert (await server.get(prefix + "/info")).json["model_type"] == {"embedding": {"pooling": "splade"}}
    assert (
        len((await server.post("/v1/embeddings", {"input": "a"})).json["data"][0]["embedding"]) == MODEL_INFO.vocab_size
    )
    await server.wait_until_idle()


async def test_dense_vectors_over_a_large_vocabulary_are_limited_by_their_texts(serve):
    server = await serve(info=model_info(dimensions=1 << 20, pooling="splade"))
    refused = await server.post("/v1/embeddings", {"input": ["a"] * 9})
    assert refused.status == 400 and "at most 8 texts in one answer" in refused.json["error"]["message"]
    assert len((await server.post("/embed_sparse", {"inputs": ["a"] * 9})).json) == 9
    await server.wait_until_idle()


async def test_a_reranker_answers_rerank_by_the_members_of_the_body(serve):
    server = await serve(info=model_info(labels=["LABEL_0"]))
    body = {"query": "a", "texts": TEXTS, "return_text": True}
    ranks = await server.post("/rerank", body)
    assert [set(rank) for rank in ranks.json] == [{"index", "text", "score"}] * 2
    for path in ("/tei/rerank", "/tei/", "/"):
        assert (await server.post(path, body)).json == ranks.json
    results = (await server.post("/rerank", {"query": "a", "documents": TEXTS})).json["results"]
    assert len(results) == 2 and "reranker" in (await server.get("/info")).json["model_type"]
    for path, other in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/embed", {"inputs": "a"}),
    ):
        assert (await server.post(path, other)).status in (400, 424)
    await server.wait_until_idle()


async def test_requests_without_a_model_go_to_the_first_that_suits_their_path(serve, folder):
    """Clients of the original name no model, since it serves one."""

    def make_model(name: str, **changes) -> ServedModel:
        engine = ScriptedEngine(info=model_info(**changes))
        return ServedModel((name,), ParleySettings(model=str(folder)), engine, ServerOptions())

    beside = [
        make_model("ranks", labels=["LABEL_0"]),
        make_model("classes", labels=["bad", "good"]),
        make_model("sparse", dimensions=320, pooling="splade"),
    ]
    server = await serve(info=model_info(dimensions=8), beside=beside)
    for prefix in ("", "/tei"):
        assert len((await server.post(prefix + "/rerank", {"query": "a", "texts": TEXTS})).json) == 2
        classes = (await server.post(prefix + "/predict", {"inputs": "a"})).json
        assert {class_["label"] for class_ in classes} == {"bad", "good"}
        assert len((await server.post(prefix + "/embed", {"inputs": "a"})).json[0]) == 8
        assert (await server.post(prefix + "/embed_sparse", {"inputs": "a"})).json[0][0]["value"] == 1
    named = await server.post("/rerank", {"model": "classes", "query": "a", "texts": TEXTS})
    assert (named.status, named.json["error_type"]) == (424, "Backend")
    late = make_model("late", token_vectors=True, token_dimensions=4)
    reranker = await serve(info=model_info(labels=["LABEL_0"]), beside=[late, make_model("vectors", dimensions=8)])
    assert len((await reranker.post("/tei/embed", {"inputs": "a"})).json[0]) == 8
    assert len((await reranker.post("/tei/embed_all", {"inputs": "a"})).json[0][0]) == 4
    assert (await reranker.post("/embed_all", {"model": "vectors", "inputs": "a"})).status == 424
    await server.wait_until_idle()


async def test_a_body_beyond_teis_limits_is_refused_below_its_prefix(serve):
    server = await serve(info=model_info(dimensions=8))
    many = {"inputs": ["a"] * 33}
    assert (await server.post("/embed", many)).status == 200
    refused = await server.post("/tei/embed", many)
    assert refused.json == {"error": "batch size 33 > maximum allowed batch size 32", "error_type": "Validation"}
    long = {"inputs": "b " * 9000}
    refused = await server.post("/embed", long)
    assert refused.status == 422 and "`inputs` must have less than 4096 tokens" in refused.json["error"]
    assert int((await server.post("/tei/embed", long)).headers["x-compute-tokens"]) == 4096
    await server.wait_until_idle()
