"""A media process for vLLM: parley's decoders, and then vLLM's own processor of the model.

It is a media process as any other (``worker/media_process.py``), with the same limits. ``start.py`` runs it with vLLM's
Python. Its arguments are VLLMSettings in JSON, the model's folder, and FD. Without PyAV it reads images only.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from parley.types import VLLMSettings
from parley.worker.media_process import serve_media_socket

if TYPE_CHECKING:
    from parley.model.media_input.jobs import MediaJobs
    from parley.worker.vllm.media.item_features import ItemFeatures


def load_jobs(folder: Path, settings: VLLMSettings) -> MediaJobs[ItemFeatures]:
    """Return the jobs for the model in ``folder``. Raises any exception of vLLM if its processor cannot be loaded."""
    os.environ |= {"VLLM_CONFIGURE_LOGGING": "0", "VLLM_NO_USAGE_STATS": "1"}
    from parley.model.media_input.digest import hash_item_parts, processor_fingerprint
    from parley.model.media_input.jobs import MediaJobs
    from parley.worker.vllm.media.item_processor import VLLMItemProcessor, settings_fingerprint

    fingerprint = hash_item_parts([processor_fingerprint(folder), settings_fingerprint(settings)])
    return MediaJobs(VLLMItemProcessor(settings), fingerprint)


if __name__ == "__main__":
    vllm_settings = msgspec.json.decode(sys.argv[1], type=VLLMSettings)
    serve_media_socket(Path(sys.argv[2]), int(sys.argv[3]), lambda folder: load_jobs(folder, vllm_settings))
