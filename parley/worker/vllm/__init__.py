"""The host of vLLM: a process between the API process and vLLM's own processes, run by vLLM's Python.

``host.py`` starts it, ``vllm_client.py`` alone imports vLLM, and everything else translates: it is plain Python, which
runs and is tested without vLLM. Of parley these modules import only what needs no more than msgspec.
"""
