"""The device of who does not choose one."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

from ..build.params import MAX_RANKS
from . import rocm

NVIDIA = Path("/proc/driver/nvidia/gpus")
HOPPER = ("H100", "H200", "GH200", "H800", "H20")


def default_device(ranks: int = MAX_RANKS) -> str:
    """The first device that can run `ranks` ranks here, of "hip", "cuda", "emulated" and "cpu".

    "hip" and "cuda" where there are so many GPUs, one a rank, and their CuPy; "emulated" where its packages are and no
    ROCm, which it would stand in for; "cpu" everywhere. Loads no library, and touches no GPU.
    """
    if rocm.real_rocm():
        usable = has_package("cupy-rocm-") and has_package("hip-python")
        return "hip" if usable and rocm.count_gpus() >= ranks else "cpu"
    if count_hopper() >= ranks and has_package("cupy-cuda"):
        return "cuda"
    from ..emulator import node

    return "emulated" if node.why_unavailable() is None else "cpu"


def has_package(prefix: str) -> bool:
    """Whether a distribution whose name begins so is installed."""
    names = (str(found.metadata["Name"]) for found in importlib.metadata.distributions())
    return any(name.lower().replace("_", "-").startswith(prefix) for name in names)


def count_hopper() -> int:
    """H100, H200 and their like that the driver lists and no mask hides."""
    models = [file.read_text().partition("Model:")[2].split("\n")[0] for file in NVIDIA.glob("*/information")]
    count = sum(any(word in HOPPER for word in model.split()) for model in models)
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    return count if mask is None else min(count, len([name for name in mask.split(",") if name]))
