"""Tool calls as models write them: what a form is, and its reader. Knows text and JSON schemas, nothing of answers."""

from .form import Form
from .reader import CallReader
from .tools import Tools, follow, kinds

__all__ = ["CallReader", "Form", "Tools", "follow", "kinds"]
