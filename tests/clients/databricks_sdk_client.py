"""Databricks' SDK: creating, changing, querying and deleting endpoints, and errors. Arguments: HOST:PORT MODEL."""

import logging
import sys

from databricks.sdk import WorkspaceClient
from databricks.sdk import errors as wrong
from databricks.sdk.service.serving import (
    ChatMessage,
    ChatMessageRole,
    EndpointCoreConfigInput,
    EndpointTag,
    Route,
    ServedEntityInput,
    ServingEndpointAccessControlRequest,
    ServingEndpointPermissionLevel,
    TrafficConfig,
)

address, model = sys.argv[1:]
QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
ASKED = [ChatMessage(role=ChatMessageRole.USER, content=QUESTION)]


def expect_error(kind, part, call, *args, **options):
    try:
        call(*args, **options)
    except kind as error:
        assert part in str(error), error
    else:
        raise AssertionError("it was not refused")


def served_config(**parts):
    return {
        "served_entities": [ServedEntityInput(entity_name=model, name=name) for name in parts],
        "traffic_config": TrafficConfig(
            routes=[Route(served_model_name=name, traffic_percentage=part) for name, part in parts.items()]
        ),
    }


class Warnings(logging.Handler):
    """Fails at a warning of the SDK, such as one about metadata that it did not find."""

    def emit(self, record):
        raise AssertionError(record.getMessage())


logging.getLogger("databricks.sdk").addHandler(Warnings(logging.WARNING))

for surface in ("", "/databricks"):
    client = WorkspaceClient(host=f"http://{address}{surface}", token="none")
    endpoints = client.serving_endpoints
    assert [endpoint.name for endpoint in endpoints.list()] == [model]

    endpoint = endpoints.create_and_wait("ab", config=EndpointCoreConfigInput(name="ab", **served_config(a=70, b=30)))
    assert endpoint.name == "ab" and endpoint.state.ready.value == "READY"
    assert [route.traffic_percentage for route in endpoint.config.traffic_config.routes] == [70, 30]
    changed = endpoints.update_config_and_wait("ab", **served_config(a=0, c=100))
    assert [entity.name for entity in changed.config.served_entities] == ["a", "c"]
    assert changed.config.config_version == 2
    tags = endpoints.patch("ab", add_tags=[EndpointTag("team", "x")])
    assert [(tag.key, tag.value) for tag in tags.tags] == [("team", "x")]
    assert sorted(endpoint.name for endpoint in endpoints.list()) == ["ab", model]
    assert endpoints.logs("ab", "a").logs == endpoints.build_logs("ab", "c").logs == ""
    assert b"parley" in endpoints.export_metrics("ab").contents.read()
    assert b"invocations" in endpoints.get_open_api("ab").contents.read()
    assert endpoints.get_permissions(endpoint.id).object_type == "serving-endpoint"
    everyone = ServingEndpointAccessControlRequest(
        group_name="users", permission_level=ServingEndpointPermissionLevel.CAN_QUERY
    )
    for change in (endpoints.set_permissions, endpoints.update_permissions):
        expect_error(wrong.BadRequest, "API keys", change, endpoint.id, access_control_list=[everyone])
    assert endpoints.set_permissions(endpoint.id, access_control_list=[]).access_control_list in (None, [])
    assert len(endpoints.get_permission_levels(endpoint.id).permission_levels) == 3

    for name in (model, "ab"):
        chat = endpoints.query(name, messages=ASKED, temperature=0, max_tokens=32, usage_context={"team": "x"})
        assert chat.choices[0].message.content == ANSWER, chat
        assert chat.served_model_name == {"ab": "c"}.get(name, model)
        assert chat.usage.total_tokens == chat.usage.prompt_tokens + chat.usage.completion_tokens
        assert chat.choices[0].finish_reason == (None if surface else "stop")  # the SDK reads another member
        text = endpoints.query(name, prompt=QUESTION, temperature=0, max_tokens=32)
        assert text.choices[0].text == ANSWER, text
        vectors = endpoints.query(name, input=["Hello", "World"])
        assert len(vectors.data) == 2 and len(vectors.data[0].embedding) == len(vectors.data[1].embedding) > 8

    openai = endpoints.get_open_ai_client()
    body = {"model": "ab", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    assert openai.chat.completions.create(**body).choices[0].message.content == ANSWER
    chunks = list(openai.chat.completions.create(**body, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
    assert all(chunk.usage.prompt_tokens for chunk in chunks)

    expect_error(
        wrong.ResourceAlreadyExists,
        "already exists",
        endpoints.create,
        "ab",
        config=EndpointCoreConfigInput(name="ab", **served_config(a=100)),
    )
    expect_error(wrong.InvalidParameterValue, "add up to 100", endpoints.update_config, "ab", **served_config(a=1))
    unknown = EndpointCoreConfigInput(name="n", served_entities=[ServedEntityInput(entity_name="other")])
    expect_error(wrong.InvalidParameterValue, "not a model of this server", endpoints.create, "n", config=unknown)
    expect_error(wrong.BadRequest, "temperature", endpoints.query, "ab", messages=ASKED, temperature=9)
    expect_error(wrong.PermissionDenied, "model of the server", endpoints.delete, model)
    endpoints.delete("ab")
    expect_error(wrong.NotFound, "does not exist", endpoints.get, "ab")
    expect_error(wrong.NotFound, "does not exist", endpoints.query, "ab", messages=ASKED)
print("good")
