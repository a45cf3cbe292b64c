"""The first lines that a server prints: its models, the addresses of its APIs, and warnings about open ports."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

from parley.dialects.dialect import Dialect
from parley.serving.server_options import ListenAddress, OfferedModel, ServerOptions
from parley.version import __version__
from parley.web.auth import is_loopback
from parley.web.banner import open_port_warning


def opening_lines(
    options: ServerOptions,
    offered_models: Iterable[OfferedModel],
    root_url: str,
    api_urls: Iterable[tuple[Dialect, str]],
    grpc: Iterable[str] = (),
    planes: Iterable[tuple[str, str]] = (),
) -> str:
    """Return the start-up lines, which are known before anything is loaded.

    ``api_urls``: each API with its URL; ``grpc``: addresses of the gRPC ports; ``planes``: titles and URLs of ports
    that have some routes of the server alone.
    """
    lines = [
        f"parley {__version__}",
        *(
            f"  model    {', '.join(names)} (on {'vLLM' if engine == 'vllm' else settings.device})"
            for names, settings, engine, _ in offered_models
        ),
    ]
    if options.api_processes > 1:
        lines.append(f"  clients  {options.api_processes} API processes, which share the ports")
    if is_member := options.role not in ("mixed", "none"):  # clients reach its APIs through a coordinator
        lines.append(f"  role     {options.role}, for coordinators at {root_url}")
    endpoints = [] if is_member else [(dialect.title, url + dialect.base_path) for dialect, url in api_urls]
    if options.ui and not is_member and options.port is not None:
        endpoints.append(("web page", f"{root_url}/"))
    endpoints += [*(("gRPC", place) for place in grpc), *planes, ("health", f"{root_url}/health/ready")]
    places = places_by_title(endpoints)
    title_width = max(8, *map(len, places))
    lines += [f"  {title:<{title_width}} {place}" for title, place in places.items()]
    ports = [] if options.port is None else [ListenAddress("", options.host, options.port)]
    public = [
        (address.api, address.host)
        for address in (*ports, *options.listen, *options.grpc)
        if not is_loopback(address.host)
        and not ((tls := address.tls or options.tls) is not None and tls.client_authorities)
    ]
    if public and not (options.has_keys or options.cluster_secret or options.cluster_networks):
        lines.append(open_port_warning(public, "may use this server; --api-key restricts this to clients with a key"))
    return "\n".join(lines)


def places_by_title(endpoints: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the places of each title as one text, divided by blanks: of URLs with the same port only the paths."""
    urls: dict[str, list[str]] = {}
    for title, place in endpoints:
        urls.setdefault(title, []).append(place)
    return {
        title: "  ".join([first, *(_shorten(url, first) for url in others)]) for title, (first, *others) in urls.items()
    }


def _shorten(place: str, first: str) -> str:
    """Return the path of a URL if it has the scheme, host and port of ``first``, else the place as it is."""
    url, first_url = urlsplit(place), urlsplit(first)
    has_same_port = url.netloc and (url.scheme, url.netloc) == (first_url.scheme, first_url.netloc)
    return (url.path or "/") if has_same_port else place
