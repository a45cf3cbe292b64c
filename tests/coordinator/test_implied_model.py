"""Requests to a cluster whose instances have different models: which model they are for, and what each model can do."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest
from support.api_keys import make_keys
from support.cluster_of_servers import Cluster
from support.http_client import MODEL_INFO
from support.scripted_instance import ScriptedInstance
from support.simulated_cluster import lose_instance, report_status, simulated_cluster

from parley.coordinator.routing.implied_model import ModelRequirement
from parley.coordinator.routing.instance_scheduler import RequestRefused
from parley.coordinator.routing.policies import SchedulingRequest
from parley.types import ModelInfo

WRITER = {"names": ["writer"], "tasks": ["embed", "generate"]}
EMBEDDER = {"names": ["vectors"], "tasks": ["embed", "token_embed"]}
RERANKER = {"names": ["reranker"], "tasks": ["score"]}
UNTOLD = {"names": ["loading"], "tasks": None}
GENERATE, EMBED, SCORE, SPARSE = (
    ModelRequirement(frozenset({task})) for task in ("generate", "embed", "score", "embed_sparse")
)
ANY, MAIN = ModelRequirement(None), ModelRequirement(frozenset({"generate"}), main_only=True)


def cluster_of(*models_of_instances: Any, **keys: Any) -> Any:
    """Return the table and the scheduler of mixed instances with these models; a list of names: an old instance."""
    table, scheduler = simulated_cluster(*["mixed"] * len(models_of_instances), **keys)
    for instance, models in zip(table, models_of_instances, strict=True):
        report_models(table, instance, models)
    return table, scheduler


def report_models(table: Any, instance: Any, models: Any) -> None:
    is_old = any(isinstance(model, str) for model in models)
    names = models if is_old else [name for model in models for name in model["names"]]
    report_status(table, instance, models=names, **({} if is_old else {"model_tasks": models}))


def answer(table: Any, requirement: ModelRequirement) -> tuple[str, set[int]]:
    choice = table.implied_models.find_implied_model(requirement)
    return choice.model.names[0] if choice.model else "", set(choice.instances)


@pytest.mark.parametrize(
    ("instances", "requirement", "expected"),
    [
        ([[EMBEDDER], [WRITER]], GENERATE, ("writer", {2})),
        ([[EMBEDDER], [WRITER]], EMBED, ("vectors", {1})),
        ([[WRITER], [EMBEDDER], [RERANKER]], EMBED, ("writer", {1})),  # as the first of a single server's models
        ([[WRITER], [EMBEDDER], [RERANKER]], SCORE, ("reranker", {3})),
        ([[WRITER], [EMBEDDER]], SPARSE, ("writer", {1})),  # which refuses it
        ([[WRITER, EMBEDDER], [EMBEDDER, WRITER]], GENERATE, ("writer", {1, 2})),
        ([[WRITER, EMBEDDER], [EMBEDDER, WRITER]], EMBED, ("writer", {1})),  # instance 2 would answer by "vectors"
        ([[WRITER, EMBEDDER], [EMBEDDER, WRITER]], ANY, ("writer", {1})),
        ([[EMBEDDER], [WRITER], [EMBEDDER]], MAIN, ("vectors", {1, 3})),
        # instances that do not tell tasks, or no models
        ([["old"], [EMBEDDER]], GENERATE, ("old", {1})),
        ([["old"], [EMBEDDER]], EMBED, ("vectors", {2})),
        ([["old"], [WRITER]], SCORE, ("old", {1})),
        ([["writer", "alias"], [WRITER]], GENERATE, ("writer", {1, 2})),
        ([[], [WRITER]], GENERATE, ("writer", {1, 2})),
        ([[], [WRITER]], EMBED, ("writer", {2})),
        ([[], []], GENERATE, ("", set())),
        ([[UNTOLD], [EMBEDDER]], EMBED, ("vectors", {2})),
        # keys that are limited to some models
        ([[WRITER], [EMBEDDER]], EMBED._replace(key_models=("vectors",)), ("vectors", {2})),
        ([[WRITER, EMBEDDER]], EMBED._replace(key_models=("vectors",)), ("vectors", {1})),
        ([[WRITER], [EMBEDDER]], EMBED._replace(key_models=("none",)), ("writer", {1})),
    ],
)
def test_a_request_without_a_model_is_for_the_first_that_suits(instances, requirement, expected):
    table, _ = cluster_of(*instances)
    assert answer(table, requirement) == expected


def test_the_choice_stays_while_its_instance_is_away_and_changes_with_the_models():
    table, _ = cluster_of([EMBEDDER], [WRITER])
    one, two = table
    assert answer(table, EMBED) == ("vectors", {1})
    lose_instance(table, one)
    assert answer(table, EMBED) == ("vectors", {1})
    report_models(table, one, [EMBEDDER | {"tasks": None}])  # restarted, and loading
    assert answer(table, EMBED) == ("vectors", {1})
    report_models(table, two, [WRITER, RERANKER])
    assert answer(table, SCORE) == ("reranker", {2})
    table.remove_instance(one.id)
    assert answer(table, EMBED) == ("writer", {2})


async def test_placement_follows_the_choice_and_refuses_only_while_no_instance_has_the_model():
    table, scheduler = cluster_of([EMBEDDER], [WRITER], [WRITER])
    one, two, three = table
    for request in (SchedulingRequest(10, requirement=GENERATE), SchedulingRequest(10, model="writer")):
        assert {(await scheduler.place_request(request)).prefill_instance.id for _ in range(4)} <= {2, 3}
        table.set_instance_offline(two, True)
        assert (await scheduler.place_request(request)).prefill_instance.id == 3
        table.set_instance_offline(three, True)
        with pytest.raises(RequestRefused) as refused:
            await scheduler.place_request(request)
        assert (refused.value.status, refused.value.retry_after) == (503, 1)
        table.set_instance_offline(two, False)
        table.set_instance_offline(three, False)
    assert (await scheduler.place_request(SchedulingRequest(10, model="unknown"))).prefill_instance in (one, two, three)


async def test_a_retry_waits_for_the_only_instance_with_its_model():
    table, scheduler = cluster_of([EMBEDDER], [WRITER])
    _, two = table
    table.set_instance_offline(two, True)
    request = SchedulingRequest(10, model="writer", earlier_attempts=1)
    placing = asyncio.create_task(scheduler.place_request(request))
    await asyncio.sleep(0)
    assert not placing.done() and scheduler.queued_requests == 1
    table.set_instance_offline(two, False)
    assert (await placing).prefill_instance is two


# -- servers


def writer(**members: Any) -> ModelInfo:
    return msgspec.structs.replace(MODEL_INFO, dimensions=0, **members)


def encoder(**members: Any) -> ModelInfo:
    return msgspec.structs.replace(MODEL_INFO, generates=False, **members)


WRITER_SERVER = {"names": ("writer",), "info": writer()}
EMBEDDER_SERVER = {"names": ("vectors",), "info": encoder(dimensions=8, token_vectors=True, pooling="mean")}
RERANKER_SERVER = {"names": ("reranker",), "info": encoder(dimensions=0, labels=["score"])}
CLASSIFIER_SERVER = {"names": ("classifier",), "info": encoder(dimensions=0, labels=["good", "bad"])}
SPARSE_SERVER = {"names": ("sparse",), "info": encoder(dimensions=640, pooling="splade")}
FLEET = (CLASSIFIER_SERVER, WRITER_SERVER, EMBEDDER_SERVER, RERANKER_SERVER, SPARSE_SERVER)
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}


@pytest.fixture
async def fleet(live_cluster) -> Cluster:
    """A cluster whose instances have one model each, the classifier first."""
    cluster = await live_cluster(*["mixed"] * len(FLEET), instance_options=FLEET)
    await cluster.front.until(lambda: all(instance.offered_models for instance in cluster.coordinator.table))
    return cluster


def count_requests(cluster: Cluster) -> dict[str, int]:
    return {server.model.name: server.model.metrics.totals.succeeded for server in cluster.instances}


async def test_requests_without_a_model_reach_the_instance_that_can_answer(fleet):
    for path, body, model in (
        ("/tei/embed", {"inputs": "a"}, "vectors"),
        ("/embed", {"inputs": "a"}, "vectors"),
        ("/tei/embed_all", {"inputs": "a"}, "vectors"),
        ("/tei/embed_sparse", {"inputs": "a"}, "sparse"),
        ("/tei/rerank", {"query": "a", "texts": ["a"]}, "reranker"),
        ("/rerank", {"query": "a", "texts": ["a"]}, "reranker"),
        ("/rerank", {"query": "a", "documents": ["a"]}, "reranker"),
        ("/tei/predict", {"inputs": "a"}, "classifier"),
        ("/tei/similarity", {"inputs": {"source_sentence": "a", "sentences": ["a"]}}, "vectors"),
        ("/tgi/generate", {"inputs": "a", "parameters": {"max_new_tokens": 2}}, "writer"),
        ("/generate", {"prompt": "a", "max_tokens": 2}, "writer"),
        ("/infer", {"inputs": "a", "parameters": {"max_new_tokens": 2}}, "writer"),
        ("/tgi/v1/chat/completions", CHAT | {"model": "tgi"}, "writer"),
        ("/vllm/v1/chat/completions", CHAT, "writer"),
        ("/", {"inputs": "a"}, "classifier"),  # TEI's, because the main model of the cluster is an encoder
    ):
        before = count_requests(fleet)
        answered = await fleet.front.post(path, body)
        assert answered.status == 200, (path, answered.body)
        after = count_requests(fleet)
        assert {name for name in after if after[name] > before[name]} == {model}, path
    assert (await fleet.front.get("/tei/info")).json["model_id"] == "classifier"
    assert (await fleet.front.get("/tgi/info")).json["model_id"] == "writer"
    assert (await fleet.front.get("/info")).json["model_type"]["classifier"]
    await fleet.wait_until_idle()


@pytest.mark.parametrize(
    ("path", "body", "sentence"),
    [
        ("/v1/chat/completions", CHAT | {"model": "vectors"}, "The model 'vectors' makes embeddings only"),
        ("/v1/messages", CHAT | {"model": "reranker"}, "The model 'reranker' is a classifier"),
        ("/api/chat", CHAT | {"model": "vectors"}, '"vectors" does not support chat'),
        ("/v2/models/vectors/generate", {"text_input": "a"}, "The model 'vectors' makes embeddings only"),
        ("/v1/embeddings", {"model": "writer", "input": "a"}, "The model 'writer' does not make embeddings"),
        ("/rerank", {"model": "classifier", "query": "a", "texts": ["a"]}, "model is not a re-ranker model"),
    ],
)
async def test_a_model_that_cannot_do_what_is_asked_is_refused_before_anything_is_queued(fleet, path, body, sentence):
    scheduler = fleet.coordinator.scheduler
    holder = next(instance for instance in scheduler.table if body.get("model", "vectors") in instance.models)
    placed, holder.slots = scheduler.counters.requests, 0  # no room: whoever waited for it would get nothing
    refused = await fleet.front.post(path, body, **{"anthropic-version": "2023-06-01"})
    alone = fleet.instances[[instance.id for instance in scheduler.table].index(holder.id)]
    expected = await alone.post(path, body, **{"anthropic-version": "2023-06-01"})
    assert (refused.status, refused.body) == (expected.status, expected.body)
    assert 400 <= refused.status < 500 and sentence in refused.body.decode().replace('\\"', '"')
    assert scheduler.counters.requests == placed and not scheduler.queued_requests


async def test_lists_and_descriptions_of_models_are_those_of_the_whole_cluster(fleet):
    names = ["classifier", "writer", "vectors", "reranker", "sparse"]
    get, version = fleet.front.get, {"anthropic-version": "2023-06-01"}
    for path in ("/v1/models", "/vllm/v1/models", "/openai/v1/models"):
        assert [model["id"] for model in (await get(path)).json["data"]] == names, path
    assert [model["name"].removesuffix(":latest") for model in (await get("/api/tags")).json["models"]] == names
    assert (await get("/v2/models")).json["models"] == names
    index = (await fleet.front.post("/v2/repository/index", {})).json
    assert [model["name"] for model in index] == names
    listed = [model["name"] for model in (await get("/api/2.0/serving-endpoints")).json["endpoints"]]
    assert sorted(listed) == sorted(names)
    pages = await get("/v1/models?limit=2&after_id=writer", **version)
    assert [model["id"] for model in pages.json["data"]] == ["vectors", "reranker"]
    assert pages.json["has_more"] and (pages.json["first_id"], pages.json["last_id"]) == ("vectors", "reranker")
    assert (await get("/v1/models?after_id=none", **version)).status == 400
    cohere_models = (await get("/cohere/v1/models?page_size=2&page_token=1")).json
    assert [model["name"] for model in cohere_models["models"]] == names[1:3]
    assert cohere_models["next_page_token"] == "3"
    defaults = {
        name: (await get(f"/cohere/v1/models?endpoint={name}&default_only=true")).json["models"][0]["name"]
        for name in ("chat", "embed", "rerank")
    }
    assert defaults == {"chat": "writer", "embed": "vectors", "rerank": "reranker"}
    assert (await get("/cohere/v1/models?page_size=0")).status == 400
    listed = (await get("/v1/models", **version)).json["data"]
    assert {model["id"]: model["capabilities"]["batch"]["supported"] for model in listed} == {
        name: name == "writer" for name in names
    }
    for name in names:
        assert (await get(f"/v1/models/{name}", **version)).json["id"] == name
        assert (await get(f"/v2/models/{name}")).json["name"] == name
        assert (await get(f"/api/2.0/serving-endpoints/{name}")).json["name"] == name
        for member in ("model", "name"):
            shown = await fleet.front.post("/api/show", {member: name})
            assert shown.status == 200, shown.body
        assert ("completion" in shown.json.get("capabilities", [])) == (name == "writer")
        assert ("embedding" in shown.json.get("capabilities", [])) == (name in ("vectors", "sparse"))
    for path, body in (
        ("/serving-endpoints/writer/invocations", CHAT),
        ("/serving-endpoints/chat/completions", CHAT | {"model": "writer"}),
        ("/serving-endpoints/vectors/invocations", {"input": "a"}),
    ):
        answered = await fleet.front.post(path, body)
        assert answered.status == 200, (path, answered.body)
    await fleet.wait_until_idle()


async def test_a_limited_key_gets_the_models_that_it_may_use(live_cluster):
    headers, keys = make_keys(vectors={"models": ["vectors"]})
    instance_options = [{"names": ("first",), "info": encoder(dimensions=4)}, EMBEDDER_SERVER]
    cluster = await live_cluster("mixed", "mixed", instance_options=instance_options, client_keys={"hashed_keys": keys})
    key = headers["vectors"]
    assert len((await cluster.front.post("/tei/embed", {"inputs": "a"}, **key)).json[0]) == 8
    assert (await cluster.front.get("/tei/info", **key)).json["model_id"] == "vectors"
    assert [model["id"] for model in (await cluster.front.get("/v1/models", **key)).json["data"]] == ["vectors"]
    for path, body in (
        ("/tokenize", {"model": "first", "prompt": "a"}),
        ("/detokenize", {"model": "first", "tokens": [70]}),
        ("/v1/embeddings", {"model": "first", "input": "a"}),
        ("/api/show", {"model": "first"}),
    ):
        assert (await cluster.front.post(path, body, **key)).status == 403, path


async def test_metrics_for_a_limited_key_are_those_of_instances_with_its_models_alone(live_cluster):
    headers, keys = make_keys(all={}, vectors={"models": ["vectors"]}, none={"models": ["gone"]})
    instance_options = [{"names": ("first",), "info": encoder(dimensions=4)}, EMBEDDER_SERVER]
    cluster = await live_cluster("mixed", "mixed", instance_options=instance_options, client_keys={"hashed_keys": keys})
    await cluster.front.until(lambda: all(instance.offered_models for instance in cluster.coordinator.table))
    pages = {name: await cluster.front.get("/metrics", **headers[name]) for name in headers}
    assert {name: page.status for name, page in pages.items()} == {"all": 200, "vectors": 200, "none": 403}
    whole, limited = pages["all"].body.decode(), pages["vectors"].body.decode()
    assert '"first"' in whole and '"vectors"' in whole and "parley:cluster_requests_total" in whole
    assert '"first"' not in limited and '"vectors"' in limited and "parley:cluster_requests_total" not in limited
    assert [line for line in limited.splitlines() if line.startswith("parley:cluster_instance_tasks")] == [
        'parley:cluster_instance_tasks{instance="2",role="mixed"} 0'
    ]


async def test_vectors_at_paths_shared_with_text_generation_are_charged(live_cluster, tmp_path):
    headers, keys = make_keys(alice={"tokens_per_minute": 1000})
    client_keys = {"hashed_keys": keys, "usage_db": str(tmp_path / "usage.db")}
    cluster = await live_cluster(
        "mixed", "mixed", instance_options=[EMBEDDER_SERVER, WRITER_SERVER], client_keys=client_keys
    )
    await cluster.front.until(lambda: all(instance.offered_models for instance in cluster.coordinator.table))
    for path in ("/", "/invocations"):
        assert (await cluster.front.post(path, {"inputs": "a b c"}, **headers["alice"])).status == 200
    await cluster.wait_until_idle()
    usage_store = cluster.coordinator.client_keys.ledger.usage_store
    rows = usage_store.list_usage("0000-01-01", "9999-12-31", "alice", "", 10)
    assert [(row.model, row.requests, row.prompt_tokens > 0) for row in rows] == [("vectors", 2, True)]


# -- instances that come and go


async def test_updates_of_instances_with_two_models_lose_no_request(live_cluster):
    instance_options = [WRITER_SERVER, WRITER_SERVER, EMBEDDER_SERVER, EMBEDDER_SERVER]
    cluster = await live_cluster("mixed", "mixed", "mixed", "mixed", instance_options=instance_options, tick=0.002)
    ended, statuses = False, []

    async def send_requests(path: str, body: Any) -> None:
        while not ended:
            statuses.append((path, (await cluster.front.post(path, body)).status))

    requests = {
        "/v1/completions": {"model": "writer", "prompt": "a", "max_tokens": 5, "ignore_eos": True},
        "/tgi/generate": {"inputs": "a", "parameters": {"max_new_tokens": 5}},
        "/v1/embeddings": {"model": "vectors", "input": "a"},
        "/tei/embed": {"inputs": "a"},
    }
    senders = [asyncio.create_task(send_requests(*request)) for request in requests.items() for _ in range(2)]

    async def let_requests_pass() -> None:
        count = len(statuses)
        await cluster.front.until(lambda: len(statuses) >= count + 24)

    await let_requests_pass()
    table = cluster.coordinator.table
    for server, instance in zip(cluster.instances, table, strict=True):
        model = server.model
        await model.drain_requests("It is being updated.", 30)  # as at a server that is asked to stop
        await let_requests_pass()
        model.ending_reason = ""
        # An answer from before this line may still be on its way, so the table alone does not show it.
        while not await cluster.coordinator.health.check_instance(instance):
            pass  # a busy machine lets a check expire
        await cluster.front.until(lambda: len(table.usable_instances()) == 4)
    ended = True
    await asyncio.gather(*senders)
    assert {status for _, status in statuses} == {200}
    assert {path for path, _ in statuses} == requests.keys()


async def test_an_instance_that_is_ready_again_is_asked_before_its_next_health_check(live_cluster):
    cluster = await live_cluster("mixed", "mixed", instance_options=[EMBEDDER_SERVER, EMBEDDER_SERVER])
    await cluster.coordinator.health.stop_checks()
    restarted, _ = cluster.coordinator.table
    restarted.accepts_requests = False  # as its last health check found it
    cluster.instances[1].model.ending_reason = "It is being updated."
    answer = await cluster.front.post("/v1/embeddings", {"model": "vectors", "input": "a"})
    assert answer.status == 200, answer.body


async def test_only_requests_for_an_absent_model_get_503(live_cluster):
    cluster = await live_cluster("mixed", "mixed", instance_options=[WRITER_SERVER, EMBEDDER_SERVER])
    embedder = cluster.instances[1].model
    vectors = [("/v1/embeddings", {"model": "vectors", "input": "a"}), ("/embed", {"inputs": "a"})]
    texts = [("/v1/completions", {"model": "writer", "prompt": "a"}), ("/tgi/generate", {"inputs": "a"})]
    vectors += [
        ("/v1/chat/completions", CHAT | {"model": "vectors"}),
        ("/tokenize", {"model": "vectors", "prompt": "a"}),
    ]
    embedder.ending_reason = "It is being updated."
    for _ in range(2):  # before the coordinator has noticed, and after
        for path, body in vectors:
            refused = await cluster.front.post(path, body)
            assert refused.status == 503 and int(refused.headers["retry-after"]) >= 1, (path, refused.body)
        for path, body in texts:
            assert (await cluster.front.post(path, body)).status == 200, path
        await cluster.front.until(lambda: len(cluster.coordinator.table.usable_instances()) == 1)
    embedder.ending_reason = ""
    await cluster.front.until(lambda: len(cluster.coordinator.table.usable_instances()) == 2)
    for path, body in vectors[:2]:
        assert (await cluster.front.post(path, body)).status == 200


def test_a_status_with_odd_models_is_read(tmp_path):
    table, _ = simulated_cluster("mixed")
    (instance,) = table
    for odd in (None, 7, "a", [1], [{}], [{"names": 5}], [{"names": ["a", 2], "tasks": ["fly", 3]}]):
        report_status(table, instance, models=["a"], model_tasks=odd)
        json.dumps([sorted(model.names) for model in instance.offered_models])
    assert instance.offered_models[0].names == ("a",) and instance.offered_models[0].tasks == frozenset()


async def test_an_instance_that_was_killed_is_absent_from_the_first_moment(cluster):
    only = ScriptedInstance()
    running = await cluster(only, heartbeat=60)
    await only.kill_instance()
    refused = await running.post("/tokenize", b'{"model":"m","prompt":"a"}')
    assert refused.status == 503 and int(refused.headers["retry-after"]) >= 1
