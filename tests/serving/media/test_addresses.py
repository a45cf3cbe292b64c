"""How URLs are read: no notation of an address passes for a name, and every parser reads the rebuilt URL alike."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from urllib.parse import urlsplit

import httpcore2
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from parley.serving.media.addresses import MAX_LOOKUPS, HostResolver, is_public, parse_fetch_url

PRIVATE_NETWORKS = ("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16", "100.64.0.0/10")
PRIVATE = st.sampled_from(PRIVATE_NETWORKS).flatmap(lambda network: st.ip_addresses(network=network))
FULLWIDTH = str.maketrans({chr(0x30 + digit): chr(0xFF10 + digit) for digit in range(10)})


def ipv4_notations(address: ipaddress.IPv4Address) -> list[str]:
    """Return what inet_aton, browsers or IDNA read as this address, and IPv6 addresses that wrap it."""
    number, parts = int(address), list(address.packed)
    last_two, last_three = number & 0xFFFF, number & 0xFFFFFF
    high, low = number >> 16, number & 0xFFFF
    return [
        str(number),
        hex(number),
        f"0{number:o}",
        f"{parts[0]}.{last_three}",
        f"{parts[0]}.{parts[1]}.{last_two}",
        ".".join(f"0{part:o}" for part in parts),
        ".".join(map(hex, parts)),
        f"{hex(parts[0])}.{parts[1]}.0{parts[2]:o}.{parts[3]}",
        ".".join(f"{part:03}" for part in parts),
        str(address),
        f"{address}.",
        str(address).translate(FULLWIDTH),
        str(address).replace(".", "\u3002"),
        "".join(f"%{ord(letter):02x}" for letter in str(address)),
        f"[::ffff:{address}]",
        f"[0:0:0:0:0:FFFF:{high:x}:{low:x}]",
        f"[::{address}]",
        f"[64:ff9b::{address}]",
        f"[64:ff9b:1::{address}]",
        f"[2002:{high:x}:{low:x}::1]",
        f"[2001:0:{high:x}:{low:x}::]",
        f"[2001::{high ^ 0xFFFF:x}:{low ^ 0xFFFF:x}]",
        f"[fe80::{address}]",
    ]


@given(PRIVATE, st.data())
def test_no_notation_of_a_private_address_is_public(address, data):
    notation = data.draw(st.sampled_from(ipv4_notations(address)))
    decoration = data.draw(st.sampled_from(("{}", "{}:80", "user@{}", "good.example@{}", "{}\\@good.example", "{}#@a")))
    try:
        parsed = parse_fetch_url(f"http://{decoration.format(notation)}/")
    except ValueError:
        return
    assert not is_public(ipaddress.ip_address(parsed.host))  # an address, and no name


URL_PIECES = st.sampled_from(
    [
        *(
            "http://",
            "HTTPS://",
            "//",
            "/",
            "\\",
            "@",
            ":",
            ":80",
            ":443",
            ":0",
            "?",
            "#",
            "%2e",
            "%00",
            "..",
            ".",
            "-",
        ),
        *("a", "B", "example", "xn--a", "127.0.0.1", "0x7f", "017700000001", "[::1]", "[", "]", "_", " ", "\t", "\r\n"),
        *("\0", "\u00fc", "\u3002", "\uff0e", "\u00ad", "\u200d", "\u2044", "\u2100", "\ud800", "\U0001f600", "=", "&"),
    ]
)


@given(st.lists(URL_PIECES, max_size=12).map("".join) | st.text(max_size=30), st.booleans())
@example("example.com/\u2100", True)
@example("a.example:80#@127.0.0.1/", True)
@example("[v1.a]/", True)
@example("a?", True)
@example("a/b??", True)
def test_every_parser_reads_a_rebuilt_url_alike(text, has_scheme):
    try:
        parsed = parse_fetch_url(f"http://{text}" if has_scheme else text)
    except ValueError:
        return
    assert parse_fetch_url(parsed.url) == parsed
    split, core = urlsplit(parsed.url), httpcore2.URL(parsed.url)
    assert parsed.url.isascii() and parsed.url.isprintable() and not {*parsed.url} & {*' "<>\\^`{|}'}
    assert split.username is None and split.password is None and not split.fragment
    assert split.hostname == parsed.host == core.host.decode().strip("[]")
    assert core.target.decode() == parsed.target
    assert (split.port or parsed.port) == parsed.port == core.origin.port
    if ":" not in parsed.host:
        try:
            packed = socket.inet_aton(parsed.host)
        except OSError:
            return
        assert parsed.host == str(ipaddress.IPv4Address(packed))  # what is no plain address is not read as one


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "93.184.215.14", "2606:4700::1111", "64:ff9b::808:808", "::ffff:8.8.8.8"]
)
def test_public_addresses_are_public(address):
    assert is_public(ipaddress.ip_address(address))


@given(st.ip_addresses(v=6))
def test_ipv6_addresses_outside_of_global_unicast_are_not_public(address):
    if address.packed[0] >> 5 != 1 and not address.ipv4_mapped and address not in ipaddress.ip_network("64:ff9b::/96"):
        assert not is_public(address)


async def test_looks_up_a_host():
    assert ipaddress.ip_address("127.0.0.1") in await HostResolver().resolve_host("localhost", 80)
    with pytest.raises(OSError):
        await HostResolver().resolve_host("missing.invalid", 80)


async def test_abandoned_lookup_still_counts_against_the_limit(monkeypatch):
    loop = asyncio.get_running_loop()
    answered = asyncio.Event()

    async def look_up(host, *_, **__):
        if host == "slow.example":
            await answered.wait()
            raise OSError("no such name")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("8.8.8.8", 80))]

    monkeypatch.setattr(loop, "getaddrinfo", look_up)
    resolver = HostResolver()
    slow = [asyncio.create_task(resolver.resolve_host("slow.example", 80)) for _ in range(MAX_LOOKUPS)]
    await asyncio.sleep(0)
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)
    quick = asyncio.create_task(resolver.resolve_host("quick.example", 80))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not quick.done()
    answered.set()
    assert await quick == [ipaddress.ip_address("8.8.8.8")]
