"""Which number formats the hardware computes in."""

import torch


def has_native_bf16(device_type: str) -> bool:
    """Whether devices of this type ("cpu", "cuda", "mps", ...) multiply bfloat16 in hardware.

    On CPU that takes AMX or AVX512-BF16: without them bfloat16 is emulated, many times slower than float32. PyTorch cannot
    tell the Apple GPUs that emulate it (M1, M2) from those that do not, so MPS counts as without.
    """
    if device_type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    features = torch.cpu.get_capabilities() if device_type == "cpu" else {}
    return bool(features.get("amx_bf16") or features.get("avx512_bf16"))
