"""A column-parallel layer's forward on every rank: gather the sequence shards, multiply by this rank's weight."""

from __future__ import annotations

import ml_dtypes
import numpy as np

import kosmos_raw as kr
from kosmos_raw.ranks.mpi import started_by_mpi, world_rank

TOKENS, HIDDEN, WIDTH = 1024, 256, 128


def forward(comm: kr.Communicator, seed: int) -> float:
    """Returns the largest difference to the float32 product, relative to its largest value."""
    rows = kr.split_rows(TOKENS, comm.ranks)
    first = sum(rows[: comm.rank])
    x = np.random.default_rng(seed).standard_normal((TOKENS, HIDDEN)).astype(ml_dtypes.bfloat16)
    w = np.random.default_rng(seed + 1 + comm.rank).standard_normal((WIDTH, HIDDEN)).astype(ml_dtypes.bfloat16)
    y = kr.ag_gemm(comm, x[first : first + rows[comm.rank]], w, rows=rows)
    want = x.astype(np.float32) @ w.astype(np.float32).T
    return float(np.abs(y.astype(np.float32) - want).max() / np.abs(want).max())


if __name__ == "__main__":
    errors = kr.launch(forward, 0, ranks=None if started_by_mpi() else 8)
    if world_rank() == 0:
        print(f"{len(errors)} ranks, largest relative difference {max(errors):.1e}")
