"""The API process: request handlers, the life of a request, its limits and metrics. Never imports torch."""
