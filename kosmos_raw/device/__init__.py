"""Where kernels run: one file a device, the same methods in each (base.py)."""

from __future__ import annotations

from .base import Device

NAMES = ("cpu", "hip", "emulated", "cuda")


def open_device(name: str, index: int, ranks: int) -> Device:
    """The device `name` for the rank that uses ordinal `index`, of `ranks` on this node.

    Raises:
        ValueError: an unknown name.
        NotAvailable: the device or the package it needs is not there; says which extra to install.
    """
    if name == "cpu":
        from .cpu import CpuDevice

        return CpuDevice(index, ranks)
    if name == "hip":
        from .hip import HipDevice

        return HipDevice(index, ranks)
    if name == "emulated":
        from .emulated import EmulatedDevice

        return EmulatedDevice(index, ranks)
    if name == "cuda":
        from .cuda import CudaDevice

        return CudaDevice(index, ranks)
    raise ValueError(f"device is {name!r}, want one of {', '.join(NAMES)}")
