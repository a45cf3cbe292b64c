"""The error of a grammar that cannot be enforced, before the caller adds which member of the request asked for it."""


class GrammarRefused(Exception):
    """A grammar cannot be enforced. The message is the end of a sentence; the caller names the request's member."""
