"""A cluster in one process: servers as its members, and the coordinator in front of them."""

from __future__ import annotations

from support.http_client import RunningServer

from parley.coordinator.coordinator import Coordinator
from parley.instance.cluster_member import ClusterMember


class Cluster:
    """The members of a cluster and the coordinator in front of them."""

    def __init__(
        self, instances: list[RunningServer], members: list[ClusterMember], coordinator: Coordinator, port: int
    ):
        self.instances, self.members, self.coordinator = instances, members, coordinator
        self.front = RunningServer(instances[0].parts, instances[0].engine, instances[0].server, port)

    async def wait_until_idle(self) -> None:
        """Wait until every request is gone from every member and from the coordinator."""
        await self.front.until(
            lambda: not self.coordinator.front.load.open_requests and not self.coordinator.scheduler.open_requests
        )
        for server, member in zip(self.instances, self.members, strict=True):
            await server.wait_until_idle()
            await server.pages_returned()
            channels = [
                channel for client in member.instance_state.results.clients.values() for channel in client.channels
            ]
            assert not channels
