"""The end of vLLM's streams, and the headers of its answers in one piece: the same for chats and completions."""

from __future__ import annotations

import json
from typing import Any

from parley.dialects import orca
from parley.dialects.openai.timings import metrics_member
from parley.dialects.reply import HeaderList, Reply, RequestTimings
from parley.dialects.request_context import ApiOptions, RequestContext
from parley.dialects.sse import STREAM_DONE, choice_event_start, data_event
from parley.dialects.vllm.error_answers import vllm_failure_events
from parley.dialects.vllm.token_usage import vllm_final_usage
from parley.errors import ParleyError
from parley.types import Usage


def load_header(context: RequestContext) -> HeaderList:
    """Return the load header of the model, for balancers that request it."""
    share = context.cached_tokens / context.cache_capacity if context.cache_capacity else 0.0
    metrics = {"num_requests_waiting": float(context.waiting_sequences), "kv_cache_usage_perc": share}
    return orca.orca_header(
        context, metrics, number_format="%s", encode=lambda metric_map: json.dumps(metric_map).encode()
    )


class VllmStreamMixin(Reply):
    """The end of a stream, and the headers of an answer in one piece."""

    _context: RequestContext
    _options: ApiOptions
    _chunk_start: bytes  # the first bytes of a plain chunk, after the first one was built

    def finish_stream(self, usage: Usage) -> bytes:
        """Return the usage chunk, if requested, and the ``[DONE]`` mark."""
        if not self.request.output_options.usage:
            return STREAM_DONE
        last_members = {
            "usage": vllm_final_usage(usage, self.created_tokens(usage)),
            "system_fingerprint": self._context.fingerprint,
        }
        for name, metrics in metrics_member(self, self._options, usage).items():
            last_members[name] = {key: value for key, value in metrics.items() if value is not None}
        return data_event(self._chunk_envelope([]) | last_members) + STREAM_DONE

    def fail_stream(self, error: ParleyError) -> bytes:
        """Return vLLM's error event and the ``[DONE]`` mark."""
        return vllm_failure_events(error)

    def answer_headers(self, timings: RequestTimings | None) -> HeaderList:
        """Return the load header of an answer in one piece, if the client asks for it; none for a stream."""
        return load_header(self._context) if timings is not None else ()

    def created_tokens(self, usage: Usage) -> int | None:
        """Return how many tokens of the prompt are in new pages of the prefix cache, None if the usage lacks that."""
        return None

    def passed_members(self) -> dict[str, Any]:
        """Return the members of the whole answer that another answer already has; none by default."""
        return {}

    def _start_of_chunk(self) -> bytes:
        if not self._chunk_start:  # the model's name is final only after the server has resolved it
            self._chunk_start = choice_event_start(self._chunk_envelope([]))
        return self._chunk_start

    def _chunk_envelope(self, choices: list[Any]) -> dict[str, Any]:
        """Return the envelope with these choices."""
        raise NotImplementedError
