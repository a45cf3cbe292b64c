"""The client's side of a request: its connection, its API key, and its pace of reading."""
