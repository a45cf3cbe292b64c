"""The reason for which a form of answers is not followed, until whoever knows who asked for it tells. Knows nothing."""


class Refused(Exception):
    """Why a grammar cannot be followed, as the end of a sentence; whoever asked for it is named where it is told."""
