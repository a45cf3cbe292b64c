"""The host of vLLM: a process between the API process and vLLM's own processes, run by vLLM's Python.

``start.py`` runs its modules: the host (``host.py``) and a media process (``media/media_process.py``).
``vllm_client.py``, ``generate_client.py``, ``connector.py``, ``media/item_processor.py`` and ``logits_plugin.py``,
which runs in vLLM's workers, import vLLM. Everything else translates (``requests`` and ``outputs``): it is plain
Python, which runs and is tested without vLLM. Other modules of parley that the host imports need no more than msgspec.
"""
