"""Decodes images, audio and videos of clients, and runs the model's processor. Used in media processes only."""
