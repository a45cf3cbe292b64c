"""Databricks' clients (SDK, OpenAI's, MLflow's, LangChain's): images in chats. Arguments: HOST:PORT VISION SPEECH."""

import os
import sys

from cases import TOKENS, check_answer, data_url, image_part, question_about
from databricks.sdk import WorkspaceClient
from databricks.sdk.service.serving import ChatMessage, ChatMessageRole
from databricks_openai import DatabricksOpenAI
from mlflow.deployments import get_deploy_client

address, vision, speech = sys.argv[1:]
IMAGE = question_about(image_part("image"))
VIDEO = question_about({"type": "video_url", "video_url": {"url": data_url("video")}})
GREEDY = {"temperature": 0, "max_tokens": TOKENS}


def check_openai_client(client):
    for name, messages in (("chat", IMAGE), ("video", VIDEO)):
        options = {"model": vision, "messages": messages, **GREEDY}
        check_answer(name, client.chat.completions.create(**options).choices[0].message.content)
        chunks = client.chat.completions.create(**options, stream=True)
        check_answer(name, "".join(chunk.choices[0].delta.content or "" for chunk in chunks))


os.environ["DATABRICKS_TOKEN"] = "none"
for surface in ("", "/databricks"):
    host = os.environ["DATABRICKS_HOST"] = f"http://{address}{surface}"
    workspace = WorkspaceClient(host=host, token="none")
    asked = [ChatMessage(role=ChatMessageRole.USER, content=IMAGE[0]["content"])]
    answer = workspace.serving_endpoints.query(vision, messages=asked, **GREEDY)
    check_answer("chat", answer.choices[0].message.content)
    check_openai_client(workspace.serving_endpoints.get_open_ai_client())
    check_openai_client(DatabricksOpenAI(workspace_client=workspace, max_retries=0))

    client = get_deploy_client("databricks")
    inputs = {"messages": IMAGE, **GREEDY}
    whole = client.predict(endpoint=vision, inputs=inputs)
    check_answer("chat", whole["choices"][0]["message"]["content"])
    chunks = client.predict_stream(endpoint=vision, inputs=inputs)
    check_answer("chat", "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks))

    from databricks_langchain import ChatDatabricks  # it reads DATABRICKS_HOST when it is imported

    chat = ChatDatabricks(model=vision, **GREEDY)
    check_answer("chat", chat.invoke(IMAGE).content)
    check_answer("chat", "".join(chunk.content for chunk in chat.stream(IMAGE)))
print("good")
