"""The neutral model: the data structures that the parts of parley exchange. Read the files in this order:

1. ``request.py``: a request, as a dialect reads it from a body; ``grammar.py``: constraints on an answer.
2. ``events.py``: the events that make up an answer; a dialect writes them as bytes.
3. ``engine.py``: the engine's side, token ids in and token ids out, without HTTP or text.

The package holds data only. It imports neither torch nor any other part of parley and knows no API's field names.
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
