"""``parley list``: the models in the Hugging Face cache."""

from __future__ import annotations

import json
import time

from parley.settings.option_kinds import switch_kind
from parley.settings.options import Option, ResolvedOptions

USAGE = """\
usage: parley list [options]

Lists the models in the Hugging Face cache, with their size on disk and the day they were last used."""

OPTIONS = [
    Option("json", switch_kind(), "Print JSON, one line per model; sizes in bytes.", False),
    Option("names", switch_kind(), "Print names alone.", False),
]


def run_command(config: ResolvedOptions) -> int:
    """Print the models. Return the exit code."""
    from parley.hub.cached_models import list_cached_models
    from parley.hub.transfer import format_bytes

    models = list_cached_models()
    if config["json"]:
        for model in models:
            facts = {"name": model.name, "size": model.size, "used": model.used, "commits": model.commits}
            print(json.dumps(facts | {"folder": str(model.folder)}))
        return 0
    if config["names"]:
        print("".join(f"{model.name}\n" for model in models), end="")
        return 0
    rows = [("NAME", "SIZE", "LAST USED", "REVISION")] + [
        (
            model.name,
            format_bytes(model.size),
            time.strftime("%Y-%m-%d", time.localtime(model.used)),
            model.commits[0][:12],
        )
        for model in models
        if model.commits
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0
