"""Refuses names from a hub that point outside of the cache, and answers beyond the limits of ``answer_limits``.

huggingface_hub names files of its cache after entity tags, checksums and commits as the hub reports them, and does not
check them: a malicious hub could write anywhere.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any

from parley.hub import answer_limits
from parley.hub.answer_watch import OpenSockets


class PathInsteadOfName(Exception):
    """A hub reports a path where the name of a file of the cache is expected. The message says where."""


@functools.cache
def guard_cache() -> None:
    """Check all answers that huggingface_hub gets from now on. The client's methods then raise PathInsteadOfName and
    HubLimitExceeded."""
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils._http import default_client_factory

    def make_client() -> Any:
        client: Any = default_client_factory()
        client.event_hooks["response"].append(answer_limits.limit_redirect)
        send_unchecked, page_limit, sockets = client.send, answer_limits.PageLimit(), OpenSockets()

        def send_request(request: Any, *, stream: bool = False, **options: Any) -> Any:
            answer_limits.limit_timeouts(request)
            with answer_limits.give_up_on_time(answer_limits.watch_answer(request, sockets)):
                response = send_unchecked(request, stream=True, **options)
            answer_limits.limit_waiting(response)
            if stream:  # a download, whose name is known by then
                answer_limits.limit_rate(response)
                return response
            answer = answer_limits.read_hub_answer(response)
            page_limit.count_page(answer)
            check_names(answer)
            return answer

        client.send = send_request
        return client

    set_client_factory(make_client)  # and not a client: after errors of connections, there is a new one


def check_names(response: Any) -> None:
    """Raise PathInsteadOfName if an answer reports a path where a name is expected."""
    for title, name in _reported_names(response):
        if "/" in name or "\\" in name:
            raise PathInsteadOfName(f"The hub cannot be used: the {title} is a path.")


def _reported_names(response: Any) -> Iterator[tuple[str, str]]:
    """Yield the names in an answer, each with a description of the named thing."""
    headers = response.headers
    yield "commit of a file", headers.get("x-repo-commit") or ""
    if response.request.method == "HEAD":
        tag = headers.get("x-linked-etag") or headers.get("etag") or ""
        yield "entity tag of a file", tag.removeprefix("W/")
        return
    try:
        content = json.loads(response.content)
    except ValueError:
        return
    if isinstance(content, dict):
        yield "commit of a model", str(content.get("sha"))
    for entry in content if isinstance(content, list) else ():
        large_file = entry.get("lfs") if isinstance(entry, dict) else None
        if isinstance(large_file, dict):
            yield "sum of a file", str(large_file.get("oid"))
