"""The engine process: receives messages, runs the engine loop and sends outputs."""
