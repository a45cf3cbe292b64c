"""Pure policy: which sequence computes what, in which step, in which pages. Imports neither torch nor the server."""
