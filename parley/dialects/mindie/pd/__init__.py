"""MindIE between instances: its coordinator's body checks, its instance plane and its recompute bodies."""
