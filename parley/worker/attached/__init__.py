"""A running vLLM server as an engine: requests are sent as token ids to its ``/inference/v1/generate``.

``attached_engine.py`` connects to a server and watches it, ``server_facts.py`` asks it for its version, model and
limits, ``token_client.py`` sends requests for choices, and ``token_answers.py`` translates them and their answers.
Fairness, beams and statistics are those of the host of vLLM (``worker/vllm/host_loop.py``).
"""
