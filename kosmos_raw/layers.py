"""Linear layers under tensor and sequence parallelism: the operators that each pass takes (paper table B.2) together.

Tokens are dealt to ranks by rows; weights by output features (column-parallel) or by input features (row-parallel).
Layers hold no optimiser and no graph: `forward` keeps what `backward` needs, and `backward` follows the `forward` that
it belongs to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .numerics.bf16 import narrow, widen
from .ops.ag_gemm import ag_gemm
from .ops.ag_gemm_dgrad import ag_gemm_dgrad
from .ops.arguments import BF16, as_matrix, shard_rows
from .ops.bulk_ag import bulk_ag
from .ops.bulk_rs import bulk_rs, gemm_wgrad
from .ops.gemm_rs import gemm_rs
from .plan.shapes import split_rows
from .ranks.communicator import Communicator


class _Linear:
    """What both layers share: the weight, its gradient, and the bias gradient."""

    name: str

    def __init__(
        self,
        comm: Communicator,
        weight: Any,
        *,
        weight_grad: Any | None = None,
        bias_grad: Any | None = None,
        policy: str | None = None,
    ):
        self.comm, self.policy = comm, policy
        self.weight = as_matrix(comm, self.name, "weight", weight)
        self.weight_grad, self.bias_grad = weight_grad, bias_grad
        self._buffer = weight_grad
        if weight_grad is not None:
            as_matrix(comm, self.name, "weight_grad", weight_grad, float32=True)
        if bias_grad is not None and bias_grad.shape != (self.weight.shape[0],):
            raise ValueError(f"{self.name}: bias_grad has shape {bias_grad.shape}, want ({self.weight.shape[0]},)")
        if bias_grad is not None and bias_grad.dtype not in (BF16, np.uint16, np.float32):
            raise TypeError(f"{self.name}: bias_grad has dtype {bias_grad.dtype}, want bfloat16 or float32")
        self._saved: Any = None

    def _take_saved(self) -> Any:
        saved, self._saved = self._saved, None
        if saved is None:
            raise ValueError(f"{self.name}: backward without the forward it belongs to")
        return saved

    def _weight_grad_options(self) -> dict[str, Any]:
        """Into a buffer of the caller's gradients are added; without one `weight_grad` is this batch's, in BF16."""
        return {} if self._buffer is None else {"c": self._buffer, "accumulate": True}

    def _add_bias_grad(self, dy: Any) -> None:
        """Sums of dY over the rows that this rank has, in FP32: over all tokens where dY is that of all tokens."""
        grad = self.bias_grad
        if grad is None:
            return
        sums = widen(dy).sum(axis=0, dtype=np.float32)
        if grad.dtype in (BF16, np.uint16):
            grad.view(np.uint16)[...] = narrow(widen(grad) + sums)
        else:
            grad += sums


class ColumnParallelLinear(_Linear):
    """Y = X @ W.T, with W dealt by output features: each rank has all tokens of its own features of Y.

    Args:
        weight: this rank's part, bf16 [features out / ranks, features in].
        weight_grad: bf16 or float32 [as weight] to which weight gradients are added; None: `backward` makes a new one.
        bias_grad: bf16 or float32 [features out / ranks] to which sums of dY are added; None: no bias.
        policy: as the operators'.
    """

    name = "ColumnParallelLinear"

    def forward(self, x: Any, *, rows: Sequence[int] | None = None) -> Any:
        """x: this rank's tokens, bf16 [rows[rank], features in]. Returns: Y of all tokens, bf16 [sum of rows, features
        out / ranks]. x is kept until `backward`."""
        x = as_matrix(self.comm, self.name, "x", x)
        every = shard_rows(self.comm, self.name, x.shape[0], rows, "x")
        self._saved = x, every
        return ag_gemm(self.comm, x, self.weight, rows=every, policy=self.policy)

    def backward(self, dy: Any) -> Any:
        """dy: bf16, as what `forward` returned. Returns: dX of this rank's tokens, bf16 [rows[rank], features in].

        Gathers X again beside the data gradient, and adds dX over ranks beside the weight gradient.
        """
        x, every = self._take_saved()
        dy = as_matrix(self.comm, self.name, "dy", dy)
        partial, gathered = bulk_ag(
            self.comm, x, dy, self.weight, rows=every, out=self._room(sum(every)), policy=self.policy
        )
        dx, grad = bulk_rs(
            self.comm, partial, dy, gathered, rows=every, policy=self.policy, **self._weight_grad_options()
        )
        self.weight_grad = grad
        self._add_bias_grad(dy)
        return dx

    _partial: Any = None

    def _room(self, tokens: int) -> Any:
        """dX of all tokens before it is added over ranks: in the arena, so that peers read it where it is written. Kept
        as long as shapes do not grow."""
        if self._partial is None or self._partial.shape[0] < tokens:
            if self._partial is not None:
                self.comm.free(self._partial)
            self._partial = self.comm.empty((tokens, self.weight.shape[1]))
        return self._partial[:tokens]


class RowParallelLinear(_Linear):
    """Y = sum over ranks of X @ W.T, with W dealt by input features: each rank gets all features of its own tokens.

    Args:
        weight: this rank's part, bf16 [features out, features in / ranks].
        weight_grad: bf16 or float32 [as weight] to which weight gradients are added; None: `backward` makes a new one.
        bias_grad: bf16 or float32 [features out] to which sums of dY over all tokens are added, alike on all ranks;
            None: no bias.
        policy: as the operators'.
    Made by all ranks together, of which each may have another number of features.
    """

    name = "RowParallelLinear"

    def __init__(self, comm: Communicator, weight: Any, **options: Any):
        super().__init__(comm, weight, **options)
        self._widths = tuple(comm.allgather(self.weight.shape[1]))

    def forward(self, x: Any, *, rows: Sequence[int] | None = None) -> Any:
        """x: all tokens, bf16 [tokens, features in / ranks]. rows: the tokens that each rank gets; None deals them
        evenly. Returns: Y of this rank's tokens, bf16 [rows[rank], features out]. x is kept until `backward`."""
        x = as_matrix(self.comm, self.name, "x", x)
        every = tuple(split_rows(x.shape[0], self.comm.ranks) if rows is None else rows)
        y = gemm_rs(self.comm, x, self.weight, rows=every, widths=self._widths, policy=self.policy)
        self._saved = x, every
        return y

    def backward(self, dy: Any) -> Any:
        """dy: bf16, as what `forward` returned. Returns: dX of all tokens, bf16 [tokens, features in / ranks].

        Gathers dY for the data gradient, and keeps it for the weight gradient.
        """
        x, every = self._take_saved()
        dy = as_matrix(self.comm, self.name, "dy", dy)
        gathered = self.comm.device.xp.empty((sum(every), self.weight.shape[0]), dy.dtype)
        dx = ag_gemm_dgrad(self.comm, dy, self.weight, rows=every, gathered=gathered, policy=self.policy)
        self.weight_grad = gemm_wgrad(self.comm, gathered, x, **self._weight_grad_options())
        self._add_bias_grad(gathered)
        return dx
