"""Trains a small language model on the sources of Python's standard library: python -m runners.train_lm --help"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np

import kosmos_raw as kr
from kosmos_raw.ranks.mpi import started_by_mpi, world_rank

from . import training
from .parameters import LMConfig, Schedule

# Of the ranks' losses beside the single process's, which is in BF16: at every step and on average, relative. README.md
# says where they come from.
ALLOWED = {"bf16": (1e-2, 3e-3), "mxfp8": (5e-2, 1e-2)}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="train_lm", description=__doc__)
    parser.add_argument("--ranks", type=int, help="4 unless mpirun or srun started them; must divide the heads")
    parser.add_argument("--device", default="cpu", choices=("cpu", "hip", "cuda"))  # emulated has no BLAS
    parser.add_argument("--mode", choices=("processes", "threads", "mpi"))
    parser.add_argument("--steps", type=int, default=200, help="to which the learning rate falls")
    parser.add_argument("--until", type=int, help="step to stop at; default: the last")
    parser.add_argument("--rate", type=float, default=Schedule.peak, help="the highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=tuple(ALLOWED), default="bf16", help="of all layers' products")
    for size in fields(LMConfig):
        parser.add_argument(f"--{size.name.replace('_', '-')}", type=int, default=size.default)
    parser.add_argument("--out", type=Path, default=Path("out/train_lm"), help="folder of checkpoints and results")
    parser.add_argument("--checkpoint-every", type=int, default=100, metavar="STEPS", help="0: never")
    parser.add_argument("--resume", type=Path, metavar="NPZ", help="a checkpoint to go on from, on any number of ranks")
    parser.add_argument("--no-reference", action="store_true", help="without the single-process run beside it")
    return parser.parse_args()


def compared(got: list[float], wanted: list[float]) -> dict[str, float]:
    """How far losses are off, relative to those wanted."""
    off = np.abs(np.array(got) / np.array(wanted) - 1)
    return {"largest": float(off.max()), "largest_at": int(off.argmax()), "mean": float(off.mean())}


def draw(path: Path, ranks: int, losses: list[float], reference: list[float] | None, every_step: float) -> None:
    """Losses by step, and below how far the two runs are apart."""
    pyplot = importlib.import_module("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    figure, panels = pyplot.subplots(
        1 + bool(reference),
        1,
        figsize=(8, 3.2 + 1.6 * bool(reference)),
        sharex=True,
        squeeze=False,
        height_ratios=[2.2, 1][: 1 + bool(reference)],
    )
    above = panels[0, 0]
    if reference:
        above.plot(reference, color="#e0a458", linewidth=4, label="one process, NumPy")
    above.plot(losses, color="#2f6db3", linewidth=1.2, label=f"{ranks} ranks")
    above.set_ylabel("loss (nats a byte)", fontsize=8)
    above.set_title("Bytes of Python's standard library", fontsize=10, loc="left")
    above.legend(fontsize=8, frameon=False)
    if reference:
        below = panels[1, 0]
        off = np.abs(np.array(losses) / np.array(reference) - 1)
        below.semilogy(np.maximum(off, 1e-9), color="#2f6db3", linewidth=0.8)
        below.axhline(every_step, color="#b8bec6", linewidth=1)
        below.text(0, every_step * 0.85, "allowed at every step", va="top", fontsize=7, color="#6b7280")
        below.set_ylabel("relative difference", fontsize=8)
    panels[-1, 0].set_xlabel("step", fontsize=8)
    for panel in panels[:, 0]:
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=140)
    pyplot.close(figure)


def main() -> int:
    given = arguments()
    config = LMConfig(**{size.name: getattr(given, size.name) for size in fields(LMConfig)})
    schedule = Schedule(given.rate, steps=given.steps)
    run = training.Run(config, schedule, given.seed, given.dtype)
    every_step, on_average = ALLOWED[given.dtype]
    until = given.steps if given.until is None else given.until
    resume = str(given.resume) if given.resume else None
    ranks = given.ranks or (None if started_by_mpi() else 4)
    start = time.perf_counter()
    every_rank = kr.launch(
        training.on_rank,
        *(run, until, str(given.out), resume, given.checkpoint_every, True),
        ranks=ranks,
        device=given.device,
        mode=given.mode,
    )
    if world_rank() != 0:
        return 0
    losses, ranks = every_rank[0], len(every_rank)
    report = {"run": asdict(run), "ranks": ranks, "seconds": time.perf_counter() - start, "losses": losses}
    mean = float(np.mean(losses[-10:]))
    print(
        f"{ranks} ranks: loss {losses[0]:.4f} at first, {mean:.4f} over the last ten steps; {report['seconds']:.0f} s"
    )
    reference, passed = None, True
    if not given.no_reference:
        start = time.perf_counter()
        reference = training.in_one_process(run, ranks, until, progress=True)
        report |= {"reference": reference, "reference_seconds": time.perf_counter() - start}
        report["difference"] = off = compared(losses, reference)
        passed = off["largest"] <= every_step and off["mean"] <= on_average
        print(
            f"one process: {np.mean(reference[-10:]):.4f}; relative difference at most {off['largest']:.1e} (step "
            f"{off['largest_at']}; allowed {every_step:.0e}), {off['mean']:.1e} on average (allowed {on_average:.0e}): "
            f"{'equal' if passed else 'NOT equal'}"
        )
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "losses.json").write_text(json.dumps(report))
    draw(given.out / "losses.png", ranks, losses, reference, every_step)
    print(f"{given.out}/losses.json, losses.png")
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
