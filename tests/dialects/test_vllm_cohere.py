"""vLLM's Cohere embedding route: vector formats, truncation, and refusals."""

import base64
import json
import struct
from dataclasses import replace

import pytest

from parley.dialects.request_context import RequestContext
from parley.dialects.vllm.error_answers import vllm_error_answer
from parley.dialects.vllm.pooling import cohere
from parley.errors import BadRequest, UnknownPromptName
from parley.types import (
    ChatPrompt,
    EncodedMedia,
    Media,
    Message,
    PlacedMedia,
    PoolingOptions,
    PromptVector,
    TextPrompt,
    Usage,
)

CONTEXT = RequestContext("0f", 1700000000, "fp_1", context_length=100, headers={b"content-type": b"application/json"})
SIGNS = (0.5, -0.5, 0.0, -0.25, 1.0, -1.0, 2.0, -2.0, 0.125)  # nine values become nine bits, so two bytes


SIGHTED = replace(CONTEXT, media_limits={"image": 1})
IMAGE_DATA_URL = "data:image/png;base64,AAAA"
IMAGE = {"type": "image_url", "image_url": {"url": IMAGE_DATA_URL}}
TEXT_PART = {"type": "text", "text": "a"}


def read_embed(context=CONTEXT, **body):
    return cohere.read_cohere_request(json.dumps(body).encode(), context)


def answer_body(context=CONTEXT, **body):
    reply = read_embed(context, **body)
    for place in reversed(range(len(reply.request.prompts))):
        reply.add_events([PromptVector(place, struct.pack("<9f", *SIGNS))])
    return reply.render_body(Usage(prompt_tokens=3))


def test_cohere_writes_embeddings():
    vector = b"[0.5,-0.5,0.0,-0.25,1.0,-1.0,2.0,-2.0,0.125]"
    assert answer_body(model="m", texts=["a", "b"]) == (
        b'{"id":"embd-0f","embeddings":{"float":[' + vector + b"," + vector + b']},"texts":["a","b"],'
        b'"meta":{"api_version":{"version":"2"},"billed_units":{"input_tokens":3,"image_tokens":0}},'
        b'"response_type":"embeddings_by_type"}'
    )


def test_cohere_writes_each_embedding_type():
    forms = json.loads(answer_body(texts=["a"], embedding_types=["base64", "ubinary", "binary", "base64"]))[
        "embeddings"
    ]
    assert list(forms) == ["base64", "ubinary", "binary"]
    assert struct.unpack("<9f", base64.b64decode(forms["base64"][0])) == SIGNS
    assert forms["ubinary"] == [[0b10101010, 0b10000000]] and forms["binary"] == [[42, 0]]


def test_cohere_lists_the_input_types_of_the_model():
    error = UnknownPromptName("unknown", name="clustering", known=["passage", "query"])
    answer = read_embed(texts=["a"], input_type="clustering").render_refusal(error)
    sentence = "Unsupported input_type 'clustering'. Supported values: passage, query"
    assert (answer.status, json.loads(answer.body)["error"]["message"]) == (400, sentence)


@pytest.mark.parametrize(
    ("members", "truncate", "keep"),
    [
        ({}, 100, "head"),
        ({"truncate": "START"}, 100, "tail"),
        ({"truncate": "NONE"}, None, "head"),
        ({"max_tokens": 9}, 9, "head"),
        ({"max_tokens": 900, "truncate": "START"}, 100, "tail"),
    ],
)
def test_cohere_truncates_as_asked(members, truncate, keep):
    request = read_embed(texts=["a"], **members).request
    assert (request.prompts, request.max_prompt_tokens, request.kept_side) == ([TextPrompt("a")], truncate, keep)


def test_cohere_members_reach_the_request():
    request = read_embed(model="m", texts="a", input_type="search_query", output_dimension=8).request
    assert (request.model, request.pooling) == ("m", PoolingOptions(8, prompt="search_query"))


NO_INPUT = "'msg': 'Value error, Exactly one of texts, images, or inputs must be provided, and it must be non-empty'"


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({}, NO_INPUT),
        ({"texts": []}, NO_INPUT),
        ({"texts": ["a"], "images": []}, NO_INPUT),
        ({"texts": ["a", ""]}, "The decoder prompt cannot be empty"),
        ({"texts": ["a"], "embedding_types": ["int3"]}, "body.embedding_types.0"),
        ({"texts": ["a"], "truncate": "MIDDLE"}, "body.truncate"),
        ({"texts": ["a"], "truncate": "NONE", "max_tokens": 5}, "max_tokens"),
        ({"texts": ["a"], "max_tokens": 0}, "max_tokens"),
        ({"texts": ["a"], "output_dimension": 0}, "output_dimension"),
    ],
)
def test_cohere_refuses_wrong_members(body, sentence):
    with pytest.raises(BadRequest) as caught:
        read_embed(**body)
    assert sentence in caught.value.message


def conversation(text, *places):
    media = [
        PlacedMedia(position, Media("image", EncodedMedia("AAAA", "image/png"), path)) for position, path in places
    ]
    return ChatPrompt([Message("user", text, media=media)], add_generation_prompt=False)


def test_cohere_reads_images_and_contents_as_conversations():
    request = read_embed(SIGHTED, images=[IMAGE_DATA_URL, IMAGE_DATA_URL], input_type="image").request
    assert request.prompts == [conversation("", (0, "images[0]")), conversation("", (0, "images[1]"))]
    assert request.pooling == PoolingOptions(prompt="image")
    inputs = [{"content": [TEXT_PART, IMAGE, TEXT_PART]}, {"content": [TEXT_PART, TEXT_PART]}]
    request = read_embed(SIGHTED, inputs=inputs).request
    assert request.prompts == [conversation("aa", (1, "inputs[0].content[1].image_url")), conversation("a\na")]


def test_cohere_bills_all_tokens_of_images_as_theirs():
    vector = b"[0.5,-0.5,0.0,-0.25,1.0,-1.0,2.0,-2.0,0.125]"
    head = b'{"id":"embd-0f","embeddings":{"float":[' + vector + b']},"meta":{"api_version":{"version":"2"},'
    tail = b'"response_type":"embeddings_by_type"}'
    billed = b'"billed_units":{"input_tokens":0,"image_tokens":3}},'
    assert answer_body(SIGHTED, images=[IMAGE_DATA_URL]) == head + billed + tail
    assert answer_body(SIGHTED, inputs=[{"content": [TEXT_PART, IMAGE]}]) == head + billed + tail
    billed = b'"billed_units":{"input_tokens":3,"image_tokens":0}},'
    assert answer_body(inputs=[{"content": [TEXT_PART]}]) == head + billed + tail


def content_fault(part_type, member, size):
    sentence = f"CohereEmbedContent with type='{part_type}' requires {member}"
    return (
        "1 validation error:\n  {'type': 'value_error', 'loc': 'body.inputs.0.content.0', 'msg': "
        f"\"Value error, {sentence}\", 'input': '<dict of {size} items>', 'ctx': {{'error': "
        f'ValueError("{sentence}")}}}}'
    )


@pytest.mark.parametrize(
    ("context", "body", "sentence"),
    [
        (CONTEXT, {"images": [IMAGE_DATA_URL]}, "At most 0 image(s) may be provided in one prompt."),
        (CONTEXT, {"inputs": [{"content": [IMAGE]}]}, "At most 0 image(s) may be provided in one prompt."),
        (SIGHTED, {"images": ["ftp://a/b"]}, "The URL must be either a HTTP, data or file URL."),
        (SIGHTED, {"images": ["data:image/png,a"]}, "Only base64 data URLs are supported for now."),
        (SIGHTED, {"inputs": [{"content": [IMAGE, IMAGE]}]}, "At most 1 image(s) may be provided in one prompt."),
        (SIGHTED, {"inputs": [{"content": [{"type": "text"}]}]}, content_fault("text", "text", 1)),
        (SIGHTED, {"inputs": [{"content": [IMAGE | {"image_url": {}}]}]},
         content_fault("image_url", "image_url.url", 2)),
        (SIGHTED, {"inputs": [{"content": [{"type": "video_url"}]}]}, "'video_url'. Supported types: text, image_url"),
        (SIGHTED, {"inputs": [{"content": [{}]}]}, "body.inputs.0.content.0.type"),
        (SIGHTED, {"inputs": [{"content": []}]}, "inputs[0].content must not be empty."),
        (SIGHTED, {"inputs": [{}]}, "body.inputs.0.content"),
        (SIGHTED, {"inputs": ["a"]}, "body.inputs.0"),
        (SIGHTED, {"inputs": 5}, "body.inputs"),
        (SIGHTED, {"images": [5]}, "body.images.0"),
        (SIGHTED, {"texts": ["a"], "embedding_types": ["float", "int8", "uint8", "binary", "ubinary", "base64"]},
         "'body.embedding_types.1', 'msg': \"Input should be 'float', 'base64', 'binary' or 'ubinary'\""),
    ],
)  # fmt: skip
def test_cohere_refuses_wrong_inputs_as_vllm_does(context, body, sentence):
    with pytest.raises(BadRequest) as caught:
        read_embed(context, **body)
    answer = vllm_error_answer(caught.value)
    assert answer.status == 400 and sentence in json.loads(answer.body)["error"]["message"]
