"""A rank that dies, raises, does not come or comes with something else: the others leave within seconds and say why."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import kosmos_raw as kr
from kosmos_raw.device.cpu import CpuDevice, CpuKernel
from kosmos_raw.ranks import mpi
from tests import programs
from tests.conftest import shared_memory_files


@pytest.mark.parametrize("how", ["kill", "raise", "exit"])
@pytest.mark.parametrize("victim", [0, 2])
def test_lost_process(how, victim):
    start = time.monotonic()
    with pytest.raises((kr.RankLost, ValueError)) as raised:
        kr.launch(programs.killed_rank, victim, how, ranks=3, mode="processes", timeout_s=60)
    assert time.monotonic() - start < 20
    text = "\n".join([str(raised.value), *raised.value.__notes__])
    cause = {"kill": "killed by signal 9", "raise": "has had enough", "exit": "exit code 3"}[how]
    assert f"rank {victim}" in text and cause in text
    survivors = re.findall(r"survivor (\d) ([\d.]+) (\w+) ([^\n]*)", text)
    assert {int(s[0]) for s in survivors} == {0, 1, 2} - {victim}
    for _, seconds, kind, message in survivors:
        assert float(seconds) < 5 and kind in ("WaitError", "CommunicatorBroken")
        assert re.search(rf"ranks? ([\d, ]*, )?{victim}(, [\d, ]*)? died or raised", message)  # others may follow it


def test_raising_thread():
    with pytest.raises(ValueError, match="has had enough") as raised:
        kr.launch(programs.killed_rank, 1, "raise", ranks=3, mode="threads", timeout_s=60)
    text = "\n".join(raised.value.__notes__)
    assert len(set(re.findall(r"survivor (\d)", text))) == 2 and re.search("ranks? .*1.* died or raised", text)


@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_absent_rank_is_named_and_rebuild_helps(mode):
    results = kr.launch(programs.absent_rank, 1, ranks=3, mode=mode, timeout_s=0.5)
    for rank in (0, 2):
        seconds, record, refused = results[rank]
        assert 0.4 < seconds < 5 and refused == "CommunicatorBroken"
        assert (record.op, record.rank, record.reason) == ("ag_gemm", rank, "waited too long")
        assert record.signal in ("started[1]", "reads_done[1]") or record.signal.startswith("counter[")
        if record.kind == "pull":
            assert (record.chunk, record.signal, record.want, record.seen) == (1, "started[1]", 2, 1)


@pytest.mark.parametrize("what", ["rows", "k"])
def test_different_calls_are_reported_by_all(what):
    for record in kr.launch(programs.different_calls, what, ranks=3, mode="threads", timeout_s=2):
        assert record.reason in ("different call", "waited too long")
    records = kr.launch(programs.different_calls, what, ranks=2, mode="threads", timeout_s=20)
    assert [record.reason for record in records] == ["different call"] * 2
    assert {record.kind for record in records} <= {"pull", "drain"} and records[0].signal == "call[1]"


def test_arena_on_one_rank_only_is_reported():
    records = kr.launch(programs.mixed_memory, ranks=2, mode="threads", timeout_s=20)
    assert [record.reason for record in records] == ["different call"] * 2


def test_nothing_is_left_after_kill(tmp_path):
    """The whole group killed at once, in the middle of calls: no file, no process."""
    script = "import kosmos_raw as kr\nfrom tests import programs\n"
    script += "if __name__ == '__main__': kr.launch(programs.back_to_back, 100000, 1, ranks=3)\n"
    path = tmp_path / "forever.py"
    path.write_text(script)
    before = shared_memory_files()
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    group = subprocess.Popen([sys.executable, str(path)], start_new_session=True, env=env)
    deadline = time.monotonic() + 60
    while _ranks_of(group.pid) < 3 and time.monotonic() < deadline:
        time.sleep(0.2)
    time.sleep(2)
    assert group.poll() is None and _ranks_of(group.pid) >= 3
    os.kill(group.pid, signal.SIGKILL)  # the parent alone: its ranks must notice
    group.wait()
    deadline = time.monotonic() + 20
    while _ranks_of(group.pid) and time.monotonic() < deadline:
        time.sleep(0.2)
    left = _ranks_of(group.pid)
    os.killpg(group.pid, signal.SIGKILL) if left else None
    assert left == 0
    assert shared_memory_files() == before


def _ranks_of(session: int) -> int:
    """Processes of a session that have a communicator: they hold memory files of this package."""
    count = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.getsid(int(pid)) == session and int(pid) != session:
                count += "kosmos_raw" in " ".join(
                    os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")
                )
        except OSError:
            continue
    return count


def test_processes_need_importable_functions():
    with pytest.raises(TypeError, match="top of a module"):
        kr.launch(lambda comm: None, ranks=2, mode="processes")


def test_program_without_a_main_guard(tmp_path):
    path = tmp_path / "unguarded.py"
    path.write_text("import kosmos_raw as kr\nfrom tests import programs\nkr.launch(programs.world, ranks=2)\n")
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode != 0
    assert "would start ranks without end" in done.stderr and "before it began" in done.stderr.splitlines()[-3:][0]


def test_mpi4py_of_another_mpi_is_refused():
    """A launcher that started four, and an mpi4py that sees one: all would take themselves for rank 0 of 1."""
    pytest.importorskip("mpi4py", reason="pip install 'kosmos-raw[mpi]'")
    env = os.environ | {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2"}
    program = "import kosmos_raw as kr; kr.launch(print)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode != 0 and "the launcher started 4 ranks, but mpi4py sees 1" in done.stderr


@pytest.mark.parametrize(
    ("variables", "world"),
    [
        ({}, (1, 0)),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}, (4, 3)),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, (2, 1)),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5", "SLURM_NTASKS": "8"}, (8, 5)),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, (1, 0)),  # a batch script, not started by srun
        ({"OMPI_COMM_WORLD_SIZE": "", "OMPI_COMM_WORLD_RANK": ""}, (1, 0)),
    ],
)
def test_launchers_are_known_by_their_variables(variables, world, monkeypatch):
    for name in list(os.environ):
        if name.startswith(("OMPI_", "PMI_", "SLURM_")):
            monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (mpi.world_size(), mpi.world_rank()) == world


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 9}, "ranks is 9, want 1 to 8"),
        ({"ranks": 0}, "ranks is 0, want 1 to 8"),
        ({"mode": "fibers"}, "want one of processes, threads, mpi"),
        ({"device": "tpu", "mode": "threads", "ranks": 1}, "device is 'tpu', want one of cpu"),
    ],
)
def test_wrong_launch_options(options, message):
    with pytest.raises(ValueError, match=message):
        kr.launch(programs.small_call, **options)


def test_ranks_meet_at_launches_if_one_of_them_must(monkeypatch):
    """Two ranks on one GPU and a third on another: seen as a hang on two GPUs."""
    monkeypatch.setattr(CpuDevice, "launches_together", property(lambda device: device.index == 1))
    assert kr.launch(programs.back_to_back, 20, 3, ranks=3, mode="threads", timeout_s=10) == [20] * 3


def test_closed_communicator_refuses():
    def use_after_close(comm):
        comm.close()
        comm.close()
        return str(programs.error_of(lambda: programs.small_call(comm))[1])

    for message in kr.launch(use_after_close, ranks=2, mode="threads"):
        assert "is closed" in message


def test_memory_that_is_not_there_is_refused_with_numbers():
    with pytest.raises(kr.NotAvailable, match=r"cannot reserve [\d,]+ bytes .* bytes are available"):
        kr.launch(programs.small_call, ranks=1, mode="threads", arena_bytes=1 << 60)


def test_no_collection_while_ranks_launch_together(monkeypatch):
    """What the collector frees may wait for kernels of all ranks, and those wait for the rank that collects."""
    during = []

    def launch(self, *args):
        for _ in range(20_000):  # enough garbage in cycles for any collector's threshold
            (cycle := []).append(cycle)
        during.append(len(collected))
        return plain(self, *args)

    plain, collected = CpuKernel.launch, []
    monkeypatch.setattr(CpuKernel, "launch", launch)
    monkeypatch.setattr(CpuDevice, "launches_together", True)
    gc.callbacks.append(watch := lambda phase, info: collected.append(phase))
    try:
        before = gc.isenabled()
        kr.launch(programs.back_to_back, 4, 5, ranks=3, mode="threads")
        assert gc.isenabled() == before
    finally:
        gc.callbacks.remove(watch)
    # Every launch of the three ranks saw as many collections as the two beside it.
    assert collected and all(len(set(during[i : i + 3])) == 1 for i in range(0, len(during), 3)), during
