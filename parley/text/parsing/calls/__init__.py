"""Tool calls as models write them: their forms, a reader and a writer. Knows texts and schemas, but not answers."""

from parley.text.parsing.calls.form import ITEM, Form
from parley.text.parsing.calls.reader import CallReader
from parley.text.parsing.calls.tools import Tools, follow, kinds
from parley.text.parsing.calls.writer import written

__all__ = ["ITEM", "CallReader", "Form", "Tools", "follow", "kinds", "written"]
