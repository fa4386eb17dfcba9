"""The language model on ranks beside the one in one process, whose gradients are the slopes of its loss."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kosmos_raw.ranks.launch import launch
from runners import data, maths, training
from runners.model import RankModel, on_host
from runners.parameters import LMConfig, Schedule, initial, joined
from runners.reference import ReferenceModel

TINY = LMConfig(hidden=16, layers=2, heads=2, experts=5, top_k=2, expert_width=24, length=13, sequences=3)
RUN = training.Run(TINY, Schedule(2e-2, steps=8, warmup=2), seed=1)
STEPS, HALF = 8, 4
# Both round to BF16 in the same places, so gradients differ by FP32's sums, and where one of these falls on the other
# side of a rounding. 2^-9 is one rounding of everything to BF16.
GRADIENTS = 2.0**-9


def batch(step: int = 0) -> tuple[np.ndarray, np.ndarray]:
    return data.batch(data.text(), RUN.seed, step, TINY.sequences, TINY.length)


def gradients_on_rank(comm, params: dict[str, np.ndarray], step: int):
    loss, grads = RankModel(comm, TINY, params).gradients(*batch(step))
    return loss, {name: on_host(grad) for name, grad in grads.items()}


def distances(params: dict[str, np.ndarray], step: int, ranks: int = 2) -> dict[str, float]:
    """Of each parameter's gradient on ranks to that in one process, relative by norm."""
    found = launch(gradients_on_rank, params, step, ranks=ranks, mode="threads")
    assert len({loss for loss, _ in found}) == 1
    _, wanted = ReferenceModel(TINY, params, ranks).gradients(*batch(step))
    assert wanted.keys() == params.keys() == found[0][1].keys()
    got = {name: joined(name, [of_rank[name] for _, of_rank in found]) for name in params}
    return {name: float(np.linalg.norm(got[name] - w) / np.linalg.norm(w)) for name, w in wanted.items()}


def on_ranks(
    folder: Path, until: int, resume: Path | None = None, ranks: int = 2, run: training.Run = RUN
) -> list[float]:
    options = (until, str(folder), str(resume) if resume else None, HALF, False)
    every = launch(training.on_rank, run, *options, ranks=ranks, mode="threads")
    assert all(losses == every[0] for losses in every)
    return every[0]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, list[float]]:
    folder = tmp_path_factory.mktemp("whole")
    return folder, on_ranks(folder, STEPS)


def test_losses_are_those_of_one_process(whole) -> None:
    _, losses = whole
    wanted = training.in_one_process(RUN, 2, STEPS)
    assert len(losses) == STEPS and losses[-1] < losses[0] - 0.5, losses
    np.testing.assert_allclose(losses, wanted, rtol=1e-2)
    assert abs(losses[0] / wanted[0] - 1) < 1e-6  # before anything has had time to drift apart


def test_losses_in_mxfp8_are_near_those_in_bf16(whole, tmp_path) -> None:
    losses = on_ranks(tmp_path, STEPS, run=replace(RUN, dtype="mxfp8"))
    np.testing.assert_allclose(losses, whole[1], rtol=2e-2)
    assert losses != whole[1] and abs(losses[0] / whole[1][0] - 1) < 2e-3  # of the same parameters


@pytest.mark.parametrize("trained", [False, True])
def test_gradients_are_those_of_one_process(whole, trained: bool) -> None:
    params = training.load(whole[0] / f"step-{HALF:06}.npz", RUN).params if trained else initial(TINY, RUN.seed)
    off = distances(params, HALF * trained)
    assert max(off.values()) < GRADIENTS, off


def test_gradients_that_are_not_summed_are_found(monkeypatch) -> None:
    monkeypatch.setattr(RankModel, "_sum_over_ranks", lambda self, loss, grads: 0.0)
    off = distances(initial(TINY, RUN.seed), 0)
    replicated = {name for name in off if name.endswith(("norm1", "norm2", "norm", "router", "position", "head"))}
    assert all((off[name] > 0.1) == (name in replicated | {"embedding"}) for name in off), off


def test_gradients_are_slopes_of_the_loss() -> None:
    """By central differences in float64, along a random direction of each parameter."""
    params = {name: p.astype(np.float64) for name, p in initial(TINY, RUN.seed).items()}
    _, grads = ReferenceModel(TINY, params, exact=True).gradients(*batch())
    rng = np.random.default_rng(0)
    for name, p in params.items():
        along = rng.standard_normal(p.shape)
        at = [ReferenceModel(TINY, params | {name: p + step * along}, exact=True) for step in (1e-5, -1e-5)]
        up, down = (model.gradients(*batch())[0] for model in at)
        assert abs((up - down) / 2e-5 - (grads[name] * along).sum()) < 1e-6, name


def test_attention_sees_no_later_position() -> None:
    rng = np.random.default_rng(0)
    qkv = rng.standard_normal((7 * 3, 2 * 3 * 4))
    later = qkv.copy()
    later[4 * 3 :] = rng.standard_normal((3 * 3, qkv.shape[1]))
    (before, _), (after, _) = (maths.attention(np, x, 7, 2) for x in (qkv, later))
    assert (before[: 4 * 3] == after[: 4 * 3]).all() and (before[4 * 3 :] != after[4 * 3 :]).all()


def test_a_resumed_run_goes_on_bit_for_bit(whole, tmp_path) -> None:
    folder, losses = whole
    assert on_ranks(tmp_path, STEPS, folder / f"step-{HALF:06}.npz") == losses
    first, again = (training.load(path / f"step-{STEPS:06}.npz", RUN) for path in (folder, tmp_path))
    assert first.step == again.step == STEPS and first.losses == again.losses == losses
    for group in training.ARRAYS:
        for name, array in getattr(first, group).items():
            assert array.shape == TINY.shapes()[name] and array.tobytes() == getattr(again, group)[name].tobytes()


def test_another_number_of_ranks_goes_on(whole, tmp_path) -> None:
    folder, losses = whole
    got = on_ranks(tmp_path, STEPS, folder / f"step-{HALF:06}.npz", ranks=1)
    assert got[:HALF] == losses[:HALF]
    np.testing.assert_allclose(got, losses, rtol=1e-2)


def test_a_checkpoint_of_another_run_is_refused(whole, tmp_path) -> None:
    with pytest.raises(ValueError, match=f"is of step {HALF}, want one before {HALF}"):
        on_ranks(tmp_path, HALF, whole[0] / f"step-{HALF:06}.npz", ranks=1)
    with pytest.raises(ValueError, match=r"is of another run; .*'seed': \(1, 2\)"):
        training.load(whole[0] / f"step-{HALF:06}.npz", replace(RUN, seed=2))


def test_the_program(tmp_path) -> None:
    """Ranks as processes, the comparison and the picture."""
    sizes = "--hidden 16 --layers 1 --heads 2 --experts 4 --expert-width 16 --length 12 --sequences 2".split()
    command = [sys.executable, "-m", "runners.train_lm", "--ranks", "2", "--steps", "3", "--out", str(tmp_path), *sizes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "losses.json").read_text())
    assert report["ranks"] == 2 and len(report["losses"]) == len(report["reference"]) == 3
    assert (tmp_path / "losses.png").read_bytes()[:4] == b"\x89PNG" and (tmp_path / "step-000003.npz").is_file()
