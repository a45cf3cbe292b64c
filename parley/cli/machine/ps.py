"""``parley ps``: the models that a running server serves."""

from __future__ import annotations

import json
import sys
from typing import Any

from parley.cli.client import ClientError, client_from_options
from parley.settings.config import CLIENT_OPTIONS
from parley.settings.option_kinds import switch_kind
from parley.settings.options import Option, ResolvedOptions

USAGE = """\
usage: parley ps [options]

Lists the models that a running server serves, with their context length; of an adapter, its model."""

OPTIONS = [Option("json", switch_kind(), "Print JSON, one line per model.", False), *CLIENT_OPTIONS]


def run_command(config: ResolvedOptions) -> int:
    """Print the models of the server. Return 1 if it does not answer."""
    client = client_from_options(config)
    try:
        cards = client.list_model_cards()
        state = _read_readiness(client)
    except ClientError as error:
        print(f"parley: {error}", file=sys.stderr)
        return 1
    if config["json"]:
        for card in cards:
            print(
                json.dumps({"name": card["id"], "context": card.get("max_model_len"), "adapter_of": card.get("parent")})
            )
        return 0
    rows = [("NAME", "CONTEXT", "ADAPTER OF")] + [_model_row(card) for card in cards]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print(f"{client.address} is {state}.")
    return 0


def _model_row(card: dict[str, Any]) -> tuple[str, str, str]:
    return str(card["id"]), str(card.get("max_model_len") or ""), str(card.get("parent") or "")


def _read_readiness(client: Any) -> str:
    """Return "ready", or why the server is not. Raises ClientError if it does not answer."""
    try:
        client.call_json("GET", "/health/ready", timeout=10)
    except ClientError as error:
        if error.status not in (404, 503):
            raise
        return "not ready" if error.status == 503 else "running"
    return "ready"
