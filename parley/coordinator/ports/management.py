"""The management port: the controller's list of instances, taking instances in and out of service, tasks, and alarms.

Paths, bodies and statuses are exactly the documented ones; parley's additions are marked at each route. Knows the table
and the scheduler. Its only command to an instance is the shutdown.
"""

from __future__ import annotations

import ipaddress
import logging
import time
from collections import deque
from typing import Any
from urllib.parse import urlsplit

from parley.coordinator.access import management_access
from parley.coordinator.ports.port import AdminPort, AdminReply, AdminRequest
from parley.coordinator.routing.health import AskInstance, Unanswered
from parley.coordinator.routing.instance import ClusterInstance
from parley.coordinator.routing.instance_scheduler import InstanceScheduler
from parley.coordinator.routing.instance_table import InstanceEvent, InstanceTable
from parley.coordinator.tolerant_json import is_count

log = logging.getLogger("parley.cluster")

MAX_IDS = 4096  # ids in one request
ROLE_LETTERS = {80: "prefill", 68: "decode", 85: "mixed", 70: "flex"}  # ASCII of P, D, U, F
LOAD_NAMES = {  # the load of an instance: its name in a list, and here
    "avail_slots_num": "avail_slots",
    "avail_block_num": "avail_blocks",
    "waiting_request_num": "waiting",
    "running_request_num": "running",
}
OK_REPLY = AdminReply()
BAD_REQUEST_REPLY = AdminReply(400)
NOT_READY_REPLY = AdminReply(503)
FAILED_REPLY = AdminReply(500)
MAX_ALARMS = 100  # alarms kept
PROBE_PATHS = frozenset(("/v1/startup", "/v1/health", "/v1/readiness"))
HEALTHY_BODY = {"message": "", "status": "0"}  # the body that controllers send as well


class ManagementPort:
    """The routes of the management port, served by ``app``. ``master``: this coordinator takes the requests, rather
    than a standby."""

    def __init__(
        self, table: InstanceTable, scheduler: InstanceScheduler, ask_instance: AskInstance, host: str = "127.0.0.1"
    ):
        self.table, self.scheduler, self._ask_instance = table, scheduler, ask_instance
        self.master = True
        self.alarms: deque[dict[str, Any]] = deque(maxlen=MAX_ALARMS)
        table.watchers.append(self._instance_changed)
        self.app = AdminPort(
            {
                ("POST", "/v1/instances/refresh"): self.refresh_instances,
                ("GET", "/v1/coordinator_info"): self.coordinator_info,
                ("POST", "/v1/instances/offline"): lambda request: self.set_offline(request, offline=True),
                ("POST", "/v1/instances/online"): lambda request: self.set_offline(request, offline=False),
                ("GET", "/v1/instances/tasks"): self.running_tasks,
                ("POST", "/v1/instances/query_tasks"): self.query_tasks,
                ("GET", "/recvs_info"): lambda _: AdminReply.from_json(
                    {"is_master": self.master, "recv_flow": self.scheduler.counters.requests}
                ),
                ("POST", "/backup_info"): self.set_master,
                ("POST", "/v1/alarm/coordinator"): self.store_alarm,
                ("POST", "/v1/alarm/llm_engine"): self.store_alarm,
                ("POST", "/v1/terminate-service"): self.terminate_server,
                ("GET", "/v1/startup"): lambda _: AdminReply.from_json(HEALTHY_BODY),
                ("GET", "/v1/health"): lambda _: AdminReply.from_json(HEALTHY_BODY),
                ("GET", "/v1/readiness"): self.cluster_readiness,  # parley's addition
                ("GET", "/v1/alarms"): lambda _: AdminReply.from_json(
                    {"alarms": list(self.alarms)}
                ),  # parley's addition
            },
            host,
            management_access(table.options),
            is_open=PROBE_PATHS.__contains__,
        )

    def cluster_readiness(self, request: AdminRequest) -> AdminReply:
        """Answer a readiness probe."""
        return OK_REPLY if self.master and self.scheduler.can_serve() else NOT_READY_REPLY

    @property
    def knows_instances(self) -> bool:
        """Whether any instances were ever announced, by configuration or by a list."""
        return self.table.list_received or any(instance.origin != "list" for instance in self.table)

    def refresh_instances(self, request: AdminRequest) -> AdminReply:
        """Replace the list of instances: those missing from it leave, the others are added or updated."""
        list_body = request.json_object()
        ids, items = (list_body.get("ids"), list_body.get("instances")) if list_body is not None else (None, None)
        if not isinstance(ids, list) or not isinstance(items, list) or len(ids) > MAX_IDS or len(items) > MAX_IDS:
            return BAD_REQUEST_REPLY
        if not all(map(is_count, ids)) or not all(map(_is_list_item, items)):
            return BAD_REQUEST_REPLY
        for instance in self.table:
            if instance.origin == "list" and instance.id not in ids:
                self.table.remove_instance(instance.id)
        for item in items:
            if item["id"] in ids:
                self._update_instance(item)
        self.table.list_received = self.table.list_received or any(instance.origin == "list" for instance in self.table)
        return OK_REPLY

    def _update_instance(self, item: dict[str, Any]) -> None:
        """Add or update one instance of the list. One that fails validation is skipped and left as it was."""
        listed_instance = parse_listed_instance(item)
        if listed_instance is None:
            log.warning("Instance %d of the list is skipped: its entry is not valid.", item["id"])
            return
        known_instance = self.table.get_instance(listed_instance.id)
        if known_instance is not None and known_instance.origin != "list":
            return
        if known_instance is None or known_instance.url != listed_instance.url:
            if len(self.table) >= self.table.options.max_res_num and known_instance is None:
                log.warning("Instance %d is skipped: there are max_res_num instances already.", listed_instance.id)
                return
            known_instance = self.table.add_instance(listed_instance)
        elif known_instance.polled:
            return
        else:
            for name in ("role", "group", "peer", "slots", "blocks", "block_size", "p_percentage", "models"):
                setattr(known_instance, name, getattr(listed_instance, name))
        if not known_instance.polled:
            _apply_listed_load(known_instance, item["dynamic_info"])
            self.table.record_answer(known_instance)

    def coordinator_info(self, request: AdminRequest) -> AdminReply:
        """Return allocated resources per instance, and request counts."""
        if not self.knows_instances:
            return NOT_READY_REPLY
        counters = self.scheduler.counters
        return AdminReply.from_json(
            {
                "schedule_info": [
                    {
                        "id": instance.id,
                        "allocated_slots": instance.prefill.slots + instance.decode.slots,
                        "allocated_blocks": instance.prefill.blocks + instance.decode.blocks,
                    }
                    for instance in self.table
                ],
                "request_num": self.scheduler.open_requests,
                "request_length_info": {
                    "input_len": round(counters.mean_input),
                    "output_len": round(counters.mean_output),
                },
            }
        )

    def set_offline(self, request: AdminRequest, *, offline: bool) -> AdminReply:
        """Take instances out of service, or back into it."""
        if not self.knows_instances:
            return NOT_READY_REPLY
        body_members = request.json_object()
        ids = body_members.get("ids") if body_members is not None else None
        if not isinstance(ids, list) or len(ids) > MAX_IDS or not all(is_count(instance_id) for instance_id in ids):
            return BAD_REQUEST_REPLY
        for instance_id in ids:
            instance = self.table.get_instance(instance_id)
            if instance is not None:
                self.table.set_instance_offline(instance, offline)
        return OK_REPLY

    def running_tasks(self, request: AdminRequest) -> AdminReply:
        """Return the number of running requests per instance id; -1 for an unknown id."""
        counts = []
        for name, value in request.query:
            if name == "id":
                number = int(value) if value.isascii() and value.isdigit() and len(value) < 20 else -1
                instance = self.table.get_instance(number)
                counts.append(-1 if instance is None else instance.tasks)
        return AdminReply.from_json({"tasks": counts})

    def query_tasks(self, request: AdminRequest) -> AdminReply:
        """Return whether an instance has no running requests left, so that its role can change.

        ``role_change_type`` 0 asks for P, 1 for D.
        """
        body_members = request.json_object() or {}
        p_id = body_members.get("p_id")
        d_id = body_members.get("d_id")
        changed_side = body_members.get("role_change_type")
        if not is_count(p_id) or not is_count(d_id) or not is_count(changed_side) or changed_side not in (0, 1):
            return AdminReply.from_json({"is_end": True}, 400)
        p, d = self.table.get_instance(p_id), self.table.get_instance(d_id)
        if not self.table.is_cluster_ready() or p is None or d is None:
            return AdminReply.from_json({"is_end": True})
        return AdminReply.from_json({"is_end": is_idle(p if changed_side == 0 else d)})

    def set_master(self, request: AdminRequest) -> AdminReply:
        """Set whether this coordinator is the master."""
        if not self.knows_instances:
            return NOT_READY_REPLY
        body_members = request.json_object() or {}
        master, abnormal = body_members.get("is_master"), body_members.get("is_abnormal")
        if not isinstance(master, bool) or not isinstance(abnormal, bool):
            return AdminReply.from_json({"update_successfully": False}, 400)
        self.master = master and not abnormal
        return AdminReply.from_json({"update_successfully": True})

    def store_alarm(self, request: AdminRequest) -> AdminReply:
        """Store another program's alarm: any object; missing id, level, source, time and detail are filled in."""
        alarm_members = request.json_object()
        if alarm_members is None or len(request.body) > 64 << 10:
            return BAD_REQUEST_REPLY
        self.alarms.append({"id": "", "level": "", "source": "", "time": time.time(), "detail": ""} | alarm_members)
        return OK_REPLY

    async def terminate_server(self, request: AdminRequest) -> AdminReply:
        """Shut down the server at an address at once, as MindIE coordinators ask for one whose results are lost."""
        body_members = request.json_object() or {}
        ip, port = body_members.get("ip"), body_members.get("port")
        if not isinstance(ip, str) or not isinstance(port, str):
            return BAD_REQUEST_REPLY
        instance = next((instance for instance in self.table if _server_address(instance) == (ip, port)), None)
        if instance is None:
            return FAILED_REPLY
        try:
            status, _ = await self._ask_instance(f"{instance.management}/stopService?mode=Force")
        except Unanswered:
            status = 0
        log.warning("Instance %d was ordered to shut down (status %d).", instance.id, status)
        return AdminReply.from_json(HEALTHY_BODY) if status == 200 else FAILED_REPLY

    def _instance_changed(self, instance: ClusterInstance, event: InstanceEvent) -> None:
        """Raise an alarm about an instance."""
        if event in ("lost", "faulty", "restarted"):
            details = {"lost": "does not answer", "faulty": "is not chosen for now", "restarted": "was restarted"}
            reason = f": {instance.fault_reason.rstrip('.')}" if event == "faulty" and instance.fault_reason else ""
            self.alarms.append(
                {
                    "id": f"instance-{instance.id}-{event}",
                    "level": "warning" if event == "restarted" else "error",
                    "source": "coordinator",
                    "time": time.time(),
                    "detail": f"Instance {instance.id} ({instance.url}) {details[event]}{reason}.",
                }
            )


def is_idle(instance: ClusterInstance) -> bool:
    """Whether the instance has no requests and, as far as it reports, no pinned pages that others still read."""
    return instance.tasks == 0 and instance.pinned == 0


def _server_address(instance: ClusterInstance) -> tuple[str, str]:
    """Return address and port of the instance."""
    url = urlsplit(instance.url)
    return url.hostname or "", str(url.port or {"http": 80, "https": 443}[url.scheme])


def _is_list_item(item: Any) -> bool:
    """Whether an entry of a controller's list has the form of one. Its values may still fail validation."""
    if not isinstance(item, dict) or not is_count(item.get("id")):
        return False
    static, load = item.get("static_info"), item.get("dynamic_info", {})
    if not isinstance(static, dict) or "role" not in static or not isinstance(load, dict):
        return False
    peers, hashes = load.get("peers", []), load.get("prefix_hash", [])
    if not isinstance(peers, list) or not isinstance(hashes, list):
        return False
    if not _all_counts(*(load[key] for key in LOAD_NAMES if key in load)):
        return False
    return _all_counts(*peers) and all(type(prompt_hash) is int for prompt_hash in hashes)


def parse_listed_instance(item: dict[str, Any]) -> ClusterInstance | None:
    """Parse an entry of a controller's list; None if it fails validation."""
    static = item["static_info"]
    try:
        host, port = _parse_address(item.get("ip")), _parse_port(item.get("port"))
        peer = _parse_port(item.get("inter_comm_port", "1121"))
        metrics = _parse_port(item.get("metric_port", item.get("port")))
    except ValueError:
        return None
    url_host = f"[{host}]" if host.version == 6 else str(host)
    role = ROLE_LETTERS.get(static.get("role")) if is_count(static.get("role")) else None
    name = item.get("model_name", "")
    slots, blocks = static.get("total_slots_num", 200), static.get("total_block_num", 1024)
    size, share = static.get("block_size", 128), static.get("p_percentage", 0)
    group, longest, label = static.get("group_id", 0), static.get("max_seq_len", 0), static.get("label", 4)
    if role is None or not isinstance(name, str) or not _all_counts(slots, blocks, size, share, group, longest, label):
        return None
    if not 1 <= slots <= 5000 or not 1 <= size <= 128 or share > 100 or label > 4 or blocks < 1:
        return None
    return ClusterInstance(
        item["id"],
        f"http://{url_host}:{port}",
        role,
        group,
        metrics=f"http://{url_host}:{metrics}",
        peer=f"{host};{peer}",
        origin="list",
        polled="dynamic_info" not in item,
        slots=slots,
        blocks=blocks,
        block_size=size,
        p_percentage=share,
        models=frozenset([name] if name else []),
    )


def _apply_listed_load(instance: ClusterInstance, reported_load: dict[str, Any]) -> None:
    """Update an instance from the load in a controller's list."""
    for key, name in LOAD_NAMES.items():
        if key in reported_load:
            setattr(instance, name, reported_load[key])
    if "peers" in reported_load:
        instance.peers = frozenset(reported_load["peers"])
    if "prefix_hash" in reported_load:
        instance.cached_hashes = frozenset(reported_load["prefix_hash"])


def _all_counts(*values: Any) -> bool:
    return all(map(is_count, values))


def _parse_address(text: Any) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Parse an IP address. Raises ValueError."""
    address = ipaddress.ip_address(text if isinstance(text, str) else "")
    if address.is_unspecified:
        raise ValueError("no host has this address")
    return address


def _parse_port(text: Any) -> int:
    """Parse a port number. Raises ValueError."""
    number = int(text) if isinstance(text, str) and text.isascii() and text.isdigit() and len(text) < 6 else 0
    if not 1 <= number <= 65_535:
        raise ValueError("not a port")
    return number
