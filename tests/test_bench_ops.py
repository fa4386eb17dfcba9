"""What bench of operators says of bytes, and keeps in its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kosmos_raw.bench import cuda_ops
from kosmos_raw.bench.cuda_mxfp8 import MX_PROBLEMS
from kosmos_raw.bench.cuda_problems import PROBLEMS
from kosmos_raw.bench.llama3 import Shape, layers, shape
from kosmos_raw.cli.bench import ops_table, shapes_of
from kosmos_raw.cli.main import main
from kosmos_raw.plan.shapes import MXFP8_FORMAT


def test_every_operator_has_a_problem_of_each_dtype():
    assert PROBLEMS.keys() == MX_PROBLEMS.keys()
    assert all(problem.dtype == "mxfp8" for problem in MX_PROBLEMS.values())


def test_rows_of_both_dtypes_go_through_a_file(tmp_path: Path):
    of, rows = shape("ag_gemm", "8B-QKV-MBS1"), []
    for dtype, nbytes in (("bf16", of.m // 2 * of.k * 2), ("mxfp8", MXFP8_FORMAT.nbytes(of.m // 2, of.k))):
        peers = (cuda_ops.SERIAL, cuda_ops.COMM, cuda_ops.GEMM, cuda_ops.PLANNED)
        samples = {(name, mode): [1.5, 2.5, 2.0] for name in peers for mode in cuda_ops.MODES}
        medians = dict.fromkeys(samples, 2.0)
        rows.append(cuda_ops.OpRow("ag_gemm", of, 2, 0.5, 0.25, medians, samples, dtype=dtype, link_bytes=nbytes))
    assert [row.of_bf16 for row in rows] == [1.0, 33 / 64]
    cuda_ops.write_csv(rows, tmp_path / "rows.csv")
    assert cuda_ops.read_csv(tmp_path / "rows.csv") == rows
    lines = ops_table(rows).splitlines()
    assert [word in lines[3] for word in ("mxfp8", "17.30", "0.516")] == [True] * 3


@pytest.mark.parametrize("op", PROBLEMS)
def test_all_layers_of_llama3_can_be_asked_for(op):
    shapes = shapes_of(op, "llama3")
    assert len({of.name for of in shapes}) == 24 and all(of == shape(op, of.name) for of in shapes)


def test_layers_of_llama3_are_those_of_the_paper():
    table = json.loads((Path(__file__).parent / "data" / "llama3.json").read_text())  # its table C.3
    assert layers("ag_gemm") == [Shape(**of) for of in table["shapes"]]


def test_what_was_measured_is_read():
    for op in PROBLEMS:
        (file,) = Path(__file__).parents[1].glob(f"docs/results/h200x2_{op}.csv")
        rows = cuda_ops.read_csv(file)
        assert len(rows) >= 5 and {row.op for row in rows} == {op}
        for row in rows:
            assert row.of_bf16 == 1.0 and row.over_bound <= 1 and min(row.ms.values()) > 0
            assert row.summary().startswith(f"{op} {row.shape.name}: at ")
            for mode in cuda_ops.MODES:
                assert row.over(cuda_ops.SERIAL, mode) > 1


def test_what_is_measured_in_bf16_alone_refuses_mxfp8(capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "gemm", "--dtype", "mxfp8"]) == 1
    assert "bench gemm: dtype is mxfp8, want bf16" in capsys.readouterr().err
