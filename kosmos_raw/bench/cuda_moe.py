"""MoE layers on CUDA GPUs beside unfused ones (moe_peer.py): nine models, with as many experts a GPU as in EP 8. Here
moe_forward; moe_backward and whole steps are in cuda_moe_backward.py.

One process and one GPU a rank; weights and tokens are made on the device. The results are compared on poisoned memory
before anything is timed; then all variants run in each round, in shuffled order, on the same data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from ..device.base import Tile
from ..numerics.bf16 import widen
from ..ops.moe_forward import MoELayer
from ..ops.moe_weights import MoEWeights
from ..plan.moe.config import MoEConfig
from ..plan.moe.forward import OP, Crews, plan_moe_forward
from ..plan.moe.sizes import CAPACITY, Rings, default_rings
from ..ranks.communicator import POISON, Communicator
from .checking import normal
from .cuda_ops import PLANNED, Options, alternate, tell, torch_group
from .moe_peer import MoePeer, PeerWeights, Sizes
from .moe_rows import CROSSINGS, KNOWN, PRODUCTS, UNFUSED, MoeRow, write_csv

EP = 8  # ranks of the paper, of which each has an equal part of a model's experts
# Largest |ours - peer's| / (|peer's| + rms of its row), and norm of the difference over that of the result. Both round
# pre, h, y and out to BF16, from sums in another order: off by 2^-8 now and then, of which a row of y collects some.
ELEMENT_OFF, NORM_OFF = 2.0**-5, 2.0**-7
SLEEP_CYCLES = {"single": 4_000_000, "steady": 16_000_000}  # 2 and 8 ms: a peer's forward makes 50 launches
MODES = {"single": 1, "steady": 5}  # calls between two events
OF_BACKWARD = ("recompute", "round_rows")  # options of a layer that no forward's plan knows
ROUTED_ALIKE = 0.99  # of the tokens: the others have keys that FP32 sums in another order turn round


def config_for(model: str, ranks: int, scale: int = 1) -> MoEConfig:
    """The model's layer with as many experts on each rank as with EP 8; its widths divided by `scale`."""
    config = MoEConfig.named(model)
    return replace(config.scaled(scale), experts=max(config.experts // EP, -(-config.top_k // ranks)) * ranks)


def layer_options(options: Options) -> dict[str, Any]:
    """Keyword arguments of MoELayer, of a variant like movers=8,senders=64,pull=1,policy=fixed."""
    known = {"policy", "pull", "pad", "movers", "senders", "crew", "crew_tiles", "capacity", "y_steps", *OF_BACKWARD}
    if wrong := set(options) - known:
        raise ValueError(f"bench {OP}: variants of {', '.join(sorted(wrong))}, want {', '.join(sorted(known))}")
    crews = {f.name: options[f.name] for f in fields(Crews) if f.name in options}
    rest = {name: value for name, value in options.items() if name not in {*crews, "capacity", "y_steps"}}
    rest |= {name: bool(rest[name]) for name in ("pull", "recompute") if name in rest}
    if crews:
        rest["crews"] = Crews(**{"movers": 0, "senders": 0} | crews)
    return rest


def rings_of(options: Options, config: MoEConfig, ranks: int, tokens: int, tile: Tile) -> Rings | None:
    """Of a variant like capacity=2,y_steps=8: times balanced rows, and steps whose rows y holds."""
    if not {"capacity", "y_steps"} & set(options):
        return None
    plan = plan_moe_forward(config, ranks, tokens, tile, 1, pad=options.get("pad"), pull=bool(options.get("pull", 0)))
    rings = default_rings(plan.tables, options.get("capacity", CAPACITY))
    y_slots = min(rings.h_slots, options["y_steps"] * rings.step_rows) if "y_steps" in options else rings.y_slots
    return replace(rings, y_slots=y_slots)


class Timed(NamedTuple):
    """What is timed, and what each call wants done before."""

    call: Callable[[], Any]
    before: Callable[[], Any] | None = None


def run(
    comm: Communicator,
    problem: type[Problem],
    todo: Sequence[tuple[str, MoEConfig]],
    tokens: int,
    variants: Mapping[str, Options],
    port: int,
    rounds: int = 5,
    repeats: int = 5,
    seed: int = 0,
    path: Path | None = None,
) -> list[MoeRow]:
    """Measures every layer of `todo`, named. Every rank calls it; results are alike on all. `repeats`: calls whose bits
    must be equal. `path`: gets the samples of all layers so far, after each; a line of each goes to stderr."""
    with torch_group(comm, port) as (torch, dist):
        rows = []
        for model, config in todo:
            of_model = problem(comm, torch, dist, model, config, tokens, seed)
            rows.append(of_model.measure({PLANNED: {}} | dict(variants), rounds, repeats))
            of_model.free()
            tell(comm, rows, path, write_csv)
        return rows


class Problem:
    """One layer: data on this rank, ours and the peer's. Its forward is what is timed."""

    op = OP
    place = "cuda"  # of tensors
    launches = 1  # a peer's, in those of a forward

    def __init__(
        self, comm: Communicator, torch: Any, dist: Any, model: str, config: MoEConfig, tokens: int, seed: int
    ):
        self.comm, self.torch, self.dist, self.model, self.config = comm, torch, dist, model, config
        xp = self.xp = comm.device.xp
        own = len(config.experts_of(comm.rank, comm.ranks))
        H, width, S = config.hidden, config.expert_width, config.shared_width
        xp.random.seed(seed)  # the same on all ranks, of what all have
        self.router = normal(xp, config.experts + config.gated_shared, H, H**-0.5)
        self.shared_gate_up = normal(xp, 2 * S, H, H**-0.5) if S else None
        self.shared_down = normal(xp, H, S, S**-0.5) if S else None
        self.bias = xp.random.uniform(-0.01, 0.01, config.experts).astype(np.float32) if config.expert_bias else None
        xp.random.seed(seed * 64 + 1 + comm.rank)
        self.x = normal(xp, tokens, H)
        self.gate_up = normal(xp, own * 2 * width, H, H**-0.5).reshape(own, 2 * width, H)
        self.down = normal(xp, own * H, width, width**-0.5).reshape(own, H, width)
        self.out = xp.empty((tokens, H), np.uint16)
        self.layers: dict[str, MoELayer] = {}

    def tensor(self, array: Any) -> Any:
        if array is None or array.dtype == np.float32:
            return None if array is None else self.torch.as_tensor(array, device=self.place)
        return self.torch.as_tensor(array.view(np.int16), device=self.place).view(self.torch.bfloat16)

    def weights(self) -> MoEWeights:
        router, gate = self.router[: self.config.experts], None
        if self.config.gated_shared:
            gate = self.router[self.config.experts]
        return MoEWeights(router, self.gate_up, self.down, self.shared_gate_up, self.shared_down, gate, self.bias)

    def make_layer(self, name: str, options: Options) -> None:
        weights = self.weights()
        tile = self.comm.kernel(OP).tile
        rings = rings_of(options, self.config, self.comm.ranks, len(self.x), tile)
        layer = MoELayer(self.comm, self.config, weights, tokens=len(self.x), rings=rings, **layer_options(options))
        for other in self.layers.values():
            layer.weights = other.weights  # one copy is enough
        self.layers[name] = layer
        self.give_memory_back()

    def make_peer(self, **options: Any) -> MoePeer:
        parts = (self.router, self.gate_up, self.down, self.shared_gate_up, self.shared_down, self.bias)
        return MoePeer(self.torch, self.dist, self.config, PeerWeights(*map(self.tensor, parts)), **options)

    def measure(self, variants: Mapping[str, Options], rounds: int, repeats: int) -> MoeRow:
        for name, options in variants.items():
            self.make_layer(name, options)
        largest = self.check(repeats)
        folds = {fold: self.make_peer(fold=fold) for fold in MoePeer.FOLDS}
        sizes = folds[MoePeer.FOLDS[0]].sizes(folds[MoePeer.FOLDS[0]].route(self.tensor(self.x)).ids.flatten())
        of_fold = {fold: self.peers(peer, sizes) for fold, peer in folds.items()}
        trial = self._alternate({fold: found[UNFUSED] for fold, found in of_fold.items()}, 1, {"single": 1})
        todo = of_fold[min(folds, key=lambda fold: trial[fold, "single"][-1])]
        todo |= {name: self.ours(layer) for name, layer in self.layers.items()}
        samples = self._alternate(todo, rounds, MODES)
        crossing = [n for q, n in enumerate(sizes.sent) if q != self.comm.rank]
        most = max(self.comm.allgather(sum(crossing))) * self.config.hidden * 2
        link, c = self.comm.device.link, self.config
        assert link is not None
        return MoeRow(
            self.model, self.comm.ranks, len(self.x), c.hidden, c.expert_width, c.experts, c.top_k, c.shared_width,
            largest, CROSSINGS[self.op] * most / link.push / 1e6,
            {key: median(times) for key, times in samples.items()}, samples, tuple(variants), self.op,
        )  # fmt: skip

    def ours(self, layer: MoELayer) -> Timed:
        return Timed(lambda: layer.forward(self.x, out=self.out))

    def peers(self, peer: MoePeer, sizes: Sizes) -> dict[str, Timed]:
        """By name; `sizes` are those that its all-to-all will have."""
        x = self.tensor(self.x)
        calls = {UNFUSED: lambda: peer(x), KNOWN: lambda: peer(x, sizes), PRODUCTS: peer.alone(peer.forward(x)[1])}
        return {name: Timed(call) for name, call in calls.items()}

    def _alternate(self, todo: Mapping[str, Timed], rounds: int, modes: Mapping[str, int]) -> Any:
        little = self.torch.zeros(1, device=self.place)

        def start_together(mode: str) -> None:
            self.torch.cuda._sleep(self.launches * SLEEP_CYCLES[mode])  # meanwhile the host queues what follows
            self.dist.all_reduce(little)

        calls = {name: timed.call for name, timed in todo.items()}
        before = {name: timed.before for name, timed in todo.items() if timed.before}
        return alternate(self.comm, calls, rounds, start_together, modes, before)

    def check(self, repeats: int) -> float:
        """Every variant on poisoned memory: the first against the peer, with the choices that ours has made; all
        others, and `repeats` calls of the first, against its bits. Returns how much of what is allowed is used.

        Raises: ValueError when something is wrong.
        """
        what, first = f"bench {self.op} {self.model}", None
        for name, layer in self.layers.items():
            for _ in range(2 if first is not None else max(1, repeats)):
                self.comm.poison()
                layer.poison()
                self.out[...] = POISON
                _, saved = layer.forward(self.x, out=self.out)
                self.comm.synchronize()
                if first is None:
                    first, ids = self.out.copy(), saved.experts
                elif different := int((self.out != first).sum()):
                    raise ValueError(f"{what}, {name}: {different} elements differ from those of the first call")
        peer, x = self.make_peer(exact=True), self.tensor(self.x)
        wanted, _ = peer.forward(x, ids=self.chosen(what, peer, ids))
        return off(what, widen(first), self.xp.asarray(wanted), self.xp)

    def chosen(self, what: str, peer: MoePeer, ids: Any) -> Any:
        """Ours' choices as a tensor. Raises ValueError if the peer's are others, but for a few."""
        chosen = self.torch.as_tensor(ids, device=self.place).long()
        theirs = peer.route(self.tensor(self.x)).ids
        alike = (theirs.sort(-1).values == chosen.sort(-1).values).all(-1)
        if len(alike) and float(alike.float().mean()) < ROUTED_ALIKE:
            raise ValueError(
                f"{what}: {int((~alike).sum())} of {len(alike)} tokens choose other experts than the peer's"
            )
        return chosen

    def free(self) -> None:
        self.comm.synchronize()
        for layer in self.layers.values():
            layer.close()
        for name in list(vars(self)):
            if name not in ("comm", "xp", "torch"):
                delattr(self, name)
        self.give_memory_back()
        self.torch.cuda.empty_cache()

    def give_memory_back(self) -> None:
        self.xp.get_default_memory_pool().free_all_blocks()


def off(what: str, ours: Any, theirs: Any, xp: Any) -> float:
    """How much of ELEMENT_OFF and NORM_OFF float32 results [T, H] use. Raises ValueError if more than there is, and of
    what is no number."""
    if not len(ours):
        return 0.0
    difference = abs(ours - theirs)
    rms = xp.sqrt((theirs * theirs).mean(-1, keepdims=True))
    if not difference.any():  # perhaps all are zeros, as gradients of an expert without rows
        return 0.0
    used = difference / xp.where(difference == 0, 1, abs(theirs) + rms) / ELEMENT_OFF
    norm = float(xp.sqrt((difference * difference).sum() / (theirs * theirs).sum())) / NORM_OFF
    largest = max(float(used.max()), norm)
    if not largest <= 1:
        at = tuple(int(i) for i in np.unravel_index(int(xp.nan_to_num(used, nan=np.inf).argmax()), used.shape))
        raise ValueError(
            f"{what}: differs from the peer's: {float(ours[at])} and {float(theirs[at])} at {at}, {largest:.3g} times "
            f"what rounding allows (norm: {norm:.3g})"
        )
    return largest
