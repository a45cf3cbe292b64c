"""Creates the sequences of a request, with the hashes of their pages. Knows nothing of steps."""

from __future__ import annotations

from parley.core.beam_search.beam import beam_capacity
from parley.core.finish_reason import output_limit
from parley.core.pages.page_pool import extend_hashes, hash_chain_root, long_rope_root
from parley.core.rope_positions import hashed_items
from parley.core.sequence import PAGE_SIZE, LoadedAdapter, Sequence
from parley.types import EngineRequest, MediaItem


class SequenceFactory:
    """Creates sequences of one model, and numbers them in the order of their arrival.

    * ``max_context``: tokens of a prompt and its output together.
    * ``page_count``: pages of the pool, which bound the beams of a search.
    * ``long_rope_after``: as in ``ModelRunner``.
    * ``hashes_pages``: False without a prefix cache.
    """

    def __init__(
        self, model_name: str, max_context: int, page_count: int, long_rope_after: float, *, hashes_pages: bool
    ):
        self._model_name = model_name
        self._max_context = max_context
        self._page_count = page_count
        self._long_rope_after = long_rope_after
        self._hashes_pages = hashes_pages
        self._arrival_count = 0

    def make_sequences(self, request: EngineRequest, queued_at: float, adapter: LoadedAdapter | None) -> list[Sequence]:
        """Return a sequence for each choice of a request, or for each beam of its search.

        ``queued_at``: the time of the request's arrival on the clock of ``perf_counter``.
        """
        hash_root = hash_chain_root(self._model_name, request.cache_salt, *([adapter.digest.hex()] if adapter else []))
        items = hashed_items(request.media, request.token_ids)
        prompt_hashes = self._hash_pages(hash_root, request.token_ids, items, [])
        stops = frozenset(request.stop_ids)
        limit = output_limit(request, self._max_context)
        beam_width = 0
        if request.beam is not None and limit:
            beam_width = request.beam.width
            limit = min(limit, beam_capacity(self._page_count, beam_width) - len(request.token_ids))
        sequences: list[Sequence] = []
        for index in range(beam_width or request.n):
            prior_tokens = request.prior_tokens[index] if request.prior_tokens and not beam_width else []
            tokens = request.token_ids + prior_tokens
            sequence = Sequence(
                request_id=request.id,
                index=index,
                request=request,
                tokens=tokens,
                prompt_len=len(request.token_ids),
                seed=(request.seed + index) % 2**64,
                arrival_number=self._arrival_count,
                hashes=(
                    self._hash_pages(hash_root, tokens, items, prompt_hashes) if prior_tokens else list(prompt_hashes)
                ),
                # All choices have the same prompt: only the first scores it.
                prompt_scores=[None] if request.prompt_logprobs >= 0 and index == 0 and not prior_tokens else [],
                output_limit=limit,
                stop_token_ids=stops,
                hash_root=hash_root,
                uses_long_rope=len(tokens) > self._long_rope_after,
                queued_at=queued_at,
                last_token_at=queued_at,
                adapter=adapter,
                admission_span=max(1, beam_width),
            )
            self._arrival_count += 1
            sequences.append(sequence)
        return sequences

    def _hash_pages(
        self, hash_root: bytes, tokens: list[int], media: list[MediaItem], prompt_hashes: list[bytes]
    ) -> list[bytes]:
        """Return the chained hashes of all full pages of a new sequence. ``prompt_hashes``: those of its prompt."""
        if not self._hashes_pages:
            return []
        hashes = list(prompt_hashes)
        if len(tokens) > self._long_rope_after:
            hashes, hash_root = [], long_rope_root(hash_root)
        extend_hashes(hashes, hash_root, tokens, len(tokens) // PAGE_SIZE, media)
        return hashes
