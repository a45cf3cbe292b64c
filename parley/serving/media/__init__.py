"""Pictures, videos and sound of requests: where they come from, and what they become before the engine sees them."""
