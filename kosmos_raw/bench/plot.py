"""A picture of what bench measured: how many times as fast as NCCL + cuBLAS, and how near to the bound."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

from . import cuda_ops
from .cuda_ops import OpRow

BARS = {  # by what: colour, and the mode that is shown
    "NCCL, then cuBLAS": "#b8bec6",
    "async TP": "#e0a458",
    "NCCL beside cuBLAS": "#c58fd0",
    "bound": "#d9e2ec",
    "ours": "#2f6db3",
}


def draw(rows: Sequence[OpRow], path: Path, mode: str = "steady") -> None:
    """One panel an operator, one group of bars a shape; times of serial calls over each."""
    pyplot = importlib.import_module("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    ops = list(dict.fromkeys(row.op for row in rows))
    figure, panels = pyplot.subplots(len(ops), 1, figsize=(9, 0.4 + 2.1 * len(ops)), squeeze=False)
    for panel, op in zip(panels[:, 0], ops, strict=True):
        of_op = [row for row in rows if row.op == op]
        for i, row in enumerate(of_op):
            serial = row.ms[cuda_ops.SERIAL, mode]
            heights = {
                "NCCL, then cuBLAS": 1.0,
                "async TP": _ratio(row, cuda_ops.ASYNC_TP, serial, mode),
                "NCCL beside cuBLAS": _ratio(row, cuda_ops.TWO_STREAMS, serial, mode),
                "ours": serial / row.ms[cuda_ops.PLANNED, mode],
                "bound": serial / row.bound(mode),
            }
            shown = [(name, height) for name, height in heights.items() if height]
            for j, (name, height) in enumerate(shown):
                x = i + (j - (len(shown) - 1) / 2) * 0.2
                panel.bar(x, height, 0.19, color=BARS[name], label=name if i == 0 else None)
                panel.text(x, height + 0.03, f"{height:.2f}", ha="center", va="bottom", fontsize=7)
        panel.set_xticks(range(len(of_op)), [row.shape.name for row in of_op], fontsize=8)
        panel.set_title(f"{op}, {of_op[0].ranks} GPUs", fontsize=10, loc="left")
        panel.set_ylabel("times as fast", fontsize=8)
        panel.set_ylim(0, 1.25 * max(serial_over_bound(row, mode) for row in of_op))
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(fontsize=7, ncols=5, frameon=False, loc="upper left", bbox_to_anchor=(0.35, 1.2))
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
    pyplot.close(figure)


def serial_over_bound(row: OpRow, mode: str) -> float:
    return row.ms[cuda_ops.SERIAL, mode] / row.bound(mode)


def _ratio(row: OpRow, peer: str, serial: float, mode: str) -> float | None:
    return serial / row.ms[peer, mode] if (peer, mode) in row.ms else None
