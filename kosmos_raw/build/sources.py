"""Where the kernel sources are, and what they say."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

# Inside an installed package the sources lie in it; in a checkout beside it.
_PLACES = (Path(__file__).parents[1] / "hip_kernels", Path(__file__).parents[2] / "hip_kernels")


def folder() -> Path:
    """The folder hip_kernels/ that belongs to this package."""
    for place in _PLACES:
        if (place / "target" / "target.h").is_file():
            return place
    raise FileNotFoundError(f"kosmos_raw: no kernel sources in {' or '.join(map(str, _PLACES))}; reinstall kosmos-raw")


def kernels() -> list[Path]:
    """The entry points of all operators."""
    return sorted((folder() / "kernels").glob("*.hip"))


def kernel(op: str) -> Path:
    """The entry point of operator `op`, hip_kernels/kernels/OP.hip."""
    return folder() / "kernels" / f"{op}.hip"


@cache
def digest() -> str:
    """Hash of every source, headers included: a changed header must not find an old binary in a cache."""
    h = hashlib.sha256()
    for path in sorted(folder().rglob("*")):
        if path.suffix in (".h", ".hip"):
            h.update(f"{path.relative_to(folder())}\0".encode() + path.read_bytes() + b"\0")
    return h.hexdigest()
