"""Each rank in a process of its own, with memory that all of them share; and the C interface."""

from __future__ import annotations

import ctypes
import mmap
import os
import traceback

import numpy as np
import pytest

from kosmos_raw import emulator
from kosmos_raw.build import zig
from kosmos_raw.emulator import Options
from kosmos_raw.emulator.module import RUNTIME, runtime_library

from .launching import params
from .test_protocol import RANKS, ROUNDS, WORDS, value
from .text import compiled_module

pytestmark = pytest.mark.emulated


def shared(shape: tuple[int, ...]) -> np.ndarray:
    """Zeros at one address in this process and in those that it forks."""
    count = int(np.prod(shape))
    return np.frombuffer(mmap.mmap(-1, -(-4 * count // mmap.PAGESIZE) * mmap.PAGESIZE), np.uint32, count).reshape(shape)


@pytest.mark.parametrize("options", [Options(), Options(caches="xcd", preempt=5, seed=2)], ids=["plain", "caches"])
def test_ranks_in_processes(options):
    module = compiled_module("exchange")
    inbox, out = shared((RANKS, WORDS)), shared((RANKS, ROUNDS, WORDS))
    full, taken = shared((RANKS, 32)), shared((RANKS, 32))
    children = []
    for r in range(RANKS):
        right, left = (r + 1) % RANKS, (r - 1) % RANKS
        given = params(inbox[r], inbox[right], full[r], full[right], taken[r], taken[left], out[r], r, ROUNDS)
        child = os.fork()
        if child == 0:
            try:
                emulator.run(
                    [emulator.Launch(module, "exchange", 2, 256, given, r)], options, [inbox, out, full, taken]
                )
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * RANKS
    rounds, i = np.arange(1, ROUNDS + 1, dtype=np.uint32), np.arange(WORDS, dtype=np.uint64)
    for r in range(RANKS):
        np.testing.assert_array_equal(out[r], value((r - 1) % RANKS, rounds, i))


def test_the_interface_is_c(tmp_path):
    """C code can be built against the header and the library, and make a machine."""
    source = tmp_path / "user.c"
    source.write_text("""
#include "emulator.h"
int make_a_machine(void) {
  EmulatorOptions options = {0};
  options.threads = 1;
  options.limit_seconds = 1;
  EmulatorMachine* machine = emulator_create(&options);
  if (!machine || emulator_launch(machine, 0, 0, 0) != EMULATOR_OK) return 1;
  emulator_destroy(machine);
  return 0;
}
""")
    library = tmp_path / "user.so"
    flags = ["-std=c11", "-O2", "-g0", "-fno-sanitize=all", "-fPIC", "-shared", "-Wall", "-Werror", f"-I{RUNTIME}"]
    zig.run(["cc", *flags, "-o", str(library), str(source), str(runtime_library())])
    assert ctypes.CDLL(str(library)).make_a_machine() == 0
