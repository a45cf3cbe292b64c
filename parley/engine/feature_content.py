"""Reads a feature file: the tensors that the model's processor made of one item, in memory of the API process."""

from __future__ import annotations

import os
import stat

from parley.types import FeatureFile


class BadFeatures(Exception):
    """The features of an item cannot be used. The message is a sentence for users, without paths."""


def read_feature_content(features: FeatureFile) -> bytes:
    """Return the content of a feature file. It is copied, because its owner may truncate it meanwhile. Raises
    BadFeatures."""
    try:
        # Non-blocking: if the number was reused for a pipe, opening it must not wait for a writer.
        descriptor = os.open(f"/proc/{features.pid}/fd/{features.fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise BadFeatures("The processed features no longer exist.") from error
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size != features.size:
            raise BadFeatures("The processed features are not those of the request.")
        content = file.read(features.size)
    if len(content) != features.size:
        raise BadFeatures("The processed features were cut off while they were read.")
    return content
