"""Kernels: CuPy's own through hiprtc, modules from files and sources, arguments, and launches that HIP refuses."""

from __future__ import annotations

import ctypes
from functools import cache

import cupy
import numpy as np
import pytest
from hip import hip

from kosmos_raw.build import cache as build_cache
from kosmos_raw.build import gfx950, zig
from kosmos_raw.emulator.node.hiprtc import INCLUDE

SIZE = 3000
HEADER = INCLUDE / "device.h"
SCALE = """
struct Params { const float* x; float* y; float factor; unsigned count; };
extern "C" __global__ void scale(Params p) {
  unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < p.count) p.y[i] = p.x[i] * p.factor;
}
extern "C" __global__ void __launch_bounds__(256) where(unsigned* out) {
  out[(blockIdx.y * gridDim.x + blockIdx.x) * blockDim.x * blockDim.y + threadIdx.y * blockDim.x + threadIdx.x] =
      blockIdx.x | blockIdx.y << 8 | threadIdx.x << 16 | threadIdx.y << 24;
}
"""
PARAMS = np.dtype([("x", "u8"), ("y", "u8"), ("factor", "f4"), ("count", "u4")], align=True)


@pytest.fixture
def x():
    return np.random.default_rng(0).standard_normal(SIZE).astype(np.float32)


# -- CuPy's own kernels
CHECKS = {
    "add": lambda c, x: x + c.float32(1.5),
    "axpy": lambda c, x: 2 * x - x * x,
    "to half": lambda c, x: x.astype("f2"),
    "to double": lambda c, x: x.astype("f8") * 3,
    "to int": lambda c, x: (x * 100).astype("i4"),
    "compare": lambda c, x: x > 0.5,
    "broadcast": lambda c, x: x.reshape(50, 60) + x[:60],
    "transpose": lambda c, x: c.ascontiguousarray(x.reshape(50, 60).T),
    "where": lambda c, x: c.where(x > 0, x, -x),
    "take": lambda c, x: x[c.asarray([5, 2, 9])],
    "sqrt": lambda c, x: c.sqrt(abs(x)),
    "exp": lambda c, x: c.exp(x),
    "sum": lambda c, x: x.sum(),
    "max": lambda c, x: x.max(),
    "sum of rows": lambda c, x: x.reshape(50, 60).sum(axis=1),
    "cumsum": lambda c, x: c.cumsum(x),
    "words": lambda c, x: (c.asarray(np.arange(1000, dtype="u2")) * c.uint16(7)).view("u1"),
    "fill": lambda c, x: c.full((40, 9), 0x7FA5, "u2"),
}


@pytest.mark.parametrize("name", CHECKS)
def test_cupy_s_own_kernels(name, x):
    got, want = (
        np.asarray(r.get() if hasattr(r, "get") else r)
        for r in (CHECKS[name](cupy, cupy.asarray(x)), CHECKS[name](np, x))
    )
    assert got.shape == want.shape
    if want.dtype.kind == "f":
        assert np.allclose(got, want, rtol=1e-3 if want.dtype == np.float16 else 1e-5, atol=1e-4)
    else:
        assert (got == want).all()


def test_an_elementwise_kernel_of_a_user(x):
    kernel = cupy.ElementwiseKernel("float32 x", "float32 y", "y = x * x + 1", "square")
    assert np.allclose(kernel(cupy.asarray(x)).get(), x * x + 1)


# -- what is not there says so
@pytest.mark.parametrize(
    ("stub", "use"),
    [
        ("libhipblas:hipblasCreate", lambda x: x.reshape(50, 60) @ x.reshape(60, 50)),
        ("libamdhip64:__hipPushCallConfiguration", lambda x: cupy.sort(x)),
        ("libhiprand:hiprandCreateGenerator", lambda x: cupy.random.rand(10)),
    ],
)
def test_what_is_not_there_fails_by_its_name(stub, use, x, stubs_called, node, capfd):
    before = set(node.stub_calls())
    with pytest.raises(Exception):  # noqa: B017 each library has its own
        use(cupy.asarray(x))
    called = set(node.stub_calls()) - before
    assert stub in called
    assert f"has no {stub.partition(':')[2]}" in capfd.readouterr().err
    stubs_called |= called


def test_functions_of_the_device_libraries_are_named(x):
    with pytest.raises(cupy.cuda.compiler.CompileException, match=r"undefined .*sinf\(float\)"):
        cupy.sin(cupy.asarray(x))


# -- modules
@cache
def scale_file():
    """A code object with its text beside it, as the product's are."""

    def make(to):
        source = to.with_suffix(".hip")
        source.write_text(SCALE)
        text = to.with_suffix(".s")
        zig.run(
            [
                "clang",
                *(o for o in gfx950.COMPILE if not o.startswith("-W")),
                "-w",
                "-include",
                str(HEADER),
                "-o",
                str(text),
                str(source),
            ]
        )
        gfx950.assemble(text, to)

    return build_cache.cached("scale.hsaco", [zig.version(), SCALE, HEADER.read_text()], make)


def scale_params(x, y, count=SIZE):
    params = np.zeros(1, PARAMS)
    params[0] = (x.data.ptr, y.data.ptr, 2.5, count)
    return params


@pytest.mark.parametrize("how", ["path", "code"])
def test_a_struct_by_value(how, x):
    module = cupy.RawModule(path=str(scale_file())) if how == "path" else cupy.RawModule(code=SCALE)
    dx, dy = cupy.asarray(x), cupy.zeros(SIZE, np.float32)
    module.get_function("scale")((12,), (256,), (scale_params(dx, dy),))
    assert np.allclose(dy.get(), x * 2.5)


def test_grids_and_blocks_of_two_dimensions():
    out = cupy.zeros(3 * 2 * 32 * 4, np.uint32)
    cupy.RawModule(path=str(scale_file())).get_function("where")((3, 2), (32, 4), (out,))
    by, bx, ty, tx = np.meshgrid(range(2), range(3), range(4), range(32), indexing="ij")
    assert (out.get() == (bx | by << 8 | tx << 16 | ty << 24).ravel()).all()


def test_name_expressions(x):
    code = """template <class T> __global__ void twice(const T* x, T* y) {
      int i = blockIdx.x * 100 + threadIdx.x;
      y[i] = 2 * x[i];
    }"""
    module = cupy.RawModule(code=code, name_expressions=("twice<float>", "twice<int>"))
    dy = cupy.zeros(SIZE, np.float32)
    module.get_function("twice<float>")((30,), (100,), (cupy.asarray(x), dy))
    assert np.allclose(dy.get(), 2 * x)
    di = cupy.zeros(100, np.int32)
    module.get_function("twice<int>")((1,), (100,), (cupy.arange(100, dtype=np.int32), di))
    assert (di.get() == 2 * np.arange(100)).all()


def test_errors_of_the_compiler_are_passed_on():
    with pytest.raises(cupy.cuda.compiler.CompileException, match="undeclared identifier 'nonsense'"):
        cupy.RawModule(code='extern "C" __global__ void f(int* p) { *p = nonsense; }').get_function("f")


def test_facts_about_a_function():
    function = cupy.RawModule(path=str(scale_file())).get_function("where")
    assert function.max_threads_per_block == 256
    assert function.local_size_bytes == function.shared_size_bytes == 0
    assert 1 <= function.num_regs <= 64
    assert hip.hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(function.kernel.ptr, 256, 80 << 10)[1] == 2
    assert hip.hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(function.kernel.ptr, 256, 81 << 10)[1] == 1


def test_a_missing_function_or_file(tmp_path, capfd):
    alone = tmp_path / "alone.hsaco"
    alone.write_bytes(scale_file().read_bytes() + b"without its text")
    for path, name in ((scale_file(), "absent"), (tmp_path / "absent.hsaco", "scale"), (alone, "scale")):
        with pytest.raises(cupy.cuda.driver.CUDADriverError):
            _ = cupy.RawModule(path=str(path)).get_function(name).kernel
    assert "no assembly text" in capfd.readouterr().err


def test_text_of_other_kernels_is_refused(tmp_path, capfd):
    changed = tmp_path / "scale.hsaco"
    changed.write_bytes(scale_file().read_bytes() + b"another")
    changed.with_suffix(".s").write_text(scale_file().with_suffix(".s").read_text().replace("where", "other"))
    with pytest.raises(cupy.cuda.driver.CUDADriverError):
        _ = cupy.RawModule(path=str(changed)).get_function("scale").kernel
    assert "its assembly text" in capfd.readouterr().err


# -- launches that HIP refuses
@pytest.fixture
def scale():
    return cupy.RawModule(path=str(scale_file())).get_function("scale")


def launch(function, grid, threads, *, lds=0, stream=None, args=b"", cooperative=False):
    """Through hip-python: HIP's error."""
    call = hip.hipModuleLaunchCooperativeKernel if cooperative else hip.hipModuleLaunchKernel
    if cooperative:
        return call(function, grid, 1, 1, threads, 1, 1, lds, stream, None)[0]
    struct = type("Args", (ctypes.Structure,), {"_fields_": [("bytes", ctypes.c_char * len(args))]})
    return call(function, grid, 1, 1, threads, 1, 1, lds, stream, None, (struct.from_buffer_copy(args),))[0]


def test_a_short_struct_is_refused_where_its_size_is_known(scale, x):
    dx, dy = cupy.asarray(x), cupy.zeros(SIZE, np.float32)
    whole = scale_params(dx, dy).tobytes()
    assert int(launch(scale.kernel.ptr, 12, 256, args=whole)) == 0
    cupy.cuda.Device(0).synchronize()
    assert np.allclose(dy.get(), x * 2.5)
    assert launch(scale.kernel.ptr, 12, 256, args=whole[:-4]) == hip.hipError_t.hipErrorInvalidValue


def test_blocks_beyond_the_bound_are_refused(x):
    where = cupy.RawModule(path=str(scale_file())).get_function("where")
    with pytest.raises(cupy.cuda.driver.CUDADriverError, match="hipErrorLaunchFailure"):
        where((1,), (257,), (cupy.zeros(257, np.uint32),))


@pytest.mark.parametrize(("grid", "threads", "lds"), [(0, 64, 0), (1, 0, 0), (1, 64, (160 << 10) + 1)])
def test_empty_grids_and_too_much_lds_are_refused(scale, grid, threads, lds):
    error = launch(scale.kernel.ptr, grid, threads, lds=lds, args=bytes(PARAMS.itemsize))
    assert error == hip.hipError_t.hipErrorInvalidValue


def test_cooperative_launches_must_be_resident(scale):
    error, masked = hip.hipExtStreamCreateWithCUMask(8, [0b111, 0, 0, 0, 0, 0, 0, 0])
    assert not int(error)
    too_large = hip.hipError_t.hipErrorCooperativeLaunchTooLarge
    one_a_unit = 100 << 10  # bytes of LDS
    assert launch(scale.kernel.ptr, 257, 512, lds=one_a_unit, cooperative=True) == too_large
    assert launch(scale.kernel.ptr, 4, 512, lds=one_a_unit, stream=masked, cooperative=True) == too_large
    hip.hipStreamDestroy(masked)


def test_kernels_of_two_streams_run_at_once():
    code = """extern "C" __global__ void meet(volatile int* mine, volatile int* theirs) {
      *mine = 1;
      while (*theirs == 0) __builtin_amdgcn_s_sleep(1);
    }"""
    meet = cupy.RawKernel(code, "meet")
    flags = cupy.zeros(2, np.int32)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    meet.compile()
    cupy.cuda.Device(0).synchronize()
    for i, stream in enumerate(streams):
        meet((1,), (64,), (flags[i:], flags[1 - i :]), stream=stream)
    for stream in streams:
        stream.synchronize()
    assert flags.get().tolist() == [1, 1]


class _Masked:
    def __init__(self, address):
        self.address = address

    def __cuda_stream__(self):
        return 0, self.address


def test_a_masked_stream_holds_back_what_is_not_resident():
    """A grid of which each workgroup waits for the last one: on too few compute units it can never end, so the first
    three leave after some time and say so."""
    code = """extern "C" __global__ void last(volatile int* here, int* gave_up) {
      here[blockIdx.x] = 1;
      for (int i = 0; i < 2000 && !here[gridDim.x - 1]; i++) __builtin_amdgcn_s_sleep(1);
      if (!here[gridDim.x - 1]) *gave_up = 1;
    }"""
    kernel = cupy.RawKernel(code, "last")
    masked = hip.hipExtStreamCreateWithCUMask(8, [0b111, 0, 0, 0, 0, 0, 0, 0])[1]
    for stream, expected in ((cupy.cuda.Stream.null, 0), (cupy.cuda.Stream.from_external(_Masked(int(masked))), 1)):
        here, gave_up = cupy.zeros(4, np.int32), cupy.zeros(1, np.int32)
        cupy.cuda.Device(0).synchronize()
        kernel((4,), (64,), (here, gave_up), shared_mem=100 << 10, stream=stream)
        stream.synchronize()
        assert int(gave_up.get()[0]) == expected
    hip.hipStreamDestroy(masked)
