"""For all tests."""

import os

# Hugging Face's client talks to servers on this machine here; its offline switch would forbid that as well.
os.environ.pop("HF_HUB_OFFLINE", None)
