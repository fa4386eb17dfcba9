"""The report of the tier: its numbers, and that it hides nothing."""

from __future__ import annotations

from types import SimpleNamespace

from . import tier


def reports(count, *tiers):
    return [SimpleNamespace(user_properties=[("tier", name) for name in tiers]) for _ in range(count)]


def test_numbers():
    stats = {"passed": reports(5, "hip") + reports(9), "failed": reports(2, "hip"), "skipped": reports(1, "hip")}
    stats["error"] = reports(1, "hip", "emulated")
    calls = {"hipMalloc": 1000, "hipFree": 3, "libamdhip64:hipGraphCreate": 2}
    line = tier.summary("hip", stats, calls)
    assert line.startswith("7 tests, 3 failed, 1 skipped; 2 distinct HIP functions, 1,003 calls; ")
    assert line.endswith("; 2 calls of stubs (libamdhip64:hipGraphCreate)")
    assert tier.summary("emulated", stats, {}) == "0 tests, 1 failed, 0 skipped; calls of HIP were not counted"
    assert tier.summary("hip", {"passed": reports(3)}, calls) is None


def test_processes_share_the_count(tmp_path, monkeypatch):
    monkeypatch.setenv(tier.FOLDER, str(tmp_path))
    tier.note_calls("hip", {"hipMalloc": 2})
    tier.note_calls("hip", {"hipMalloc": 3, "hipFree": 1})
    assert tier.node.read_log(tmp_path / "hip") == {"hipMalloc": 5, "hipFree": 1}
