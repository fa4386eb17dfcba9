"""What an installed package does, outside of the repository."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kosmos_raw.build import gfx950, sources

ROOT = Path(__file__).parents[1]


def run(*command: object, **options) -> str:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, env=env, timeout=540, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT)
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def bare_python(wheel, tmp_path_factory) -> Path:
    """A new environment with the wheel, its dependencies, and no extra."""
    folder = tmp_path_factory.mktemp("bare")
    run(sys.executable, "-m", "venv", folder)
    python = folder / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel)
    return python


def test_wheel_holds_the_kernel_sources(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    ours = {f"kosmos_raw/{p.relative_to(ROOT)}" for p in (ROOT / "hip_kernels").rglob("*") if p.is_file()}
    assert ours <= names and "kosmos_raw/py.typed" in names
    assert not [name for name in names if name.startswith(("tests", "hip_kernels", "runners"))]


def test_wheel_holds_code_objects_of_these_sources(wheel, bare_python, tmp_path):
    """A machine with ROCm and no compiler loads them."""
    with zipfile.ZipFile(wheel) as files:
        manifest = json.loads(files.read("kosmos_raw/code_objects/gfx950/manifest.json"))
    assert manifest["compiler"] == "ziglang 0.17.1" and manifest["sources"] == sources.digest()
    program = "from kosmos_raw.build import gfx950; b = gfx950.code_object('ag_gemm'); print(b.code_object)"
    found = run(bare_python, "-c", program, cwd=tmp_path).strip()
    assert found.endswith("code_objects/gfx950/ag_gemm.hsaco")
    assert Path(found).read_bytes() == gfx950.build("ag_gemm").code_object.read_bytes()
    changed = Path(found).parents[2] / "hip_kernels" / "schedule" / "group.h"
    text = changed.read_text()
    try:
        changed.write_text(text + "// changed\n")
        done = subprocess.run([bare_python, "-c", program], capture_output=True, text=True, cwd=tmp_path, timeout=60)
        assert done.returncode != 0 and "kosmos-raw[cpu]" in done.stderr  # not the old one: it must be built
    finally:
        changed.write_text(text)


def test_what_needs_an_extra_says_which(bare_python, tmp_path):
    for program, extra in (
        ("import kosmos_raw; kosmos_raw.launch(print, ranks=1, mode='threads', device='hip')", "rocm"),
        ("import kosmos_raw; kosmos_raw.launch(print, ranks=1, mode='threads', device='cuda')", "cuda"),
        ("import kosmos_raw, tests_of_extras; tests_of_extras.call()", "cpu"),
        (
            "import os; os.environ.update(PMI_SIZE='2', PMI_RANK='0'); import kosmos_raw; kosmos_raw.launch(print)",
            "mpi",
        ),
        ("from kosmos_raw.trace import draw_timeline, Trace; draw_timeline(Trace(()), 'x.png')", "plot"),
    ):
        (tmp_path / "tests_of_extras.py").write_text(
            "import kosmos_raw as kr, numpy as np, ml_dtypes\n"
            "x = np.ones((8, 8), ml_dtypes.bfloat16)\n"
            "def call(): kr.launch(lambda comm: kr.ag_gemm(comm, x, x), ranks=1, mode='threads')\n"
        )
        done = subprocess.run([bare_python, "-c", program], capture_output=True, text=True, cwd=tmp_path, timeout=60)
        assert done.returncode != 0 and f"kosmos-raw[{extra}]" in done.stderr, (extra, done.stderr)


def test_demo_in_a_fresh_environment(bare_python, wheel, tmp_path):
    run(
        bare_python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        f"kosmos-raw[cpu] @ {wheel.as_uri()}",
    )
    output = run(bare_python, "-m", "kosmos_raw", "demo", "--json", cwd=tmp_path)
    report = json.loads(output)
    assert report["passed"] and len(report["checks"]) >= 7 and len(report["drills"]) == 3
    assert all(check["bitwise_repeat"] for check in report["checks"])
    assert json.loads((tmp_path / "out" / "ag_gemm.json").read_text())["traceEvents"]
    where = run(bare_python, "-c", "import kosmos_raw; print(kosmos_raw.__file__)", cwd=tmp_path)
    assert str(ROOT) not in where
