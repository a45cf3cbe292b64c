"""Configures vLLM's KV connector: which one, where it listens, and which properties must be equal on both sides.

By default it is NIXL's, which works on GPUs and CPUs, over shared memory, InfiniBand or TCP. It moves the pages; parley
passes messages from one vLLM to the other (``page_moves.py``).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from vllm.config import KVTransferConfig, VllmConfig
from vllm.platforms import current_platform
from vllm.utils.network_utils import get_ip, get_open_port

from parley.types import Arena, VLLMSettings
from parley.worker.vllm.page_moves import DEFAULT_LEASE_SECONDS

DEFAULT_CONNECTOR = "NixlConnector"
WILDCARD_HOSTS = frozenset({"", "0.0.0.0", "::"})
LISTEN_HOST, LISTEN_PORT = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"
SAMPLES, SAMPLE_BYTES = 64, 4096  # samples of a file of weights, for the fingerprint


def connector_config(config: KVTransferConfig | None) -> KVTransferConfig:
    """Return the connector's configuration: the user's, or the default one. Pages that do not come are computed."""
    if config is None:
        config = KVTransferConfig(kv_connector=DEFAULT_CONNECTOR, kv_role="kv_both")
    config.kv_load_failure_policy = "recompute"
    return config


def listen_for_pages(host: str) -> None:
    """Let NIXL's connector answer other instances at this host, and at a free port; unless variables say otherwise."""
    os.environ.setdefault(LISTEN_HOST, get_ip() if host in WILDCARD_HOSTS else host)
    os.environ.setdefault(LISTEN_PORT, str(get_open_port()))


def lease_seconds(config: VllmConfig) -> float:
    """Return how long pages are kept for another instance that has not asked for them yet."""
    transfer = config.kv_transfer_config
    if transfer is None:
        return DEFAULT_LEASE_SECONDS
    return float(transfer.get_from_extra_config("kv_lease_duration", DEFAULT_LEASE_SECONDS))


def connector_arena(config: VllmConfig, settings: VLLMSettings, version: str) -> Arena | None:
    """Return the facts that other instances compare before they exchange pages; None without a connector.

    How a model is divided among GPUs is not part of it: vLLM's connectors handle differences, or compute the pages.
    """
    if config.kv_transfer_config is None:
        return None
    cache = config.cache_config
    parts: Mapping[str, object] = {
        "engine": f"vllm {version}",
        "connector": config.kv_transfer_config.kv_connector,
        "device": current_platform.device_type,
        "model": model_digest(Path(settings.model)),
        "weights": f"{config.model_config.quantization or 'none'} {config.model_config.dtype}",
        "pages": f"{cache.block_size} {cache.cache_dtype}",
        "trust-marks": "on" if settings.trust_marks else "off",
    }
    layout = ";".join(f"{name}={value}" for name, value in parts.items())
    return Arena(0, -1, cache.num_gpu_blocks or 0, [], layout)


def model_digest(folder: Path) -> str:
    """Return a digest of a model's configuration, and of samples of its weights."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as content:
            for number in range(SAMPLES):
                content.seek(size * number // SAMPLES)
                digest.update(content.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def adapter_digest(folder: str) -> str:
    """Return a digest of an adapter's files: pages depend on its content. Raises OSError."""
    digest = hashlib.sha256()
    for file in sorted(Path(folder).iterdir()):
        if file.is_file():
            digest.update(f"{file.name} {file.stat().st_size} ".encode())
            with file.open("rb") as content:
                digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()
