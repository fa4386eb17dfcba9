"""Where kernels run: one file a device, the same methods in each (base.py)."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed

from ..build import sources
from .base import Device
from .choice import default_device

__all__ = ["NAMES", "Device", "build_kernels", "default_device", "device_class", "open_device"]
NAMES = ("cpu", "hip", "emulated", "cuda")


def device_class(name: str) -> type[Device]:
    """The class of device `name`. ValueError for an unknown name."""
    if name not in NAMES:
        raise ValueError(f"device is {name!r}, want one of {', '.join(NAMES)}")
    return getattr(importlib.import_module(f".{name}", __package__), f"{name.capitalize()}Device")


def open_device(name: str, index: int, ranks: int) -> Device:
    """The device `name` for the rank that uses ordinal `index`, of `ranks` on this node.

    Raises:
        ValueError: an unknown name.
        NotAvailable: the device or the package it needs is not there; says which extra to install.
    """
    return device_class(name)(index, ranks)


def build_kernels(name: str, ops: Iterable[str]) -> Iterator[str]:
    """Compiles operators for device `name` side by side, so that ranks find them in the cache; yields what is done."""
    kernels = sorted({path.stem for path in sources.kernels() if path.stem.startswith(tuple(ops))})
    build = device_class(name).build
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        jobs = {pool.submit(build, kernel): kernel for kernel in kernels}
        for job in as_completed(jobs):
            job.result()
            yield jobs[job]
