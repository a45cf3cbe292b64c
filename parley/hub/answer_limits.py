"""Limits of time and size for a hub's answers: without them, one that never ends keeps a download for ever.

huggingface_hub limits the time between two bytes at most, and not the number of bytes. ``AnswerWatch`` limits the time
while no part of an answer is complete.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from parley.hub.answer_watch import AnswerWatch, OpenSockets

READ_SECONDS = 30.0  # until the next byte, where huggingface_hub sets no limit
ANSWER_SECONDS = 120.0  # until an answer other than a file is complete
MAX_ANSWER_BYTES = 32 << 20  # of an answer other than a file, also after decompression
MAX_PAGES = 200  # of the list of a model's files; the hub puts 1,000 files on each
MAX_WAIT_SECONDS = 300  # that a hub may ask a client to wait before it tries again
RATE_SECONDS, MIN_RATE_BYTES = 60.0, 60 << 10  # in each such period, at least this many bytes of a file have to arrive
# The rest of a window of requests in a RateLimit header, as huggingface_hub reads it
RESET_SECONDS = re.compile(r"\bt\s*=\s*(\d+)")


class HubLimitExceeded(Exception):
    """A hub's answer is too slow or too large. The message says which."""


def limit_timeouts(request: Any) -> None:
    """Limit the time until the next byte of a request's answer, where it is not limited."""
    timeouts = request.extensions.get("timeout") or {}
    names = ("connect", "read", "write", "pool")
    request.extensions["timeout"] = {
        name: READ_SECONDS if timeouts.get(name) is None else timeouts[name] for name in names
    }


def watch_answer(request: Any, sockets: OpenSockets) -> AnswerWatch:
    """Return the watch of the answer to a request that is about to be sent."""
    watch = request.extensions["watch"] = AnswerWatch(sockets)
    request.extensions["trace"] = watch.trace
    return watch


@contextmanager
def give_up_on_time(watch: AnswerWatch) -> Iterator[None]:
    """Turn the end of a connection that the watch has ended into HubLimitExceeded."""
    try:
        yield
    except Exception:
        if watch.reason:
            raise HubLimitExceeded(watch.reason) from None
        raise
    finally:
        watch.stop_timer()


def limit_redirect(response: Any) -> None:
    """Limit the body of a redirect, which the client reads before it follows it."""
    if response.has_redirect_location:
        _replace_parts(response, _limit_answer(response.iter_raw, response.request.extensions["watch"]))


def limit_rate(response: Any) -> None:
    """Limit how slowly a file arrives. Reading it then raises HubLimitExceeded."""
    _replace_parts(response, _limit_file(response.iter_raw, response.request.extensions["watch"]))


def read_hub_answer(response: Any) -> Any:
    """Read an answer other than a file, and return it complete. Raises HubLimitExceeded."""
    if response.request.method == "HEAD":
        response.read()
        return response
    try:
        content = b"".join(_limit_answer(response.iter_bytes, response.request.extensions["watch"])())
    finally:
        response.close()
    headers = [(name, value) for name, value in response.headers.raw if name.lower() != b"content-encoding"]
    answer = type(response)(response.status_code, headers=headers, content=content, request=response.request)
    answer.history = response.history
    return answer


def limit_waiting(response: Any) -> None:
    """Raise HubLimitExceeded if a hub asks a client to wait for too long."""
    if response.status_code < 400:  # its header RateLimit then only gives the remaining budget
        return
    retry_after = response.headers.get("retry-after", "").strip()
    waits = [retry_after] if retry_after.isdecimal() else []
    waits += RESET_SECONDS.findall(response.headers.get("ratelimit", ""))
    if any(len(seconds) > 9 or int(seconds) > MAX_WAIT_SECONDS for seconds in waits):
        response.close()
        raise HubLimitExceeded(f"The hub cannot be used now: it asks to wait for over {MAX_WAIT_SECONDS} seconds.")


class PageLimit:
    """Counts the pages of a list, one after the other."""

    def __init__(self) -> None:
        self._pages = 0

    def count_page(self, response: Any) -> None:
        """Count an answer that names a further page. Raises HubLimitExceeded."""
        self._pages = self._pages + 1 if "next" in response.links else 0
        if self._pages > MAX_PAGES:
            raise HubLimitExceeded(f"The hub cannot be used: a list of files has over {MAX_PAGES} pages.")


def _replace_parts(response: Any, iterate_raw: Any) -> None:
    response.iter_raw = iterate_raw  # the other ways to read a body call it


def _limit_answer(iterate: Any, watch: AnswerWatch) -> Any:
    """Return a function that yields the parts of an answer within its limits."""

    def limited(*args: Any, **kwargs: Any) -> Iterator[bytes]:
        size = 0
        watch.start_timer(ANSWER_SECONDS, f"an answer takes over {ANSWER_SECONDS:g} seconds")
        with give_up_on_time(watch):
            for part in iterate(*args, **kwargs):
                size += len(part)
                if size > MAX_ANSWER_BYTES:
                    raise HubLimitExceeded(f"The hub cannot be used: an answer has over {MAX_ANSWER_BYTES >> 20} MiB.")
                yield part

    return limited


def _limit_file(iterate: Any, watch: AnswerWatch) -> Any:
    """Return a function that yields the parts of a file as long as they come fast enough."""

    def limited(*args: Any, **kwargs: Any) -> Iterator[bytes]:
        size = 0

        def check_rate() -> str:
            nonlocal size
            arrived, size = size, 0
            if arrived >= MIN_RATE_BYTES:
                return ""
            return (
                f"in {RATE_SECONDS:g} seconds {arrived} bytes of a file arrived, and at least {MIN_RATE_BYTES} are "
                "needed"
            )

        watch.start_checks(RATE_SECONDS, check_rate)
        with give_up_on_time(watch):
            for part in iterate(*args, **kwargs):
                size += len(part)
                yield part

    return limited
