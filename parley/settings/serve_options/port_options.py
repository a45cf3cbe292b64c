"""Options of ``parley serve`` about ports: addresses, encryption, and the limits of connections and bodies."""

from __future__ import annotations

from parley.settings.option_kinds import (
    OptionKind,
    duration_kind,
    endpoint_kind,
    integer_kind,
    parse_socket_path,
    proxy_kind,
    root_path_kind,
    size_kind,
    switch_kind,
    text_kind,
)
from parley.settings.options import Option

PORT_OPTIONS: list[Option] = [
    Option(
        "tls-cert",
        text_kind("FILE"),
        "Certificate (PEM, with its chain) of all ports, gRPC included; they then accept only TLS. It is read again "
        "when it changes, and at SIGHUP.",
        section="server",
        unset_text="no encryption",
        configurable=True,
    ),
    Option("tls-key", text_kind("FILE"), "Key of that certificate (PEM).", section="server", configurable=True),
    Option(
        "tls-key-password-file",
        text_kind("FILE"),
        "File with the key's password; without it, an encrypted key is asked for at the terminal. Not for gRPC.",
        section="server",
        configurable=True,
    ),
    Option(
        "tls-client-ca",
        text_kind("FILE"),
        "CA certificates (PEM). Every client, probes and metrics scrapers included, must present a certificate that "
        "one of them has signed.",
        section="server",
        unset_text="clients need no certificate",
        configurable=True,
    ),
    Option("host", text_kind("ADDRESS"), "Address to listen on.", "127.0.0.1", section="server", configurable=True),
    Option(
        "port",
        integer_kind(0, 65_535, "PORT"),
        "Port to listen on; 0 takes a free one.",
        8000,
        section="server",
        configurable=True,
    ),
    Option(
        "listen",
        endpoint_kind(),
        "An additional port that serves one API (a prefix that `parley routes` lists, without its slash) at the root, "
        "like the original server; port 0 takes a free one.",
        section="server",
        repeatable=True,
        configurable=True,
    ),
    Option(
        "uds",
        OptionKind("PATH", parse_socket_path),
        "Listen on a Unix socket instead of --host and --port. For one API: `--listen NAME=unix:PATH`.",
        section="server",
        configurable=True,
    ),
    Option(
        "root-path",
        root_path_kind(),
        "Path below which a proxy shows this server, whether or not the proxy removes it from requests.",
        section="server",
        configurable=True,
    ),
    Option(
        "trusted-proxy",
        proxy_kind(),
        "Proxies whose headers Forwarded, X-Forwarded-For and X-Forwarded-Proto say who the client is: a network, or "
        "`unix` for those at a Unix socket. Such headers of others are ignored.",
        section="server",
        repeatable=True,
        configurable=True,
    ),
    Option(
        "metrics-port",
        integer_kind(0, 65_535, "PORT"),
        "Port for /metrics alone, on the same address; other ports then have no /metrics. 0 takes a free one.",
        section="server",
        configurable=True,
    ),
    Option(
        "admin-port",
        integer_kind(0, 65_535, "PORT"),
        "Port for the routes that change the server, on 127.0.0.1 unless --admin-host says otherwise; other ports then "
        "do not have them. 0 takes a free one.",
        section="server",
        configurable=True,
    ),
    Option(
        "admin-host",
        text_kind("ADDRESS"),
        "Address of --admin-port.",
        "127.0.0.1",
        section="server",
        configurable=True,
    ),
    Option(
        "grpc-port",
        integer_kind(0, 65_535, "PORT"),
        "Port for Triton's API over gRPC, on the same address; needs `pip install 'parley-llm[grpc]'`. For another "
        "address: `--listen grpc=HOST:PORT`.",
        section="server",
        unset_text="none",
        configurable=True,
    ),
    Option(
        "api-processes",
        integer_kind(1, 64),
        "Processes that read requests and write answers, on the same ports and engines; the main process then does "
        "not. One writes some 30,000 tokens/s.",
        1,
        section="server",
        configurable=True,
    ),
    Option(
        "max-connections",
        integer_kind(1),
        "Connections of clients over HTTP, and as many over gRPC; further ones replace idle ones, or get 429.",
        section="server",
        unset_text="as many as `ulimit -n` allows",
        configurable=True,
    ),
    Option(
        "header-timeout",
        duration_kind(0.001),
        "Limit for a request's headers, and for the handshakes of TLS and gRPC.",
        15.0,
        section="server",
        configurable=True,
    ),
    Option(
        "idle-timeout",
        duration_kind(0.001),
        "How long a connection without a request is kept open, over HTTP and gRPC.",
        75.0,
        section="server",
        configurable=True,
    ),
    Option(
        "http2",
        switch_kind(),
        "Speak HTTP/2 with clients that offer it: over TLS, and without TLS to those that begin with it; needs "
        "`pip install 'parley-llm[http2]'`.",
        True,
        section="server",
        configurable=True,
    ),
    Option("body-limit", size_kind(1024), "Largest request body.", 32 << 20, section="server", configurable=True),
    Option(
        "body-memory",
        size_kind(1024),
        "Memory for the bodies of requests that are still arriving or being read; above it they get 429.",
        256 << 20,
        section="server",
        configurable=True,
    ),
    Option(
        "body-rate",
        size_kind(1),
        "Bytes per second that an unfinished body has to bring; a slower one gets 408.",
        1024,
        section="server",
        configurable=True,
    ),
    Option(
        "cors-origin",
        text_kind("ORIGIN"),
        "Web origin that may call the server; * allows all.",
        section="server",
        repeatable=True,
        configurable=True,
    ),
    Option(
        "allow-host",
        text_kind("NAME"),
        "Further host name to answer to, besides those of this machine, while listening on this machine only.",
        section="server",
        repeatable=True,
        configurable=True,
    ),
    Option(
        "ping",
        duration_kind(),
        "Silence in a stream after which a comment keeps the connection open.",
        section="server",
        unset_text="never",
        configurable=True,
    ),
]
