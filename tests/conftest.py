"""Settings for all tests."""

import gc
import os
from importlib.util import find_spec

from hypothesis import HealthCheck, settings

# The time of an example depends on the load of the machine; no test is about it.
settings.register_profile("untimed", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# Several test processes share the processors; torch's threads would wait for each other. Set before torch is imported.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

if find_spec("torchvision"):
    import parley.model.load  # noqa: F401  # makes Transformers importable beside it

# Tests connect Hugging Face's client to servers on this machine; its offline switch would forbid that as well.
os.environ.pop("HF_HUB_OFFLINE", None)

pytest_plugins = ["support.server_fixtures"]

# gRPC and WebSockets are extras: the lock files include them, but a custom environment may lack them.
collect_ignore = [] if find_spec("grpc") else ["dialects/test_triton_rpc.py", "apis/test_triton_grpc.py"]
if not find_spec("wsproto"):
    collect_ignore += ["web/test_websocket.py", "apis/test_openai_websocket.py"]

# Collecting makes objects that stay: each pass over them would find nothing, and all passes take ten seconds.
gc.disable()


def pytest_collection_finish() -> None:
    """Leave the collected tests out of later garbage collections: a pass over them takes half a second.

    The code's limits of processor time would count that half second as its own.
    """
    gc.freeze()
    gc.enable()
