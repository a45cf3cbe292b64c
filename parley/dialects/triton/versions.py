"""Model versions: there is only one. Paths may name it."""

from __future__ import annotations

from collections.abc import Mapping

from parley.dialects.triton.error_answers import quote_name
from parley.dialects.triton.model import MODEL_VERSION
from parley.errors import InvalidValue, NotFound, UnknownModel


def check_model_version(path: Mapping[str, str]) -> None:
    """Raise NotFound, UnknownModel or InvalidValue if the path names another version."""
    version = path.get("version", MODEL_VERSION)
    if not (version.isascii() and version.isdigit()):
        raise NotFound("A version is a number.")
    if len(version) > 19 or int(version) >= 2**63:
        raise InvalidValue(
            f"failed to get model version from specified version string {quote_name(version)} (details: stol), version "
            "should be an integral value > 0"
        )
    if int(version) != int(MODEL_VERSION):
        raise UnknownModel(f"Request for unknown model: '{path.get('model', '')}' version {version} is not found")
