"""`python -m kosmos_raw compile`: build the kernels ahead of time, and say what they take of a compute unit."""

from __future__ import annotations

import argparse
import ctypes
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..build import gfx950, report, sm90, sources, zig

TARGETS = ("gfx950", "sm_90a", "host")


def operators() -> list[str]:
    """All operators that have a kernel."""
    return sorted(path.stem for path in (sources.folder() / "kernels").glob("*.hip"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--target", choices=(*TARGETS, "all"), default="all", help="what to build for (all)")
    parser.add_argument("--op", choices=operators(), help="one operator; all of them if left out")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="copy what was built to DIR/TARGET/")


def run(args: argparse.Namespace) -> int:
    """Builds and prints; 0 only when everything that could be built, and all that was asked for by name, is right."""
    targets = TARGETS if args.target == "all" else (args.target,)
    results = []
    for target in targets:
        for op in [args.op] if args.op else operators():
            results.append(build(target, op))
            if args.output:
                _copy(results[-1]["files"], args.output / target)
    if args.json:
        print(json.dumps(results, indent=2))
    else:
        print(table(results))
    absent = [r for r in results if r["needs"]]
    failed = any(r["problems"] for r in results) or len(absent) == len(results)
    return int(failed or (args.target != "all" and bool(absent)))


def build(target: str, op: str) -> dict[str, Any]:
    """Builds one operator for one target.

    Returns: op, target, needs (what the machine lacks, or None), problems, kernels (reports), files.
    """
    result: dict[str, Any] = {"op": op, "target": target, "needs": None, "problems": [], "kernels": [], "files": []}
    missing, make = _TARGETS[target]
    result["needs"] = missing()
    if result["needs"]:
        return result
    try:
        kernels, files, wrong = make(op)
    except zig.BuildError as error:
        result["problems"] = [str(error)]
        return result
    want = report.python_param_bytes(op)
    for kernel in kernels:
        wrong += report.check(kernel, want)
    result.update(problems=wrong, kernels=[asdict(k) for k in kernels], files=[str(path) for path in files])
    return result


Made = tuple[list[report.KernelReport], list[Path], list[str]]


def _gfx950(op: str) -> Made:
    made = gfx950.build(op)
    return report.gfx950(made), [made.text, made.code_object], []


def _sm90(op: str) -> Made:
    made = sm90.cubin(op)
    return report.sm90(made), [made.text, made.log, made.cubin], []


def _host(op: str) -> Made:
    made = zig.shared_library(sources.kernel(op))
    size = int(getattr(ctypes.CDLL(str(made)), f"{op}_params_bytes")())
    want = report.python_param_bytes(op)
    wrong = [] if size == want else [f"host {op}: the params struct has {size} bytes, {want} in Python"]
    return [], [made], wrong


_TARGETS: dict[str, tuple[Callable[[], str | None], Callable[[str], Made]]] = {
    "gfx950": (gfx950.missing, _gfx950),
    "sm_90a": (sm90.missing, _sm90),
    "host": (gfx950.missing, _host),  # the same compiler
}

_COLUMNS: tuple[tuple[str, Callable[[dict[str, Any]], Any]], ...] = (
    ("threads", lambda k: k["threads"]),
    ("registers", lambda k: k["registers"]),
    ("scalars", lambda k: k["scalars"] or "-"),
    ("spills", lambda k: k["spills"]),
    ("scalar spills", lambda k: k["scalar_spills"]),
    ("scratch", lambda k: k["scratch_bytes"]),
    ("shared", lambda k: k["shared_bytes"]),
    ("params", lambda k: k["param_bytes"]),
    ("code", lambda k: k["code_bytes"] or "-"),
)


def table(results: list[dict[str, Any]]) -> str:
    """What was built, a kernel a line, for people."""
    rows = [["target", "kernel", *(name for name, _ in _COLUMNS), ""]]
    notes = []
    for r in results:
        verdict = "FAILED" if r["problems"] else "ok"
        for kernel in r["kernels"]:
            rows.append([r["target"], kernel["kernel"], *(str(value(kernel)) for _, value in _COLUMNS), verdict])
        if not r["kernels"]:
            rows.append([r["target"], r["op"], *("-" for _ in _COLUMNS), "not built" if r["needs"] else verdict])
        notes += [f"{r['target']} {r['op']} not built: {r['needs'].removeprefix('kosmos_raw: ')}"] if r["needs"] else []
        notes += [_tile(kernel) for kernel in r["kernels"] if kernel["tile"]]
        notes += r["problems"]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(f"{cell:{'<' if i < 2 else '>'}{widths[i]}}" for i, cell in enumerate(row)) for row in rows]
    files = [file for r in results for file in r["files"]]
    return "\n".join([*lines, *(["", *notes] if notes else []), *(["", *files] if files else [])])


def _tile(kernel: dict[str, Any]) -> str:
    """The main loop of a kernel's GEMM tile in words."""
    t = kernel["tile"]
    outside = t["outside_cycles_estimate"]
    return (
        f"{kernel['target']} {kernel['kernel']}, a K step of a wave: {t['mfma']} MFMA, each with "
        f"{t['lds_bytes_per_mfma']:.0f} bytes of LDS and {t['global_bytes_per_mfma']:.0f} bytes of memory; "
        f"{t['waits']} waits, {t['barriers']} barriers. "
        f"Estimate, not measured: MFMA busy {t['busy_estimate']:.1%} at {report.BARRIER_CYCLES} cycles a barrier"
        + (f", {outside:.0f} cycles a tile outside the loop" if outside is not None else "")
    )


def _copy(files: list[str], to: Path) -> None:
    if files:
        to.mkdir(parents=True, exist_ok=True)
    for file in files:
        shutil.copy(file, to)
