"""Finds the files of weights that have no index, by the numbers in their names: model-00001-of-00003.safetensors."""

from __future__ import annotations

import re
from pathlib import Path

INDEX_NAME = "model.safetensors.index.json"
SHARD_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors", re.DOTALL)
MAKER_PREFIX = "consolidated"  # the same weights in the format of their maker


def find_shards(folder: Path) -> tuple[list[Path], str]:
    """Return the numbered files of a model in order, none if there are none, and a clause if any is missing."""
    matches = (SHARD_NAME.fullmatch(path.name) for path in sorted(folder.glob("*.safetensors")))
    sets = {(match[1], match[3]) for match in matches if match is not None and not match[1].startswith(MAKER_PREFIX)}
    if not sets:
        return [], ""
    if len(sets) > 1:
        names = " and ".join(f"{stem}-*-of-{count}" for stem, count in sorted(sets))
        return [], f"its folder has the weights {names}, and no {INDEX_NAME} that says which are the model's"
    ((stem, count),) = sets
    shards = [folder / f"{stem}-{number:05}-of-{count}.safetensors" for number in range(1, int(count) + 1)]
    absent = [shard for shard in shards if not shard.is_file()]
    if absent:
        return shards, f"{len(absent)} of its {len(shards)} weight files are missing, first {absent[0].name}"
    return shards, ""
