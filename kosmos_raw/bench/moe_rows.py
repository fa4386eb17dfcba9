"""What bench moe_forward and bench moe_backward measure, a row a model, and their files."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import median
from typing import Any

from ..plan.moe.backward import OP as BACKWARD
from ..plan.moe.forward import OP as FORWARD
from .cuda_ops import PLANNED, listed

STEP = "moe_step"  # a forward and its backward
UNFUSED, KNOWN, PRODUCTS = "unfused", "unfused, sizes known", "products alone"
PEERS = (UNFUSED, KNOWN, PRODUCTS)
# For each token, element of it and element of its experts' widths: products with a gate, an up and a down matrix, in a
# backward both for rows and for weights.
FLOPS = {FORWARD: 6, BACKWARD: 12, STEP: 18}
CROSSINGS = {FORWARD: 2, BACKWARD: 2, STEP: 4}  # of a row that goes to another rank


@dataclass
class MoeRow:
    """One model: milliseconds of the slowest rank, median over rounds, by (variant, mode)."""

    model: str
    ranks: int
    tokens: int
    hidden: int
    expert_width: int
    experts: int  # of all ranks
    top_k: int
    shared_width: int
    largest_off: float  # of what ELEMENT_OFF allows
    link_ms: float  # of the rank with most rows that go to others and back, at the rate that was measured for pushes
    ms: dict[tuple[str, str], float]
    samples: dict[tuple[str, str], list[float]] = field(repr=False)
    variants: tuple[str, ...] = (PLANNED,)  # ours
    op: str = FORWARD  # or BACKWARD, or STEP

    def summary(self) -> str:
        return f"{self.op} {self.model}: at {self.largest_off:.2f} of what rounding allows; ms: {listed(self.ms)}"

    def tflops(self, variant: str, mode: str) -> float:
        """Of a rank, in its products; neither the router nor what a backward makes once more is counted."""
        width = self.top_k * self.expert_width + self.shared_width
        return FLOPS[self.op] * self.tokens * self.hidden * width / self.ms[variant, mode] / 1e9

    def over(self, peer: str, mode: str, variant: str = PLANNED) -> float | None:
        """How many times as fast as a peer; None if it was not there."""
        if (peer, mode) not in self.ms:
            return None
        return self.ms[peer, mode] / self.ms[variant, mode]

    def of_bound(self, mode: str, variant: str = PLANNED) -> float:
        """No call can be faster: link, or products as PyTorch makes them, whichever takes longer."""
        return max(self.link_ms, self.ms[PRODUCTS, mode]) / self.ms[variant, mode]


def write_csv(rows: Sequence[MoeRow], path: Path) -> None:
    """Every sample, one a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow([*FIXED, "ours", "variant", "mode", "round", "ms"])
        for row in rows:
            values = asdict(row)
            for (variant, mode), times in row.samples.items():
                for i, ms in enumerate(times):
                    ours = int(variant in row.variants)
                    out.writerow([*(values[name] for name in FIXED), ours, variant, mode, i, f"{ms:.5f}"])


FIXED = tuple(f.name for f in fields(MoeRow) if f.name not in ("ms", "samples", "variants"))


def read_csv(path: Path) -> list[MoeRow]:
    """What write_csv wrote; older files are of moe_forward and do not say so."""
    rows: dict[tuple[str, ...], MoeRow] = {}
    with path.open() as file:
        for line in csv.DictReader(file):
            op = line.get("op", FORWARD)
            key = (op, line["model"], line["ranks"], line["tokens"])
            if key not in rows:
                values: dict[str, Any] = {name: int(line[name]) for name in _WHOLE}
                values |= {name: float(line[name]) for name in _PARTS}
                rows[key] = MoeRow(model=line["model"], ms={}, samples={}, variants=(), op=op, **values)
            row = rows[key]
            row.samples.setdefault((line["variant"], line["mode"]), []).append(float(line["ms"]))
            if int(line["ours"]) and line["variant"] not in row.variants:
                row.variants += (line["variant"],)
    for row in rows.values():
        row.ms = {key: median(times) for key, times in row.samples.items()}
    return list(rows.values())


_WHOLE = {f.name for f in fields(MoeRow) if f.type == "int"}
_PARTS = {f.name for f in fields(MoeRow) if f.type == "float"}
