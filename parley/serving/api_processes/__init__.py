"""Several API processes for one server: they read requests and write answers, and the main process owns all state."""
