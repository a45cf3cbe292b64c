"""Sealed reasoning: what comes back is what was sealed, for the same tenant and key only."""

import pytest

from parley.dialects.reasoning_seal import ReasoningSeal
from parley.serving.server_options import ServerOptions

DATA = "First, 2 + 2.\n\u2713".encode()


def test_sealed_text_can_be_opened():
    seal = ReasoningSeal()
    text = seal.seal("tenant", DATA)
    assert text.isascii() and seal.open("tenant", text) == DATA
    assert seal.seal("tenant", DATA) == text  # prefill and decode instances render the same bytes


def test_servers_with_one_secret_open_each_others_seals():
    text = ReasoningSeal("cluster secret").seal("", DATA)
    assert ReasoningSeal("cluster secret").open("", text) == DATA
    for other in (ReasoningSeal("another secret"), ReasoningSeal()):
        with pytest.raises(ValueError, match="not sealed by this server"):
            other.open("", text)


def test_prefill_and_decode_instances_open_each_others_seals_without_a_secret():
    seals = [ReasoningSeal(ServerOptions(role=role, peer_port=0).seal_secret) for role in ("prefill", "decode")]
    assert seals[1].open("", seals[0].seal("", DATA)) == DATA
    assert ServerOptions().seal_secret == "" and ServerOptions(cluster_secret="s", peer_port=0).seal_secret == "s"


def test_refuses_the_seal_of_another_tenant():
    seal = ReasoningSeal()
    for owner, reader in (("a", "b"), ("a", ""), ("", "a")):
        with pytest.raises(ValueError, match="this tenant"):
            seal.open(reader, seal.seal(owner, DATA))


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "",
        lambda text: "AAAA",
        lambda text: text[:-4],
        lambda text: "é",
        lambda text: text[::-1],
        lambda text: text + "AAAA",
        lambda text: "*" + text,
    ],
)
def test_refuses_an_altered_text(change):  # fmt: skip
    seal = ReasoningSeal("s")
    text = seal.seal("", DATA)
    altered = change(text)
    assert altered != text
    with pytest.raises(ValueError):
        seal.open("", altered)
