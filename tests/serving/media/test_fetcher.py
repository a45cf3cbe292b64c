"""Fetching over real sockets: what is allowed, what comes back, and how every refusal is reported."""

from __future__ import annotations

import asyncio
import gzip
import ipaddress
import os
import random
import ssl

import pytest
from support.certificates import make_authority, make_certificate
from support.media_host import MediaHost, http_answer, redirect_to, run_media_host

from parley.errors import BadMedia, Overloaded
from parley.serving.media import fetcher as fetcher_module
from parley.serving.media import pinned_connection
from parley.serving.media.fetcher import MediaFetcher
from parley.serving.server_options import MediaOptions
from parley.settings.media_hosts import parse_media_host

FIELD = "messages[0].content[1].image_url.url"
LOCALHOST = ipaddress.ip_address("127.0.0.1")


class Resolver:
    """Answers lookups from a list for each host, the last of which stays; counts them."""

    def __init__(self, **answers: list[str]):
        self.answers = {name.replace("_", "."): list(texts) for name, texts in answers.items()}
        self.lookups: list[str] = []

    async def __call__(self, host: str, port: int):
        self.lookups.append(host)
        if host not in self.answers:
            raise OSError("Name or service not known")
        texts = self.answers[host]
        return [ipaddress.ip_address(text) for text in (texts.pop(0) if len(texts) > 1 else texts[0]).split()]


def make_fetcher(*entries: str, resolver: Resolver | None = None, context=None, **options) -> MediaFetcher:
    hosts = tuple(parse_media_host(entry) for entry in entries)
    return MediaFetcher(MediaOptions(hosts=hosts, **options), resolver, context)


@pytest.fixture
async def host():
    async with run_media_host() as media_host:
        yield media_host


async def refusal(fetcher: MediaFetcher, url: str) -> BadMedia:
    """Return the error of a fetch, after checking what holds for all of them."""
    with pytest.raises(BadMedia) as raised:
        await fetcher.fetch(url, "image", FIELD)
    error = raised.value
    assert error.kind == "image" and error.field == FIELD and error.message.endswith(".")
    sentence = error.message.replace(repr(error.detail.get("host")), "")
    assert "127." not in sentence and "http" not in sentence.replace("http://HOST", "").replace("https://HOST", "")
    assert "Errno" not in sentence
    return error


async def test_fetches_from_an_internal_host(host: MediaHost):
    host.answers["/a.png?size=2&name=%C3%BC"] = http_answer(b"image")
    fetcher = make_fetcher(f"internal:media.test:{host.port}", resolver=Resolver(media_test=["127.0.0.1"]))
    url = f"HTTP://Media.Test.:{host.port}/a.png?size=2&name=ü#top"
    assert await fetcher.fetch(url, "image", FIELD) == b"image"
    lines = host.heads[0].decode().split("\r\n")
    assert lines[:2] == ["GET /a.png?size=2&name=%C3%BC HTTP/1.1", f"Host: media.test:{host.port}"]
    assert sorted(line.partition(":")[0] for line in lines[2:] if line) == [
        "Accept",
        "Accept-Encoding",
        "Connection",
        "User-Agent",
    ]
    assert "Accept-Encoding: identity" in lines


async def test_ignores_proxies_of_the_environment(host: MediaHost, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    host.answers["/"] = http_answer(b"direct")
    fetcher = make_fetcher(f"127.0.0.1:{host.port}")
    assert await fetcher.fetch(f"http://127.0.0.1:{host.port}", "image", FIELD) == b"direct"


async def test_fetches_nothing_without_hosts(host: MediaHost):
    error = await refusal(make_fetcher(), f"http://127.0.0.1:{host.port}/")
    assert error.reason == "forbidden_address" and error.detail == {"host": "127.0.0.1", "allowed": "[]"}
    assert not host.heads


@pytest.mark.parametrize(
    "url",
    [
        "http://other.test/",
        "http://media.test.evil.test/",
        "http://evilmedia.test/",
        "http://media.test:8080/",
        "http://sub.deep.media.test:81/",
    ],
)
async def test_refuses_hosts_and_ports_that_are_not_listed(url: str):
    resolver = Resolver()
    error = await refusal(make_fetcher("media.test", "*.media.test", "internal:b:9000", resolver=resolver), url)
    assert error.reason == "forbidden_address" and error.detail["allowed"] == "['media.test', '*.media.test']"
    assert not resolver.lookups


PRIVATE_ADDRESSES = [
    "127.0.0.1",
    "127.8.9.1",
    "0.0.0.0",
    "10.0.0.5",
    "172.16.3.4",
    "192.168.1.1",
    "100.64.0.1",
    "169.254.169.254",
    "192.0.0.8",
    "192.0.2.1",
    "198.18.0.1",
    "224.0.0.1",
    "239.255.255.250",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::127.0.0.1",
    "::ffff:127.0.0.1",
    "::ffff:169.254.169.254",
    "64:ff9b::7f00:1",
    "64:ff9b::a9fe:a9fe",
    "64:ff9b:1::a00:1",
    "2002:7f00:1::",
    "2002:808:808::",
    "2001:0:4136:e378:8000:63bf:80ff:fffe",
    "fe80::1",
    "fc00::1",
    "fd00:ec2::254",
    "fec0::1",
    "ff02::1",
    "2001:db8::1",
    "100::1",
    "5f00::1",
]


@pytest.mark.parametrize("address", PRIVATE_ADDRESSES)
async def test_refuses_a_host_with_an_address_that_is_not_public(address: str):
    fetcher = make_fetcher("any-public", resolver=Resolver(media_test=[f"8.8.8.8 {address}"]))
    assert (await refusal(fetcher, "http://media.test/")).reason == "forbidden_address"


@pytest.mark.parametrize("address", PRIVATE_ADDRESSES)
async def test_refuses_a_url_with_an_address_that_is_not_public(address: str):
    literal = f"[{address}]" if ":" in address else address
    error = await refusal(make_fetcher("any-public"), f"http://{literal}/")
    assert error.reason == "forbidden_address"


@pytest.mark.parametrize(
    "authority",
    [
        "2130706433",
        "0x7f000001",
        "017700000001",
        "0177.0.0.1",
        "0x7f.0.0.1",
        "127.1",
        "127.0.1",
        "0",
        "[::1%25lo]",
        "[::1%lo]",
        "%31%32%37.0.0.1",
        "good.test@127.0.0.1",
        "user:password@127.0.0.1",
        "good.test:80@127.0.0.1",
        "127.0.0.1:99999",
        "127.0.0.1:0",
        "127.0.0.1:",
        "127.0.0.1:80:80",
        "good.test\\@127.0.0.1",
        "good.test\\.evil.test",
        "good.test\t",
        "good\u200b.test",
        "good test",
        "good..test",
        "[127.0.0.1]",
        "::1",
        "",
    ],
)
async def test_refuses_an_authority_that_parsers_disagree_on(authority: str):
    assert (await refusal(make_fetcher("any-public"), f"http://{authority}/")).reason == "bad_address"


@pytest.mark.parametrize(
    "host_name", ["\uff11\uff12\uff17.\uff10.0.1", "127\u30020\u30020\u30021", "\u2460\u2461\u2466.0.0.1"]
)
async def test_reads_digits_of_other_scripts_as_the_address_that_they_mean(host_name: str):
    error = await refusal(make_fetcher("any-public"), f"http://{host_name}/")
    assert error.reason == "forbidden_address" and error.detail["host"] == "127.0.0.1"


@pytest.mark.parametrize(
    "url",
    [
        "ftp://media.test/",
        "file:///etc/passwd",
        "gopher://media.test/",
        "//media.test/",
        "http:media.test",
        "",
        "http://media.test/a\\b",
        "\ud800",
    ],
)
async def test_refuses_what_is_no_http_url(url: str):
    assert (await refusal(make_fetcher("any-public"), url)).reason == "bad_address"


async def test_refuses_a_long_url():
    error = await refusal(make_fetcher("any-public"), "http://media.test/" + "a" * 4096)
    assert error.reason == "bad_address" and error.detail == {"size": 4114, "limit": 4096}


async def test_connects_to_the_address_that_was_checked(host: MediaHost):
    """A name that answers otherwise at the second lookup is looked up once, for each redirect again."""
    host.answers["/again"] = redirect_to("/")
    port = host.port
    resolver = Resolver(media_test=["93.184.215.14", "127.0.0.1"])
    fetcher = make_fetcher(f"media.test:{port}", resolver=resolver)
    connected = []

    async def refuse_connection(_self, remote, _port, *_):
        connected.append(remote)
        raise pinned_connection.httpcore2.ConnectError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pinned_connection.httpcore2.AnyIOBackend, "connect_tcp", refuse_connection)
        assert (await refusal(fetcher, f"http://media.test:{port}/again")).reason == "unreachable"
    assert connected == ["93.184.215.14"] and resolver.lookups == ["media.test"]
    assert (await refusal(fetcher, f"http://media.test:{port}/again")).reason == "forbidden_address"
    assert not host.heads


async def test_tries_the_next_address_of_a_host(host: MediaHost):
    host.answers["/"] = http_answer(b"second")
    resolver = Resolver(media_test=["127.0.0.2 127.0.0.1"])  # the host listens on the second one only
    fetcher = make_fetcher(f"internal:media.test:{host.port}", resolver=resolver)
    assert await fetcher.fetch(f"http://media.test:{host.port}/", "image", FIELD) == b"second"


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "303 See Other", "307 Temporary", "308 Permanent"])
async def test_follows_redirects(host: MediaHost, status: str):
    host.answers["/a/b"] = redirect_to("../c", status)
    host.answers["/c"] = redirect_to(f"http://127.0.0.1:{host.port}/d", status)
    host.answers["/d"] = redirect_to(f"//127.0.0.1:{host.port}/e", status)
    host.answers["/e"] = http_answer(b"moved")
    fetcher = make_fetcher(f"127.0.0.1:{host.port}")
    assert await fetcher.fetch(f"http://127.0.0.1:{host.port}/a/b", "image", FIELD) == b"moved"
    host.answers["/e"] = redirect_to("/f")
    error = await refusal(fetcher, f"http://127.0.0.1:{host.port}/a/b")
    assert error.reason == "unreachable" and "3 redirects" in error.message


@pytest.mark.parametrize(
    ("location", "reason"),
    [
        ("http://169.254.169.254/latest/meta-data", "forbidden_address"),
        ("http://[::ffff:169.254.169.254]/", "forbidden_address"),
        ("http://localhost/", "forbidden_address"),
        ("//10.0.0.1/", "forbidden_address"),
        ("http://0xa9fea9fe/", "unreachable"),
        ("http://2852039166/", "unreachable"),
        ("http://media.test@127.0.0.1/", "unreachable"),
        ("http://[", "unreachable"),
        ("file:///etc/passwd", "unreachable"),
        ("gopher://127.0.0.1:70/", "unreachable"),
    ],
)
async def test_checks_where_a_redirect_leads(host: MediaHost, location: str, reason: str):
    host.answers["/"] = redirect_to(location)
    resolver = Resolver(media_test=["127.0.0.1"], localhost=["127.0.0.1"])
    fetcher = make_fetcher("any-public", f"internal:media.test:{host.port}", resolver=resolver)
    error = await refusal(fetcher, f"http://media.test:{host.port}/")
    assert error.reason == reason
    assert error.detail["host"] == "media.test" and "169" not in error.message  # not where it leads
    assert len(host.heads) == 1


@pytest.mark.parametrize("status", ["404 Not Found", "500 Oops", "204 No Content", "206 Partial Content", "304 Same"])
async def test_takes_no_other_status_than_200(host: MediaHost, status: str):
    host.answers["/"] = f"HTTP/1.1 {status}\r\nConnection: close\r\n\r\n".encode()
    error = await refusal(make_fetcher(f"127.0.0.1:{host.port}"), f"http://127.0.0.1:{host.port}/")
    assert error.reason == "unreachable" and error.detail["status"] == int(status[:3])


BROKEN_ANSWERS = {
    "nothing": b"",
    "no HTTP": b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
    "negative length": b"HTTP/1.1 200 OK\r\nContent-Length: -3\r\n\r\nabcd",
    "bad chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabcd",
    "cut chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n8\r\nabcd",
    "cut body": b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabcd",
    "endless line": b"HTTP/1.1 200 OK\r\nX: " + b"a" * 300_000,
    "endless headers": b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 50_000,
    "endless interim answers": b"HTTP/1.1 103 Early Hints\r\n\r\n" * 10_000 + http_answer(b"late"),
    "upgrade": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
    "tiny chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 100_000 + b"0\r\n\r\n",
    "compressed": http_answer(gzip.compress(b"image"), "Content-Encoding: gzip"),
}


@pytest.mark.parametrize("case", BROKEN_ANSWERS)
async def test_refuses_a_broken_answer(host: MediaHost, case: str):
    host.answers["/"] = BROKEN_ANSWERS[case]
    error = await refusal(make_fetcher(f"127.0.0.1:{host.port}"), f"http://127.0.0.1:{host.port}/")
    assert error.reason == "unreachable"
    await host.wait_until_idle()


GOOD_ANSWERS = (
    http_answer(b"an image" * 20, "Content-Type: image/png"),
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nan i\r\n4\r\nmage\r\n0\r\nTrailer: a\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n" + http_answer(b"late"),
    redirect_to("http://127.0.0.1/elsewhere?a=b#c"),
)
FUZZED_ANSWERS = 5000 if os.environ.get("PARLEY_NIGHTLY") else 200


def damage_bytes(answer: bytes, draw: random.Random) -> bytes:
    """Change, remove, repeat and insert some bytes."""
    data = bytearray(answer)
    for _ in range(draw.randint(1, 6)):
        start = draw.randrange(len(data) + 1)
        end = min(len(data), start + draw.choice((0, 1, 1, 4, 40)))
        data[start:end] = draw.choice((b"", data[start:end] * 2, draw.randbytes(2), b"\r\n", b"\0", b": ", b"ffffffff"))
    return bytes(data)


async def test_every_answer_is_a_file_or_an_error(host: MediaHost):
    fetcher = make_fetcher(f"127.0.0.1:{host.port}")
    draw = random.Random(5)
    outcomes = set()
    for _ in range(FUZZED_ANSWERS):
        host.answers["/"] = damage_bytes(draw.choice(GOOD_ANSWERS), draw)
        try:
            await fetcher.fetch(f"http://127.0.0.1:{host.port}/", "image", FIELD)
            outcomes.add("file")
        except BadMedia as error:
            outcomes.add(error.reason)
    assert outcomes == {"file", "unreachable", "forbidden_address"}
    await host.wait_until_idle()
    assert fetcher.budget.held_bytes == 0


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\nContent-Encoding: identity\r\n\r\n",
        b"HTTP/1.0 200 OK\r\n\r\n",
        b"HTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n",
    ],
)
async def test_reads_every_form_of_body(host: MediaHost, head: bytes):
    host.answers["/"] = head + b"an image"
    fetcher = make_fetcher(f"127.0.0.1:{host.port}")
    assert await fetcher.fetch(f"http://127.0.0.1:{host.port}/", "image", FIELD) == b"an image"


async def test_reads_a_chunked_body(host: MediaHost):
    host.answers["/"] = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nan i\r\n4\r\nmage\r\n0\r\n\r\n"
    fetcher = make_fetcher(f"127.0.0.1:{host.port}")
    assert await fetcher.fetch(f"http://127.0.0.1:{host.port}/", "image", FIELD) == b"an image"


async def test_refuses_an_announced_size_before_reading(host: MediaHost):
    host.answers["/"] = b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n"
    fetcher = make_fetcher(f"127.0.0.1:{host.port}", sizes={"image": 1000})
    error = await refusal(fetcher, f"http://127.0.0.1:{host.port}/")
    assert error.reason == "too_large"
    assert error.detail == {"host": "127.0.0.1", "limit": 1000, "size": 99999999999}
    assert error.message == "The image from '127.0.0.1' is larger than the limit of 1000 bytes."


async def write_endlessly(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        writer.write(b"a" * 10_000)
        await writer.drain()


async def test_ends_an_endless_body_at_the_limit(host: MediaHost):
    host.answers["/"] = write_endlessly
    fetcher = make_fetcher(f"127.0.0.1:{host.port}", sizes={"image": 1 << 20})
    error = await refusal(fetcher, f"http://127.0.0.1:{host.port}/")
    assert error.reason == "too_large" and error.detail["limit"] == 1 << 20
    await host.wait_until_idle()
    assert fetcher.budget.held_bytes == 0


async def say_nothing(_writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


async def write_slowly(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5000000\r\n\r\n")
    while True:
        writer.write(b"a")
        await writer.drain()
        await asyncio.sleep(0.01)


async def test_ends_the_fetch_from_a_silent_host(host: MediaHost, monkeypatch):
    monkeypatch.setattr(fetcher_module, "FETCH_SECONDS", 0.2)
    host.answers["/"] = say_nothing
    error = await refusal(make_fetcher(f"127.0.0.1:{host.port}"), f"http://127.0.0.1:{host.port}/")
    assert error.reason == "unreachable" and "too slow" in error.message


async def test_redirects_share_the_time_of_a_fetch(host: MediaHost, monkeypatch):
    async def redirect_late(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.3)
        writer.write(redirect_to("/next"))

    host.answers = {"/": redirect_late, "/next": redirect_late}
    monkeypatch.setattr(fetcher_module, "FETCH_SECONDS", 0.5)
    error = await refusal(make_fetcher(f"127.0.0.1:{host.port}"), f"http://127.0.0.1:{host.port}/")
    assert error.reason == "unreachable" and "too slow" in error.message


async def test_ends_the_fetch_of_a_slow_body(host: MediaHost, monkeypatch):
    monkeypatch.setattr(pinned_connection, "RATE_SECONDS", 0.2)
    host.answers["/"] = write_slowly
    error = await refusal(make_fetcher(f"127.0.0.1:{host.port}"), f"http://127.0.0.1:{host.port}/")
    assert error.reason == "unreachable" and "too slow" in error.message
    await host.wait_until_idle()


async def test_ends_a_slow_lookup(monkeypatch):
    monkeypatch.setattr(fetcher_module, "LOOKUP_SECONDS", 0.1)

    async def resolve(_host: str, _port: int):
        await asyncio.sleep(60)

    fetcher = MediaFetcher(MediaOptions(hosts=(parse_media_host("media.test"),)), resolve)
    assert (await refusal(fetcher, "http://media.test/")).reason == "unreachable"


async def test_reports_a_host_that_does_not_exist():
    error = await refusal(make_fetcher("any-public", resolver=Resolver()), "http://media.test/")
    assert error.reason == "unreachable" and error.detail == {"host": "media.test"}


async def test_a_cancelled_fetch_leaves_no_connection(host: MediaHost):
    host.answers["/"] = say_nothing
    fetcher = make_fetcher(f"127.0.0.1:{host.port}")
    task = asyncio.create_task(fetcher.fetch(f"http://127.0.0.1:{host.port}/", "image", FIELD))
    while not host.heads:
        await asyncio.sleep(0.01)
    host.answers["/"] = http_answer(b"next")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await host.wait_until_idle()
    assert await fetcher.fetch(f"http://127.0.0.1:{host.port}/", "image", FIELD) == b"next"


async def test_a_request_has_two_connections_to_a_host(host: MediaHost):
    async def answer_late(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.02)
        writer.write(http_answer(b"late"))
        await writer.drain()

    host.answers["/"] = answer_late
    fetcher = make_fetcher(f"127.0.0.1:{host.port}")
    url = f"http://127.0.0.1:{host.port}/"
    shared = fetcher.request_connections()
    answers = await asyncio.gather(*(fetcher.fetch(url, "image", FIELD, shared) for _ in range(8)))
    assert answers == [b"late"] * 8
    assert host.max_connections == 2
    await asyncio.gather(*(fetcher.fetch(url, "image", FIELD) for _ in range(40)))
    assert 2 < host.max_connections <= 16


async def test_an_api_key_leaves_connections_for_others(host: MediaHost):
    host.answers = {"/slow": say_nothing, "/": http_answer(b"quick")}
    url = f"http://127.0.0.1:{host.port}/"
    fetcher = make_fetcher(f"127.0.0.1:{host.port}")
    slow = [
        asyncio.create_task(fetcher.fetch(f"{url}slow", "image", FIELD, fetcher.request_connections("greedy")))
        for _ in range(20)
    ]
    while host.open_connections < 8:
        await asyncio.sleep(0.01)
    assert await fetcher.fetch(url, "image", FIELD, fetcher.request_connections("other")) == b"quick"
    assert host.max_connections == 9
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)


async def test_limits_the_memory_of_what_is_being_fetched(host: MediaHost):
    half_sent, go_on = asyncio.Event(), asyncio.Event()

    async def answer_in_halves(writer: asyncio.StreamWriter) -> None:
        writer.write(http_answer(b"a" * 1000)[:-400])
        half_sent.set()
        await go_on.wait()
        writer.write(b"a" * 400)

    host.answers = {"/halves": answer_in_halves, "/": http_answer(b"a" * 600)}
    url = f"http://127.0.0.1:{host.port}/"
    fetcher = make_fetcher(f"127.0.0.1:{host.port}", memory=1100)
    first = asyncio.create_task(fetcher.fetch(f"{url}halves", "image", FIELD))
    await half_sent.wait()
    while fetcher.budget.held_bytes < 600:
        await asyncio.sleep(0.01)
    with pytest.raises(Overloaded):
        await fetcher.fetch(url, "image", FIELD)
    go_on.set()
    assert await first == b"a" * 1000
    assert fetcher.budget.held_bytes == 0
    assert await fetcher.fetch(url, "image", FIELD) == b"a" * 600


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificates")
    make_authority(folder, "authority")
    make_certificate(folder, "host", "authority")
    return folder


async def test_verifies_certificates(certificates, monkeypatch):
    server_context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server_context.load_cert_chain(certificates / "host.pem", certificates / "host.key")
    names = []
    server_context.sni_callback = lambda _socket, name, _context: names.append(name)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates / "authority.pem"))
    async with run_media_host(server_context) as host:
        host.answers["/"] = http_answer(b"encrypted")
        resolver = Resolver(media_test=["127.0.0.1"], **{"127_0_0_1": ["127.0.0.1"]})
        fetcher = make_fetcher(f"internal:media.test:{host.port}", f"127.0.0.1:{host.port}", resolver=resolver)
        assert await fetcher.fetch(f"https://127.0.0.1:{host.port}/", "image", FIELD) == b"encrypted"
        error = await refusal(fetcher, f"https://media.test:{host.port}/")  # the certificate is for another name
        assert error.reason == "unreachable" and names[-1] == "media.test"
        monkeypatch.delenv("SSL_CERT_FILE")
        stranger = make_fetcher(f"127.0.0.1:{host.port}")
        assert (await refusal(stranger, f"https://127.0.0.1:{host.port}/")).reason == "unreachable"
        assert (await refusal(stranger, f"http://127.0.0.1:{host.port}/")).reason == "unreachable"
        assert len(host.heads) == 1
