"""One text per kernel, every header of ours in it: what run-time compilers (hiprtc, NVRTC) get through CuPy.

CuPy's cache key covers the text that it is given, not the headers which that text includes: a changed header would find
an old binary.
"""

from __future__ import annotations

import re
from pathlib import Path

from . import sources

_DIRECTIVE = re.compile(r'\s*#\s*(if|endif|pragma\s+once|include\s+"([^"]+)")')


def source_text(op: str, folder: Path | None = None) -> str:
    """hip_kernels/kernels/OP.hip with every #include of ours replaced by the file, for all targets alike.

    Args:
        op: name of the operator, for example "ag_gemm".
        folder: another hip_kernels/ than this package's.
    Returns: the text. Includes of system headers stay; only the host's branch of target/ has them.
    """
    root = (folder or sources.folder()).resolve()
    everywhere: set[Path] = set()  # files that are in the text outside of every #if: what follows has them already
    stack: list[Path] = []
    out: list[str] = []

    def include(path: Path, conditional: bool) -> None:
        if path in everywhere or path in stack:
            return
        name = path.relative_to(root).as_posix()
        if not path.is_file():
            out.append(f"#error {name}: no such file")
            return
        stack.append(path)
        guard = "KOSMOS_HAS_" + re.sub(r"\W", "_", name)  # a file may stand in several branches of an #if
        out.extend((f"#ifndef {guard}", f"#define {guard}", f'#line 1 "{name}"'))
        depth = 0
        for number, line in enumerate(path.read_text().splitlines(), 1):
            found = _DIRECTIVE.match(line)
            word = found[1] if found else ""
            depth += (word == "if") - (word == "endif")
            if found and found[2]:
                include((path.parent / found[2]).resolve(), conditional or depth > 0)
                out.append(f'#line {number + 1} "{name}"')
            else:
                out.append("" if word.startswith("pragma") else line)
        out.append("#endif")
        stack.pop()
        if not conditional:
            everywhere.add(path)

    include(root / "kernels" / f"{op}.hip", False)
    return "\n".join(out) + "\n"
