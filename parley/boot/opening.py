"""The first lines that a server prints: its models, and the addresses of its APIs."""

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
    """The first lines: known before anything is loaded. ``surfaces``: every API with the URL that it is at; ``grpc``:
    addresses for that."""
    lines = [
        f"parley {__version__}",
        *(f"  model    {', '.join(names)} (on {settings.device})" for names, settings, _ in offers),
    ]
    if member := options.role not in ("mixed", "none"):  # whose APIs clients see at a coordinator
        lines.append(f"  role     {options.role}, for coordinators at {root}")
    places = [] if member else [(dialect.title, url + dialect.base) for dialect, url in surfaces]
    places += [*(("gRPC", place) for place in grpc), ("health", f"{root}/health/ready")]
    wide = max(8, *(len(title) for title, _ in places))
    lines += [f"  {title:<{wide}} {place}" for title, place in places]
    own = [] if options.port is None else [("", options.host)]
    others = [(each.api, each.host) for each in options.listen + options.grpc if not each.tls or not each.tls.clients]
    public = [(api, host) for api, host in own + others if not is_loopback(host)]
    ordered = options.role != "mixed"  # by whoever may
    if public and ordered and not options.cluster_secret:
        lines.append(warning(public, "may act for the cluster; --cluster-secret would name those who may"))
        return "\n".join(lines)
    if ordered:  # who knows the secret; planes take no orders
        public = [(api, host) for api, host in public if api in PLANES]
    if public and not options.api_keys:
        lines.append(warning(public, "may use this server; --api-key would ask for a key"))
    return "\n".join(lines)
