"""Copies arrays from the host to a device without waiting for the device's other work."""

from __future__ import annotations

import numpy as np
import torch


def copy_to_device(numbers: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return an array as a tensor on the device. On the CPU, both share the memory.

    A GPU copies from pinned memory, in stream order with its other work. Torch keeps that memory until the copy is
    done.
    """
    tensor = torch.from_numpy(numbers)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
