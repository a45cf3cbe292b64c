"""Stores the state of batches that have not ended: their answers so far, and how to send their other requests.

So a batch can let others run, and a server that shares the file of the store resumes the batches of one that has ended.
No key is kept: the server that resumes a batch checks that the key with the tenant's id is still accepted.
"""

from __future__ import annotations

import uuid

import msgspec

from parley.dialects.batch_job import RUN_PREFIX, BatchAnswer
from parley.dialects.records import SILENT_SECONDS
from parley.serving.records.open_store import AnyRecordStore
from parley.serving.records.record_store import RecordStore

ANSWERS_PREFIX = "batch-answers/"

Answers = list[tuple[int, BatchAnswer]]  # with the numbers of their requests


class BatchTaken(Exception):
    """Another server has taken a batch over, because this one seemed to have ended."""


class ResumeInfo(msgspec.Struct, frozen=True):
    """How to send the requests of a batch.

    * ``apis``: the APIs of the port that its client used.
    * ``key_id``: the id of a key that is known by its hash.
    * ``headers``: the headers of each request.
    * ``prefix``: the beginning of all paths.
    * ``owner``: the server that runs the batch.
    """

    apis: str
    prefix: str
    creation_path: str
    key_id: str
    result_expiry: int | None
    headers: list[tuple[bytes, bytes]]
    owner: str = ""


class BatchLog:
    """The log of all batches of a store. All calls raise NotReady if its file cannot be used now."""

    def __init__(self, store: AnyRecordStore):
        self._store = store
        self._shared_store = store if isinstance(store, RecordStore) else None
        self._owner = uuid.uuid4().hex  # this server
        self._counts: dict[tuple[str, str], int] = {}  # records with answers of each batch that runs here

    @property
    def outlives_server(self) -> bool:
        """Whether another server can resume a batch."""
        return self._shared_store is not None

    def record_prefixes(self, name: str) -> tuple[str, ...]:
        """Return the prefixes of the names of a batch's records. ``name``: of its own record."""
        return RUN_PREFIX + name, _answers_name(name)

    def save_resume_info(self, tenant: str, name: str, resume_info: ResumeInfo) -> None:
        """Store how to resume a batch. ``name``: of its record."""
        if self._shared_store is not None:
            data = msgspec.msgpack.encode(msgspec.structs.replace(resume_info, owner=self._owner))
            self._store.save_record(tenant, RUN_PREFIX + name, data)

    def check_owner(self, tenant: str, name: str) -> None:
        """Raise BatchTaken if another server has taken a batch over. Otherwise the record for its resumption counts as
        new, so that a full store drops other records first."""

        def renew_record(data: bytes) -> tuple[bytes, tuple[str, ...]]:
            if msgspec.msgpack.decode(data, type=ResumeInfo).owner != self._owner:
                raise BatchTaken
            return data, ()

        if self._shared_store is not None:
            self._shared_store.update_record(tenant, RUN_PREFIX + name, renew_record)

    def save_answers(self, tenant: str, name: str, answers: Answers) -> None:
        """Keep further answers. Raises BatchTaken."""
        self.check_owner(tenant, name)
        number = self._counts.get((tenant, name), 0)
        self._store.save_record(tenant, _answers_name(name, number), msgspec.msgpack.encode(answers))
        self._counts[tenant, name] = number + 1

    def load_answers(self, tenant: str, name: str) -> Answers:
        """Return all answers of a batch that are still kept."""
        names = self._store.list_names(tenant, _answers_name(name))
        if names:
            self._counts[tenant, name] = 1 + int(names[-1].rpartition("/")[2])
        records = [self._store.find_record(tenant, record_name) for record_name in names]
        return [line for data in records if data is not None for line in msgspec.msgpack.decode(data, type=Answers)]

    def drop_batch(self, tenant: str, name: str) -> None:
        """Forget a batch, which has ended."""
        self._counts.pop((tenant, name), None)
        for record_name in (*self._store.list_names(tenant, _answers_name(name)), RUN_PREFIX + name):
            self._store.delete_record(tenant, record_name)

    def release_batch(self, tenant: str, name: str) -> None:
        """Let another server resume a batch at once."""
        if self._shared_store is not None:
            self._shared_store.age_record(tenant, name, SILENT_SECONDS)

    def list_orphaned_batches(self) -> list[tuple[str, str]]:
        """Return the batches whose servers seem to have ended: tenant, and name of the record."""
        store = self._shared_store
        if store is None:
            return []
        orphaned = []
        for tenant, run_name in store.list_all(RUN_PREFIX):
            name = run_name.removeprefix(RUN_PREFIX)
            if store.find_record(tenant, name) is None:  # the store has dropped it
                self.drop_batch(tenant, name)
            elif store.record_age(tenant, name) > SILENT_SECONDS:
                orphaned.append((tenant, name))
        return orphaned

    def load_resume_info(self, tenant: str, name: str) -> ResumeInfo | None:
        """Return how to resume a batch, None if that is not kept any more."""
        data = self._store.find_record(tenant, RUN_PREFIX + name)
        return None if data is None else msgspec.msgpack.decode(data, type=ResumeInfo)

    def claim_batch(self, tenant: str, name: str, resume_info: ResumeInfo) -> bool:
        """Take over a batch whose server has ended. Return False if another server was faster. A server that had only
        been silent stops its batch when it next looks (``check_owner``)."""
        if self._shared_store is None or not self._shared_store.claim_record(tenant, name, SILENT_SECONDS):
            return False
        self.save_resume_info(tenant, name, resume_info)
        return True


def _answers_name(name: str, number: int | None = None) -> str:
    return f"{ANSWERS_PREFIX}{name}/" + ("" if number is None else f"{number:08d}")
