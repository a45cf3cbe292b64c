"""What a coordinator says of a request in its headers: read and checked, in the order and words of MindIE's servers.

A coordinator of parley's own marks itself by a header and may then say more. Knows nothing of bodies and of what is
done with a request.
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

PORT = 1121  # of an instance for others, where none is said
LONGEST = 1024  # characters of a req-id
MISSING = "DMI request must have req-type, req-id, d-target headers"
MISPLACED = "DMI inference requests can be sent only to the prefill node or p_percentage of the flex node == 0"
UNKNOWN = "The server cannot process the inference request due to an unknown status. "
TARGET = "Parameter d-target must be an IPv4 address"
ITSELF = "d-target should not be itself"
SECRET = "The header parley-secret must be the cluster's secret."
RECOMPUTE = "Parameter is-recompute is an optional parameter. When it is set, it must be true or false."

# What a coordinator says of a request, and no client may; with all that begins with OWN.
ORDERS = frozenset((b"req-id", b"req-type", b"d-target", b"d-port", b"is-recompute"))
OWN = b"parley-"
LOST = OWN + b"lost"  # of an answer to an order: the instance's engine is gone, and others may do it
SHORT = OWN + b"short"  # of one, too: the instance's context is too short, and that of others may not be

HEX = re.compile(r"[0-9a-fA-F]+")
WORD = re.compile(r"[0-9a-zA-Z_-]+")
CLIENT = re.compile(r"[0-9a-zA-Z_-]{1,64}")
NUMBER = re.compile(r"[0-9]{1,15}")


@dataclass(frozen=True, slots=True)
class Order:
    """One request of a coordinator.

    ``id``: what it is called, of this attempt. ``target``: who is to go on after the first output; ``here``: that is
    this instance. ``recompute``: its prompt has outputs of an attempt before.
    The rest is there in the extended mode only, where ``client`` is not empty. ``client``: whose connection gets the
    results. ``identity``: 32 hex digits, the same for all attempts; "" for none. ``created``: seconds since the epoch
    that the answer is to carry. ``given``: so many bytes before the body are records of attempts before.
    ``spent``: seconds since the client asked, from which its limits count.
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
    """Is this from a coordinator of parley's own?"""
    return b"parley-results" in headers


def preface(headers: Mapping[bytes, bytes]) -> int:
    """How many bytes there are before the client's body. What is wrong with the header is said by ``read``."""
    given = headers.get(b"parley-given", b"0").decode("latin-1") if extended(headers) else "0"
    return int(given) if NUMBER.fullmatch(given) else 0


def trusted(headers: Mapping[bytes, bytes], secret: str) -> bool:
    """Does it know the cluster's secret, if there is one?"""
    return not secret or hmac.compare_digest(headers.get(b"parley-secret", b""), secret.encode())


def member(headers: Mapping[bytes, bytes], secret: str) -> bool:
    """Is this from a coordinator that speaks for itself and for no client? Then it needs no key."""
    return bool(secret) and b"parley-secret" in headers and b"req-id" not in headers and trusted(headers, secret)


def read(headers: Mapping[bytes, bytes], role: Role, own: Address, secret: str = "") -> Order:
    """The order in the headers of a request to the instance at ``own``. Raises OrderRefused."""
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
    """The address that a d-target names, None if it names none. ``more``: it may be an IPv6 address in brackets, and
    ``self``."""
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
    """The order with what parley's own coordinator says. Raises OrderRefused."""
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
