"""The options of ``parley serve``, by subject."""
