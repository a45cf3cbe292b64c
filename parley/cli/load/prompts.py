"""Random prompts of exact length, of tokens that the server's ``/tokenize`` returns for a text of ordinary words."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from parley.cli.client import ClientError, OpenAIClient
from parley.cli.load.images import add_random_images
from parley.settings.options import ResolvedOptions

if TYPE_CHECKING:
    from parley.dialects.bench import BenchApi

SAMPLE_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information "
    "back parent face others level office door health person art war history party result change morning reason"
)
WORD_SPACES = ("Ġ", "▁")  # the space before a word, in vocabularies


@dataclass(frozen=True)
class TokenPool:
    """The tokens that prompts are made of: ids of ordinary words, with their texts if the API takes only text.

    ``added_tokens``: number of tokens that the server adds around such a text.
    """

    pieces: dict[int, str]
    added_tokens: int = 0

    def make_prompt(self, ids: list[int], api: BenchApi) -> list[int] | str:
        """Return a prompt of these tokens: ids, or their text if the API takes only text."""
        return ids if api.takes_token_ids else "".join(self.pieces[token_id] for token_id in ids)


def fetch_token_pool(client: OpenAIClient, model: str, api: BenchApi) -> TokenPool:
    """Ask the server for usable tokens. Raises ClientError if its ``/tokenize`` does not return enough."""
    words = {"model": model, "prompt": SAMPLE_WORDS, "add_special_tokens": False, "return_token_strs": True}
    answer = request_tokens(client, words)
    pieces = dict(zip(answer["tokens"], answer.get("token_strs") or [""] * len(answer["tokens"]), strict=False))
    if not api.takes_token_ids:  # a piece that begins a word is the same token in any context
        pieces = {
            token_id: " " + piece[1:]
            for token_id, piece in pieces.items()
            if piece[:1] in WORD_SPACES and len(piece) > 1
        }
    if len(pieces) < 2:
        raise ClientError(f"{client.address} has no /tokenize that gives token ids; prompts of exact length need it.")
    pool = TokenPool(dict(sorted(pieces.items())))
    if api.takes_token_ids:
        return pool
    sample = list(pool.pieces) * 8
    text = pool.make_prompt(sample, api)
    prompt_body = {"messages": [{"role": "user", "content": text}]} if api.is_chat else {"prompt": text}
    return TokenPool(pool.pieces, len(request_tokens(client, {"model": model, **prompt_body})["tokens"]) - len(sample))


def request_tokens(client: OpenAIClient, body: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of the server's ``/tokenize``, without tokens if there is no such path. Raises ClientError."""
    try:
        answer = client.call_json("POST", "/tokenize", body)
        result: dict[str, Any] = answer | {"tokens": [int(token) for token in answer["tokens"]]}
        return result
    except ClientError as error:
        if error.status != 404:
            raise
    except (KeyError, TypeError, ValueError):
        pass
    return {"tokens": []}


def random_prompts(pool: TokenPool, config: ResolvedOptions, api: BenchApi, count: int, seed: str) -> list[Any]:
    """Return random prompts of exactly ``prompt-len`` tokens. Their first ``shared-prefix`` tokens are one of
    ``num-prefixes`` prefixes in turn.

    Images come before the text and in addition to its length.
    """
    random_, ids = random.Random(seed), list(pool.pieces)
    prefixes = [random_.choices(ids, k=config["shared-prefix"]) for _ in range(config["num-prefixes"])]
    own_tokens = config["prompt-len"] - config["shared-prefix"] - pool.added_tokens
    prompts = [
        pool.make_prompt(prefixes[number % len(prefixes)] + random_.choices(ids, k=own_tokens), api)
        for number in range(count)
    ]
    if not config["images"]:
        return prompts
    image_seeds = [seed if config["same-images"] else f"{seed} {number}" for number in range(count)]
    return [
        add_random_images(str(prompt), config["images"], config["image-size"], random.Random(image_seed))
        for prompt, image_seed in zip(prompts, image_seeds, strict=True)
    ]
