"""Find a model's folder: the built-in model, a local folder, the Hugging Face cache, or a download from the hub.

``model_folder.py`` finds a folder and reports missing files, ``download.py`` downloads one, and ``derived_folder.py``
makes another with a different config, tokenizer or chat template. Reads no weights. The API process uses this package
in a worker thread, so nothing here imports torch; ``huggingface_hub`` is imported only for names that are not folders.
"""

from __future__ import annotations

from parley.hub.download import ModelMissing
from parley.hub.model_folder import (
    BUILT_IN,
    check_model_folder,
    find_draft_model,
    find_model,
    folder_problem,
    pull_model,
    resolve_draft_model,
    resolve_model,
    served_name,
)

__all__ = [
    "BUILT_IN",
    "ModelMissing",
    "check_model_folder",
    "find_draft_model",
    "find_model",
    "folder_problem",
    "pull_model",
    "resolve_draft_model",
    "resolve_model",
    "served_name",
]
