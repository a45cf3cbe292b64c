"""The API process: HTTP, the life of a request, limits and metrics. Never imports torch or transformers."""
