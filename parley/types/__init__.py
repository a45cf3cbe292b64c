"""The neutral model: the data that the parts of parley exchange. Read it first, in this order:

1. ``request.py``: a request as a dialect reads it from a body; ``grammar.py`` has the forms that it may ask for.
2. ``events.py``: the events that an answer consists of; a dialect writes them as bytes.
3. ``engine.py``: token ids in, token ids out; nothing of HTTP or text.

Everything here is data. Nothing here imports torch or another part of parley, or knows an API's field names.
"""

from __future__ import annotations

from parley.types.engine import (
    Arena,
    Batch,
    Cost,
    Finish,
    ModelInfo,
    Output,
    Region,
    Score,
    Settings,
    Stats,
    Thinking,
    Work,
)
from parley.types.events import (
    Accepted,
    CallDelta,
    Delta,
    Done,
    Event,
    Failed,
    Part,
    Reason,
    Scored,
    Token,
    Usage,
    Vector,
)
from parley.types.grammar import AnyText, Either, Exactly, Grammar, Piece, Repeat, Sequence, Tag, TagList, Tags
from parley.types.request import (
    Beam,
    Chat,
    Keep,
    Message,
    Pooling,
    Prompt,
    Repetition,
    Request,
    Sampling,
    Stop,
    Text,
    Tokens,
    ToolCall,
    Want,
)

__all__ = [
    "Accepted",
    "AnyText",
    "Arena",
    "Batch",
    "Beam",
    "CallDelta",
    "Chat",
    "Cost",
    "Delta",
    "Done",
    "Either",
    "Event",
    "Exactly",
    "Failed",
    "Finish",
    "Grammar",
    "Keep",
    "Message",
    "ModelInfo",
    "Output",
    "Part",
    "Piece",
    "Pooling",
    "Prompt",
    "Reason",
    "Region",
    "Repeat",
    "Repetition",
    "Request",
    "Sampling",
    "Score",
    "Scored",
    "Sequence",
    "Settings",
    "Stats",
    "Stop",
    "Tag",
    "TagList",
    "Tags",
    "Text",
    "Thinking",
    "Token",
    "Tokens",
    "ToolCall",
    "Usage",
    "Vector",
    "Want",
    "Work",
]
