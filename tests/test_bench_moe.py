"""bench moe_forward, but for what needs GPUs: layers that it makes, what it takes for equal, its files and tables."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kosmos_raw.bench import cuda_moe
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
