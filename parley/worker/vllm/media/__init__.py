"""Images, video and audio for vLLM: a media process of vLLM's Python, vLLM's processor, and its features in files."""
