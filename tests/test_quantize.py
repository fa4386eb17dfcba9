"""The quantising kernel against the oracle: its arithmetic block by block, and whole matrices, on the host and as
gfx950 code in the emulator. All bytes are equal."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kosmos_raw as kr
from kosmos_raw import emulator
from kosmos_raw.build import gfx950
from kosmos_raw.numerics import mxfp8
from tests.emulator import test_operators
from tests.emulator.test_operators import emulated  # noqa: F401
from tests.mxfp8 import blocks
from tests.test_mxfp8 import vectors

BF16 = ml_dtypes.bfloat16
needs_gfx950 = pytest.mark.skipif(gfx950.missing() is not None, reason=str(gfx950.missing()))
TARGETS = ["host", pytest.param("gfx950", marks=[pytest.mark.emulated, needs_gfx950])]


def faults(run: blocks.Run, bits: np.ndarray) -> list[str]:
    """What is wrong with the bytes, and with the values that they are taken for."""
    wrong = []
    for rule in mxfp8.RULES:
        elements, scales, values = run(bits, rule)
        exact, exact_scales = mxfp8.quantize(bits.view(np.float32), rule)
        bad = (elements != exact).any(1) | (scales != exact_scales[:, 0])
        wrong += [f"{rule}: block {i}: {elements[i].tolist()}, scale {scales[i]}" for i in np.flatnonzero(bad)[:1]]
        with np.errstate(all="ignore"):
            meant = mxfp8.dequantize(exact, exact_scales).astype(np.float32)
        if not np.array_equal(values, meant, equal_nan=True):
            wrong.append(f"{rule}: values")
    return wrong


def random_blocks(seed: int, count: int) -> np.ndarray:
    """FP32 bits: any at all; of one magnitude; and such that BF16 holds, NaNs and infinities among all of them."""
    rng = np.random.default_rng(seed)
    anything = rng.integers(0, 1 << 32, (count, 32), dtype=np.uint32)
    exponent = np.maximum(rng.integers(0, 256, (count, 1)) - rng.integers(0, 20, (count, 32)), 0)
    near = (anything & 0x807FFFFF) | exponent.astype(np.uint32) << 23
    return np.concatenate([anything, near, near & 0xFFFF0000, np.where(near >> 23 & 255 == 255, 0, near)])


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Callable[[str], blocks.Run]:
    made: dict[str, blocks.Run] = {}

    def get(target: str) -> blocks.Run:
        if target not in made:
            text = tmp_path_factory.mktemp("blocks") / "blocks.s"
            made[target] = blocks.host() if target == "host" else blocks.emulated(blocks.SOURCE, text)
        return made[target]

    return get


@pytest.mark.parametrize("target", TARGETS)
def test_arithmetic(runs, target):
    assert faults(runs(target), vectors()[1]) == []
    assert faults(runs(target), random_blocks(1, 5000)) == []


FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True) | st.floats(-500, 500, width=32)


@pytest.mark.parametrize("target", TARGETS)
@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(FLOATS, min_size=32, max_size=32), min_size=1, max_size=4))
def test_arithmetic_of_hypothesis(runs, target, floats):
    assert faults(runs(target), np.array(floats, np.float32).view(np.uint32)) == []


SUM = "__builtin_bit_cast(Float, kept) + __builtin_bit_cast(Float, anchor)"
FINER = "__builtin_bit_cast(Float, kept) * 8 + __builtin_bit_cast(Float, anchor)"
MUTATIONS = {
    "truncates": (
        "work/mxfp8.h",
        f"cast(Bits, {SUM});\n  return rounded - anchor",
        f"cast(Bits, {FINER});\n  return (rounded - anchor) / 8",
    ),
    "rounds half up": (
        "work/mxfp8.h",
        f"cast(Bits, {SUM});\n  return rounded - anchor",
        f"cast(Bits, {FINER});\n  return (rounded - anchor + 4) / 8",
    ),
    "scales down at 448": ("work/mxfp8.h", "> 0x600000u + (exponent == 8)", ">= 0x600000u + (exponent == 8)"),
    "exact at 448 * 2^-127": ("work/mxfp8.h", "> 0x600000u + (exponent == 8)", "> 0x600000u"),
    "the other rule": ("work/mxfp8.h", "rule == SCALE_UP && mantissa", "rule == SCALE_FLOOR && mantissa"),
    "signs count": (
        "work/mxfp8.h",
        "By::largest(__builtin_bit_cast(typename By::Bits32, x) & 0x7fffffff)",
        "By::largest(__builtin_bit_cast(typename By::Bits32, x))",
    ),
    "NaNs count": ("work/mxfp8.h", "magnitude <= FP32_INFINITY && magnitude > largest", "magnitude > largest"),
    "infinities are finite": ("work/mxfp8.h", "(largest >= FP32_INFINITY, 0)", "(largest > FP32_INFINITY, 0)"),
    "no saturation": ("work/mxfp8.h", "kept = magnitude > most ? most : magnitude;", "kept = magnitude + 0 * most;"),
    "subnormals lose a bit": ("work/mxfp8.h", "least = Bits{} + 0x3c800000", "least = Bits{} + 0x3d000000"),
    "byte 0 is no scale": ("work/mxfp8.h", "byte == 0 ? 0x00400000 : byte << 23", "byte << 23"),
    "byte 254 is no scale": ("work/mxfp8.h", "byte == 254 ? 0x00400000 : (254 - byte) << 23", "(254 - byte) << 23"),
}
OF_GFX950 = {
    "not clamped": ("target/gfx950.h", "__builtin_amdgcn_fmed3f(b, -448, 448)", "b"),
    "signs count": ("work/mxfp8.h", "x[i] & 0x7fffffff;\n    largest =", "x[i];\n    largest ="),
    "the other half": ("target/gfx950.h", "448), 0, false)", "448), 0, true)"),
}


def spoilt(to: Path, file: str, old: str, new: str) -> Path:
    source = blocks.copy_of_sources(to)
    path = to / "hip_kernels" / file
    text = path.read_text()
    assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in {file}"
    path.write_text(text.replace(old, new))
    return source


@pytest.mark.parametrize("name", MUTATIONS)
def test_faults_of_arithmetic_are_noticed(tmp_path, name):
    run = blocks.host(spoilt(tmp_path, *MUTATIONS[name]))
    assert faults(run, vectors()[1]) + faults(run, random_blocks(1, 1000))


@needs_gfx950
@pytest.mark.emulated
@pytest.mark.parametrize("name", OF_GFX950)
def test_faults_of_gfx950_are_noticed(tmp_path, name):
    assert faults(blocks.emulated(spoilt(tmp_path, *OF_GFX950[name]), tmp_path / "blocks.s"), vectors()[1])


# -- whole matrices

SHAPES = [
    # rows, columns, groups
    (1, 1, None),
    (33, 72, (33,)),
    (128, 128, (1, 0, 127)),
    (300, 260, (7, 0, 200, 93)),
    (0, 40, None),
    (5, 0, (2, 3)),
]
GUARD = 0xDD


def guarded(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """An array of the same shape, and all memory that lies round it."""
    memory = np.full(array.nbytes + 64, GUARD, np.uint8)
    start = -memory.ctypes.data % 16 + 16
    return memory[start : start + array.nbytes].reshape(array.shape), memory


def check_matrices(comm: kr.Communicator) -> list[str]:
    """Every shape, axis and rule on random bits and on random numbers, into guarded memory."""
    wrong = []
    for seed, ((rows, columns, groups), rule, axis) in enumerate(
        itertools.product(SHAPES, mxfp8.RULES, (0, 1, (1, 0)))
    ):
        rng = np.random.default_rng(seed)
        x = rng.integers(0, 1 << 16, (rows, columns), np.uint16).view(BF16)
        if seed % 2:
            x = rng.standard_normal((rows, columns)).astype(BF16)
        for copy in _copies(comm, x, axis, rule, groups):
            name = f"{rows}x{columns} {groups} {rule} axis {axis}"
            wrong += [f"{name}: {what}" for what in _faults(x, rule, copy)]
    return wrong


def _copies(comm: kr.Communicator, x: np.ndarray, axis: Any, rule: str, groups: Any) -> list[kr.MxArray]:
    axes = axis if isinstance(axis, tuple) else (axis,)
    plain = [kr.MxArray.empty(comm, x.shape, one, groups=groups) for one in axes]
    memory = [(guarded(copy.elements), guarded(copy.scales)) for copy in plain]
    out = [replace(c, elements=e, scales=s) for c, ((e, _), (s, _)) in zip(plain, memory, strict=True)]
    given = tuple(out) if isinstance(axis, tuple) else out[0]
    assert kr.quantize_mxfp8(comm, x, axis, rule=rule, groups=groups, out=given) is given
    for array, whole in itertools.chain(*memory):
        before = array.ctypes.data - whole.ctypes.data
        assert (whole[:before] == GUARD).all() and (whole[before + array.nbytes :] == GUARD).all(), array.shape
    return out


def _faults(x: np.ndarray, rule: str, copy: kr.MxArray) -> list[str]:
    if copy.axis == 1:
        elements, scales = mxfp8.quantize(x, rule)
        places = [(0, elements, scales)]
    else:
        starts = np.cumsum((0, *copy.groups))
        places, at = [], 0
        for rows, first in zip(copy.groups, starts, strict=False):
            places.append((at, *mxfp8.quantize(x[first : first + rows].T, rule)))
            at += -(-rows // 128) * 128
        assert at == copy.depth
    want, want_scales = np.zeros_like(copy.elements), np.zeros((copy.lines, copy.depth // 32), np.uint8)
    for at, elements, scales in places:  # beyond a group's end, all is zero
        want[:, at : at + elements.shape[1]] = elements
        want_scales[:, at // 32 : at // 32 + scales.shape[1]] = scales
    wrong = [] if np.array_equal(copy.elements, want) else ["elements"]
    wrong += [] if np.array_equal(copy.scales_by_line(), want_scales) else ["scales"]
    if not np.array_equal(copy.dequantize(), _values(x.shape, copy, want, want_scales), equal_nan=True):
        wrong.append("dequantize")
    return wrong


def _values(shape: Any, copy: kr.MxArray, elements: np.ndarray, scales: np.ndarray) -> np.ndarray:
    values = mxfp8.dequantize(elements, scales)
    if copy.axis == 1:
        return values[:, : shape[1]]
    at = np.concatenate([[*range(s, s + r)] for s, r in _starts(copy.groups)] or [[]]).astype(int)
    return values[:, at].T


def _starts(groups: tuple[int, ...]) -> list[tuple[int, int]]:
    return [(sum(-(-r // 128) * 128 for r in groups[:i]), rows) for i, rows in enumerate(groups)]


def test_matrices_on_the_host():
    assert kr.launch(check_matrices, ranks=1, mode="threads", workgroups=3) == [[]]


@needs_gfx950
@pytest.mark.emulated
def test_matrices_on_gfx950(emulated):  # noqa: F811
    emulated(1, emulator.Options(late_memory=("lds", "loads", "stores"), preempt=4, seed=2, threads=2))
    assert kr.launch(check_matrices, ranks=1, mode="threads", workgroups=3) == [[]]


BARRIER = "target::barrier();"
TILE_FAULTS = {
    "not all of a tile is there": ("read_tile(p, t, s);\n      " + BARRIER, "read_tile(p, t, s);"),
    "not all columns are there": (BARRIER + "\n  for", "for"),
    "the next tile comes too early": (BARRIER + "  // all have read", "// all have read"),
    "groups are not padded": ("first += padded_to_step(p.m.rows(q))", "first += p.m.rows(q)"),
    "a column past the end": ("word * 8 < t.columns", "word * 8 < 128"),
}


@needs_gfx950
@pytest.mark.emulated
@pytest.mark.parametrize("name", TILE_FAULTS)
def test_faults_of_matrices_are_noticed(emulated, monkeypatch, tmp_path, name):  # noqa: F811
    spoilt(tmp_path, "work/quantize.h", *TILE_FAULTS[name])
    text = tmp_path / "quantize.s"
    gfx950.compile_text(tmp_path / "hip_kernels" / "kernels" / "quantize_mxfp8.hip", text)
    spoilt_module = emulator.Module(text)
    monkeypatch.setattr(test_operators, "module", lambda op: spoilt_module)
    emulated(1, emulator.Options(late_memory=("lds", "loads", "stores"), preempt=4, seed=2, threads=2))
    try:
        found = kr.launch(check_matrices, ranks=1, mode="threads", workgroups=3) != [[]]
    except (AssertionError, emulator.RunError):  # memory past an end was written, or read
        found = True
    assert found


def _refused(comm: kr.Communicator) -> None:
    x = np.ones((4, 8), BF16)
    for wrong, said in (
        ({"axis": 2}, "axis is 2, want 0, 1"),
        ({"rule": "nearest"}, "rule is 'nearest', want one of up, floor, even"),
        ({"groups": (1, 2)}, r"groups is \[1, 2\], want at most 8 counts of rows whose sum is 4"),
        ({"out": kr.MxArray.empty(comm, (4, 8), 0)}, "out has axis 0"),
    ):
        with pytest.raises(ValueError, match=f"quantize_mxfp8: {said}"):
            kr.quantize_mxfp8(comm, x, **wrong)
    with pytest.raises(TypeError, match="quantize_mxfp8: x has dtype float32, want bfloat16"):
        kr.quantize_mxfp8(comm, x.astype(np.float32))


def test_what_is_refused():
    kr.launch(_refused, ranks=1, mode="threads")
