"""Puts the emulated node under CuPy and hip-python: loads its libraries before either looks for ROCm's.

The loader takes a library that is already there under the same soname, so the wheels stay as they are.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
from pathlib import Path

from ...build import cache as build_cache
from ...build import zig
from ...build.zig import BuildError
from ...device.rocm import hip_libraries, real_rocm
from ...errors import NotAvailable
from . import code_objects, hiprtc, libraries, stubs
from .options import LOG, NodeOptions, from_environment

_lock = threading.Lock()
_node: Node | None = None


class Node:
    """The loaded runtime of this process."""

    def __init__(self, folder: Path, options: NodeOptions):
        self.folder, self.options = folder, options
        self._libraries = {path.name: ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL) for path in _in_order(folder / "lib")}
        hip = self._libraries[stubs.HIP]
        given = options.to_c()
        hip.kosmos_node_configure(ctypes.byref(given))
        hip.kosmos_node_set_loader(code_objects.LOADER)
        hip.kosmos_node_calls.restype = ctypes.c_uint64
        hip.kosmos_node_calls.argtypes = [ctypes.c_char_p, ctypes.c_uint64]
        self._keep = hiprtc.connect(self._libraries["libhiprtc.so.7"])

    def calls(self) -> dict[str, int]:
        """How often each function of HIP was called; stubs as "library:function"."""
        hip = self._libraries[stubs.HIP]
        buffer = ctypes.create_string_buffer(int(hip.kosmos_node_calls(None, 0)) + 4096)
        hip.kosmos_node_calls(buffer, len(buffer))
        return {name: int(times) for name, times in (line.split() for line in buffer.value.decode().splitlines())}

    def stub_calls(self) -> dict[str, int]:
        """Calls of what the node does not have. Tests state how many they expect, which is none."""
        return {name: times for name, times in self.calls().items() if ":" in name}


def _in_order(folder: Path) -> list[Path]:
    """libamdhip64 first: the stubs need it."""
    files = [path for path in folder.iterdir() if not path.is_symlink()]
    return sorted(files, key=lambda path: (path.name != stubs.HIP, path.name))


def preload(options: NodeOptions | None = None) -> Node:
    """Loads the node into this process, once; later calls return the same.

    Args:
        options: None takes those of the environment variable KOSMOS_EMULATOR, which child processes inherit.
    Raises:
        NotAvailable: a real ROCm is there, CuPy is loaded already, or something is missing; says what.
    """
    global _node
    with _lock:
        if _node is None:
            _refuse_if_too_late()
            try:
                folder = libraries.node_folder()
                _set_environment(folder)
                _node = Node(folder, options or from_environment())
            except BuildError as error:
                raise NotAvailable(f"device emulated: {error}") from error
            if os.environ.get(LOG):
                atexit.register(_write_log, _node)
        return _node


def build(text: Path) -> None:
    """Builds the node and the translation of a kernel's text into the cache, and loads neither."""
    libraries.node_folder()
    code_objects.translated(text)


def _refuse_if_too_late() -> None:
    for module in ("cupy", "hip.hip", "rocm.bindings.hip"):
        if module in sys.modules and hip_libraries():
            raise NotAvailable(
                f"device emulated: {module} is loaded already, with another HIP runtime; open the emulated device first"
            )
    why = why_unavailable()
    if why:
        raise NotAvailable(f"device emulated: {why}" + ("; use device='hip'" if real_rocm() else ""))


def why_unavailable() -> str | None:
    """What speaks against an emulated node on this machine: a missing package, or a real ROCm. None: nothing."""
    found = real_rocm()
    if found:
        return f"this machine has a real HIP runtime ({found})"
    try:
        zig.require()
    except BuildError as error:
        return str(error)
    return stubs.missing_wheels()


def _set_environment(folder: Path) -> None:
    """For this process and its children: where hip-python looks, the hipcc that CuPy asks, and a kernel cache of our
    own, for what was compiled here must never meet a real GPU."""
    os.environ["ROCM_PATH"] = os.environ["ROCM_HOME"] = str(folder)
    programs = str(folder / "bin")
    path = os.environ.get("PATH", os.defpath)
    if programs not in path.split(os.pathsep):
        os.environ["PATH"] = programs + os.pathsep + path
    os.environ["CUPY_CACHE_DIR"] = str(build_cache.folder() / "cupy-emulated")


def _write_log(node: Node) -> None:
    lines = "".join(f"{name} {times}\n" for name, times in sorted(node.calls().items()))
    with open(os.environ[LOG], "a") as log:  # one write: ranks share the file
        log.write(lines)


def read_log(path: Path) -> dict[str, int]:
    """Calls of all processes that wrote to KOSMOS_EMULATOR_LOG."""
    total: dict[str, int] = {}
    for line in path.read_text().splitlines():
        name, times = line.split()
        total[name] = total.get(name, 0) + int(times)
    return total
