"""The API keys of a coordinator's clients: their permissions, limits and usage.

Keys, limits and accounts are those of a single server (``serving.keys``). The coordinator counts for all instances, and
tells them so together with the name of the client (``disagg.wire.vouched_client``).
"""

from __future__ import annotations

import asyncio

import msgspec

from parley.coordinator.config import CoordinatorOptions
from parley.coordinator.proxy.downstream.client import DownstreamClient
from parley.coordinator.proxy.paths import ApiPath
from parley.dialects.mounts import API_NAMES, route_scope
from parley.disagg.wire.vouched_client import CLIENT_HEADER, UsedTokens, write_vouched_client
from parley.errors import Unauthorized
from parley.serving.keys.accounts import KeyLedger
from parley.serving.keys.audit_log import AuditLog
from parley.serving.keys.scopes import check_key_api
from parley.serving.keys.usage_page import render_usage
from parley.serving.keys.usage_store import UsageStore
from parley.types import Tenant, Usage
from parley.web.auth import BATCH_KEY_REFUSED, TENANT_REFERENCE_KEY, ApiKeys


class ClientKeys:
    """The keys of ``options.hashed_keys``. Raises BadUsageFile."""

    def __init__(self, options: CoordinatorOptions):
        self.keys = ApiKeys((), cluster_secret=options.secret, hashed_keys=options.hashed_keys)
        self._usage_store = None if options.usage_db is None else UsageStore(options.usage_db)
        self.ledger = KeyLedger(self._usage_store)
        self._audit_log = AuditLog(options.audit_log or "")

    def use_options(self, options: CoordinatorOptions) -> None:
        """Accept the keys of other options from now on."""
        self.keys.replace_keys((), (), (), options.secret, {}, options.hashed_keys)

    async def close(self) -> None:
        """Write all usage."""
        if self._usage_store is not None:
            await asyncio.to_thread(self._usage_store.close)

    def authenticate_client(self, client: DownstreamClient, path: ApiPath | None) -> None:
        """Check the client's key, and whether it may use a path; None: there is no such path. Raises Unauthorized,
        Forbidden."""
        scope = "client" if path is None else route_scope(path.route)
        client.is_admin_call = scope == "admin"
        if path is not None and (path.is_open or path.find_page(client.headers) is not None):
            return
        client.tenant = tenant = self._find_tenant(client)
        client.log_entry.key = self.keys.name_key(tenant)
        if client.is_admin_call:
            self.keys.check_admin_key(client.headers)
            tenant = msgspec.structs.replace(tenant, is_admin=True)  # perhaps by another of several keys
        client.vouched_headers = ((CLIENT_HEADER, write_vouched_client(tenant, client.log_entry.key)),)

    def _find_tenant(self, client: DownstreamClient) -> Tenant:
        """Return the tenant that a request is for: its client's, or that of the batch to which it belongs.

        Raises Unauthorized.
        """
        if TENANT_REFERENCE_KEY not in client.scope:
            return self.keys.check_key(client.headers)
        tenant = self.keys.find_tenant(client.scope[TENANT_REFERENCE_KEY])
        if tenant is None:
            raise Unauthorized(BATCH_KEY_REFUSED)
        return tenant

    def check_api(self, client: DownstreamClient) -> None:
        """Check that the client's key may use the API of its request. Raises Forbidden."""
        client.log_entry.api = client.dialect.name
        if client.dialect.name in API_NAMES:
            check_key_api(client.tenant, client.dialect.name)

    def admit_request(self, client: DownstreamClient) -> None:
        """Open the account of a request that generates or embeds. Raises Forbidden, RateLimited."""
        self.check_api(client)
        client.account = self.ledger.admit_request(client)

    def settle_request(self, client: DownstreamClient, used_tokens: UsedTokens | None, *, client_left: bool) -> None:
        """Charge a request's key for its usage; None: nothing was used. ``client_left``: the client left before any
        instance reported usage, so the prompt may have been computed."""
        account, client.account = client.account, None
        if account is None:
            return
        if used_tokens is None and client_left and client.reserved_prompt_tokens:
            used_tokens = UsedTokens(client.log_entry.model, client.reserved_prompt_tokens, 0, 0)
        counted_tokens = used_tokens or UsedTokens(client.log_entry.model, 0, 0, 0)
        usage = Usage(prompt_tokens=counted_tokens.prompt_tokens, cached_tokens=counted_tokens.cached_tokens)
        account.settle(counted_tokens.model, usage, counted_tokens.output_tokens, was_submitted=used_tokens is not None)

    def finish_request(self, client: DownstreamClient) -> None:
        """End an account that is open, and record a call that might change the instances."""
        if client.account is not None:
            client.account.cancel()
        if client.is_admin_call:
            self._audit_log.record_call(client)

    async def usage_page(self, client: DownstreamClient) -> bytes:
        """Return the usage of all keys as JSON. Raises InvalidValue, NotFound, NotReady."""
        return await render_usage(self._usage_store, client.scope.get("query_string", b"").decode("latin-1"))
