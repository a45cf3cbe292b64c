"""Explain a flag that ``parley serve`` does not have and another server has."""

from __future__ import annotations

from parley.cli.peers.tables import read_peers
from parley.cli.peers.translate import describe_counterpart


def explain_foreign_flag(flag: str) -> str:
    """Name the servers that have this flag and its counterpart here, as sentences; "" if no other server has it."""
    owners = [(peer, row) for peer in read_peers() if (row := peer.find_flag(flag)) and flag.startswith("-")]
    if not owners:
        return ""
    peer, row = owners[0]
    titles = [other.title for other, other_row in owners if other_row.counterpart == row.counterpart]
    whose = " and ".join([", ".join(titles[:-1]), titles[-1]] if len(titles) > 1 else titles)
    spelled = "" if flag == row.name else f" {row.name}"
    return (
        f"It is {whose}'s{spelled}: {describe_counterpart(row)}. "
        f"`parley migrate {peer.name} -- FLAGS` translates a whole command."
    )
