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

from parley.coordinator.lenient import count
from parley.coordinator.ports.port import Asked, Plane, Reply
from parley.coordinator.routing.admission import Choice
from parley.coordinator.routing.health import Ask, Unanswered
from parley.coordinator.routing.instance import Instance
from parley.coordinator.routing.instance_table import News, Table

log = logging.getLogger("parley.cluster")

MOST = 4096  # ids in one request
ROLES = {80: "prefill", 68: "decode", 85: "mixed", 70: "flex"}  # ASCII of P, D, U, F
OK = Reply()
BAD = Reply(400)
NOT_YET = Reply(503)
FAILED = Reply(500)
ALARMS = 100  # alarms kept
WELL = {"message": "", "status": "0"}  # the body that controllers send as well


class Management:
    """The routes of the management port, served by ``app``. ``master``: this coordinator takes the requests, rather
    than a standby."""

    def __init__(self, table: Table, choice: Choice, ask: Ask, host: str = "127.0.0.1"):
        self.table, self.choice, self._ask = table, choice, ask
        self.master = True
        self.alarms: deque[dict[str, Any]] = deque(maxlen=ALARMS)
        table.watchers.append(self._changed)
        self.app = Plane(
            {
                ("POST", "/v1/instances/refresh"): self.refresh,
                ("GET", "/v1/coordinator_info"): self.info,
                ("POST", "/v1/instances/offline"): lambda asked: self.serve(asked, offline=True),
                ("POST", "/v1/instances/online"): lambda asked: self.serve(asked, offline=False),
                ("GET", "/v1/instances/tasks"): self.tasks,
                ("POST", "/v1/instances/query_tasks"): self.query,
                ("GET", "/recvs_info"): lambda _: Reply.json(
                    {"is_master": self.master, "recv_flow": self.choice.tally.requests}
                ),
                ("POST", "/backup_info"): self.backup,
                ("POST", "/v1/alarm/coordinator"): self.alarm,
                ("POST", "/v1/alarm/llm_engine"): self.alarm,
                ("POST", "/v1/terminate-service"): self.terminate,
                ("GET", "/v1/startup"): lambda _: Reply.json(WELL),
                ("GET", "/v1/health"): lambda _: Reply.json(WELL),
                ("GET", "/v1/alarms"): lambda _: Reply.json({"alarms": list(self.alarms)}),  # parley's addition
            },
            host,
            "" if table.options.tls.clients else table.options.secret or "",
        )

    @property
    def begun(self) -> bool:
        """Whether any instances were ever announced, by configuration or by a list."""
        return self.table.listed or any(each.found != "list" for each in self.table)

    def refresh(self, asked: Asked) -> Reply:
        """Replace the list of instances: those missing from it leave, the others are added or updated."""
        said = asked.members()
        ids, items = (said.get("ids"), said.get("instances")) if said is not None else (None, None)
        if not isinstance(ids, list) or not isinstance(items, list) or len(ids) > MOST or len(items) > MOST:
            return BAD
        for item in items:
            static = item.get("static_info") if isinstance(item, dict) else None
            if not isinstance(static, dict) or not count(item.get("id")) or "role" not in static:
                return BAD
        for each in self.table:
            if each.found == "list" and each.id not in ids:
                self.table.remove(each.id)
        for item in items:
            if item["id"] in ids:
                self._take(item)
        self.table.listed = self.table.listed or any(each.found == "list" for each in self.table)
        return OK

    def _take(self, item: dict[str, Any]) -> None:
        """Add or update one instance of the list. One that fails validation is skipped and left as it was."""
        made = listed(item)
        if made is None:
            log.warning("Instance %d of the list is skipped: its entry is not valid.", item["id"])
            return
        before = self.table.get(made.id)
        if before is not None and before.found != "list":
            return
        if before is None or before.url != made.url:
            if len(self.table) >= self.table.options.max_res_num and before is None:
                log.warning("Instance %d is skipped: there are max_res_num instances already.", made.id)
                return
            before = self.table.add(made)
        elif before.asked:
            return
        else:
            for name in ("role", "group", "peer", "slots", "blocks", "block_size", "p_percentage", "models"):
                setattr(before, name, getattr(made, name))
        if not before.asked:
            _report(before, item.get("dynamic_info"))
            self.table.heard(before)

    def info(self, asked: Asked) -> Reply:
        """Return allocated resources per instance, and request counts."""
        if not self.begun:
            return NOT_YET
        tally = self.choice.tally
        return Reply.json(
            {
                "schedule_info": [
                    {
                        "id": each.id,
                        "allocated_slots": each.prefill.slots + each.decode.slots,
                        "allocated_blocks": each.prefill.blocks + each.decode.blocks,
                    }
                    for each in self.table
                ],
                "request_num": self.choice.open,
                "request_length_info": {"input_len": round(tally.input), "output_len": round(tally.output)},
            }
        )

    def serve(self, asked: Asked, *, offline: bool) -> Reply:
        """Take instances out of service, or back into it."""
        if not self.begun:
            return NOT_YET
        said = asked.members()
        ids = said.get("ids") if said is not None else None
        if not isinstance(ids, list) or len(ids) > MOST or not all(count(id) for id in ids):
            return BAD
        for id in ids:
            instance = self.table.get(id)
            if instance is not None:
                self.table.withhold(instance, offline)
        return OK

    def tasks(self, asked: Asked) -> Reply:
        """Return the number of running requests per instance id; -1 for an unknown id."""
        counts = []
        for name, value in asked.query:
            if name == "id":
                number = int(value) if value.isascii() and value.isdigit() and len(value) < 20 else -1
                instance = self.table.get(number)
                counts.append(-1 if instance is None else instance.tasks)
        return Reply.json({"tasks": counts})

    def query(self, asked: Asked) -> Reply:
        """Return whether an instance has no running requests left, so that its role can change.

        ``role_change_type`` 0 asks for P, 1 for D.
        """
        said = asked.members() or {}
        p_id, d_id, kind = said.get("p_id"), said.get("d_id"), said.get("role_change_type")
        if not count(p_id) or not count(d_id) or not count(kind) or kind not in (0, 1):
            return Reply.json({"is_end": True}, 400)
        p, d = self.table.get(p_id), self.table.get(d_id)
        if not self.table.ready() or p is None or d is None:
            return Reply.json({"is_end": True})
        return Reply.json({"is_end": idle(p if kind == 0 else d)})

    def backup(self, asked: Asked) -> Reply:
        """Set whether this coordinator is the master."""
        if not self.begun:
            return NOT_YET
        said = asked.members() or {}
        master, abnormal = said.get("is_master"), said.get("is_abnormal")
        if not isinstance(master, bool) or not isinstance(abnormal, bool):
            return Reply.json({"update_successfully": False}, 400)
        self.master = master and not abnormal
        return Reply.json({"update_successfully": True})

    def alarm(self, asked: Asked) -> Reply:
        """Store another program's alarm: any object; missing id, level, source, time and detail are filled in."""
        said = asked.members()
        if said is None or len(asked.body) > 64 << 10:
            return BAD
        self.alarms.append({"id": "", "level": "", "source": "", "time": time.time(), "detail": ""} | said)
        return OK

    async def terminate(self, asked: Asked) -> Reply:
        """Shut down the server at an address at once, as MindIE coordinators ask for one whose results are lost."""
        said = asked.members() or {}
        ip, port = said.get("ip"), said.get("port")
        if not isinstance(ip, str) or not isinstance(port, str):
            return BAD
        instance = next((each for each in self.table if _place(each) == (ip, port)), None)
        if instance is None:
            return FAILED
        try:
            status, _ = await self._ask(f"{instance.management}/stopService?mode=Force")
        except Unanswered:
            status = 0
        log.warning("Instance %d was ordered to shut down (status %d).", instance.id, status)
        return Reply.json(WELL) if status == 200 else FAILED

    def _changed(self, instance: Instance, news: News) -> None:
        """Raise an alarm about an instance."""
        if news in ("lost", "faulty", "restarted"):
            details = {"lost": "does not answer", "faulty": "is not chosen for now", "restarted": "was restarted"}
            reason = f": {instance.fault.rstrip('.')}" if news == "faulty" and instance.fault else ""
            self.alarms.append(
                {
                    "id": f"instance-{instance.id}-{news}",
                    "level": "warning" if news == "restarted" else "error",
                    "source": "coordinator",
                    "time": time.time(),
                    "detail": f"Instance {instance.id} ({instance.url}) {details[news]}{reason}.",
                }
            )


def idle(instance: Instance) -> bool:
    """Whether the instance has no requests and, as far as it reports, no pinned pages that others still read."""
    return instance.tasks == 0 and instance.pinned == 0


def _place(instance: Instance) -> tuple[str, str]:
    """Return address and port of the instance."""
    url = urlsplit(instance.url)
    return url.hostname or "", str(url.port or {"http": 80, "https": 443}[url.scheme])


def listed(item: dict[str, Any]) -> Instance | None:
    """Parse an entry of a controller's list; None if it fails validation."""
    static = item["static_info"]
    try:
        host, port = _address(item.get("ip")), _port(item.get("port"))
        peer, metrics = _port(item.get("inter_comm_port", "1121")), _port(item.get("metric_port", item.get("port")))
    except ValueError:
        return None
    where = f"[{host}]" if host.version == 6 else str(host)
    role, name = ROLES.get(static.get("role")) if count(static.get("role")) else None, item.get("model_name", "")
    slots, blocks = static.get("total_slots_num", 200), static.get("total_block_num", 1024)
    size, share = static.get("block_size", 128), static.get("p_percentage", 0)
    group, longest, label = static.get("group_id", 0), static.get("max_seq_len", 0), static.get("label", 4)
    if role is None or not isinstance(name, str) or not _all(slots, blocks, size, share, group, longest, label):
        return None
    if not 1 <= slots <= 5000 or not 1 <= size <= 128 or share > 100 or label > 4 or blocks < 1:
        return None
    return Instance(
        item["id"],
        f"http://{where}:{port}",
        role,
        group,
        metrics=f"http://{where}:{metrics}",
        peer=f"{host};{peer}",
        found="list",
        asked="dynamic_info" not in item,
        slots=slots,
        blocks=blocks,
        block_size=size,
        p_percentage=share,
        models=frozenset([name] if name else []),
    )


def _report(instance: Instance, said: Any) -> None:
    """Update an instance from the load in a controller's list."""
    if not isinstance(said, dict):
        return
    for name, key in (("avail_slots", "avail_slots_num"), ("avail_blocks", "avail_block_num"),
                      ("waiting", "waiting_request_num"), ("running", "running_request_num")):  # fmt: skip
        if count(said.get(key)):
            setattr(instance, name, said[key])
    if isinstance(peers := said.get("peers"), list):
        instance.peers = frozenset(id for id in peers if count(id))
    if isinstance(hashes := said.get("prefix_hash"), list):
        instance.hashes = frozenset(hash for hash in hashes if isinstance(hash, int))


def _all(*values: Any) -> bool:
    return all(map(count, values))


def _address(text: Any) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Parse an IP address. Raises ValueError."""
    address = ipaddress.ip_address(text if isinstance(text, str) else "")
    if address.is_unspecified:
        raise ValueError("no host has this address")
    return address


def _port(text: Any) -> int:
    """Parse a port number. Raises ValueError."""
    number = int(text) if isinstance(text, str) and text.isascii() and text.isdigit() and len(text) < 6 else 0
    if not 1 <= number <= 65_535:
        raise ValueError("not a port")
    return number
