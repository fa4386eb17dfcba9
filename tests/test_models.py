"""A sample of what `make models` does, and what it says of a case that fails."""

from __future__ import annotations

import csv

import pytest

from kosmos_raw.checks.validate import Outcome
from kosmos_raw.plan.moe.config import models as names
from tests import models


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    def main(*arguments: str) -> tuple[int, list[dict[str, str]], str]:
        path = tmp_path / "rows.csv"
        monkeypatch.setattr("sys.argv", ["models", "--devices", "cpu", "--tokens", "9", "--csv", str(path), *arguments])
        status = models.main()
        return status, list(csv.DictReader(path.open())), capsys.readouterr().out

    return main


def test_a_sample_passes(run):
    status, rows, said = run("--models", "Qwen3-30B", "Llama-4-Scout", "--ranks", "2", "--routings", "skewed")
    assert status == 0 and "all 4 cases passed" in said
    assert [(row["op"], row["model"]) for row in rows] == [
        (op, model) for op in models.CHECKS for model in ("Qwen3-30B", "Llama-4-Scout")
    ]
    assert all(row["bits_equal"] == "True" and not row["problem"] and row["tokens"] == "9 8" for row in rows)


def wrong(comm, case):
    outcome = Outcome()
    if comm.rank == 1:
        outcome.fail("out at (0, 3)")
    return outcome


def raises(comm, case):
    raise ValueError("no such layer")


@pytest.mark.parametrize(
    ("check", "problem"), [(wrong, "rank 1, out at (0, 3)"), (raises, "ValueError: no such layer")]
)
def test_a_case_that_fails_is_said_and_others_go_on(check, problem, run, monkeypatch):
    monkeypatch.setitem(models.CHECKS, "moe_forward", check)
    status, rows, said = run("--models", "Qwen3-30B", "--ranks", "2", "--routings", "balanced")
    assert status == 1 and "1 of 2 cases failed" in said and f"1 FAILED: {problem}" in said
    assert [row["problem"].startswith(problem) for row in rows] == [True, False]


def test_every_model_can_be_skewed():
    for ranks in (2, 4, 8):
        for model in names():
            case = models.case_of(model, 32, (3,) * ranks, "skewed")
            assert case.config.experts >= min(ranks, names()[model].experts)
