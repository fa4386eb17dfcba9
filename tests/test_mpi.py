"""Ranks as processes of the mpirun that the extra `mpi` installs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

MPIRUN = Path(sys.executable).parent / "mpirun"


@pytest.fixture(autouse=True)
def mpirun_is_installed():
    if not MPIRUN.is_file():
        pytest.skip(f"no {MPIRUN.name} beside this Python: pip install 'kosmos-raw[mpi]'")


def mpirun(ranks: int, *command: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [MPIRUN, "-n", str(ranks), sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[1],
    )


def test_validate_prints_once():
    shape = "--m 512 --n 256 --k 128 --json".split()
    done = mpirun(4, "-m", "kosmos_raw", "validate", "ag_gemm", "--device", "cpu", *shape)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["passed"] and report["bitwise_repeat"] and report["ranks"] == 4


def test_tests_on_three_ranks():
    done = mpirun(3, "-m", "pytest", "-m", "mpi", "-q", "-p", "no:cacheprovider", "tests/mpi")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" passed") == 1 and "skipped" not in done.stdout


@pytest.mark.parametrize("how", ["raise", "kill"])
def test_a_rank_that_fails_ends_all(how):
    program = f"import kosmos_raw as kr; from tests import programs; kr.launch(programs.killed_rank, 1, {how!r})"
    start = time.monotonic()
    done = mpirun(3, "-c", program)
    assert done.returncode != 0 and time.monotonic() - start < 30
    if how == "raise":
        assert "rank 1 of 3 raised" in done.stderr and "has had enough" in done.stderr
