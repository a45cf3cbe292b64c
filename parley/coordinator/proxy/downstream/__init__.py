"""The client's side of a request: its connection, its API key, and the pace at which it reads."""
