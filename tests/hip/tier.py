"""The hip tier (mark `hip`): what an MI355X runs. Where ROCm is, on the real runtime; elsewhere the same tests, product
and wheels on the emulated node. And the report of this tier, and of the tests of that node itself (mark `emulated`)."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kosmos_raw.device import rocm
from kosmos_raw.emulator import node
from kosmos_raw.emulator.node.options import LOG, VARIABLE

REAL = rocm.real_rocm()
DEVICE = "hip" if REAL else "emulated"
WHY_NOT = None if REAL else node.why_unavailable()
TIERS = ("hip", "emulated")
FOLDER = "KOSMOS_TEST_CALLS"  # where all processes of a test run note the calls of HIP, a file a tier

_node: node.Node | None = None
_environment: dict[str, str] = {}  # what loading the node has set: other tests must not see it


def load_node() -> node.Node:
    """Loads the emulated node into this process, once; leaves the environment as it was."""
    global _node
    if _node is None:
        before = dict(os.environ)
        _node = node.preload()
        _environment.update({name: value for name, value in os.environ.items() if before.get(name) != value})
        for name in _environment:
            os.environ.pop(name)
        os.environ.update({name: before[name] for name in _environment if name in before})
    return _node


@pytest.fixture(autouse=True)
def hip_tier(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Puts the node under tests of the tier where there is no ROCm, counts calls, and lets none reach a stub."""
    if not request.node.get_closest_marker("hip"):
        yield
        return
    if WHY_NOT:
        pytest.skip(f"hip tier: {WHY_NOT}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KOSMOS_SHARE_GPU", "1")  # one GPU is enough
        if REAL:
            yield
            return
        patch.delenv(VARIABLE, raising=False)
        loaded, log = load_node(), tmp_path_factory.mktemp("calls") / "log"
        for name, value in _environment.items():
            patch.setenv(name, value)
        patch.setenv(LOG, str(log))  # of processes that the test starts
        before = Counter(loaded.calls())
        yield
        calls = Counter(loaded.calls()) - before
    if log.exists():
        calls += Counter(node.read_log(log))
    note_calls("hip", calls)
    assert not [name for name in calls if ":" in name], "functions that the emulated node does not have were called"


# -- the report
def note_calls(tier: str, calls: dict[str, int]) -> None:
    """Adds calls of HIP to the report. Stubs go by "library:function"."""
    if FOLDER in os.environ:
        with open(Path(os.environ[FOLDER]) / tier, "a") as file:  # one write: workers share the file
            file.write("".join(f"{name} {times}\n" for name, times in calls.items()))


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # xdist's workers inherit it
        folder = tempfile.TemporaryDirectory(prefix="kosmos-calls-")
        config.add_cleanup(folder.cleanup)
        os.environ[FOLDER] = folder.name
        config.add_cleanup(lambda: os.environ.pop(FOLDER, None))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.user_properties += [("tier", tier) for tier in TIERS if item.get_closest_marker(tier)]


def summary(tier: str, stats: dict[str, list], calls: dict[str, int]) -> str | None:
    """One line of the report; None when no test of the tier was chosen."""
    counts = {
        outcome: sum(("tier", tier) in getattr(report, "user_properties", ()) for report in stats.get(outcome, ()))
        for outcome in ("passed", "failed", "error", "skipped")
    }
    if not sum(counts.values()):
        return None
    ran, failed = counts["passed"] + counts["failed"], counts["failed"] + counts["error"]
    line = f"{ran} tests, {failed} failed, {counts['skipped']} skipped; "
    if not calls:
        return line + "calls of HIP were not counted"
    stubs = sorted(name for name in calls if ":" in name)
    functions = [name for name in calls if ":" not in name]
    line += f"{len(functions)} distinct HIP functions, {sum(calls[name] for name in functions):,} calls; "
    return line + f"{sum(calls[name] for name in stubs)} calls of stubs" + (f" ({', '.join(stubs)})" if stubs else "")


def where() -> str:
    if REAL:
        return f"on ROCm {'.'.join(map(str, rocm.rocm_version([REAL]) or ('?',)))} ({REAL})"
    return f"NOT RUN: {WHY_NOT}" if WHY_NOT else "on emulated MI355X, for there is no ROCm here"


def pytest_terminal_summary(terminalreporter) -> None:  # type: ignore[no-untyped-def]
    for tier in TIERS:
        file = Path(os.environ[FOLDER]) / tier
        line = summary(tier, terminalreporter.stats, node.read_log(file) if file.exists() else {})
        if line:
            terminalreporter.write_line(f"{tier} tier{f' ({where()})' if tier == 'hip' else ''}: {line}")
