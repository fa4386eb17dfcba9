"""gfx950 code objects that travel in the wheel, so that a machine with ROCm compiles nothing.

A manifest beside them says which compiler made them, and from which sources: they are used only while the sources of
this package are the same.
"""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

from . import sources, zig
from .gfx950 import GfxBuild, build, flags

FOLDER = Path(__file__).parents[1] / "code_objects" / "gfx950"
MANIFEST = "manifest.json"


def write(folder: Path) -> dict[str, Any]:
    """Builds every operator into `folder`: OP.hsaco, OP.s (the text it was assembled from), and the manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    ops = [path.stem for path in sources.kernels()]
    for op in ops:
        built = build(op)
        for made in (built.text, built.code_object):
            shutil.copy(made, folder / made.name)
    manifest = {
        "target": "gfx950",
        "compiler": f"ziglang {zig.version()}",
        "flags": flags(),
        "sources": sources.digest(),
        "operators": ops,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest


@cache
def manifest() -> dict[str, Any]:
    """What the installed package ships; empty when it ships nothing."""
    try:
        return json.loads((FOLDER / MANIFEST).read_text())
    except OSError:
        return {}


def find(op: str) -> GfxBuild | None:
    """The shipped build of `op`, if there is one and it was made from these very sources."""
    if op not in manifest().get("operators", ()) or manifest()["sources"] != sources.digest():
        return None
    return GfxBuild(op, FOLDER / f"{op}.s", FOLDER / f"{op}.hsaco")
