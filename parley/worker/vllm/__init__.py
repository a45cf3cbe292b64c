"""The host of vLLM: a process between the API process and vLLM's own processes, run by vLLM's Python.

``start.py`` runs its modules: the host (``host.py``) and a media process (``media_process.py``). ``vllm_client.py``,
``generate_client.py`` and ``item_processor.py`` import vLLM, and everything else translates: it is plain Python, which
runs and is tested without vLLM. Of parley the host's modules import only what needs no more than msgspec.
"""
