"""The tokens of a request, before and after it runs, for the limits and the usage of its client's key.

Only instances tokenize prompts, so one of them is asked how many tokens a request reserves; it runs nothing for that.
At the end the answering instance reports how many were used. Other servers can do neither: for them, the usage in the
answer counts, or else an estimate.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

import msgspec

from parley.coordinator import refusals
from parley.coordinator.proxy.downstream.client import DownstreamClient
from parley.coordinator.proxy.paths import ApiPath
from parley.coordinator.proxy.upstream import forward
from parley.coordinator.proxy.upstream.connections import InstanceConnections
from parley.coordinator.routing.instance import ClusterInstance
from parley.coordinator.routing.policies import SchedulingRequest
from parley.dialects.reply import Reply
from parley.dialects.request_context import RequestContext
from parley.dialects.route import Route
from parley.disagg.wire.vouched_client import (
    COUNT_HEADER,
    ReservedTokens,
    TokenCount,
    UsedTokens,
    read_reserved_tokens,
)
from parley.errors import ParleyError
from parley.serving.keys.scopes import check_key_models
from parley.web.http_client import ConnectionBroken, InstanceAnswer, InstanceUnreachable

USAGE_MEMBER = re.compile(rb'"usage"\s*:\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})')
KEPT_BYTES = 64 << 10  # bytes kept of the end of an answer, which contains its usage


class _AnswerUsage(msgspec.Struct):
    """The usage in an answer of the APIs that have one; OpenAI and Anthropic name the counts differently."""

    prompt_tokens: TokenCount = 0
    completion_tokens: TokenCount = 0
    input_tokens: TokenCount = 0
    output_tokens: TokenCount = 0


class AnswerMeter:
    """Measures the token usage of an answer from a server other than parley. ``prompt_tokens``: an estimate."""

    def __init__(self, model: str, prompt_tokens: int, characters_per_token: float):
        self._model, self._prompt_tokens, self._rate = model, prompt_tokens, characters_per_token
        self._end = b""
        self._size = self._events = 0

    def add_bytes(self, data: bytes) -> None:
        """Note a part of the answer."""
        self._end = (self._end + data)[-KEPT_BYTES:]
        self._size += len(data)
        self._events += data.count(b"data:") - data.count(b"data: [DONE]")

    def used_tokens(self) -> UsedTokens | None:
        """Return the token usage; None without an answer. Without a report, each event of a stream counts as one."""
        if not self._size:
            return None
        for member in reversed(USAGE_MEMBER.findall(self._end)):
            try:
                usage = msgspec.json.decode(member, type=_AnswerUsage)
            except (msgspec.MsgspecError, UnicodeError):
                continue
            prompt_tokens = usage.prompt_tokens or usage.input_tokens
            return UsedTokens(self._model, prompt_tokens, 0, usage.completion_tokens or usage.output_tokens)
        output_tokens = self._events or round(self._size / self._rate)
        return UsedTokens(self._model, self._prompt_tokens, 0, output_tokens)


async def reserve_tokens(
    connections: InstanceConnections,
    client: DownstreamClient,
    path: ApiPath,
    body: bytes,
    scheduling_request: SchedulingRequest,
    instances: Sequence[ClusterInstance],
) -> InstanceAnswer | None:
    """Reserve the tokens that a request may use, if its client's key has limits of tokens. ``instances``: usable ones
    that have its model, the best first. Return an instance's refusal of the request, if there is one. Raises
    ParleyError, ClientGone."""
    native = [instance for instance in instances if instance.native]
    if len(native) < len(instances):
        check_key_models(client.tenant, (scheduling_request.model,))  # servers other than parley do not know the key
    limits = client.tenant.limits
    if client.account is None or limits.tokens_per_minute is limits.tokens_per_day is None:
        return None
    if not instances:
        raise refusals.coordinator_error(503, refusals.TEXTS.cluster_not_ready)
    if native:
        counts = await _ask_token_counts(connections, client, native, body)
        if isinstance(counts, InstanceAnswer):
            return counts
    else:
        route, _ = await client.to_thread_if_large(len(body), partial(path.pick_route, body, client.headers))
        counts = await _estimate_token_counts(client, route, body, scheduling_request.prompt_tokens)
    await client.account.reserve_tokens(counts.prompt_tokens, counts.output_tokens)
    client.reserved_prompt_tokens = counts.prompt_tokens
    return None


async def _ask_token_counts(
    connections: InstanceConnections, client: DownstreamClient, instances: Sequence[ClusterInstance], body: bytes
) -> ReservedTokens | InstanceAnswer:
    """Return the tokens that a request reserves, or an instance's refusal of the request. Raises ParleyError if no
    instance can say it."""
    longest = max((instance.context_length for instance in instances), default=0)  # fits most requests
    refusal: InstanceAnswer | None = None  # of a request that another instance may have the context for
    for instance in instances:
        headers = [*forward.forwarded_headers(connections, client, instance), (COUNT_HEADER, b"1")]
        try:
            answer = await connections.http_client(instance).request_answer(
                client.scope["method"].encode(), client.request_target, headers, (body,)
            )
        except (InstanceUnreachable, ConnectionBroken):
            continue
        if answer.status == 200 and (counts := read_reserved_tokens(answer.body)) is not None:
            return counts
        if answer.status not in (429, 503) and (answer.status != 400 or instance.context_length >= longest):
            return answer
        if answer.status == 400:
            refusal = answer
    if refusal is not None:
        return refusal
    raise refusals.coordinator_error(503, refusals.TEXTS.cluster_not_ready)


async def _estimate_token_counts(
    client: DownstreamClient, route: Route, body: bytes, prompt_tokens: int
) -> ReservedTokens:
    """Return the tokens that a request to servers other than parley reserves. ``prompt_tokens``: an estimate."""
    context = RequestContext(client.request_uuid, 0, "", path_parts=client.path_params, headers=client.headers)
    try:
        assert route.reader is not None
        reply = await client.to_thread_if_large(len(body), partial(route.reader, body, context))
    except ParleyError:  # the server will say so
        return ReservedTokens(prompt_tokens, 0)
    if not isinstance(reply, Reply) or reply.request.pooling is not None:
        return ReservedTokens(prompt_tokens, 0)
    max_tokens = reply.request.stop_conditions.max_tokens
    return ReservedTokens(prompt_tokens, None if max_tokens is None else max_tokens * reply.request.sequences)
