"""The options of ``parley serve`` by subject, and their translation from MindIE's configuration file."""
