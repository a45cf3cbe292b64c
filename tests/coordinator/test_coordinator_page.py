"""The web page on a coordinator's inference port."""

from support.api_keys import make_keys
from support.http_client import HELLO_CHAT

HTML = {"accept": "text/html,*/*"}


async def test_web_page_equals_that_of_a_server_and_needs_no_key(live_cluster):
    headers, keys = make_keys(alice={})
    cluster = await live_cluster("mixed", "mixed", client_keys={"hashed_keys": keys})
    instance = cluster.instances[0]
    for path in ("/", "/ui", "/ui/status", "/docs", "/ui/playground.js", "/ui/apis/index.js", "/ui/no-such-file"):
        expected, actual = await instance.get(path, **HTML), await cluster.front.get(path, **HTML)
        assert (actual.status, actual.body) == (expected.status, expected.body), path
        assert actual.headers.get("content-security-policy") == expected.headers.get("content-security-policy")
    known = await cluster.front.get("/ui", **{"if-none-match": (await cluster.front.get("/ui")).headers["etag"]})
    assert known.status == 304
    assert (await cluster.front.get("/")).body == b""  # a probe of TGI's
    assert (await cluster.front.get("/ui/activity")).status == 401
    assert (await cluster.front.get("/openapi.json", **headers["alice"])).status == 200
    assert (await cluster.front.post("/v1/chat/completions", HELLO_CHAT, **headers["alice"])).status == 200
    state = (await cluster.front.get("/ui/activity?since=0", **headers["alice"])).json
    assert [(model["name"], model["instance"]) for model in state["models"]] == [("tiny", 1), ("tiny", 2)]
    assert (state["request_count"], state["phase"], state["sees_all"]) == (0, "ready", False)


async def test_web_page_can_be_disabled(live_cluster):
    cluster = await live_cluster("mixed", client_keys={"ui": False})
    assert (await cluster.front.get("/ui", **HTML)).status == 404
