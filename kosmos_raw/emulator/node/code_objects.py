"""Code objects for the node: what their metadata says, the assembly text that belongs to them, and its translation.

The text is either in the code object itself (section TEXT_SECTION; hiprtc.py puts it there) or in the .s file beside
it.
"""

from __future__ import annotations

import ctypes
import shutil
import struct
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...build import cache as build_cache
from ...build import zig
from ..asm import Unsupported
from ..module import Module
from ..translate import UnknownInstructions
from . import symbols

TEXT_SECTION = ".kosmos.gfx950"
EMULATOR = Path(__file__).parents[1]
_SUCCESS, _INVALID_IMAGE, _NO_BINARY, _FILE_NOT_FOUND = 0, 200, 209, 301  # hipError...
_AMDGPU, _GFX950, _NOTE, _METADATA = 224, 0x4F, 7, 32


class BadCodeObject(ValueError):
    """Not a code object that the node can run; `status` is HIP's number of the error."""

    def __init__(self, message: str, status: int = _INVALID_IMAGE):
        self.status = status
        super().__init__(message)


# ---- reading ----
@dataclass(frozen=True)
class Image:
    """A code object's metadata, as msgpack has it, and its assembly text, if it carries one."""

    metadata: dict[str, Any]
    text: bytes | None


def read_image(data: bytes) -> Image:
    """Raises: BadCodeObject."""
    if data[:4] != b"\x7fELF":
        raise BadCodeObject("not a bare code object (offload bundles are not unpacked)")
    machine, flags = struct.unpack_from("<H", data, 18)[0], struct.unpack_from("<I", data, 48)[0]
    if machine != _AMDGPU or flags & 0xFF != _GFX950:
        raise BadCodeObject(
            f"built for another machine (ELF machine {machine}, flags {flags:#x}), want gfx950", _NO_BINARY
        )
    metadata: dict[str, Any] = {}
    text = None
    for section in symbols.sections(data):
        if section.name == TEXT_SECTION:
            text = section.data
        if section.kind == _NOTE:
            metadata |= _metadata(section.data)
    return Image(metadata, text)


def _metadata(notes: bytes) -> dict[str, Any]:
    at = 0
    while at + 12 <= len(notes):
        name_bytes, size, kind = struct.unpack_from("<III", notes, at)
        start = at + 12 + (name_bytes + 3) // 4 * 4
        if kind == _METADATA:
            return unpack(notes[start : start + size])
        at = start + (size + 3) // 4 * 4
    return {}


def unpack(data: bytes) -> Any:
    """One msgpack value: the kinds that metadata has."""
    value, _ = _value(data, 0)
    return value


_INTEGERS = {0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}
_LENGTHS = {0xD9: ">B", 0xDA: ">H", 0xDB: ">I", 0xDC: ">H", 0xDD: ">I", 0xDE: ">H", 0xDF: ">I"}
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}


def _value(data: bytes, at: int) -> tuple[Any, int]:
    first = data[at]
    at += 1
    if first < 0x80:
        return first, at
    if first >= 0xE0:
        return first - 0x100, at
    if first in _CONSTANTS:
        return _CONSTANTS[first], at
    if first in _INTEGERS:
        return struct.unpack_from(_INTEGERS[first], data, at)[0], at + struct.calcsize(_INTEGERS[first])
    if first in _LENGTHS:
        length = struct.unpack_from(_LENGTHS[first], data, at)[0]
        at += struct.calcsize(_LENGTHS[first])
        kind = "text" if first <= 0xDB else "list" if first <= 0xDD else "map"
    elif first < 0xC0:
        kind = "map" if first < 0x90 else "list" if first < 0xA0 else "text"
        length = first & (0x1F if kind == "text" else 0x0F)
    else:
        raise BadCodeObject(f"metadata has a value of unknown kind {first:#x}")
    if kind == "text":
        return data[at : at + length].decode(), at + length
    items = []
    for _ in range(length * (2 if kind == "map" else 1)):
        item, at = _value(data, at)
        items.append(item)
    return (dict(zip(items[::2], items[1::2], strict=True)) if kind == "map" else items), at


# ---- for modules.cpp ----
class _Argument(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in "offset bytes kind axis".split()]


class _Function(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("translated", ctypes.c_void_p),
        ("arguments", ctypes.POINTER(_Argument)),
        *((name, ctypes.c_uint32) for name in "argument_count params_bytes lds_bytes scratch_bytes".split()),
        *((name, ctypes.c_uint32) for name in "vector_registers scalar_registers max_threads".split()),
    ]


class _CodeObject(ctypes.Structure):
    _fields_ = [("functions", ctypes.POINTER(_Function)), ("count", ctypes.c_uint32)]


_GIVEN, _BLOCK_COUNT, _GROUP_SIZE, _GRID_DIMS, _DYNAMIC_LDS, _ZERO = range(6)
_HIDDEN = {"hidden_grid_dims": _GRID_DIMS, "hidden_dynamic_lds_size": _DYNAMIC_LDS}


def _argument(a: dict[str, Any]) -> _Argument:
    kind, axis = a[".value_kind"], 0
    if not kind.startswith("hidden_"):
        number = _GIVEN
    elif kind.startswith(("hidden_block_count_", "hidden_group_size_")):
        number = _BLOCK_COUNT if "block_count" in kind else _GROUP_SIZE
        axis = "xyz".index(kind[-1])
    else:
        number = _HIDDEN.get(kind, _ZERO)
    return _Argument(a[".offset"], a[".size"], number, axis)


def _function(kernel: dict[str, Any], translated: int) -> _Function:
    arguments = [_argument(a) for a in kernel.get(".args", [])]
    return _Function(
        kernel[".name"].encode(),
        translated,
        (_Argument * len(arguments))(*arguments),
        len(arguments),
        kernel[".kernarg_segment_size"],
        kernel[".group_segment_fixed_size"],
        kernel[".private_segment_fixed_size"],
        kernel[".vgpr_count"],
        kernel[".sgpr_count"],
        kernel[".max_flat_workgroup_size"],
    )


# ---- loading ----
_lock = threading.Lock()
_loaded: dict[bytes, tuple[_CodeObject, ctypes.CDLL]] = {}  # by content; never let go, for launches may be under way


def load(data: bytes, beside: Path | None = None) -> _CodeObject:
    """The code object, translated; the same one for the same bytes.

    Raises: BadCodeObject, UnknownInstructions, BuildError.
    """
    with _lock:  # ranks that are threads: one translates, the others wait
        known = _loaded.get(data)
        if known is None:
            known = _loaded[data] = _translate(data, beside)
        return known[0]


def _translate(data: bytes, beside: Path | None) -> tuple[_CodeObject, ctypes.CDLL]:
    image = read_image(data)
    kernels = image.metadata.get("amdhsa.kernels", [])
    made = translated(_text_file(image, beside))
    names, in_text = sorted(kernel[".name"] for kernel in kernels), made.with_suffix(".names").read_text().split()
    if names != in_text:
        raise BadCodeObject(f"the code object has the kernels {names}, its assembly text {in_text}")
    library = ctypes.CDLL(str(made))
    library.emulator_module.restype = ctypes.c_void_p
    functions = (_Function * len(kernels))(*(_function(kernel, library.emulator_module()) for kernel in kernels))
    return _CodeObject(functions, len(kernels)), library


def translated(text: Path) -> Path:
    """The library of translated kernels, and their names beside it. All ranks load the same text: one translates it."""
    ours = [*sorted(EMULATOR.glob("*.py")), *sorted((EMULATOR / "runtime").glob("*.h"))]
    key = [zig.version(), zig.cpu_identity(), text.name, *(path.read_text() for path in (text, *ours))]

    def make(to: Path) -> None:
        module = Module(text)
        shutil.copy(module.library, to)
        to.with_suffix(".names").write_text("\n".join(sorted(module.kernels)))

    return build_cache.cached("translated.so", key, make)


def _text_file(image: Image, beside: Path | None) -> Path:
    if image.text is not None:
        text = image.text

        def make(to: Path) -> None:
            to.write_bytes(text)

        return build_cache.cached("kernels.s", [text.decode()], make)
    if beside is not None and beside.with_suffix(".s").is_file():
        return beside.with_suffix(".s")
    where = f"and no {beside.with_suffix('.s')}" if beside else "and it was loaded from memory"
    raise BadCodeObject(f"no assembly text to emulate: the code object has no section {TEXT_SECTION}, {where}")


def _elf_bytes(image: int) -> bytes:
    """The whole ELF file that starts at an address: its section headers come last."""
    head = ctypes.string_at(image, 64)
    if head[:4] != b"\x7fELF":
        return head
    table, entry, count = *struct.unpack_from("<Q", head, 40), *struct.unpack_from("<HH", head, 58)
    return ctypes.string_at(image, table + entry * count)


def _load_for_hip(path: bytes | None, image: int | None, to: Any) -> int:
    """What modules.cpp calls: a HIP error, and why on stderr, for HIP has no words for it."""
    try:
        file = Path(path.decode()) if path else None
        code = load(file.read_bytes() if file else _elf_bytes(image or 0), file)
        to[0] = ctypes.addressof(code)
        return _SUCCESS
    except FileNotFoundError:
        return _FILE_NOT_FOUND
    except (BadCodeObject, UnknownInstructions, Unsupported) as error:
        print(f"emulated node: {error}", file=sys.stderr, flush=True)
        return getattr(error, "status", _INVALID_IMAGE)
    except BaseException:  # nothing may pass through C
        traceback.print_exc()
        return _INVALID_IMAGE


LOADER: Callable[..., Any] = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
)(_load_for_hip)
