"""The images, videos and clips of a request, divided among its prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from parley.errors import InvalidValue
from parley.types import ChatPrompt, Media, ProcessedMedia, Prompt, Request, TextPrompt


def prompt_media(prompt: Prompt) -> list[Media]:
    """Return the media of a prompt, in its order."""
    if isinstance(prompt, ChatPrompt):
        return [placed.media for message in prompt.messages for placed in message.media]
    return [placed.media for placed in prompt.media] if isinstance(prompt, TextPrompt) else []


def request_media(request: Request) -> list[Media]:
    """Return the media of all prompts of a request, in order."""
    return [media for prompt in request.prompts for media in prompt_media(prompt)]


def media_by_prompt(request: Request, items: Sequence[ProcessedMedia]) -> Iterator[Sequence[ProcessedMedia]]:
    """Divide the processed media of a request among its prompts."""
    first = 0
    for prompt in request.prompts:
        end = first + len(prompt_media(prompt))
        yield items[first:end]
        first = end


def drop_media(request: Request) -> None:
    """Forget a request's media: they may be large, and its tokens and features have taken their place."""
    request.prompts = [_without_media(prompt) for prompt in request.prompts]


def _without_media(prompt: Prompt) -> Prompt:
    if not prompt_media(prompt):
        return prompt
    if isinstance(prompt, ChatPrompt):
        messages = [replace(message, media=[]) if message.media else message for message in prompt.messages]
        return replace(prompt, messages=messages)
    return replace(prompt, media=[])


def check_prompt_is_whole(request: Request, token_count: int) -> None:
    """Raise InvalidValue if a prompt with media would be cut: a part of an item has no meaning."""
    most = request.max_prompt_tokens
    if most is not None and token_count > most:
        raise InvalidValue(
            f"A prompt with media cannot be truncated. It has {token_count} tokens, but at most {most} are to be kept.",
            field="max_prompt_tokens",
        )
