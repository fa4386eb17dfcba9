"""Operators under forced interleavings: builds tests/forced/forced_OP.cpp and plays histories.

Many:           python tests/forced/forced.py OP --histories N
To replay one:  python tests/forced/forced.py OP --setup NAME [--mutation M] [--without-fence F] --seed N
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import sys
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # so that it runs as a script in a checkout

from tqdm import tqdm  # noqa: E402

from kosmos_raw.build import params, zig  # noqa: E402
from kosmos_raw.plan.shapes import split_rows  # noqa: E402

SYMPTOMS = tuple("WRONG_VALUE RACE OUTSIDE NARROW_SCOPE DEADLOCK ENDLESS CRASH WRONG_END TWO_WRITERS".split())


@dataclass(frozen=True)
class Setup:
    """What is played. All else (shapes, WGs, movers, data, who runs when) is drawn from the seed of a history."""

    op: str = "ag_gemm"
    ranks: int = 3
    policy: str = "one_way"
    run_ahead: bool = False  # the form of sm_90a; else serial
    kind: str = "RIGHT"  # OTHER_CALL, LOST_RANK, TOLD_TO_STOP_BY_HOST: what goes wrong in one rank
    mutation: str = "NONE"
    mixed: bool = False  # launches of other operators come between
    near_wrap: bool = False  # epochs go through 2^32
    without_fence: str = ""  # a name from fences()
    narrow_fence: str = ""  # a fence that acts in device scope only


OPS = tuple(sorted(path.stem.removeprefix("forced_") for path in HERE.glob("forced_*.cpp")))
FORMS = {"serial": False, "ahead": True}
BESIDE = ("ag_gemm", "ag_gemm_dgrad", "bulk_ag", "bulk_rs")  # operators whose movers may be agents of their own
TWO_WAY = ("ag_gemm", "ag_gemm_dgrad", "ag_gemm_grads", "gemm_rs")  # operators for which it is a policy of its own
MIXED = ("gemm_rs", "gemm_rs_push")  # operators whose library has others too


def policies(op: str) -> tuple[str, ...]:
    """Those that differ; FIXED stands for all crews of moe_forward that do not build as they like."""
    if op.startswith("moe_"):
        return ("two_way", "fixed") if op == "moe_forward" else ("two_way",)
    only = {"two_way": TWO_WAY, "beside": BESIDE}
    return tuple(policy for policy in params.POLICIES if op in only.get(policy, (op,)))


def right(op: str) -> dict[str, Setup]:
    """Setups of `op` in which nothing is wrong, by name."""
    return {
        f"{ranks}-{policy}-{form}{wrap}": Setup(op, ranks, policy, run_ahead, near_wrap=bool(wrap))
        for ranks in (1, 2, 3, 8)
        for policy in params.POLICIES
        if policy in policies(op)
        for form, run_ahead in FORMS.items()
        if run_ahead or policy != "beside"  # the serial targets have no such agents
        for wrap in ("", "-wrap")
    } | {
        f"{ranks}-mixed-{form}": Setup(op, ranks, "one_way", run_ahead, mixed=True)
        for ranks in (2, 3)
        for form, run_ahead in FORMS.items()
        if op in MIXED
    }


def amiss(op: str) -> dict[str, Setup]:
    """Setups of `op` in which one rank goes wrong, by name."""
    return {
        f"{ranks}-{kind.lower()}-{form}": Setup(op, ranks, "one_way", run_ahead, kind)
        for kind in ("OTHER_CALL", "LOST_RANK", "TOLD_TO_STOP_BY_HOST")
        for ranks in (2, 3, 8)
        for form, run_ahead in FORMS.items()
    }


def setups(op: str) -> dict[str, Setup]:
    return right(op) | amiss(op)


_SETUP = (
    "ranks",
    "policy",
    "run_ahead",
    "kind",
    "mutation",
    "mixed",
    "near_wrap",
    "without_fence",
    "narrow_fence",
    "log",
)
_RESULT = ("histories", "bad", "first_bad_seed", "steps", "digest")


class _Setup(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in _SETUP]


class _Result(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint64) for name in _RESULT),
        ("symptoms", ctypes.c_uint64 * len(SYMPTOMS)),
        ("message", ctypes.c_char * 800),
    ]


@dataclass(frozen=True)
class Result:
    setup: Setup
    histories: int
    bad: int
    first_bad_seed: int
    steps: int
    digest: int  # of every choice made: equal digests, equal histories
    symptoms: dict[str, int]  # how many histories show each
    message: str  # of the first bad history
    seconds: float

    def __str__(self) -> str:
        if not self.bad:
            return f"0 bad of {self.histories}"
        seen = ", ".join(f"{name} {n}" for name, n in self.symptoms.items() if n)
        return (
            f"{self.bad} bad of {self.histories} ({seen})\nfirst at seed {self.first_bad_seed}:\n{self.message}\n"
            f"replay: python tests/forced/forced.py {flags(self.setup)} --seed {self.first_bad_seed}"
        )


def flags(setup: Setup) -> str:
    """The command line that makes this setup."""
    plain = dataclasses.replace(setup, mutation="NONE", without_fence="", narrow_fence="")
    words = [f"{setup.op} --setup {next((name for name, s in setups(setup.op).items() if s == plain), '?')}"]
    if setup.mutation != "NONE":
        words.append(f"--mutation {setup.mutation}")
    if setup.without_fence:
        words.append(f"--without-fence '{setup.without_fence}'")
    if setup.narrow_fence:
        words.append(f"--narrow-fence '{setup.narrow_fence}'")
    return " ".join(words)


def library(op: str, *more_flags: str) -> ctypes.CDLL:
    """The histories of an operator, built for this machine."""
    path = zig.shared_library(
        HERE / f"forced_{op}.cpp",
        ["-DKOSMOS_FORCED", "-fvisibility=hidden", *more_flags],
        sorted(HERE.glob("*.h")),
    )
    lib = ctypes.CDLL(str(path))
    for name in ("kind", "mutation", "symptom", "fence"):
        getattr(lib, f"forced_{name}").restype = ctypes.c_char_p
    lib.forced_run.argtypes = [ctypes.POINTER(_Setup), ctypes.c_uint64, ctypes.c_uint32, ctypes.POINTER(_Result)]
    if (lib.forced_setup_bytes(), lib.forced_result_bytes()) != (ctypes.sizeof(_Setup), ctypes.sizeof(_Result)):
        raise TypeError("forced.py: Setup or Result is not what tests/forced/*.h say")
    if tuple(names("symptom", lib)) != SYMPTOMS:
        raise TypeError("forced.py: other symptoms than in hip_kernels/target/forced_world.h")
    return lib


@cache
def default_library(op: str) -> ctypes.CDLL:
    return library(op)


def names(what: str, lib: ctypes.CDLL) -> list[str]:
    """All of "kind", "mutation" or "symptom"."""
    get, found = getattr(lib, f"forced_{what}"), []
    while name := get(len(found)):
        found.append(name.decode())
    return found


def _fences(lib: ctypes.CDLL) -> list[tuple[str, bool]]:
    found, passed = [], ctypes.c_uint32()
    while name := lib.forced_fence(len(found), ctypes.byref(passed)):
        found.append((name.decode(), passed.value != 0))
    return found


@cache
def fences(op: str) -> tuple[str, ...]:
    """Fences that a right `op` passes, "file function release|acquire device|system"; the library then knows all."""
    lib = default_library(op)
    result = _Result()
    lib.forced_run(_Setup(ranks=3, policy=params.POLICIES.index("two_way")), 0, 100, result)
    found = {name for name, passed in _fences(lib) if passed}
    lib.forced_run(_Setup(ranks=3), 0, 100, result)
    return tuple(sorted(found | {name for name, passed in _fences(lib) if passed}))


def _fence_index(op: str, lib: ctypes.CDLL, name: str) -> int:
    if not name:
        return 0
    fences(op)  # so that all are known
    known = [n for n, _ in _fences(lib)]
    if name not in known:
        raise ValueError(f"no fence {name!r}; there are {known}")
    return 1 + known.index(name)


def play(
    setup: Setup, histories: int, first_seed: int = 0, *, log: bool = False, lib: ctypes.CDLL | None = None
) -> Result:
    """Plays histories first_seed, first_seed + 1, ... of a setup. With `log`, prints what every WG did, in order."""
    lib = lib or default_library(setup.op)
    raw = _Setup(
        ranks=setup.ranks,
        policy=params.POLICIES.index(setup.policy),
        run_ahead=setup.run_ahead,
        kind=names("kind", lib).index(setup.kind),
        mutation=names("mutation", lib).index(setup.mutation),
        mixed=setup.mixed,
        near_wrap=setup.near_wrap,
        without_fence=_fence_index(setup.op, lib, setup.without_fence),
        narrow_fence=_fence_index(setup.op, lib, setup.narrow_fence),
        log=log,
    )
    result = _Result()
    start = time.perf_counter()
    lib.forced_run(raw, first_seed, histories, result)
    return Result(
        setup,
        *(getattr(result, name) for name in _RESULT),
        dict(zip(SYMPTOMS, result.symptoms, strict=True)),
        result.message.decode(),
        time.perf_counter() - start,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Play forced interleavings; exits 0 when none is bad.")
    parser.add_argument("op", choices=OPS)
    parser.add_argument("--setup", help="as right() and amiss() in this file name them (default: each of right())")
    parser.add_argument("--mutation", default="NONE")
    parser.add_argument("--without-fence", default="", metavar="NAME", help="as fences() names it")
    parser.add_argument("--narrow-fence", default="", metavar="NAME")
    parser.add_argument("--histories", type=int, default=1000, help="of all setups together (default: 1000)")
    parser.add_argument("--seed", type=int, help="play this one history, and print what every WG did")
    a = parser.parse_args()
    one = a.seed is not None
    if one and not a.setup:
        parser.error("--seed is one history of one --setup")
    known = setups(a.op)
    if a.setup not in (None, *known):
        parser.error(f"{a.op} has no setup {a.setup}; there are {', '.join(known)}")
    changes = {"mutation": a.mutation, "without_fence": a.without_fence, "narrow_fence": a.narrow_fence}
    chosen = [known[a.setup]] if a.setup else list(right(a.op).values())
    shares = split_rows(1 if one else a.histories, len(chosen))
    results = []
    for setup, histories in zip(tqdm(chosen, desc=a.op, disable=None, leave=False), shares, strict=True):
        results.append(play(dataclasses.replace(setup, **changes), histories, a.seed or 0, log=one))
        if results[-1].bad:
            print(results[-1])
    count, bad, steps, seconds = (sum(getattr(r, n) for r in results) for n in ("histories", "bad", "steps", "seconds"))
    print(f"{a.op}: {bad} bad of {count} histories of {len(results)} setups, {steps} steps")
    print(f"{count / seconds:.0f} histories/s, {steps / seconds / 1e6:.1f} M steps/s")
    return bad > 0


if __name__ == "__main__":
    sys.exit(main())
