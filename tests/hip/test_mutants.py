"""Each bug that is put into device/hip.py on purpose makes its test fail, and without bugs none of these fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .mutants import MUTANTS
from .tier import REAL, WHY_NOT

pytestmark = [
    pytest.mark.emulated,  # bugs are not for a real GPU
    pytest.mark.skipif(bool(REAL or WHY_NOT), reason=f"emulated node: {WHY_NOT or 'there is a real ROCm'}"),
]


@pytest.fixture(scope="module")
def caught():
    command = [sys.executable, "-m", "tests.hip.mutants"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(name, caught):
    assert caught[name]


def test_without_a_mutant_all_pass(caught):
    assert caught[""] == ""
