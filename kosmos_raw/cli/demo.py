"""demo: the main job, once, on this machine."""

from __future__ import annotations

import argparse
import importlib.util
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from ..build.params import MAX_RANKS
from ..checks import validate as check
from ..checks.drills import DRILLS
from ..checks.operators import Case
from ..device import NAMES, build_kernels, default_device
from ..plan.shapes import split_rows
from ..ranks.launch import launch
from ..trace import draw_timeline, summarise, write_perfetto
from .shared import DEFAULT_DEVICE, print_json, table
from .trace import record, title

TRACED = Case(tuple(split_rows(2048, MAX_RANKS)), 512, 512)
MAIN = Case(tuple(split_rows(1024, MAX_RANKS)), 256, 256)
CASES = [
    MAIN,
    Case(MAIN.rows, 256, 256, policy="fixed"),
    Case(tuple(split_rows(1003, MAX_RANKS)), 130, 72),
    Case((300, 0, 1, 97, 0, 64, 33, 5), 200, 264, arena=True),
    Case((1, 1, 1, 0, 0, 0, 0, 0), 7, 9),
    Case(tuple(split_rows(1000, 3)), 130, 72),
    Case((257,), 100, 40),
]
CASES += [replace(case, op="gemm_rs", arena=False) for case in CASES]
CASES += [
    Case(rows, n, k, op, arena=arena)
    for op in ("ag_gemm_dgrad", "bulk_ag", "bulk_rs")
    for rows, n, k, arena in ((MAIN.rows, 256, 256, True), ((300, 0, 1, 97, 0, 64, 33, 5), 130, 72, False))
]


# New data once, run twice: a newcomer should not wait for a minute. `validate` takes longer.
CASES = [replace(case, iters=1) for case in CASES]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=NAMES, help=f"where kernels run (default: {DEFAULT_DEVICE})")
    parser.add_argument("-o", "--output", type=Path, default=Path("out"), help="folder for picture and trace")
    parser.add_argument("--json", action="store_true")


def run(args: argparse.Namespace) -> int:
    device = args.device or default_device()
    checks: list[dict] = []
    steps = tqdm(total=len(CASES) + len(DRILLS) + 1, desc="demo", unit="check", disable=None, leave=False)
    steps.set_postfix_str("building kernels")
    for built in build_kernels(device, {case.op for case in CASES}):
        steps.set_postfix_str(f"built {built}")
    for ranks in sorted({len(case.rows) for case in CASES}, reverse=True):
        cases = [case for case in CASES if len(case.rows) == ranks]
        steps.set_postfix_str(f"{ranks} ranks")
        arena = check.arena_bytes(cases)
        mode = "processes" if ranks == MAX_RANKS else "threads"  # starting processes is what takes long
        outcomes = launch(check.run_all, cases, ranks=ranks, device=device, mode=mode, arena_bytes=arena)
        for case, *of_ranks in zip(cases, *outcomes, strict=True):
            checks.append(check.report(case, device, check.merge(of_ranks)))
        steps.update(len(cases))
    drills = {}
    for name, drill in DRILLS.items():
        steps.set_postfix_str(name)
        drills[name] = drill(3, 30.0, device)
        steps.update()
    steps.set_postfix_str("timeline")
    args.output.mkdir(parents=True, exist_ok=True)
    options = {
        "ranks": len(TRACED.rows),
        "device": device,
        "mode": "threads",
        "arena_bytes": check.arena_bytes([TRACED]),
    }
    trace = record(TRACED, options, events=1024)
    written = [args.output / "ag_gemm.json"]
    write_perfetto(trace, written[0])
    if importlib.util.find_spec("matplotlib"):
        written.append(args.output / "ag_gemm.png")
        draw_timeline(trace, written[1], title=title("ag_gemm", TRACED, device))
    steps.close()

    passed = all(c["passed"] for c in checks) and all(ok for ok, _ in drills.values())
    if args.json:
        print_json(
            {
                "passed": passed,
                "checks": checks,
                "drills": {name: {"passed": ok, "seen": seen} for name, (ok, seen) in drills.items()},
                "trace": summarise(trace).as_dict(),
            }
        )
        return 0 if passed else 1
    print(_checks_table(checks), end="\n\n")
    lines = [[name, seen, "passed" if ok else "FAILED"] for name, (ok, seen) in drills.items()]
    print(table(["when it goes wrong", "seen", "result"], lines), end="\n\n")
    print(f"timeline of one call on all {len(TRACED.rows)} ranks: {', '.join(map(str, written))}")
    if len(written) == 1:
        print("(for a picture: pip install 'kosmos-raw[plot]')")
    count = len(checks) + len(drills)
    print(f"all {count} checks passed" if passed else "NOT all checks passed")
    for c in checks:
        for problem in c["problems"]:
            print(f"  {c['op']} {c['shape']}: {problem}")
    return 0 if passed else 1


def _checks_table(checks: list[dict]) -> str:
    lines = []
    for c in checks:
        s = c["shape"]
        rows = s["rows"]
        dealt = "equal" if len(set(rows)) == 1 else "even" if max(rows) - min(rows) == 1 else "ragged"
        lines.append(
            [
                c["op"],
                c["device"],
                str(c["ranks"]),
                str(s["m"]),
                str(s["n"]),
                str(s["k"]),
                dealt,
                c["policy"],
                f"{c['rel_error']:.1e}",
                f"{c['over_bound']:.2f}",
                "equal" if c["bitwise_repeat"] else "DIFFER",
                f"{c['seconds'] * 1e3:.1f}",
                "passed" if c["passed"] else "FAILED",
            ]
        )
    header = "operator,device,ranks,M,N,K,rows,policy,rel. error,of bound,bits,ms,result".split(",")
    return table(header, lines)
