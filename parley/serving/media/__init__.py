"""Images, videos and audio of requests: fetching them, and processing them before the engine sees them."""
