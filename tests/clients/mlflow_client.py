"""MLflow's deployments client: endpoints, predictions, streams, errors. Arguments: HOST:PORT MODEL."""

import os
import sys

from mlflow.deployments import get_deploy_client

address, model = sys.argv[1:]
ASKED = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
ANSWER = "The capital of France is Paris."


def expect_error(part, call, **options):
    try:
        call(**options)
    except Exception as error:
        assert part in str(error), error
    else:
        raise AssertionError("it was not refused")


os.environ["DATABRICKS_TOKEN"] = "none"
for surface in ("", "/databricks"):
    os.environ["DATABRICKS_HOST"] = f"http://{address}{surface}"
    client = get_deploy_client("databricks")
    assert [endpoint["name"] for endpoint in client.list_endpoints()] == [model]
    server = [{"entity_name": model, "name": name} for name in "ab"]
    routes = [
        {"served_model_name": "a", "traffic_percentage": 0},
        {"served_model_name": "b", "traffic_percentage": "100"},
    ]
    config = {"served_entities": server, "traffic_config": {"routes": routes}}
    endpoint = client.create_endpoint(config={"name": "ab", "config": config, "tags": [{"key": "team", "value": "x"}]})
    assert endpoint.state["ready"] == "READY" and endpoint.tags == [{"key": "team", "value": "x"}]
    assert client.get_endpoint("ab").config["config_version"] == 1
    updated = client.update_endpoint_config("ab", config={"served_entities": server[:1]})
    assert updated["config"]["traffic_config"]["routes"][0]["traffic_percentage"] == 100
    client.update_endpoint_tags("ab", config={"delete_tags": ["team"]})
    assert client.get_endpoint("ab").tags == []

    for name in (model, "ab"):
        answer = client.predict(endpoint=name, inputs=ASKED)
        assert answer["choices"][0]["message"]["content"] == ANSWER
        chunks = list(client.predict_stream(endpoint=name, inputs=ASKED))
        assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == ANSWER
        assert chunks[-1]["usage"] == answer["usage"] and chunks[-1]["choices"][0]["finish_reason"] == "stop"
        texts = client.predict(endpoint=name, inputs={"prompt": ["Hello", "World"], "max_tokens": 4, "suffix": "!"})
        assert [choice["text"][-1] for choice in texts["choices"]] == ["!", "!"]
        vectors = client.predict(endpoint=name, inputs={"input": ["Hello"], "instruction": "Find:"})
        assert len(vectors["data"][0]["embedding"]) > 8

    expect_error("temperature", client.predict, endpoint="ab", inputs=ASKED | {"temperature": 9})
    expect_error("already exists", client.create_endpoint, config={"name": "ab", "config": config})
    client.delete_endpoint("ab")
    expect_error("does not exist", client.predict, endpoint="ab", inputs=ASKED)
    expect_error("does not exist", client.get_endpoint, endpoint="ab")
print("good")
