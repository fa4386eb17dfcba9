"""Linear layers under tensor and sequence parallelism: the operators that each pass takes (paper table B.2) together.

Tokens are dealt to ranks by rows; weights by output features (column-parallel) or by input features (row-parallel).
Layers hold no optimiser and no graph: `forward` keeps what `backward` needs, and `backward` follows the `forward` that
it belongs to.

With dtype="mxfp8" all products are of MXFP8 (E4M3, a scale for 32): activations and gradients are quantised as they
come, the weight once. What is given and returned stays BF16, and so do sums over ranks; biases' gradients are those of
the BF16 dY.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .factors import DTYPES, Factors, MxFactors, sum_over_ranks
from .numerics.bf16 import narrow, widen
from .ops.ag_gemm import ag_gemm
from .ops.ag_gemm_dgrad import ag_gemm_dgrad
from .ops.ag_gemm_grads import ag_gemm_grads
from .ops.arguments import BF16, as_matrix, dealt_rows, shard_rows
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
        dtype: str = "bf16",
    ):
        if dtype not in DTYPES:
            raise ValueError(f"{self.name}: dtype is {dtype!r}, want one of {', '.join(DTYPES)}")
        self.comm, self.policy, self.dtype = comm, policy, dtype
        self.weight = as_matrix(comm, self.name, "weight", weight)
        self.weight_grad, self.bias_grad = weight_grad, bias_grad
        self._buffer = weight_grad
        if weight_grad is not None:
            as_matrix(comm, self.name, "weight_grad", weight_grad, float32=True)
        if bias_grad is not None and bias_grad.shape != (self.weight.shape[0],):
            raise ValueError(f"{self.name}: bias_grad has shape {bias_grad.shape}, want ({self.weight.shape[0]},)")
        if bias_grad is not None and bias_grad.dtype not in (BF16, np.uint16, np.float32):
            raise TypeError(f"{self.name}: bias_grad has dtype {bias_grad.dtype}, want bfloat16 or float32")
        self._factors = (Factors if dtype == "bf16" else MxFactors)(comm, self.weight)
        self._saved: Any = None

    def weight_changed(self) -> None:
        """To be called after every change of the weight's values: in MXFP8 what was made of them is kept until then."""
        self._factors.weight_changed()

    def _given(self, name: str, value: Any, features: int, rows: int | None = None) -> Any:
        """A matrix of so many features, and rows if they are known."""
        value = as_matrix(self.comm, self.name, name, value)
        want = (value.shape[0] if rows is None else rows, features)
        if tuple(value.shape) != want:
            raise ValueError(
                f"{self.name}: {name} has shape {tuple(value.shape)}, want {want} on rank {self.comm.rank}; the weight "
                f"is {tuple(self.weight.shape)}, features out and features in"
            )
        return value

    def _take_saved(self) -> Any:
        saved, self._saved = self._saved, None
        if saved is None:
            raise ValueError(f"{self.name}: backward without the forward it belongs to")
        return saved

    def _weight_grad_options(self) -> dict[str, Any]:
        """Into a buffer of the caller's gradients are added; without one `weight_grad` is this batch's, in BF16."""
        return {} if self._buffer is None else {"c": self._buffer, "accumulate": True}

    def _keep_weight_grad(self, grad: Any) -> None:
        self.weight_grad = grad if self._buffer is not None else grad.view(self.weight.dtype)

    def _add_bias_grad(self, dy: Any, *, own_rows: bool = False) -> None:
        """Sums of dY over all tokens, in FP32. own_rows: this rank has its own alone."""
        grad = self.bias_grad
        if grad is None:
            return
        sums = widen(dy).sum(axis=0, dtype=np.float32)
        if own_rows:
            sums = sum_over_ranks(self.comm, sums)
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
        dtype: "bf16" or "mxfp8", of what is multiplied; see `weight_changed`.
    """

    name = "ColumnParallelLinear"

    def forward(self, x: Any, *, rows: Sequence[int] | None = None) -> Any:
        """x: this rank's tokens, bf16 [rows[rank], features in]. Returns: Y of all tokens, bf16 [sum of rows, features
        out / ranks]. x is kept until `backward`."""
        x = self._given("x", x, self.weight.shape[1])
        every = shard_rows(self.comm, self.name, x.shape[0], rows, "x")
        by_columns, by_rows = self._factors.shared(x, every)
        self._saved = by_rows, every
        weight, _ = self._factors.of_weight()
        return ag_gemm(self.comm, by_columns, weight, rows=every, policy=self.policy).view(x.dtype)

    def backward(self, dy: Any) -> Any:
        """dy: bf16, as what `forward` returned. Returns: dX of this rank's tokens, bf16 [rows[rank], features in].

        Gathers X again beside the data gradient, and adds dX over ranks beside the weight gradient.
        """
        x, every = self._take_saved()
        dy = self._given("dy", dy, self.weight.shape[0], sum(every))
        by_columns, by_rows = self._factors.own(dy, every)
        _, weight = self._factors.of_weight()
        partial, gathered = bulk_ag(
            self.comm, x, by_columns, weight, rows=every, out=self._room(sum(every)), policy=self.policy
        )
        dx, grad = bulk_rs(
            self.comm, partial, by_rows, gathered, rows=every, policy=self.policy, **self._weight_grad_options()
        )
        self._keep_weight_grad(grad)
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
        dtype: "bf16" or "mxfp8", of what is multiplied; see `weight_changed`.
    Made by all ranks together, of which each may have another number of features.
    """

    name = "RowParallelLinear"

    def __init__(self, comm: Communicator, weight: Any, **options: Any):
        super().__init__(comm, weight, **options)
        self._widths = tuple(comm.allgather(self.weight.shape[1]))

    def forward(self, x: Any, *, rows: Sequence[int] | None = None) -> Any:
        """x: all tokens, bf16 [tokens, features in / ranks]. rows: the tokens that each rank gets; None deals them
        evenly. Returns: Y of this rank's tokens, bf16 [rows[rank], features out]. x is kept until `backward`."""
        x = self._given("x", x, self.weight.shape[1])
        if rows is None:
            rows = split_rows(x.shape[0], self.comm.ranks)
        every = dealt_rows(self.comm, self.name, "x", x.shape[0], rows)
        by_columns, by_rows = self._factors.own(x, every)
        weight, _ = self._factors.of_weight()
        y = gemm_rs(self.comm, by_columns, weight, rows=every, widths=self._widths, policy=self.policy)
        self._saved = by_rows, every
        return y.view(x.dtype)

    def backward(self, dy: Any) -> Any:
        """dy: bf16, as what `forward` returned. Returns: dX of all tokens, bf16 [tokens, features in / ranks].

        Gathers dY for both gradients: in BF16 once, in MXFP8 by rows and by columns, in one launch.
        """
        x, every = self._take_saved()
        dy = self._given("dy", dy, self.weight.shape[0], every[self.comm.rank])
        options = self._weight_grad_options()
        _, weight = self._factors.of_weight()
        if self.dtype == "mxfp8":
            both = self._factors.shared(dy, every)
            dx, grad = ag_gemm_grads(self.comm, *both, weight, x, rows=every, policy=self.policy, **options)
            self._add_bias_grad(dy, own_rows=True)
        else:
            gathered = self.comm.device.xp.empty((sum(every), self.weight.shape[0]), dy.dtype)
            dx = ag_gemm_dgrad(self.comm, dy, weight, rows=every, gathered=gathered, policy=self.policy)
            grad = gemm_wgrad(self.comm, gathered, x, **options)
            self._add_bias_grad(gathered)
        self._keep_weight_grad(grad)
        return dx.view(dy.dtype)
