"""What the store keeps of batches that have not ended: their answers so far, and how to send their other requests.

So a batch can let others run, and a server that shares the file of the store goes on with the batches of one that has
ended. No key is kept: the server that goes on asks whether the key with the tenant's id is still accepted.
"""

from __future__ import annotations

import msgspec

from parley.dialects.batch_job import RUN_PREFIX, BatchAnswer
from parley.dialects.records import SILENT_SECONDS
from parley.serving.records.opening import AnyRecordStore
from parley.serving.records.record_store import RecordStore

ANSWERS_PREFIX = "batch-answers/"

Answers = list[tuple[int, BatchAnswer]]  # with the numbers of their requests


class KeptRun(msgspec.Struct, frozen=True):
    """How to send the requests of a batch. ``apis``: those of the port that its client used. ``key_id``: of a key that
    is known by its hash. ``headers``: of each request. Paths begin with ``prefix``."""

    apis: str
    prefix: str
    creation_path: str
    key_id: str
    result_expiry: int | None
    headers: list[tuple[bytes, bytes]]


class BatchLog:
    """The log of all batches of a store. All calls raise NotReady if its file cannot be used now."""

    def __init__(self, store: AnyRecordStore):
        self._store = store
        self._shared_store = store if isinstance(store, RecordStore) else None
        self._counts: dict[tuple[str, str], int] = {}  # records with answers of each batch that runs here

    @property
    def outlives_server(self) -> bool:
        """Whether another server can go on with a batch."""
        return self._shared_store is not None

    def save_run(self, tenant: str, name: str, run: KeptRun) -> None:
        """Keep how to go on with a batch. ``name``: of its record."""
        if self._shared_store is not None:
            self._store.save_record(tenant, RUN_PREFIX + name, msgspec.msgpack.encode(run))

    def save_answers(self, tenant: str, name: str, answers: Answers) -> None:
        """Keep further answers."""
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
        """Let another server go on with a batch at once."""
        if self._shared_store is not None:
            self._shared_store.age_record(tenant, name, SILENT_SECONDS)

    def list_left_batches(self) -> list[tuple[str, str, KeptRun]]:
        """Return the batches whose servers have ended, the oldest first: tenant, name of the record, and run."""
        store = self._shared_store
        if store is None:
            return []
        left = []
        for tenant, run_name in store.list_all(RUN_PREFIX):
            name = run_name.removeprefix(RUN_PREFIX)
            if store.find_record(tenant, name) is None:  # the store has dropped it
                self.drop_batch(tenant, name)
            elif store.record_age(tenant, name) > SILENT_SECONDS:
                data = store.find_record(tenant, run_name)
                if data is not None:
                    left.append((tenant, name, msgspec.msgpack.decode(data, type=KeptRun)))
        return left

    def claim_batch(self, tenant: str, name: str) -> bool:
        """Take over a batch whose server has ended. Return False if another server was faster."""
        return self._shared_store is not None and self._shared_store.claim_record(tenant, name, SILENT_SECONDS)


def _answers_name(name: str, number: int | None = None) -> str:
    return f"{ANSWERS_PREFIX}{name}/" + ("" if number is None else f"{number:08d}")
