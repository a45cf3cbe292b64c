"""Sends the requests of a batch to the application of a port, as the client that created the batch."""

from __future__ import annotations

from typing import Any

from starlette.types import ASGIApp, Scope

from parley.dialects.batch_job import BATCH_HEADER, BatchJob, BatchRequest
from parley.dialects.reply import HeaderList
from parley.serving.inherited_headers import inherited_headers
from parley.serving.records.batch_log import ResumeInfo
from parley.web.auth import TENANT_REFERENCE_KEY, TenantReference
from parley.web.exchange import TIMEOUT_HEADER
from parley.web.inner_cycle import InnerCycle

# Headers of one request. Those that limit its time are not meant for its batch.
OWN_HEADERS = frozenset((b"accept", b"accept-encoding", b"idempotency-key", b"x-request-id", TIMEOUT_HEADER))
SCOPE_KEYS = ("type", "asgi", "http_version", "server", "client", "scheme", "root_path", "state")
# The request that created a batch on another server is not known any more.
BARE_SCOPE: dict[str, Any] = {
    "type": "http",
    "asgi": {"version": "3.0"},
    "http_version": "1.1",
    "server": None,
    "client": None,
    "scheme": "http",
    "root_path": "",
}


class InnerSender:
    """Sends requests to ``app``. All have ``scope`` and ``headers``; ``prefix`` is before their paths."""

    def __init__(self, app: ASGIApp, scope: dict[str, Any], headers: HeaderList, prefix: str):
        self._app, self._scope, self._headers, self._prefix = app, scope, headers, prefix

    async def send_request(self, request: BatchRequest) -> InnerCycle:
        """Send a request. Return the cycle with its answer."""
        path = self._prefix + request.path
        length_header = (b"content-length", b"%d" % len(request.body))
        scope = self._scope | {
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [*self._headers, length_header],
        }
        cycle = InnerCycle(scope, request.body)
        await cycle.run_app(self._app)
        return cycle


def sender_of_client(app: ASGIApp, scope: Scope, job: BatchJob) -> InnerSender:
    """Return the sender for a batch that a request with this scope created."""
    headers = [header for header in inherited_headers(scope["headers"]) if header[0] not in OWN_HEADERS]
    kept_scope = {name: scope[name] for name in SCOPE_KEYS if name in scope}
    return InnerSender(app, kept_scope, (*headers, (BATCH_HEADER, b"1")), batch_prefix(scope, job))


def sender_of_tenant(app: ASGIApp, tenant: TenantReference, headers: HeaderList, prefix: str) -> InnerSender:
    """Return the sender for a batch that was created on a server that has ended."""
    fixed: HeaderList = ((b"content-type", b"application/json"), (BATCH_HEADER, b"1"))
    return InnerSender(app, BARE_SCOPE | {TENANT_REFERENCE_KEY: tenant}, (*headers, *fixed), prefix)


def batch_prefix(scope: Scope, job: BatchJob) -> str:
    """Return the prefix of the paths of a batch's requests. ``scope``: of the request that created the batch."""
    path: str = scope["path"]
    return path.removesuffix(job.creation_path)


def resume_info(scope: Scope, job: BatchJob, apis: str, tenant: TenantReference) -> ResumeInfo:
    """Return how another server resumes a batch. ``scope``: of the request that created it, at a port with these
    ``apis``."""
    headers = [header for header in scope["headers"] if header[0] in job.kept_headers]
    return ResumeInfo(apis, batch_prefix(scope, job), job.creation_path, tenant.key_id, job.result_expiry, headers)
