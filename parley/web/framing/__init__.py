"""Request heads and timers of HTTP/1.1 and HTTP/2, and the framing of HTTP/2."""

from importlib.util import find_spec

HAS_HTTP2 = find_spec("h2") is not None  # an extra; without it, all ports speak HTTP/1.1
