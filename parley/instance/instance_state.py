"""Instance state: a server's role, results and rates, and its address for other instances.

Servers of every role have one; a mixed server without a coordinator never uses it.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from parley.disagg.wire import headers as pd_headers
from parley.disagg.wire.headers import PrefillCommand
from parley.disagg.wire.prompt_hash import RecentPrefixes, hash_prompt
from parley.disagg.wire.role import InstanceAddress, InstanceRole, InstanceRoleName
from parley.disagg.wire.vouched_client import VouchedClient
from parley.instance.cluster_access import ClusterAccess
from parley.instance.engine_rates import EngineRates
from parley.instance.peer_links import PeerLinks
from parley.instance.result_streams import ResultStreams
from parley.serving.served_model import ServedModel
from parley.serving.server_options import ServerOptions
from parley.web.auth import PortReach
from parley.web.exchange import Exchange

MAPPED_IPV4_PREFIX = "::ffff:"  # prefix of an IPv4 address on a socket for both IPv4 and IPv6


class InstanceState:
    """The state of this server as an instance of a cluster.

    * ``epoch``: random name of this process.
    * ``models``: the served models.
    * ``recent_prefixes``: hashes of recently computed prompts.
    * ``transfers``: statistics of handovers.
    """

    def __init__(self, options: ServerOptions, links: PeerLinks):
        self.epoch = secrets.token_hex(8)
        self.access = ClusterAccess(options)
        self.models: list[ServedModel] = []
        self.results = ResultStreams()
        self.rates = EngineRates()
        self.recent_prefixes, self._prefix_capacity = RecentPrefixes(0), 0
        self.transfers: dict[str, float] = {}
        self._links = links
        self.role = InstanceRole(
            options.role,
            options.p_percentage,
            link_peer=links.link_state,
            is_busy=lambda: any(model.open_requests for model in self.models),
            on_role_end=self._end_role,
            on_role_set=self._apply_prefill_share,
        )

    def add_model(self, model: ServedModel) -> None:
        """Measure the rates of a model's engine, and set the prefill share of its time as the role says."""
        self.models.append(model)
        model.engine.step_observers.append(partial(self.rates.record_step, model))
        model.engine.set_prefill_share(self.role.engine_prefill_share)

    def remove_model(self, model: ServedModel) -> None:
        """Forget a model."""
        self.models.remove(model)

    def address_for(self, exchange: Exchange) -> InstanceAddress:
        """Return this instance's address for other instances: the one that the sender of the request used."""
        host, port = exchange.scope.get("server") or ("127.0.0.1", 0)
        return InstanceAddress(host.removeprefix(MAPPED_IPV4_PREFIX), self._links.handover_port or port or 0)

    def read_command(self, exchange: Exchange) -> PrefillCommand | None:
        """Return the coordinator's command in a request's headers, or None for an ordinary request. Raises
        CommandRefused."""
        if self.role.name == "mixed" and not pd_headers.is_native(exchange.headers):
            return None
        command = pd_headers.parse_prefill_command(
            exchange.headers, self.role, self.address_for(exchange), from_member=self.access.is_from_member(exchange)
        )
        return replace(command, target_known=self.access.knows_target(exchange, command.target, self.role.link_states))

    def is_coordinator(self, headers: Mapping[bytes, bytes]) -> bool:
        """Whether a coordinator of the cluster sends this on its own behalf. Such requests need no API key."""
        secret = self.access.secret
        return bool(secret) and pd_headers.speaks_for_itself(headers, secret)

    def vouched_client(
        self, headers: Mapping[bytes, bytes], client_host: str, reach: PortReach, *, has_keys: bool
    ) -> VouchedClient | None:
        """Return the client whose key the sender of a request has checked, if the sender may say so; else None."""
        return self.access.vouched_client(headers, client_host, reach, has_keys=has_keys)

    def check_client(self, headers: Mapping[bytes, bytes], client_host: str, reach: PortReach) -> None:
        """Check that a client may call this instance directly. Raises Unauthorized."""
        self.access.check_client(headers, client_host, reach)

    def check_change(self, exchange: Exchange) -> None:
        """Check that a request may change this server, where no admin key is required. Raises Forbidden."""
        self.access.check_change(exchange)

    def record_prompt(self, body: bytes, capacity: int, owner: str) -> None:
        """Record the prompt hashes of a request that is computed here. ``capacity``: tokens that the cache holds;
        ``owner``: the tenant that its prefixes belong to, "" for all."""
        if capacity != self._prefix_capacity:
            self.recent_prefixes, self._prefix_capacity = RecentPrefixes(capacity), capacity
        self.recent_prefixes.add_prompt(hash_prompt(body, owner=owner).marks)

    async def close_state(self) -> None:
        """Stop a role change in progress, and end all results."""
        self.role.cancel_change()
        self.results.close_clients()

    def _apply_prefill_share(self) -> None:
        """Apply the role's prefill share to all engines."""
        for model in self.models:
            model.engine.set_prefill_share(self.role.engine_prefill_share)

    def _end_role(self, old_role: InstanceRoleName) -> None:
        """End the old role. MindIE's coordinator gets results from a decode instance only, so its running requests must
        continue elsewhere."""
        if old_role in ("decode", "flex"):
            client = self.results.get_client()
            client.recall_requests()
            client.close_client()
