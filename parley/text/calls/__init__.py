"""Tool calls as models write them: their forms, a reader and a writer. Knows texts and schemas, but not answers."""

from .form import ITEM, Form
from .reader import CallReader
from .tools import Tools, follow, kinds
from .written import written

__all__ = ["ITEM", "CallReader", "Form", "Tools", "follow", "kinds", "written"]
