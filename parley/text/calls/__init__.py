"""Tool calls as models write them: what a form is, its reader, its writer. Knows texts and schemas, not answers."""

from .form import ITEM, Form
from .reader import CallReader
from .tools import Tools, follow, kinds
from .written import written

__all__ = ["ITEM", "CallReader", "Form", "Tools", "follow", "kinds", "written"]
