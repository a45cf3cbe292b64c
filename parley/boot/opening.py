"""The first lines that a server prints: its models, the addresses of its APIs, and warnings about open ports."""

from __future__ import annotations

from collections.abc import Iterable

from parley.dialects.dialect import Dialect
from parley.dialects.mounts import PLANES
from parley.serving.options import Offer, ServerOptions
from parley.version import __version__
from parley.web.auth import is_loopback
from parley.web.banner import warning


def opening(
    options: ServerOptions,
    offers: Iterable[Offer],
    root: str,
    surfaces: Iterable[tuple[Dialect, str]],
    grpc: Iterable[str] = (),
) -> str:
    """Return the start-up lines, which are known before anything is loaded.

    ``surfaces``: each API with its URL; ``grpc``: addresses of the gRPC ports.
    """
    lines = [
        f"parley {__version__}",
        *(f"  model    {', '.join(names)} (on {settings.device})" for names, settings, _ in offers),
    ]
    if member := options.role not in ("mixed", "none"):  # clients reach its APIs through a coordinator
        lines.append(f"  role     {options.role}, for coordinators at {root}")
    places = [] if member else [(dialect.title, url + dialect.base) for dialect, url in surfaces]
    places += [*(("gRPC", place) for place in grpc), ("health", f"{root}/health/ready")]
    wide = max(8, *(len(title) for title, _ in places))
    lines += [f"  {title:<{wide}} {place}" for title, place in places]
    own = [] if options.port is None else [("", options.host)]
    others = [(each.api, each.host) for each in options.listen + options.grpc if not each.tls or not each.tls.clients]
    public = [(api, host) for api, host in own + others if not is_loopback(host)]
    ordered = options.role != "mixed"  # it takes commands from a coordinator or from anyone who can reach it
    if public and ordered and not options.cluster_secret:
        lines.append(warning(public, "may act for the cluster; --cluster-secret restricts this to its members"))
        return "\n".join(lines)
    if ordered:  # with a secret, only the admin ports are open; they take no commands
        public = [(api, host) for api, host in public if api in PLANES]
    if public and not options.api_keys:
        lines.append(warning(public, "may use this server; --api-key restricts this to clients with a key"))
    return "\n".join(lines)
