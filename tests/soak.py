"""Every operator on every device without a GPU, many times, with ranks and workgroups that come late: make soak.

What `validate` checks, for more ranks and shapes than tests have time for. A line a device, rank count and operator.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

from tqdm import tqdm

import kosmos_raw as kr
from kosmos_raw.checks.operators import CHECKED, Case
from kosmos_raw.checks.validate import arena_bytes, merge, run_all
from kosmos_raw.emulator.node.options import VARIABLE as EMULATOR
from kosmos_raw.plan.crew import policies_of
from kosmos_raw.plan.shapes import split_rows

# A name, the device, and how the emulator behaves: no cache sees another's writes, loads and stores come late.
DEVICES = {
    "cpu": ("cpu", ""),
    "emulated": ("emulated", "preempt=7"),
    "emulated-caches": ("emulated", "caches=workgroup,preempt=5,late,seed=3"),
}
RANKS = (2, 3, 4, 5, 8)
DIVIDING, RAGGED = 96, 67  # rows of a rank, and of a rank but for one row more on the first
ODD_ROWS = {3: (1000,), 4: (10, 3)}  # more matrices that do not divide, by ranks


def cases(op: str, ranks: int, calls: int, seed: int = 0) -> list[Case]:
    """Shapes of one operator. Policies take turns."""
    rows = [DIVIDING * ranks, RAGGED * ranks + 1, *ODD_ROWS.get(ranks, ())]
    there = policies_of(op, beside=False)
    sizes = [(264, 136), (130, 72), (40, 200), (9, 300)]
    return [
        Case(
            tuple(split_rows(m, ranks)),
            n,
            k,
            op,
            there[(i + ranks) % len(there)],
            iters=1,
            repeats=calls,
            delay_us=300,
            seed=seed,
        )
        for i, (m, (n, k)) in enumerate(zip(rows, sizes, strict=False))
    ]


def soak(device: str, ranks: int, calls: int, seed: int = 0, progress: bool = False) -> list[list[str]]:
    """All operators on one group of ranks. Returns what went wrong in each, in the order of CHECKED."""
    name, os.environ[EMULATOR] = DEVICES[device]
    groups = [cases(op, ranks, calls, seed) for op in CHECKED]
    every = [case for group in groups for case in group]
    options = {"device": name, "arena_bytes": arena_bytes(every), "workgroups": 4}
    outcomes = kr.launch(run_all, every, progress, ranks=ranks, mode="processes", timeout_s=120, **options)
    merged = iter([merge(of_ranks) for of_ranks in zip(*outcomes, strict=True)])
    problems = []
    for group in groups:
        of_group = [(case, next(merged)) for case in group]
        problems.append(
            [f"{c}: {o.problems}" for c, o in of_group if not (o.passed and o.bitwise_repeat and o.over_bound <= 1)]
        )
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", nargs="+", choices=DEVICES, default=list(DEVICES))
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS)
    parser.add_argument("--calls", type=int, default=50, help="of each shape (default: 50)")
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args()
    bad = 0
    todo = [(device, ranks) for device in a.devices for ranks in a.ranks]
    for device, ranks in (bar := tqdm(todo, disable=None)):
        bar.set_description(f"{device}, {ranks} ranks")
        start = time.perf_counter()
        for op, problems in zip(CHECKED, soak(device, ranks, a.calls, a.seed, True), strict=True):
            said = "; ".join(problems) or f"passed, {len(cases(op, ranks, 1))} shapes x {a.calls} calls, bits equal"
            tqdm.write(f"{device:16} {ranks} ranks  {op:14} {said}", file=sys.stdout)
            bad += len(problems)
        tqdm.write(f"{device:16} {ranks} ranks  {time.perf_counter() - start:.0f} s", file=sys.stdout)
    print(f"{bad} shapes failed" if bad else "all passed")
    return bad > 0


if __name__ == "__main__":
    sys.exit(main())
