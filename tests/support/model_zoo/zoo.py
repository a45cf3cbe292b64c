"""The model zoo: small random checkpoints in the forms that people publish, each served and compared, or refused."""

from __future__ import annotations

from support.model_zoo.file_folders import file_folders
from support.model_zoo.plain_folders import plain_folders
from support.model_zoo.published_folders import published_folders
from support.model_zoo.quantized_folders import quantized_folders
from support.model_zoo.zoo_folder import ZooFolder

ZOO: dict[str, ZooFolder] = {
    folder.name: folder for folder in [*plain_folders(), *published_folders(), *quantized_folders(), *file_folders()]
}
