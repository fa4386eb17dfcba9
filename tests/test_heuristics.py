"""Table B.3: every value that the paper's rules give for its own shapes, and how they scale."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kosmos_raw.plan import heuristics
from kosmos_raw.plan.moe.config import models

DATA = Path(__file__).parent / "data"
HIDDEN = {"8B": 4096, "70B": 8192, "405B": 16384}
FFN = {"8B": 14336, "70B": 28672, "405B": 53248}


def shape(kernel: str, name: str) -> tuple[int, int, int]:
    """M, N, K of a kernel in Llama 3 at 8 ranks: t tokens, hidden h, and w, a rank's share of the layer's width."""
    model, layer, batch = name.split("-")
    h, f, t = HIDDEN[model], FFN[model], 8192 * int(batch.removeprefix("MBS"))
    w = {"FC1": 2 * f, "QKV": h + 2 * 1024, "Down": f, "OProj": h}[layer] // 8
    return {
        "ag_tn_col_fprop": (t, w, h),
        "gemm_rs_row_fprop": (t, h, w),
        "ag_nn_row_dgrad": (t, w, h),
        "bulk_ag_col_dgrad": (t, h, w),
        "bulk_rs_col_wgrad": (w, h, t),
    }[kernel]


def value(kernel: str, name: str, dtype: str, parameter: str, models: dict[str, tuple[int, int]]) -> int | None:
    if name in models:
        hidden, width = models[name]
        if parameter == "push_burst_depth":
            return heuristics.push_burst_depth(hidden)
        return heuristics.moe_dispatch_crew(width, dtype)
    m, n, k = shape(kernel, name)
    if parameter == "split_k":
        return heuristics.split_k(kernel, m, n, dtype)
    if parameter.startswith("xcd_bucketing"):
        return int(heuristics.xcd_bucketing(m, n, m if parameter.endswith("total") else m // 8))
    return heuristics.movers_per_peer(kernel, m, n, k, dtype)


def test_every_value_of_the_table():
    sizes = {name: (config.hidden, config.expert_width) for name, config in models().items()}
    with (DATA / "heuristics_expected.csv").open() as file:
        rows = list(csv.DictReader(file))
    seen = Counter(row["parameter"] for row in rows)
    assert sum(seen.values()) == 708 and seen["movers_per_peer"] == 144 and seen["dispatch_crew"] == 18
    wrong = []
    for row in rows:
        want = int(row["value"]) if row["value"] else None
        got = value(row["kernel"], row["shape_or_model"], row["dtype"], row["parameter"], sizes)
        if got != want:
            wrong.append((row, got))
    assert wrong == []


@pytest.mark.parametrize(
    ("per_peer", "ranks", "workgroups", "movers"),
    [
        (6, 8, 256, 42),
        (8, 8, 256, 56),
        (8, 1, 256, 0),
        (6, 2, 256, 6),
        (8, 8, 4, 1),
        (8, 8, 2, 1),
        (8, 8, 64, 14),
        (8, 3, 128, 8),
    ],
)
def test_crews_scale(per_peer, ranks, workgroups, movers):
    assert heuristics.crew(per_peer, ranks, workgroups) == movers


@given(st.integers(1, 14), st.integers(2, 8), st.integers(2, 256))
def test_every_mover_has_a_builder_beside_it(per_peer, ranks, workgroups):
    assert 1 <= heuristics.crew(per_peer, ranks, workgroups) <= workgroups // 2


def test_a_cap_shrinks_reducers_and_builders_in_proportion():
    whole, half = heuristics.crew(8, 8, 256), heuristics.crew(8, 8, 128)
    assert (whole, half) == (56, 28) and (256 - whole) == 2 * (128 - half)


def test_crews_of_experts():
    assert heuristics.moe_combine_crew(256) == 128 and heuristics.moe_combine_crew(100) == 96
    assert heuristics.moe_dispatch_crew(512, "mxfp8") == 48
    assert heuristics.moe_dispatch_crew(512, "mxfp8", with_columns=True) == 96
    assert heuristics.moe_backward_dispatch_crew(1, 3) == 64 and heuristics.moe_backward_dispatch_crew(0, 1) == 32
    assert heuristics.moe_backward_combine_crew(0, 1) == 24 and heuristics.moe_backward_combine_crew(1, 1) == 128
    assert heuristics.moe_backward_combine_crew(0, 1, "mxfp8") == 32
