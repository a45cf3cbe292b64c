"""vLLM servers that run already, as an engine: tokens go there and come back over ``/inference/v1/generate``.

``attached_engine.py`` has the life of the engine, ``server_facts.py`` its questions before a server is used,
``token_client.py`` the requests for choices, and ``token_answers.py`` the translation of answers. Fairness, beams and
statistics are those of the host of vLLM (``worker/vllm/host_loop.py``).
"""
