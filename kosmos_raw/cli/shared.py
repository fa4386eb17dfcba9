"""What commands have in common."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from ..build.params import MAX_RANKS, ORDERS, POLICIES
from ..checks.operators import CHECKED, Case
from ..device import NAMES, default_device
from ..emulator.node.options import VARIABLE as EMULATOR
from ..plan.gemm_rs import TRANSPORTS
from ..plan.heuristics import DTYPES
from ..plan.moe.forward import POLICIES as MOE_POLICIES
from ..plan.shapes import split_rows
from ..ranks.mpi import started_by_mpi, world_rank, world_size

OPS = tuple(CHECKED)
DEFAULT_DEVICE = "hip or cuda with a GPU for every rank, else emulated if its packages are there and no ROCm, else cpu"


def add_group_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=NAMES, help=f"where kernels run (default: {DEFAULT_DEVICE})")
    parser.add_argument(
        "--emulator", metavar="OPTIONS", help="of --device emulated, like caches,preempt=7 (emulator/node/options.py)"
    )
    parser.add_argument("--ranks", type=int, help=f"1 to {MAX_RANKS} (default: 8, or as many as mpirun started)")
    parser.add_argument("--mode", choices=("processes", "threads"), help="how ranks run (default: processes)")
    parser.add_argument("--workgroups", type=int, help="WGs of each rank (default: the device's own number)")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="how long one wait in a kernel may last")
    parser.add_argument("--arena-mib", type=int, metavar="MIB", help="symmetric memory of each rank")


def add_shape_arguments(parser: argparse.ArgumentParser, m: int, n: int, k: int) -> None:
    parser.add_argument("--m", type=int, default=m, help=f"rows of all ranks together (default: {m})")
    parser.add_argument("--n", type=int, default=n, help=f"columns of C on each rank (default: {n})")
    parser.add_argument("--k", type=int, default=k, help=f"contraction width (default: {k})")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of what is multiplied (default: bf16)")
    parser.add_argument("--rows", help="rows of every rank, like 3,0,5; instead of --m and --ranks")
    parser.add_argument(
        "--policy",
        choices=(*POLICIES, *(p for p in MOE_POLICIES if p not in POLICIES)),
        help="how WGs divide moving and building (default: one_way; two_way of moe_forward)",
    )
    parser.add_argument("--order", choices=ORDERS, default="as_consumed", help="of the tiles (default: as_consumed)")
    parser.add_argument("--transport", choices=TRANSPORTS, help="of gemm_rs (default: planned)")
    parser.add_argument("--movers", type=int, help="WGs that begin as movers (default: planned)")
    parser.add_argument("--seed", type=int, default=0)


def row_counts(args: argparse.Namespace) -> tuple[int, ...]:
    """--rows, or --m dealt to --ranks. Makes args.ranks agree."""
    if args.rows:
        rows = tuple(int(r) for r in args.rows.split(","))
        if args.ranks not in (None, len(rows)):
            raise ValueError(f"--rows names {len(rows)} ranks, --ranks says {args.ranks}")
    else:
        ranks = args.ranks or (world_size() if started_by_mpi() else MAX_RANKS)
        rows = tuple(split_rows(args.m, ranks))
    args.ranks = len(rows)
    return rows


def case_of(args: argparse.Namespace) -> Case:
    """The case that the shape arguments describe."""
    return Case(
        op=args.op,
        rows=row_counts(args),
        n=args.n,
        k=args.k,
        policy=args.policy,
        order=args.order,
        transport=args.transport,
        movers=args.movers,
        dtype=args.dtype,
        seed=args.seed,
    )


def launch_options(args: argparse.Namespace, arena_bytes: int | None = None) -> dict[str, Any]:
    """Keyword arguments of launch(). What nobody says is chosen: a device, which args.device names from now on, and an
    arena as large as the case needs."""
    args.device = args.device or ("emulated" if args.emulator else default_device(args.ranks))
    if args.emulator:
        if args.device != "emulated":
            raise ValueError(f"--emulator {args.emulator}: only --device emulated has an emulator, not {args.device}")
        os.environ[EMULATOR] = args.emulator  # for the processes of the ranks
    asked = args.arena_mib << 20 if args.arena_mib else None
    return {
        "ranks": args.ranks,
        "device": args.device,
        "mode": args.mode,
        "workgroups": args.workgroups,
        "timeout_s": args.timeout,
        "arena_bytes": asked or arena_bytes,
    }


def is_first_process() -> bool:
    """Whether this process prints: under mpirun every one comes here, one speaks."""
    return world_rank() == 0


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=1))


def table(header: list[str], lines: list[list[str]]) -> str:
    """Columns as wide as they need to be; numbers to the right."""
    widths = [max(len(line[i]) for line in [header, *lines]) for i in range(len(header))]

    def row(cells: list[str]) -> str:
        return "  ".join(
            cell.rjust(width) if cell[:1].isdigit() else cell.ljust(width)
            for cell, width in zip(cells, widths, strict=True)
        ).rstrip()

    return "\n".join([row(header), "  ".join("-" * width for width in widths), *map(row, lines)])
