"""Tool calls as models write them: their forms, a reader and a writer. Knows texts and schemas, but not answers."""

from parley.text.parsing.calls.form import LIST_ITEM, CallForm
from parley.text.parsing.calls.reader import CallReader
from parley.text.parsing.calls.tools import RequestTools, resolve_pointer, schema_types
from parley.text.parsing.calls.writer import write_calls

__all__ = [
    "LIST_ITEM",
    "CallForm",
    "CallReader",
    "RequestTools",
    "resolve_pointer",
    "schema_types",
    "write_calls",
]
