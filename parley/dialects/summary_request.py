"""What the model is asked for a summary of a conversation, and how the summary stands in a later one."""

from __future__ import annotations

SUMMARY_REQUEST = (
    "Summarize the conversation so far, so that you can continue it from the summary alone. Keep all facts, decisions, "
    "names and open tasks. Write nothing but the summary."
)
# The answer follows at once, to the summary alone.
ANSWERED_SUMMARY_REQUEST = (
    f"{SUMMARY_REQUEST} End with the last request of the user, word by word, and with what was done about it so far."
)
SUMMARY_HEADING = "Summary of the conversation so far:"


def summary_text(summary: str) -> str:
    """Return a summary as the message of the user that stands for the turns before it."""
    return f"{SUMMARY_HEADING}\n{summary}"
