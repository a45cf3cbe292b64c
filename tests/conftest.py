"""For all tests."""

import os
from importlib.util import find_spec

from hypothesis import settings

# How long an example takes is up to what else the machine does; no test is about that.
settings.register_profile("untimed", settings(), deadline=None)
settings.load_profile("untimed")

# Hugging Face's client talks to servers on this machine here; its offline switch would forbid that as well.
os.environ.pop("HF_HUB_OFFLINE", None)

# gRPC is an extra; the lock files have it, an environment of somebody's own may not.
pytest_plugins = ["support.server_fixtures"]

collect_ignore = [] if find_spec("grpc") else ["dialects/test_triton_rpc.py", "apis/test_triton_grpc.py"]
