"""OpenAI's Python client against a running server."""

import asyncio

import openai
import pytest
from support.sound_forms import tone_clip

MESSAGES = [{"role": "user", "content": "Hello"}]


def make_client(server, **options):
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="sk-none", max_retries=0, **options)


@pytest.fixture
async def server(serve):
    return await serve()


async def test_openai_client_lists_and_retrieves_models(server):
    async with make_client(server) as c:
        models = await c.models.list()
        assert [model.id for model in models.data] == ["tiny"]
        assert (await c.models.retrieve("tiny")).id == "tiny"
        with pytest.raises(openai.NotFoundError) as caught:
            await c.models.retrieve("org/other")
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


async def test_openai_client_completes_a_chat(server):
    async with make_client(server) as c:
        answer = await c.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=8)
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content == "user\nHel"
    assert choice.finish_reason == "length"
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (8, answer.usage.prompt_tokens + 8)
    assert answer.id.startswith("chatcmpl-")
    assert answer._request_id.startswith("req_")  # documented by the client library under this name


async def test_openai_client_streams_the_same_chat(server):
    async with make_client(server) as c:
        stream = await c.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=8, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:-1])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "user\nHel"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 8


async def test_openai_stream_helper_accumulates_all_choices(server):
    async with make_client(server) as c, c.chat.completions.stream(model="tiny", messages=MESSAGES, n=2) as s:
        async for _ in s:
            pass
        final = await s.get_final_completion()
    assert [choice.message.content for choice in final.choices] == ["user\nHello"] * 2


async def test_openai_client_gets_three_choices(server):
    async with make_client(server) as c:
        answer = await c.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=4, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage.completion_tokens == 12


async def test_openai_client_gets_equal_logprobs_whole_and_streamed(server):
    async with make_client(server) as c:
        answer = await c.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=4, logprobs=True, top_logprobs=2
        )
        entries = answer.choices[0].logprobs.content
        assert len(entries) == 4
        assert all(entry.logprob == -0.5 and len(entry.top_logprobs) == 2 for entry in entries)
        stream = await c.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=4, logprobs=True, top_logprobs=2, stream=True
        )
        streamed = [e async for chunk in stream if chunk.choices[0].logprobs for e in chunk.choices[0].logprobs.content]
    assert streamed == entries


async def test_openai_client_echoes_and_scores_prompts_without_generating(server):
    async with make_client(server) as c:
        answer = await c.completions.create(
            model="tiny", prompt=["The quick", "fox"], max_tokens=0, echo=True, logprobs=1
        )
    assert [choice.text for choice in answer.choices] == ["The quick", "fox"]
    for choice in answer.choices:
        assert choice.logprobs.token_logprobs[0] is None
        assert choice.logprobs.token_logprobs[1:] == [-0.5] * (len(choice.logprobs.tokens) - 1)
        assert "".join(choice.logprobs.tokens) == choice.text
        assert choice.finish_reason == "length"
    assert answer.usage.completion_tokens == 0


async def test_openai_client_streams_completions_of_token_ids(server):
    async with make_client(server) as c:
        ids = [[40, 41], [50, 51, 52]]
        whole = await c.completions.create(model="tiny", prompt=ids, max_tokens=6, n=2)
        stream = await c.completions.create(model="tiny", prompt=ids, max_tokens=6, n=2, stream=True)
        texts = ["", "", "", ""]
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]
    assert texts[0] == texts[1] != texts[2] == texts[3]


async def test_openai_client_raises_its_own_error_classes(server):
    async with make_client(server) as c:
        with pytest.raises(openai.BadRequestError) as caught:
            await c.chat.completions.create(model="tiny", messages=MESSAGES, temperature=7)
        assert (caught.value.param, caught.value.code) == ("temperature", "decimal_above_max_value")
        with pytest.raises(openai.BadRequestError) as caught:
            await c.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=5000)
        assert (caught.value.param, caught.value.code) == ("messages", "context_length_exceeded")
        assert "4096" in caught.value.message and "5000" in caught.value.message
        with pytest.raises(openai.NotFoundError) as caught:
            await c.chat.completions.create(model="other", messages=MESSAGES)
        assert caught.value.code == "model_not_found"
        assert caught.value.request_id.startswith("req_")


async def test_openai_client_raises_an_error_inside_a_stream(serve):
    server = await serve(tick=0.002)
    async with make_client(server) as c:
        stream = await c.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError) as caught:
            async for _ in stream:
                server.engine.crash_engine("The engine process was killed.")
        assert "killed" in caught.value.message


async def test_openai_client_raises_authentication_error_on_a_wrong_key(serve):
    server = await serve(api_keys=("sk-right-key-0123456789",))
    async with make_client(server) as c:
        with pytest.raises(openai.AuthenticationError) as caught:
            await c.models.list()
        assert caught.value.code == "invalid_api_key"
        c.api_key = "sk-right-key-0123456789"
        assert (await c.models.list()).data


async def test_blocking_openai_client_lists_and_streams(server):
    def talk():
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x") as c:
            models = [model.id for model in c.models.list()]
            stream = c.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=8, stream=True)
            return models, "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    assert await asyncio.to_thread(talk) == (["tiny"], "user\nHel")


async def test_closing_an_openai_client_stream_cancels_the_request(serve):
    server = await serve(tick=0.002)
    async with make_client(server) as c:
        stream = await c.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
        async for _ in stream:
            break
        await stream.close()
        await server.wait_until_idle()


@pytest.mark.parametrize("prefix", ["/mindie", "/mindie-old"])
async def test_openai_client_understands_mindie_answers(server, prefix):
    """MindIE's events each have a role, and its last text event has usage without ``stream_options``."""
    url = f"{server.url}{prefix}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="sk-none", max_retries=0) as c:
        whole = await c.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=8)
        stream = await c.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=8, stream=True)
        chunks = [chunk async for chunk in stream]
        text = await c.completions.create(model="tiny", prompt="Hello", max_tokens=8)
        models = await c.models.list()
        with pytest.raises(openai.UnprocessableEntityError) as caught:
            await c.chat.completions.create(model="other", messages=MESSAGES)
    assert caught.value.body == "Model not found"
    streamed = "".join(chunk.choices[0].delta.content for chunk in chunks)
    assert streamed == whole.choices[0].message.content == "user\nHel"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == text.usage.completion_tokens == 8
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert [model.id for model in models.data] == ["tiny"]


async def test_azure_client_names_the_model_by_its_deployment(serve):
    key = "sk-right-key-0123456789"
    server = await serve(api_keys=(key,))
    azure = {"azure_endpoint": server.url, "api_version": "2024-10-21", "max_retries": 0}
    for options in ({}, {"azure_deployment": "tiny"}):
        async with openai.AsyncAzureOpenAI(**azure, **options, api_key=key) as c:  # sent in the header api-key
            name = "another" if options else "tiny"  # the deployment in the path counts
            answer = await c.chat.completions.create(model=name, messages=MESSAGES, max_tokens=8)
            assert (answer.choices[0].message.content, answer.model) == ("user\nHel", "tiny")
            stream = await c.chat.completions.create(model=name, messages=MESSAGES, max_tokens=8, stream=True)
            assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "user\nHel"
            assert (await c.completions.create(model=name, prompt="Hello", max_tokens=8)).usage.completion_tokens == 8
            assert len((await c.embeddings.create(model=name, input=["a", "b"])).data) == 2
    async with openai.AsyncAzureOpenAI(**azure, api_key=key) as c:
        assert [model.id async for model in c.models.list()] == ["tiny"]
        response = await c.responses.create(model="tiny", input="Hello", max_output_tokens=16)
        assert (await c.responses.retrieve(response.id)).output_text == response.output_text
        with pytest.raises(openai.NotFoundError) as caught:
            await c.chat.completions.create(model="other", messages=MESSAGES)
        assert caught.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as caught:
            await c.chat.completions.create(model="tiny", messages=MESSAGES, temperature=7)
        assert caught.value.param == "temperature"
    async with openai.AsyncAzureOpenAI(**azure, api_key="sk-wrong") as c:
        with pytest.raises(openai.AuthenticationError):
            await c.chat.completions.create(model="tiny", messages=MESSAGES)


async def test_azure_client_transcribes_by_its_deployment(server):
    """A model of texts refuses the clip, but for its own kind, and not for a model that is missing."""
    async with openai.AsyncAzureOpenAI(
        azure_endpoint=server.url, api_version="2024-10-21", api_key="none", max_retries=0
    ) as c:
        with pytest.raises(openai.BadRequestError, match="does not support Transcriptions API"):
            await c.audio.transcriptions.create(model="tiny", file=("a.wav", tone_clip(0.1)))
        with pytest.raises(openai.NotFoundError):
            await c.audio.transcriptions.create(model="other", file=("a.wav", tone_clip(0.1)))
