"""Puts gfx950 code objects into the wheel, when the compiler (ziglang) is there while the wheel is built."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NEEDED = ("ziglang", "numpy", "ml_dtypes", "tqdm")
PROGRAM = "import sys, pathlib; from kosmos_raw.build import shipped; shipped.write(pathlib.Path(sys.argv[1]))"


class CodeObjects(BuildHookInterface):
    """Builds them in a temporary folder. An editable install builds kernels on first use instead."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
        if absent:
            self.app.display_warning(
                f"the wheel will carry no gfx950 code objects: {', '.join(absent)} not installed here "
                "(make wheel has them); kernels are then built on first use"
            )
            return
        self._folder = tempfile.TemporaryDirectory(prefix="kosmos_raw-")
        made = Path(self._folder.name) / "gfx950"
        subprocess.run([sys.executable, "-c", PROGRAM, str(made)], cwd=self.root, check=True)
        build_data["force_include"][str(made)] = "kosmos_raw/code_objects/gfx950"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "_folder"):
            self._folder.cleanup()
