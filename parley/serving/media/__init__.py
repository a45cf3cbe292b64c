"""Pictures, videos and sound of requests: fetching them, and processing them before the engine sees them."""
