"""What hiprtc does: source to code object, by the clang of the ziglang wheel and the headers in include/."""

from __future__ import annotations

import ctypes
import re
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...build import cache as build_cache
from ...build import gfx950, zig
from ...build.zig import BuildError
from .code_objects import TEXT_SECTION

INCLUDE = Path(__file__).parent / "include"
_SUCCESS, _COMPILATION = 0, 6  # HIPRTC_...
_COMPILE = (
    *(
        "-x",
        "hip",
        "--cuda-device-only",
        "--offload-arch=gfx950",
        "-nogpulib",
        "-nogpuinc",
        "-O3",
        "-fuse-cuid=none",
        "-w",
    ),
    *("-mllvm", "-amdgpu-sdwa-peephole=0", "-D__HIPCC_RTC__", "-D__HIPCC__"),
)
_NAME = "kosmos_name_"  # variables that hold what a name expression stands for


@dataclass
class Request:
    source: str
    options: list[str]
    headers: dict[str, str] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)  # expressions such as "f<float>"


@dataclass
class Compiled:
    code_object: bytes
    lowered: list[str]  # symbol of each name


def clang_options(options: Sequence[str]) -> list[str]:
    """hiprtc's options as clang takes them; the architecture is ours to choose."""
    out, standard = [], "-std=c++17"
    for option in options:
        if option == "-fcuda-flush-denormals-to-zero":
            out.append("-fgpu-flush-denormals-to-zero")
        elif match := re.fullmatch(r"--?std=(.*)", option):
            standard = f"-std={match[1]}"
        elif not re.match(r"-arch=|--gpu-architecture=|--offload-arch=", option):
            out.append(option)
    return [*out, standard]


def compile_program(request: Request) -> Compiled:
    """Raises: BuildError with what the compiler said."""
    gfx950.require_compiler()
    options = clang_options(request.options)
    headers = [
        f"{path.relative_to(INCLUDE)}\n{path.read_text()}" for path in sorted(INCLUDE.rglob("*")) if path.is_file()
    ]
    given = [f"{name}\n{text}" for name, text in sorted(request.headers.items())]
    key = [zig.version(), *_COMPILE, *options, TEXT_SECTION, *headers, *given, *request.names, request.source]

    def make(to: Path) -> None:
        with tempfile.TemporaryDirectory() as folder:
            _compile(request, options, Path(folder), to)

    made = build_cache.cached("program.hsaco", key, make)
    return Compiled(made.read_bytes(), made.with_suffix(".names").read_text().split("\n")[: len(request.names)])


def _compile(request: Request, options: Sequence[str], folder: Path, to: Path) -> None:
    for name, text in request.headers.items():
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    source, text_file, assembled = folder / "program.hip", folder / "program.s", folder / "whole.s"
    source.write_text(request.source + "\n" + _name_variables(request.names))
    folders = (f"-I{folder}", "-include", str(INCLUDE / "device.h"), "-isystem", str(INCLUDE))
    zig.run(["clang", *_COMPILE, *folders, *options, "-S", "-o", str(text_file), str(source)])
    text = text_file.read_text()
    assembled.write_text(f'{text}\n\t.section {TEXT_SECTION},"",@progbits\n\t.incbin "{text_file}"\n')
    gfx950.assemble(assembled, to)
    to.with_suffix(".names").write_text("\n".join(_lowered(text, i) for i in range(len(request.names))))


def _name_variables(names: Sequence[str]) -> str:
    lines = [
        f'extern "C" __device__ const void* const {_NAME}{i} __attribute__((used)) = (const void*)({name});'
        for i, name in enumerate(names)
    ]
    return "\n".join(lines) + "\n"


def _lowered(text: str, i: int) -> str:
    found = re.search(rf"^{_NAME}{i}:\n\s+\.quad\s+([\w.$]+)", text, re.M)
    return found[1] if found else ""


# ---- for hiprtc.cpp ----
def connect(library: ctypes.CDLL) -> Any:
    """Has the library compile through this module. Returns what must be kept alive."""
    library.kosmos_rtc_source.restype = ctypes.c_char_p
    library.kosmos_rtc_source.argtypes = [ctypes.c_void_p]
    library.kosmos_rtc_header.restype = ctypes.c_char_p
    library.kosmos_rtc_header.argtypes = [ctypes.c_void_p, ctypes.c_uint32, ctypes.POINTER(ctypes.c_char_p)]
    library.kosmos_rtc_name.restype = ctypes.c_char_p
    library.kosmos_rtc_name.argtypes = [ctypes.c_void_p, ctypes.c_uint32]
    library.kosmos_rtc_set_code.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint64]
    library.kosmos_rtc_set_log.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    library.kosmos_rtc_set_lowered.argtypes = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_char_p]
    callback: Callable[..., Any] = ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)
    )(lambda program, count, options: _compile_for_c(library, program, [options[i].decode() for i in range(count)]))
    library.kosmos_rtc_set_compiler(callback)
    return callback


def _compile_for_c(library: ctypes.CDLL, program: int, options: list[str]) -> int:
    try:
        done = compile_program(_request(library, program, options))
        library.kosmos_rtc_set_code(program, done.code_object, len(done.code_object))
        for i, name in enumerate(done.lowered):
            library.kosmos_rtc_set_lowered(program, i, name.encode())
        return _SUCCESS
    except BuildError as error:
        library.kosmos_rtc_set_log(program, str(error).encode())
    except BaseException:  # nothing may pass through C
        library.kosmos_rtc_set_log(program, traceback.format_exc().encode())
    return _COMPILATION


def _request(library: ctypes.CDLL, program: int, options: list[str]) -> Request:
    request = Request(library.kosmos_rtc_source(program).decode(), options)
    name = ctypes.c_char_p()
    while (text := library.kosmos_rtc_header(program, len(request.headers), ctypes.byref(name))) is not None:
        request.headers[(name.value or b"").decode()] = text.decode()
    while (expression := library.kosmos_rtc_name(program, len(request.names))) is not None:
        request.names.append(expression.decode())
    return request
