"""bench moe_forward and bench moe_backward, but for what needs GPUs: layers that they make, their checks (on the CPU
device, beside PyTorch's CPU tensors where it is installed), files and tables."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kosmos_raw.bench import checking, cuda_moe, cuda_moe_backward, cuda_ops, moe_rows
from kosmos_raw.bench.moe_peer import MoePeer
from kosmos_raw.cli import bench_moe
from kosmos_raw.cli.main import main
from kosmos_raw.device.base import Tile
from kosmos_raw.plan.moe.config import MoEConfig, models
from kosmos_raw.plan.moe.sizes import default_rings, tables
from kosmos_raw.ranks.launch import launch


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
    assert cuda_moe.layer_options({"recompute": 1, "round_rows": 8}) == {"recompute": True, "round_rows": 8}
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


def test_zeros_equal_zeros() -> None:
    """Gradients of an expert without rows, all of them or one of its router."""
    nothing, one_row = np.zeros((3, 8), np.float32), np.eye(3, 8, dtype=np.float32)
    one_row[1:] = 0
    assert cuda_moe.off("x", nothing, nothing, np) == 0
    assert cuda_moe.off("x", one_row * np.float32(1.001), one_row, np) < 0.5
    for wrong in (np.nan, 1e-30):
        with pytest.raises(ValueError, match=r"x: differs .* and 0.0 at \(2, 0\)"), np.errstate(divide="ignore"):
            cuda_moe.off("x", np.where(np.arange(24).reshape(3, 8) == 16, np.float32(wrong), one_row), one_row, np)


PEERS = {moe_rows.UNFUSED: 3.0, moe_rows.KNOWN: 2.5, moe_rows.PRODUCTS: 1.5}


def row(model: str, ours: float, op: str = "moe_forward", peers: tuple[str, ...] = moe_rows.PEERS) -> moe_rows.MoeRow:
    times = {}
    for mode in cuda_moe.MODES:
        for variant, ms in {"planned": ours, "pull=1": 4.0, **{name: PEERS[name] for name in peers}}.items():
            times[variant, mode] = [ms, ms + 1, ms - 0.5]
    ms = {key: sorted(found)[1] for key, found in times.items()}
    sizes = (2, 8192, 7168, 2048, 64, 8, 2048)
    return moe_rows.MoeRow(model, *sizes, 0.25, 1.75, ms, times, ("planned", "pull=1"), op)


def test_files_give_back_what_was_measured(tmp_path, capsys) -> None:
    path, rows = tmp_path / "moe.csv", [row("DeepSeek-V3", 2.0), row("Qwen3-30B", 3.0)]
    moe_rows.write_csv(rows, path)
    assert moe_rows.read_csv(path) == rows
    assert main(["bench", "moe_forward", "--redraw", str(path)]) == 0
    text = capsys.readouterr().out
    first = next(line for line in text.splitlines() if line.startswith("DeepSeek-V3"))
    for word in ("2.000", "1.50", "1.25", "0.88", "32"):  # ms; over both peers; of the bound; experts a rank
        assert word in first.split(), first
    assert f"{6 * 8192 * 7168 * (8 + 1) * 2048 / 2e-3 / 1e12:.0f}" in first.split()
    assert "moe_forward single planned: over unfused 1.225 (least 1.00)" in text  # (1.5 * 1.0) ** 0.5


def test_files_of_backwards_and_steps(tmp_path, capsys) -> None:
    """A backward knows all sizes, so one of its peers is not there; in a step it is."""
    path = tmp_path / "moe.csv"
    rows = [
        row("Qwen3-30B", 2.0, "moe_backward", (moe_rows.UNFUSED, moe_rows.PRODUCTS)),
        row("Qwen3-30B", 2.5, "moe_step"),
    ]
    moe_rows.write_csv(rows, path)
    assert moe_rows.read_csv(path) == rows
    first = path.read_text().splitlines()[0]
    fixed = "model,ranks,tokens,hidden,expert_width,experts,top_k,shared_width,largest_off,link_ms,op"
    assert first == fixed + ",ours,variant,mode,round,ms"
    assert main(["bench", "moe_backward", "--redraw", str(path)]) == 0
    text = capsys.readouterr().out
    lines = [line.split() for line in text.splitlines() if line.startswith("Qwen3-30B")]
    backward, step = (next(words for words in lines if words[1] == op) for op in ("moe_backward", "moe_step"))
    assert backward[-3:] == ["1.50", "-", "0.88"] and step[-3:] == ["1.20", "1.00", "0.70"]
    flops = 2 * 8192 * 7168 * (8 + 1) * 2048 * 3  # of a forward
    assert f"{2 * flops / 2e-3 / 1e12:.0f}" in backward and f"{3 * flops / 2.5e-3 / 1e12:.0f}" in step
    assert "moe_backward single planned: over unfused 1.500 (least 1.50), of max(link, products) 0.875" in text
    assert "moe_step steady planned: over unfused 1.200 (least 1.20), over unfused, sizes known 1.000" in text
    assert main(["bench", "moe_backward", "--redraw", str(path), "--json"]) == 0
    assert [entry["op"] for entry in json.loads(capsys.readouterr().out)] == ["moe_backward", "moe_step"]


def test_files_from_before_there_were_backwards() -> None:
    rows = moe_rows.read_csv(Path(__file__).parents[1] / "docs" / "results" / "h200x2_moe_forward.csv")
    assert len(rows) == 9 and {row.op for row in rows} == {"moe_forward"}
    assert all(row.over(peer, "steady") > 1 for row in rows for peer in (moe_rows.UNFUSED, moe_rows.KNOWN))


@pytest.mark.parametrize(
    "line, error",
    [
        ("moe_forward", "bench moe_forward: needs --device cuda"),
        ("moe_backward", "bench moe_backward: needs --device cuda"),
        ("moe_forward --step --device cuda", "bench moe_forward: --step is of moe_backward"),
        ("moe_backward --device cuda --models Qwen3-30B --variants pull=1", "moe_backward: the layer pulls rows"),
        ("moe_backward --device cuda --models Qwen3-30B --variants round_rows=7", "moe_backward: round_rows is 7"),
        ("moe_backward --device cuda --models Qwen3-30B --variants tile=7", "variants of tile, want capacity"),
    ],
)
def test_what_cannot_be_measured_is_refused(line: str, error: str, capsys) -> None:
    """Before any process is started."""
    assert main(["bench", *line.split()]) != 0
    assert error in capsys.readouterr().err


def test_a_backward_needs_room_for_rows_of_both_gradients() -> None:
    todo = [("DeepSeek-V3", cuda_moe.config_for("DeepSeek-V3", 2))]
    forward, backward, recompute = (
        bench_moe.arena_bytes(todo, 8192, SimpleNamespace(ranks=2, what=what), {"x": options} if options else {})
        for what, options in (("moe_forward", {}), ("moe_backward", {}), ("moe_backward", {"recompute": 1}))
    )
    rows = 8192 * 8 * 7168 * 2  # balanced ones, of dOut or dX
    assert backward >= forward + 2 * rows and recompute > backward


class Clock:
    """A device on which work takes milliseconds that it says, and so nothing else does."""

    link = None

    def __init__(self) -> None:
        self.now = 0.0

    def record(self) -> float:
        return self.now

    def elapsed_ms(self, a: float, b: float) -> float:
        return b - a

    def works(self, ms: float):
        def work() -> None:
            self.now += ms

        return work


def test_what_is_done_before_a_call_is_not_in_its_time() -> None:
    clock = Clock()
    comm = SimpleNamespace(device=clock, synchronize=lambda: None, barrier=lambda: None, allgather=lambda mine: [mine])
    calls = {"backward": clock.works(3.0), "step": clock.works(5.0)}
    started: list[str] = []

    def start(mode: str) -> None:
        started.append(mode)
        clock.now += 1000

    before = {"backward": clock.works(200.0)}
    samples = cuda_ops.alternate(comm, calls, 2, start, {"single": 1, "steady": 5}, before)
    assert samples == {(name, mode): [ms, ms] for name, ms in (("backward", 3), ("step", 5)) for mode in cuda_moe.MODES}
    assert len(started) == 4 * 4 and clock.now == 4 * (2 * 1000 * 2 + 6 * 203 + 6 * 5)


TOKENS = 96


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


def measured(comm, op, config, tokens, variants, spoil=None):
    """The row that `measure` makes; what it timed, by name, and whether something comes before its calls. All of it but
    the clock: calls are made once, with what comes before them, and take as long as their names are."""
    import torch

    device = SimpleNamespace(
        zeros=np.zeros,
        random=SimpleNamespace(standard_normal=lambda shape, dtype: np.random.standard_normal(shape).astype(dtype)),
    )

    def normal(xp, *given):  # CuPy's generator takes a dtype, NumPy's does not
        return checking.normal(device, *given)

    for module in (cuda_moe, cuda_moe_backward):
        module.normal = normal
    comm.device.link = SimpleNamespace(push=200.0, pull=100.0, mover=10.0)
    timed = {}

    class OnCpu(cuda_moe_backward.PROBLEMS[op]):
        place = "cpu"

        def give_memory_back(self):
            pass

        def make_layer(self, name, options):
            comm.device.link, link = None, comm.device.link  # or the layer would be planned for it
            super().make_layer(name, options)
            comm.device.link = link

        def _alternate(self, todo, rounds, modes):
            for name, (call, before) in todo.items():
                timed[name] = before is not None
                if before:
                    before()
                call()
                self.comm.synchronize()
            return {(name, mode): [float(len(name))] * rounds for name in todo for mode in modes}

    problem = OnCpu(comm, torch, Exchange(comm), "tiny", config, tokens, 5)
    if spoil:
        spoil(problem)
    return problem.measure(variants, 3, 2), timed


def check(op, model, variants, spoil=None):
    config = cuda_moe.config_for(model, 2, 32)
    given = (op, config, TOKENS, {"planned": {}} | variants, spoil)
    return launch(measured, *given, ranks=2, device="cpu", workgroups=2, arena_bytes=128 << 20)


needs_torch = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="needs PyTorch")


@needs_torch
@pytest.mark.parametrize(
    "op, model, variants",
    [
        ("moe_forward", "DeepSeek-V3", {}),
        ("moe_backward", "DeepSeek-V3", {"recompute=1": {"recompute": 1}}),
        ("moe_backward", "Llama-4-Scout", {}),  # weights on inputs
        ("moe_step", "Qwen3.5-397B", {"capacity=1": {"capacity": 1}}),  # a shared expert with a gate
    ],
)
def test_ours_and_the_peer_agree(op, model, variants) -> None:
    peers = moe_rows.PEERS if op != "moe_backward" else (moe_rows.UNFUSED, moe_rows.PRODUCTS)  # who knows all sizes
    results = check(op, model, variants)
    for row, timed in results:
        assert 0.1 < row.largest_off < 0.5  # ours are rounded to BF16 at last, the peer's are not
        assert (row.op, row.variants, row.ms["planned", "steady"]) == (op, ("planned", *variants), 7)
        assert {name for name, _ in row.ms} == {*peers, "planned", *variants}
        assert set(timed) == {name for name, _ in row.ms} | set(MoePeer.FOLDS)  # whose trial picks one
        assert {name for name, before in timed.items() if before} == (
            set(timed) - {moe_rows.PRODUCTS} if op == "moe_backward" else set()
        )
        at_most = TOKENS * row.top_k * row.hidden * 2 / 200e6  # if all rows of a rank went to the other one
        assert 0 < row.link_ms < at_most * {"moe_forward": 2, "moe_backward": 2, "moe_step": 4}[op]
    assert results[0][0].link_ms == results[1][0].link_ms


def one_expert_wrong(problem) -> None:
    """Of the last variant, in one row of one expert's gradient, by eight steps of BF16."""
    back = problem.back

    def wrong(layer):
        g = back(layer)
        if layer is problem.layers["recompute=1"]:
            problem.into.down[1, 3] += 8
        return g

    problem.back = wrong


@needs_torch
def test_a_wrong_gradient_is_not_timed() -> None:
    with pytest.raises(Exception, match=r"bench moe_backward tiny, recompute=1, gradient of down of expert 1: differs"):
        check("moe_backward", "Qwen3-30B", {"recompute=1": {"recompute": 1}}, one_expert_wrong)
