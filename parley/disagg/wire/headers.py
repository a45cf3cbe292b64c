"""The PD headers of a request: a coordinator's command to a prefill instance, parsed and checked.

Checks, their order and their error texts are those of MindIE's servers. A coordinator of parley's own identifies itself
by a header and may then send further headers. Knows neither bodies nor the execution of a request.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from parley.dialects.instance_plane import IDENTITY
from parley.disagg.wire.role import Address, Role
from parley.errors import OrderRefused

PORT = 1121  # default port for handovers to an instance
LONGEST = 1024  # characters of a req-id
MISSING = "DMI request must have req-type, req-id, d-target headers"
MISPLACED = "DMI inference requests can be sent only to the prefill node or p_percentage of the flex node == 0"
UNKNOWN = "The server cannot process the inference request due to an unknown status. "
TARGET = "Parameter d-target must be an IPv4 address"
ITSELF = "d-target should not be itself"
SECRET = "The header parley-secret must be the cluster's secret."
RECOMPUTE = "Parameter is-recompute is an optional parameter. When it is set, it must be true or false."

# Headers that only a coordinator may send; so are all that begin with OWN.
ORDERS = frozenset((b"req-id", b"req-type", b"d-target", b"d-port", b"is-recompute"))
OWN = b"parley-"
LOST = OWN + b"lost"  # in an answer to a coordinator: the engine died, so another instance may serve the request
SHORT = OWN + b"short"  # in an answer to a coordinator: the context is too short here, but may suffice elsewhere

HEX = re.compile(r"[0-9a-fA-F]+")
WORD = re.compile(r"[0-9a-zA-Z_-]+")
CLIENT = re.compile(r"[0-9a-zA-Z_-]{1,64}")
NUMBER = re.compile(r"[0-9]{1,15}")


@dataclass(frozen=True, slots=True)
class Order:
    """A coordinator's command to run the prefill stage of one request.

    ``id``: identifies this attempt. ``target``: the instance that continues after the first output; ``here``: that is
    this instance. ``recompute``: the body contains outputs of an earlier attempt.
    The other fields need parley's own coordinator, which sets ``client``, the name of the connection for results.
    ``identity``: the request UUID, 32 hex digits, equal for all attempts; "" for none. ``created``: creation time of
    the answer, in seconds since the epoch. ``given``: number of bytes before the body that are records of earlier
    attempts. ``spent``: seconds since the client's request arrived; time limits count from then.
    """

    id: str
    target: Address
    here: bool
    recompute: bool = False
    client: str = ""
    identity: str = ""
    created: int | None = None
    given: int = 0
    spent: float = 0.0


def extended(headers: Mapping[bytes, bytes]) -> bool:
    """Whether the sender is parley's own coordinator."""
    return b"parley-results" in headers


def preface(headers: Mapping[bytes, bytes]) -> int:
    """Return the number of bytes before the client's body. ``parse_prefill_command`` reports an invalid header."""
    given = headers.get(b"parley-given", b"0").decode("latin-1") if extended(headers) else "0"
    return int(given) if NUMBER.fullmatch(given) else 0


def trusted(headers: Mapping[bytes, bytes], secret: str) -> bool:
    """Whether the sender knows the cluster's secret; True if there is none."""
    return not secret or hmac.compare_digest(headers.get(b"parley-secret", b""), secret.encode())


def member(headers: Mapping[bytes, bytes], secret: str) -> bool:
    """Whether a coordinator sends this on its own behalf, not for a client. Such requests need no API key."""
    return bool(secret) and b"parley-secret" in headers and b"req-id" not in headers and trusted(headers, secret)


def read(headers: Mapping[bytes, bytes], role: Role, own: Address, secret: str = "") -> Order:
    """Parse the command in the headers of a request to the instance at ``own``. Raises OrderRefused."""
    said = {name: headers[name].decode("latin-1") for name in headers if name in NAMES}
    more = extended(headers)
    if role.unknown:
        raise OrderRefused(503, UNKNOWN)
    target = target_of(said.get(b"d-target", ""), own, more)
    here = target == own
    if not (role.prefills or (more and here)):
        raise OrderRefused(400, MISPLACED)
    if not all(said.get(name) for name in (b"req-type", b"req-id", b"d-target")):
        raise OrderRefused(400, MISSING)
    id = said[b"req-id"]
    if not (WORD if more else HEX).fullmatch(id):
        allowed = "of [0-9, a-z, A-Z, _, -]" if more else "hex char [0-9, a-f, A-F]"
        raise OrderRefused(400, f"Invalid req-id, the character of req-id should be {allowed}, but got {id}")
    if len(id) > LONGEST:
        raise OrderRefused(400, f"The length of req-id cannot exceed {LONGEST}")
    if said[b"req-type"] != "prefill":
        raise OrderRefused(400, f"Parameter req-type must be prefill but got {said[b'req-type']}")
    if target is None:
        raise OrderRefused(400, TARGET)
    if here and not more and not role.decodes:
        raise OrderRefused(400, ITSELF)
    if said.get(b"is-recompute", "false") not in ("true", "false"):
        raise OrderRefused(400, RECOMPUTE)
    if not trusted(headers, secret):
        raise OrderRefused(401, SECRET)
    order = Order(id, target, here, said.get(b"is-recompute") == "true")
    return _extended(order, said) if more else order


def target_of(target: str, own: Address, more: bool = False) -> Address | None:
    """Return the address in a d-target, or None if it is invalid. ``more``: also accept an IPv6 address in brackets,
    and ``self``."""
    if more and target == "self":
        return own
    host, semicolon, port = target.partition(";")
    number = PORT
    if semicolon:
        if not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 65536:
            return None
        number = int(port)
    try:
        if more and host.startswith("[") and host.endswith("]"):
            return Address(str(ipaddress.IPv6Address(host[1:-1])), number)
        address = ipaddress.IPv4Address(host)
    except ValueError:
        return None
    return None if address.is_unspecified else Address(str(address), number)


NAMES = frozenset(
    (b"req-id", b"req-type", b"d-target", b"is-recompute", b"parley-results", b"parley-id", b"parley-created",
     b"parley-given", b"parley-spent")
)  # fmt: skip


def _extended(order: Order, said: Mapping[bytes, str]) -> Order:
    """Add the values of parley's own headers to the command. Raises OrderRefused."""
    client, identity = said[b"parley-results"], said.get(b"parley-id", "")
    created, given = said.get(b"parley-created"), said.get(b"parley-given", "0")
    spent = said.get(b"parley-spent", "0")
    if not CLIENT.fullmatch(client):
        raise OrderRefused(400, "The header parley-results must be 1 to 64 letters, digits, _ or -.")
    if identity and not IDENTITY.fullmatch(identity):
        raise OrderRefused(400, "The header parley-id must be 32 hexadecimal digits in lower case.")
    if created is not None and not NUMBER.fullmatch(created):
        raise OrderRefused(400, "The header parley-created must be a number of seconds.")
    if not NUMBER.fullmatch(given):
        raise OrderRefused(400, "The header parley-given must be a number of bytes.")
    if not NUMBER.fullmatch(spent):
        raise OrderRefused(400, "The header parley-spent must be a number of milliseconds.")
    return replace(
        order,
        client=client,
        identity=identity,
        created=None if created is None else int(created),
        given=int(given),
        spent=int(spent) / 1000,
    )
