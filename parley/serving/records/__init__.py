"""Records that a server keeps for its clients between requests, and requests that run without a client."""
