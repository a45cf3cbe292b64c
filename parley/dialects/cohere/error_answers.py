"""Errors as answers of Cohere's API: an object with the request's id and a message."""

from __future__ import annotations

from parley.dialects.cohere.answer_ids import id_as_uuid
from parley.dialects.json_answer import encode_json
from parley.dialects.reply import Answer
from parley.dialects.vllm.pooling.cohere import input_type_sentence
from parley.errors import ContextLength, ParleyError, UnknownModel, UnknownPromptName

# The coordinator's refusal when it has no memory for a body.
NO_MEMORY_BODY = b'{"message":"Memory limit exceeded"}'


def cohere_error_sentence(error: ParleyError) -> str:
    """Return the sentence of an error."""
    match error:
        case UnknownModel() if error.name:
            return (
                f"model '{error.name[:256]}' not found, make sure the correct model ID was used and that you have "
                "access to the model."
            )
        case ContextLength(limit=int() as limit) if error.prompt is not None or error.prompt_over is not None:
            # Of a prompt that was not counted to its end, the smallest possible length.
            tokens = error.prompt if error.prompt is not None else (error.prompt_over or 0) + 1
            return (
                f"too many tokens: total number of tokens in the prompt cannot exceed {limit - 1} - received {tokens}. "
                "Try using a shorter prompt."
            )
        case UnknownPromptName():
            return input_type_sentence(error)
        case ContextLength():
            return f"too many tokens: {error.message}"
    return error.message


def cohere_error_answer(error: ParleyError) -> Answer:
    """Return an error as a complete answer."""
    members = {"id": id_as_uuid(error.request_uuid)} if error.request_uuid else {}
    return Answer(error.status, encode_json(members | {"message": cohere_error_sentence(error)}))
