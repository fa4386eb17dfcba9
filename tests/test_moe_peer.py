"""The layer that bench moe_forward and bench moe_backward compare with, on CPU tensors against the float64 oracle;
ranks are threads. Needs PyTorch, which nothing of the project does."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from kosmos_raw.bench import moe_peer_backward
from kosmos_raw.bench.moe_peer import MoePeer, PeerWeights
from kosmos_raw.numerics.moe import generators, layer
from kosmos_raw.plan.moe.config import MoEConfig

torch = pytest.importorskip("torch")
TOKENS = 96
SMALL = MoEConfig(hidden=64, expert_width=32, experts=8, top_k=2)
CONFIGS = {
    "softmax": replace(SMALL, aux_loss="batch", aux_loss_coeff=0.1),
    "softmax of the chosen": replace(SMALL, softmax_after_topk=True, normalise=False),
    "groups, bias, shared": replace(
        SMALL, score="sigmoid", scaling=2.5, expert_bias=True, groups=4, top_groups=2, shared_width=32,
        aux_loss="batch", aux_loss_coeff=0.1,
    ),
    "gated shared": replace(SMALL, top_k=3, shared_width=16, gated_shared=True),
    "limit": replace(SMALL, score="sqrtsoftplus", expert_bias=True, swiglu_limit=0.5, scaling=1.5, shared_width=32),
    "on the input": replace(SMALL, score="sigmoid", top_k=1, normalise=False, weight_on="input", shared_width=32),
}  # fmt: skip


class Ranks:
    """What the peer asks of a process group, of threads that lend each other their tensors."""

    def __init__(self, ranks: int):
        self.ranks, self.barrier, self.given = ranks, threading.Barrier(ranks), [None] * ranks

    def of(self, rank: int):
        return Rank(self, rank)


class Rank:
    def __init__(self, group: Ranks, rank: int):
        self.group, self.rank = group, rank

    def get_world_size(self) -> int:
        return self.group.ranks

    def all_to_all_single(self, output, given, received=None, sent=None) -> None:
        sizes = sent or [len(given) // self.group.ranks] * self.group.ranks
        self.group.given[self.rank] = given.split(sizes)
        self.group.barrier.wait(60)
        got = torch.cat([of_rank[self.rank] for of_rank in self.group.given])
        if received is not None:
            assert [len(of_rank[self.rank]) for of_rank in self.group.given] == received
        output.copy_(got)
        self.group.barrier.wait(60)


def on_ranks(ranks: int, work) -> list:
    """work(rank, its process group) in a thread each."""
    group = Ranks(ranks)
    with ThreadPoolExecutor(ranks) as pool:
        waiting = [pool.submit(work, rank, group.of(rank)) for rank in range(ranks)]
        return [w.result(120) for w in waiting]


def peer_of(config, w: layer.Weights, rank: int, group, dtype, **options) -> MoePeer:
    own = config.experts_of(rank, group.get_world_size())
    experts = slice(own.start, own.stop)

    def tensor(array):
        return None if array is None else torch.tensor(array).to(dtype)

    router = w.router if w.shared_gate is None else np.concatenate([w.router, w.shared_gate[None]])
    parts = (router, w.gate_up[experts], w.down[experts], w.shared_gate_up, w.shared_down)
    bias = None if w.bias is None else torch.tensor(w.bias).float()
    return MoePeer(torch, group, config, PeerWeights(*map(tensor, parts), bias), **options)


def step(config, ranks, made, dtype, **options):
    """(out, choices, gradients) of every rank, NumPy."""

    def work(rank, group):
        peer = peer_of(config, made.weights, rank, group, dtype, **options)
        x, dout = (torch.tensor(rows[rank]).to(dtype) for rows in (made.x, made.dout))
        out, kept = peer.forward(x, keep=True)
        g = moe_peer_backward.backward(peer, kept, dout, aux_grad=0.7)
        found = {name: None if t is None else t.double().numpy() for name, t in vars(g).items()}
        return out.double().numpy(), kept.routed.ids.numpy(), found

    return on_ranks(ranks, work)


def exact(config, ranks, made, ids):
    """[(out, {name: gradient})] of every rank in float64, with these choices."""
    found = []
    for rank in range(ranks):
        f = layer.forward(config, made.x[rank], made.weights, ids=ids[rank])
        found.append((f.out, layer.backward(config, f, made.weights, made.dout[rank], aux_scale=0.7)))
    sums = {name: sum(getattr(g.weights, name) for _, g in found) for name in ("gate_up", "down")}
    results = []
    for rank, (out, g) in enumerate(found):
        own = config.experts_of(rank, ranks)
        of_rank = {"x": g.x, "slot_weights": g.slot_weights, "logits": g.logits, "router": g.weights.router}
        of_rank |= {name: value[own.start : own.stop] for name, value in sums.items()}
        of_rank |= {name: getattr(g.weights, name) for name in ("shared_gate_up", "shared_down")}
        of_rank["shared_gate"] = g.weights.shared_gate
        results.append((out, of_rank))
    return results


def matched(config, got: dict) -> dict:
    """The peer's gradients by the oracle's names."""
    E = config.experts
    gate = got["router"][E] if config.gated_shared else None
    return got | {"router": got["router"][:E], "logits": got["logits"][:, :E], "shared_gate": gate}


@pytest.mark.parametrize("name", ["gated shared", "groups, bias, shared", "on the input"])
@pytest.mark.parametrize("fold", MoePeer.FOLDS)
def test_step_in_bf16(name, fold):
    """As it is timed. Each result is rounded a few times on its way. (Of a limit the mathematics has steps, over which
    rounding carries some elements.)"""
    config, ranks = CONFIGS[name], 2
    made = generators.inputs(config, [TOKENS] * ranks, seed=4)
    got = step(config, ranks, made, torch.bfloat16, fold=fold)
    wanted = exact(config, ranks, made, [ids for _, ids, _ in got])
    for (out, _, gradients), (want_out, want) in zip(got, wanted, strict=True):
        pairs = {"out": (out, want_out)}
        found = matched(config, gradients)
        pairs |= {part: (found[part], value) for part, value in want.items() if value is not None}
        for part, (one, other) in pairs.items():
            assert np.linalg.norm(one - other) < 2.0**-6 * np.linalg.norm(other), part


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("options", [{"fold": "scatter_add"}, {"fold": "gathered"}, {"exact": True}], ids=str)
def test_step_is_the_mathematics(name, options):
    """In float32: what is left is rounding alone."""
    config, ranks = CONFIGS[name], 2
    made = generators.inputs(config, [TOKENS] * ranks, "skewed", seed=3, load=1.3)
    got = step(config, ranks, made, torch.float32, **options)
    wanted = exact(config, ranks, made, [ids for _, ids, _ in got])
    for (out, _, gradients), (want_out, want) in zip(got, wanted, strict=True):
        np.testing.assert_allclose(out, want_out, rtol=0, atol=1e-5 * abs(want_out).max())
        found = matched(config, gradients)
        assert {n for n, g in found.items() if g is not None} == {n for n, g in want.items() if g is not None}
        for part, value in want.items():
            if value is not None:
                assert abs(value).max() > 0, part
                np.testing.assert_allclose(found[part], value, rtol=0, atol=2e-5 * abs(value).max(), err_msg=part)
