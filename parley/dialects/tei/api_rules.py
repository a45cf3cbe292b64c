"""The rule sets of TEI's API: strict ones like the original's, and extended ones."""

from __future__ import annotations

from dataclasses import dataclass

from parley.dialects.tgi.refusal_wording import STRICT_TGI_WORDING, TGI_WORDING, TgiErrorWording


@dataclass(frozen=True, slots=True)
class TeiRules:
    """The limits the original is started with. ``strict``: bodies must be declared as JSON, name no
    model, and have no 5.0 for an integer.

    ``auto_truncate``: texts that are too long are cut unless a request says otherwise.
    """

    strict: bool
    max_batch: int
    auto_truncate: bool
    max_body: int | None = None  # bytes

    @property
    def wording(self) -> TgiErrorWording:
        """The wording of refusals of a body's members, which is TGI's."""
        return STRICT_TGI_WORDING if self.strict else TGI_WORDING


STRICT_TEI_RULES = TeiRules(strict=True, max_batch=32, auto_truncate=True, max_body=2_000_000)
EXTENDED_TEI_RULES = TeiRules(strict=False, max_batch=2048, auto_truncate=False)
