"""Builds the node: a folder that looks like a small ROCm, with libamdhip64, hiprtc, stubs of all else, and a hipcc.

The folder is kept in the build cache under a key that covers our sources and the wheels that it was made for.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from ...build import cache as build_cache
from ...build import zig
from ...build.zig import BuildError
from . import stubs

HERE = Path(__file__).parent
RUNTIME = HERE.parent / "runtime"
ROCM_VERSION = "7.0.2"
_HIP_SOURCES = ("memory.cpp", "streams.cpp", "modules.cpp", "properties.cpp", "record.cpp")
_COMPILE = (
    *("-std=c++20", "-march=native", "-O2", "-g0", "-Wall", "-Wextra", "-Werror", "-fPIC", "-pthread"),
    *("-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics", "-fno-sanitize=all", "-fvisibility=hidden"),
)
_LINK = ("-shared", "-nostdlib", "-fno-sanitize=all", "-pthread")
_HIPCC = """\
#!/bin/sh
# CuPy asks hipcc for nothing but its include folders.
case " $* " in
  *" -E -v "*)
    include="$(cd "$(dirname "$0")/.." && pwd)/include"
    printf '#include <...> search starts here:\\n %s\\nEnd of search list.\\n' "$include" >&2
    ;;
  *)
    echo "hipcc: the emulated node compiles with hiprtc only (backend 'nvrtc' of RawModule)" >&2
    exit 1
    ;;
esac
"""


def node_folder() -> Path:
    """The built node. Takes some seconds the first time.

    Raises: BuildError when the compiler or a wheel is missing.
    """
    missing = stubs.missing_wheels()
    if missing:
        raise BuildError(f"emulated node: {missing}")
    ours = [HERE / name for name in (*_HIP_SOURCES, "hiprtc.cpp", "node.h", "stubs.py", "symbols.py", "libraries.py")]
    ours += sorted((HERE / "include").rglob("*")) + sorted(RUNTIME.glob("*"))
    texts = [f"{path.name}\n{path.read_text()}" for path in ours if path.is_file()]
    key = [zig.version(), zig.cpu_identity(), *stubs.wheel_versions(), *_COMPILE, *_LINK, *texts]
    return build_cache.cached(f"node/lib/{stubs.HIP}", key, _make).parents[1]


def _make(to: Path) -> None:
    """Everything, into the folder above the one of `to`; `to` last, for it says that all is there."""
    library = to.parent
    root = library.parent
    for folder in (library, root / "bin", root / ".info", root / "include"):
        folder.mkdir(parents=True, exist_ok=True)
    (root / ".info" / "version").write_text(ROCM_VERSION + "\n")
    (root / "bin" / "hipcc").write_text(_HIPCC)
    (root / "bin" / "hipcc").chmod(0o755)
    for header in (HERE / "include").rglob("*"):
        if header.is_file():
            place = root / "include" / header.relative_to(HERE / "include")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(header.read_bytes())
    build = root / "build"
    build.mkdir()
    wanted = stubs.wanted_by_cupy()
    _hip_library(build, to, wanted.pop(stubs.HIP, {}))
    for soname, functions in wanted.items():
        _stub_library(build, library / soname, functions, to)
    _link(library / "libhiprtc.so.7", [_object(build, HERE / "hiprtc.cpp")])
    (library / "libamdhip64.so").symlink_to(stubs.HIP)  # hip-python looks for this name
    (library / "libhiprtc.so").symlink_to("libhiprtc.so.7")


def _object(build: Path, source: Path, *flags: str) -> Path:
    made = build / f"{source.stem}.o"
    zig.run(["c++", "-x", "c++", *_COMPILE, f"-I{build}", *flags, "-c", "-o", str(made), str(source)])
    return made


def _link(to: Path, inputs: list[Path], *flags: str) -> None:
    zig.run(["cc", *_LINK, f"-Wl,-soname,{to.name}", *flags, "-o", str(to), *map(str, inputs), *zig.LIBC])


def _hip_library(build: Path, to: Path, functions: dict[str, str]) -> None:
    (build / "hip_names.h").write_text(names_header())
    sources = [HERE / name for name in _HIP_SOURCES]
    have = stubs.implemented(sources)
    lacking = sorted((functions.keys() | set(stubs.wanted_by_hip_python())) - have)
    stub_source = build / "hip_stubs.cpp"
    stub_source.write_text(stubs.source(stubs.HIP, lacking))
    script = build / "hip.map"
    script.write_text(stubs.version_script(functions))
    objects = [_object(build, source) for source in (*sources, stub_source)]
    objects.append(_object(build, RUNTIME / "runtime.cpp", "-ffp-contract=off"))
    _link(to, objects, f"-Wl,--version-script={script}")


def _stub_library(build: Path, to: Path, functions: dict[str, str], hip: Path) -> None:
    source = build / f"{to.name.split('.')[0]}.cpp"
    source.write_text(stubs.source(to.name, sorted(functions)))
    script = build / f"{source.stem}.map"
    script.write_text(stubs.version_script(functions))
    versions = [f"-Wl,--version-script={script}"] if script.stat().st_size else []
    _link(to, [_object(build, source), hip], *versions)


_FUNCTION_ATTRIBUTES = (
    "MAX_THREADS_PER_BLOCK", "SHARED_SIZE_BYTES", "LOCAL_SIZE_BYTES", "NUM_REGS", "MAX_DYNAMIC_SHARED_SIZE_BYTES",
)  # fmt: skip


def names_header() -> str:
    """Numbers of HIP's errors and attributes, as hip-python knows them."""
    hip = importlib.import_module("rocm.bindings.hip")
    errors = hip.hipError_t.__members__
    attributes = hip.hipDeviceAttribute_t.__members__
    functions = {
        f"HIP_FUNC_ATTRIBUTE_{n}": getattr(hip.hipFunction_attribute, f"HIP_FUNC_ATTRIBUTE_{n}")
        for n in _FUNCTION_ATTRIBUTES
    }
    numbers = [
        f"  {name} = {int(value)}," for name, value in (*errors.items(), *attributes.items(), *functions.items())
    ]
    named = [f'    {{{int(value)}, "{name}"}},' for name, value in errors.items()]
    lines = ["// Generated by libraries.py from hip-python.", "#pragma once", "enum {", *numbers, "};"]
    lines += ["struct ErrorName {", "  int code;", "  const char* name;", "};"]
    lines += ["static const ErrorName ERROR_NAMES[] = {", *named, "};"]
    return "\n".join(lines) + "\n"
