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

from parley.dialects.instance_plane import REQUEST_UUID
from parley.disagg.wire.role import InstanceAddress, InstanceRole
from parley.errors import CommandRefused

DEFAULT_PEER_PORT = 1121  # default port for handovers to an instance
MAX_REQUEST_ID_LENGTH = 1024  # characters of a req-id
MISSING_HEADERS = "DMI request must have req-type, req-id, d-target headers"
NOT_A_PREFILL_INSTANCE = (
    "DMI inference requests can be sent only to the prefill node or p_percentage of the flex node == 0"
)
UNKNOWN_STATUS = "The server cannot process the inference request due to an unknown status. "
INVALID_TARGET = "Parameter d-target must be an IPv4 address"
TARGET_IS_SELF = "d-target should not be itself"
WRONG_SECRET = (
    "The header parley-secret must be the cluster's secret, unless --cluster-network names the network of the sender."
)
INVALID_RECOMPUTE = "Parameter is-recompute is an optional parameter. When it is set, it must be true or false."

# Only a coordinator may send these headers and all that begin with NATIVE_PREFIX.
COMMAND_HEADERS = frozenset((b"req-id", b"req-type", b"d-target", b"d-port", b"is-recompute"))
NATIVE_PREFIX = b"parley-"
# In a command or a query of a member: the cluster's secret.
SECRET_HEADER = NATIVE_PREFIX + b"secret"
# In a command: the name under which the coordinator reads results. It makes the command native.
RESULTS_HEADER = NATIVE_PREFIX + b"results"
# In a native command: the request UUID, 32 hexadecimal digits, equal for all attempts.
UUID_HEADER = NATIVE_PREFIX + b"id"
# In a native command: the creation time that the answer shows, in seconds since the epoch.
CREATED_HEADER = NATIVE_PREFIX + b"created"
# In a native command: milliseconds since the client's request arrived at the coordinator.
ELAPSED_HEADER = NATIVE_PREFIX + b"spent"
# In a native command: the number of bytes before the client's body that are records of earlier attempts.
PREFACE_HEADER = NATIVE_PREFIX + b"given"
# In a native command: the request id that the client chose itself.
CLIENT_ID_HEADER = NATIVE_PREFIX + b"label"
# In a native command: "true" if the client has stopped the request while it waited in the coordinator.
STOPPED_HEADER = NATIVE_PREFIX + b"stopped"
# In an answer to a coordinator: the engine died, so another instance may serve the request.
LOST_HEADER = NATIVE_PREFIX + b"lost"
# In an answer to a coordinator: the context is too short here, but may suffice elsewhere.
SHORT_HEADER = NATIVE_PREFIX + b"short"
# In an answer to a coordinator: the request is at fault. APIs have different statuses for that.
REFUSED_HEADER = NATIVE_PREFIX + b"refused"
# In a client's request that a coordinator forwards: who reaches the coordinator's port, "private" or "public".
FORWARDED_HEADER = NATIVE_PREFIX + b"forwarded"
# In a client's request that a coordinator passes on: the body contains the records that it refers to, and the
# coordinator keeps the new ones. It stays with the request on all instances.
RECORDS_HEADER = NATIVE_PREFIX + b"records"

HEX_DIGITS = re.compile(r"[0-9a-fA-F]+")
WORD_CHARACTERS = re.compile(r"[0-9a-zA-Z_-]+")
COORDINATOR_NAME = re.compile(r"[0-9a-zA-Z_-]{1,64}")
DECIMAL_NUMBER = re.compile(r"[0-9]{1,15}")


@dataclass(frozen=True, slots=True)
class PrefillCommand:
    """A coordinator's command to run the prefill stage of one request.

    * ``request_id``: identifies this attempt.
    * ``target``: the instance that continues after the first output.
    * ``continues_here``: that is this instance.
    * ``target_known``: this instance may connect to it.
    * ``recompute``: the body contains outputs of an earlier attempt.

    Only parley's own coordinator sets the other fields:

    * ``coordinator_name``: the name of the connection for results.
    * ``request_uuid``: the request UUID, 32 hex digits, equal for all attempts; "" for none.
    * ``created``: creation time of the answer, in seconds since the epoch.
    * ``preface_size``: number of bytes before the client's body that are records of earlier attempts.
    * ``elapsed``: seconds since the client's request arrived; time limits count from then.
    * ``stopped``: the client has stopped the request, which ends with the outputs that it has.
    """

    request_id: str
    target: InstanceAddress
    continues_here: bool
    recompute: bool = False
    coordinator_name: str = ""
    request_uuid: str = ""
    created: int | None = None
    preface_size: int = 0
    elapsed: float = 0.0
    stopped: bool = False
    target_known: bool = False


def is_from_coordinator(headers: Mapping[bytes, bytes]) -> bool:
    """Whether a request has headers that only a coordinator may send."""
    return any(name in COMMAND_HEADERS or name.startswith(NATIVE_PREFIX) for name in headers)


def is_native(headers: Mapping[bytes, bytes]) -> bool:
    """Whether the sender is parley's own coordinator."""
    return RESULTS_HEADER in headers


def read_preface_size(headers: Mapping[bytes, bytes]) -> int:
    """Return the number of bytes before the client's body. ``parse_prefill_command`` reports an invalid header."""
    size_text = headers.get(PREFACE_HEADER, b"0").decode("latin-1") if is_native(headers) else "0"
    return int(size_text) if DECIMAL_NUMBER.fullmatch(size_text) else 0


def shows_secret(headers: Mapping[bytes, bytes], secret: str) -> bool:
    """Whether the sender knows the cluster's secret; False if there is none."""
    return bool(secret) and hmac.compare_digest(headers.get(SECRET_HEADER, b""), secret.encode())


def speaks_for_itself(headers: Mapping[bytes, bytes], secret: str) -> bool:
    """Whether a coordinator sends this on its own behalf, not for a client. Such requests need no API key."""
    return b"req-id" not in headers and FORWARDED_HEADER not in headers and shows_secret(headers, secret)


def parse_prefill_command(
    headers: Mapping[bytes, bytes], role: InstanceRole, own_address: InstanceAddress, *, from_member: bool = True
) -> PrefillCommand:
    """Parse the command in the headers of a request to the instance at ``own_address``. ``from_member``: a member of
    the cluster sent it. Raises CommandRefused."""
    header_values = {name: headers[name].decode("latin-1") for name in headers if name in PARSED_HEADERS}
    native = is_native(headers)
    if role.is_unsettled:
        raise CommandRefused(503, UNKNOWN_STATUS)
    target = parse_target(header_values.get(b"d-target", ""), own_address, native)
    is_own_target = target == own_address
    if not (role.runs_prefill or (native and is_own_target)):
        raise CommandRefused(400, NOT_A_PREFILL_INSTANCE)
    if not all(header_values.get(name) for name in (b"req-type", b"req-id", b"d-target")):
        raise CommandRefused(400, MISSING_HEADERS)
    request_id = header_values[b"req-id"]
    if not (WORD_CHARACTERS if native else HEX_DIGITS).fullmatch(request_id):
        allowed = "of [0-9, a-z, A-Z, _, -]" if native else "hex char [0-9, a-f, A-F]"
        raise CommandRefused(400, f"Invalid req-id, the character of req-id should be {allowed}, but got {request_id}")
    if len(request_id) > MAX_REQUEST_ID_LENGTH:
        raise CommandRefused(400, f"The length of req-id cannot exceed {MAX_REQUEST_ID_LENGTH}")
    if header_values[b"req-type"] != "prefill":
        raise CommandRefused(400, f"Parameter req-type must be prefill but got {header_values[b'req-type']}")
    if target is None:
        raise CommandRefused(400, INVALID_TARGET)
    if is_own_target and not native and not role.runs_decode:
        raise CommandRefused(400, TARGET_IS_SELF)
    if header_values.get(b"is-recompute", "false") not in ("true", "false"):
        raise CommandRefused(400, INVALID_RECOMPUTE)
    if not from_member:
        raise CommandRefused(401, WRONG_SECRET)
    command = PrefillCommand(request_id, target, is_own_target, recompute=header_values.get(b"is-recompute") == "true")
    return _with_native_headers(command, header_values) if native else command


def parse_target(target: str, own_address: InstanceAddress, native: bool = False) -> InstanceAddress | None:
    """Return the address in a d-target, or None if it is invalid. ``native``: also accept an IPv6 address in brackets,
    and ``self``."""
    if native and target == "self":
        return own_address
    host, semicolon, port = target.partition(";")
    port_number = DEFAULT_PEER_PORT
    if semicolon:
        if not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 65536:
            return None
        port_number = int(port)
    try:
        if native and host.startswith("[") and host.endswith("]"):
            return InstanceAddress(str(ipaddress.IPv6Address(host[1:-1])), port_number)
        address = ipaddress.IPv4Address(host)
    except ValueError:
        return None
    return None if address.is_unspecified else InstanceAddress(str(address), port_number)


PARSED_HEADERS = frozenset(
    (b"req-id", b"req-type", b"d-target", b"is-recompute", RESULTS_HEADER, UUID_HEADER, CREATED_HEADER, PREFACE_HEADER,
     ELAPSED_HEADER, STOPPED_HEADER)
)  # fmt: skip


def _with_native_headers(command: PrefillCommand, header_values: Mapping[bytes, str]) -> PrefillCommand:
    """Add the values of parley's own headers to the command. Raises CommandRefused."""
    coordinator_name, request_uuid = header_values[RESULTS_HEADER], header_values.get(UUID_HEADER, "")
    created, preface_size = header_values.get(CREATED_HEADER), header_values.get(PREFACE_HEADER, "0")
    elapsed_milliseconds = header_values.get(ELAPSED_HEADER, "0")
    if not COORDINATOR_NAME.fullmatch(coordinator_name):
        raise CommandRefused(400, "The header parley-results must be 1 to 64 letters, digits, _ or -.")
    if request_uuid and not REQUEST_UUID.fullmatch(request_uuid):
        raise CommandRefused(400, "The header parley-id must be 32 hexadecimal digits in lower case.")
    if created is not None and not DECIMAL_NUMBER.fullmatch(created):
        raise CommandRefused(400, "The header parley-created must be a number of seconds.")
    if not DECIMAL_NUMBER.fullmatch(preface_size):
        raise CommandRefused(400, "The header parley-given must be a number of bytes.")
    if not DECIMAL_NUMBER.fullmatch(elapsed_milliseconds):
        raise CommandRefused(400, "The header parley-spent must be a number of milliseconds.")
    if header_values.get(STOPPED_HEADER, "true") != "true":
        raise CommandRefused(400, "The header parley-stopped must be true.")
    return replace(
        command,
        coordinator_name=coordinator_name,
        request_uuid=request_uuid,
        created=None if created is None else int(created),
        preface_size=int(preface_size),
        elapsed=int(elapsed_milliseconds) / 1000,
        stopped=STOPPED_HEADER in header_values,
    )
