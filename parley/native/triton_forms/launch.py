"""Options that all launches share, and whether kernels run in Triton's interpreter."""

from __future__ import annotations

import torch
import triton

# TRITON_INTERPRET=1 runs kernels on CPU tensors, for tests.
INTERPRETED: bool = triton.knobs.runtime.interpret

# A fused multiplication and addition is rounded once, two operations twice. Which of them a compiler fuses would differ
# between kernels that must agree.
NO_FUSION = {} if INTERPRETED else {"enable_fp_fusion": False}


def unused(like: torch.Tensor) -> torch.Tensor:
    """Return a tensor for a parameter that the kernel does not read."""
    return like
