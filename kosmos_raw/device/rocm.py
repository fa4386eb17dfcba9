"""What can be known of ROCm, and of the GPUs of this machine, without loading or asking any library."""

from __future__ import annotations

import importlib.util
import os
from ctypes.util import find_library
from pathlib import Path

from ..build import cache as build_cache

ROOTS = ("ROCM_PATH", "ROCM_HOME", "HIP_PATH")  # environment variables that name a ROCm
WHEELS = ("_rocm_sdk_core", "_rocm_sdk_devel")  # ROCm as Python packages
MASKS = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")  # hide GPUs from a process
KFD = Path("/sys/class/kfd/kfd/topology/nodes")
GFX950 = 90500  # gfx_target_version of the driver


def hip_libraries() -> list[str]:
    """Files of the HIP runtimes that this process has loaded; one, if all is well."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    return sorted({line.split(maxsplit=5)[5] for line in lines if "/libamdhip64.so" in line})


def real_rocm() -> str | None:
    """File of a HIP runtime that is not the emulated one: loaded, or where wheels would find it. None without one."""
    ours = str(build_cache.folder().resolve())
    loaded = hip_libraries()
    if loaded:
        return next((library for library in loaded if not library.startswith(ours)), None)
    for place in _places():
        for library in sorted(place.glob("libamdhip64.so*")):
            if not str(library.resolve()).startswith(ours):
                return str(library)
    return find_library("amdhip64")


def _places() -> list[Path]:
    roots = [Path(os.environ[name]) for name in ROOTS if os.environ.get(name)]
    roots += sorted(Path("/opt").glob("rocm*"))
    for name in WHEELS:
        wheel = importlib.util.find_spec(name)
        roots += map(Path, wheel.submodule_search_locations or ()) if wheel else ()
    places = [root / folder for root in roots for folder in ("lib", "lib64")]
    return places + [Path(place) for place in os.environ.get("LD_LIBRARY_PATH", "").split(":") if place]


def rocm_version(libraries: list[str]) -> tuple[int, ...] | None:
    """Version of the ROCm that a runtime library belongs to, by the file .info/version; None when there is none.
    (HIP's own number does not tell ROCm 7.0.1 from 7.0.2.)"""
    roots = [Path(library).resolve().parents[1] for library in libraries]
    roots += [Path(os.environ[name]) for name in ROOTS[:2] if os.environ.get(name)]
    for root in roots:
        try:
            text = (root / ".info" / "version").read_text().strip()
            return tuple(int(part) for part in text.split("-")[0].split(".")[:3])
        except (OSError, ValueError):
            continue
    return None


def count_gpus() -> int:
    """MI350X and MI355X that the kernel driver knows and no mask hides."""
    count = sum(f"gfx_target_version {GFX950}" in _text(file).splitlines() for file in KFD.glob("*/properties"))
    for mask in MASKS:
        if mask in os.environ:
            count = min(count, len([name for name in os.environ[mask].split(",") if name]))
    return count


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # a node that a container hides
        return ""
