"""Built files, kept under a name that says everything they were made of."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

SCHEMA = "1"  # part of every key; raise it when the way of building changes


def folder() -> Path:
    """KOSMOS_CACHE_DIR, else kosmos_raw in the user's cache folder. Safe to delete at any time."""
    chosen = os.environ.get("KOSMOS_CACHE_DIR")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kosmos_raw"


def cached(name: str, key: Iterable[str], make: Callable[[Path], None]) -> Path:
    """The file `name` made by `make(path)`, made once for each key.

    Ranks that start together wait for the first of them to build. A build happens in a temporary folder and is renamed,
    so that a killed build leaves nothing that looks finished.
    """
    h = hashlib.sha256()
    for part in (SCHEMA, name, *key):
        h.update(f"{len(part)}:{part}".encode())
    place = folder() / h.hexdigest()[:24]
    if (place / name).is_file():
        return place / name
    folder().mkdir(parents=True, exist_ok=True)
    with open(folder() / f"{place.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / name).is_file():
            with tempfile.TemporaryDirectory(dir=folder(), prefix="building-") as building:
                make(Path(building) / name)
                place.mkdir(exist_ok=True)
                for made in sorted(Path(building).iterdir(), key=lambda path: path.name == name):
                    os.replace(made, place / made.name)  # `name` last: when it is there, all is
    return place / name
