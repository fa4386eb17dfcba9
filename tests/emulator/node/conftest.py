"""Tests of the emulated node. Those in inside/ run in processes that have loaded it, started by test_node.py: a process
has one HIP runtime for life, and one set of options for it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from kosmos_raw.emulator.node import read_log, why_unavailable
from kosmos_raw.emulator.node.options import LOG, VARIABLE
from tests.hip.tier import note_calls

ROOT = Path(__file__).parents[3]
INSIDE = "KOSMOS_TEST_INSIDE_NODE"
collect_ignore = [] if os.environ.get(INSIDE) else ["inside"]


def pytest_collection_modifyitems(items):
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    why = why_unavailable() if here else None
    for item in here:
        item.add_marker(pytest.mark.emulated)
        if why:
            item.add_marker(pytest.mark.skip(reason=f"emulated node: {why}"))


@dataclass
class Done:
    """What a process on the node left."""

    status: int
    out: str  # both streams
    calls: dict[str, int]

    @property
    def stub_calls(self) -> dict[str, int]:
        return {name: times for name, times in self.calls.items() if ":" in name}


@pytest.fixture
def on_node(tmp_path):
    """on_node(*arguments of Python, options="caches", **environment) -> Done."""

    def run(*arguments: str, options: str = "", timeout: float = 600, **environment: str) -> Done:
        log = tmp_path / f"calls{len(list(tmp_path.iterdir()))}"
        env = {**os.environ, VARIABLE: options, LOG: str(log), "PYTHONPATH": str(ROOT), **environment}
        done = subprocess.run(
            [sys.executable, *arguments], cwd=ROOT, env=env, text=True, timeout=timeout,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        calls = read_log(log) if log.exists() else {}
        note_calls("emulated", calls)
        return Done(done.returncode, done.stdout, calls)

    return run
