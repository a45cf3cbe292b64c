"""``parley rm``: removes a model from the Hugging Face cache, after asking."""

from __future__ import annotations

import sys

from parley.settings.option_kinds import switch_kind, text_kind
from parley.settings.options import ConfigError, Option, ResolvedOptions, did_you_mean

USAGE = """\
usage: parley rm MODEL [options]

Removes a model from the Hugging Face cache. MODEL is owner/name, or owner/name@COMMIT for one of its revisions. A
folder of your own is never removed."""

OPTIONS = [
    Option("model", text_kind("MODEL"), "Name of the model, as `parley list` prints it.", positional=True),
    Option("yes", switch_kind(), "Do not ask.", False, short="-y"),
]


def run_command(config: ResolvedOptions) -> int:
    """Remove the model if the user agrees. Return 1 if it is not there or the user does not agree."""
    from parley.hub.cached_models import list_cached_models, remove_cached_model
    from parley.hub.transfer import format_bytes

    if config["model"] is None:
        raise ConfigError("Name a model; `parley list` lists those of the cache.")
    name, _, commit = config["model"].partition("@")
    models = {model.name: model for model in list_cached_models()}
    model = models.get(name)
    if model is None or not any(known_commit.startswith(commit) for known_commit in model.commits):
        hint = did_you_mean(name, list(models)) if model is None else f" It has {', '.join(model.commits)}."
        print(f"parley: The cache has no model {config['model']}.{hint}", file=sys.stderr)
        return 1
    if not config["yes"]:
        if not sys.stdin.isatty():
            raise ConfigError("Confirmation needs a terminal; --yes removes the model without it.")
        size = f" ({format_bytes(model.size)})" if not commit else f" at {commit}"
        if input(f"Remove {name}{size} from the cache? [y/N] ").strip().lower() not in ("y", "yes"):
            print("Nothing was removed.")
            return 1
    freed = remove_cached_model(name, commit or None)
    print(f"Removed {config['model']}: {format_bytes(freed)} are free again.")
    return 0
