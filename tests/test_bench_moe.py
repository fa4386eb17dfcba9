"""bench moe_forward and bench moe_backward, but for what needs GPUs: layers that they make, their checks (on the CPU
device, beside PyTorch's CPU tensors where it is installed), files and tables."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from kosmos_raw.bench import checking, cuda_moe, cuda_moe_backward, moe_rows
from kosmos_raw.bench.moe_peer import MoePeer
from kosmos_raw.cli.main import main
from kosmos_raw.device.base import Tile
from kosmos_raw.plan.moe.config import MoEConfig, models
from kosmos_raw.plan.moe.sizes import default_rings, tables


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_every_gpu_has_an_eighth_of_the_experts(ranks: int) -> None:
    for model in models():
        config, whole = cuda_moe.config_for(model, ranks), MoEConfig.named(model)
        own = whole.experts // 8
        assert config.experts == max(own * ranks, config.top_k) and config.per_rank(ranks) >= own
        assert (config.hidden, config.top_k, config.groups) == (whole.hidden, whole.top_k, whole.groups)


def test_variants_are_options_of_the_layer() -> None:
    found = cuda_moe.layer_options({"policy": "fixed", "pull": 1, "movers": 8})
    assert found["pull"] is True and (found["crews"].movers, found["crews"].senders) == (8, 0)
    with pytest.raises(ValueError, match="variants of width, want"):
        cuda_moe.layer_options({"width": 3})


def test_rings_of_a_variant() -> None:
    config, tile = cuda_moe.config_for("DeepSeek-V3", 2), Tile(128, 256)
    assert cuda_moe.rings_of({"pull": 1}, config, 2, 8192, tile) is None
    usual = default_rings(tables(config, 2, 8192, 128))
    assert cuda_moe.rings_of({"y_steps": 3}, config, 2, 8192, tile) == replace(usual, y_slots=3 * usual.step_rows)
    longer = cuda_moe.rings_of({"capacity": 2, "y_steps": 99}, config, 2, 8192, tile)
    assert longer.x_slots > usual.x_slots and longer.y_slots == longer.h_slots


def test_what_rounding_explains_passes_and_nothing_else() -> None:
    rng = np.random.default_rng(0)
    right = rng.standard_normal((50, 64)).astype(np.float32)
    near = right * (1 + rng.uniform(-(2.0**-9), 2.0**-9, right.shape)).astype(np.float32)
    assert 0 < cuda_moe.off("x", near, right, np) < 0.5
    for wrong in (0.1, np.nan):
        off = near.copy()
        off[7, 3] += np.float32(wrong + abs(off[7, 3]) * 0.1)
        with pytest.raises(ValueError, match=r"x: differs from the peer's: .* at \(7, 3\)"):
            cuda_moe.off("x", off, right, np)
    with pytest.raises(ValueError, match="norm: "):  # each element by little, but all in one direction
        cuda_moe.off("x", right * np.float32(1.02), right, np)


def row(model: str, ours: float) -> cuda_moe.MoeRow:
    c, times = cuda_moe, {}
    for mode in c.MODES:
        for variant, ms in ((c.PLANNED, ours), ("pull=1", 4.0), (c.UNFUSED, 3.0), (c.KNOWN, 2.5), (c.PRODUCTS, 1.5)):
            times[variant, mode] = [ms, ms + 1, ms - 0.5]
    ms = {key: sorted(found)[1] for key, found in times.items()}
    return c.MoeRow(model, 2, 8192, 7168, 2048, 64, 8, 2048, 0.25, 1.75, ms, times, (c.PLANNED, "pull=1"))


def test_files_give_back_what_was_measured(tmp_path, capsys) -> None:
    path, rows = tmp_path / "moe.csv", [row("DeepSeek-V3", 2.0), row("Qwen3-30B", 3.0)]
    cuda_moe.write_csv(rows, path)
    assert cuda_moe.read_csv(path) == rows
    assert main(["bench", "moe_forward", "--redraw", str(path)]) == 0
    text = capsys.readouterr().out
    first = next(line for line in text.splitlines() if line.startswith("DeepSeek-V3"))
    for word in ("2.000", "1.50", "1.25", "0.88", "32"):  # ms; over both peers; of the bound; experts a rank
        assert word in first.split(), first
    assert f"{6 * 8192 * 7168 * (8 + 1) * 2048 / 2e-3 / 1e12:.0f}" in first.split()
    assert "moe_forward single planned: over unfused 1.225 (least 1.00)" in text  # (1.5 * 1.0) ** 0.5


def test_the_cpu_has_nothing_to_compare_with(capsys) -> None:
    assert main(["bench", "moe_forward", "--device", "cpu"]) != 0
    assert "needs --device cuda" in capsys.readouterr().err


class Exchange:
    """What the peer asks of a process group, through what the ranks' processes exchange on the host."""

    def __init__(self, comm):
        self.comm = comm

    def get_world_size(self):
        return self.comm.ranks

    def all_to_all_single(self, output, given, received=None, sent=None):
        sizes = sent or [len(given) // self.comm.ranks] * self.comm.ranks
        everywhere = self.comm.allgather([part.clone() for part in given.split(sizes)])
        at = 0
        for parts in everywhere:
            part = parts[self.comm.rank]
            output[at : at + len(part)] = part
            at += len(part)
        assert at == len(output)


def checked(comm, op, config, tokens, variants, spoil=None):
    """What `measure` does before it times, and one call of all that it would time, in order. Returns how much of what is
    allowed was used, and what was timed."""
    import torch

    device = SimpleNamespace(
        zeros=np.zeros,
        random=SimpleNamespace(standard_normal=lambda shape, dtype: np.random.standard_normal(shape).astype(dtype)),
    )

    def normal(xp, *given):  # CuPy's generator takes a dtype, NumPy's does not
        return checking.normal(device, *given)

    for module in (cuda_moe, cuda_moe_backward):
        module.normal = normal

    class OnCpu(cuda_moe_backward.PROBLEMS[op]):
        place = "cpu"

        def give_memory_back(self):
            pass

    problem = OnCpu(comm, torch, Exchange(comm), "tiny", config, tokens, 5)
    for name, options in variants.items():
        problem.make_layer(name, options)
    if spoil:
        spoil(problem)
    used = problem.check(2)
    sizes = problem.make_peer().sizes(problem.make_peer().route(problem.tensor(problem.x)).ids.flatten())
    todo = {name: problem.ours(layer) for name, layer in problem.layers.items()}
    for fold in MoePeer.FOLDS:
        todo |= {f"{fold}: {name}": t for name, t in problem.peers(problem.make_peer(fold=fold), sizes).items()}
    for timed in todo.values():
        for _ in range(2):
            if timed.before:
                timed.before()
            timed.call()
    comm.synchronize()
    return used, {name: timed.before is not None for name, timed in todo.items()}
