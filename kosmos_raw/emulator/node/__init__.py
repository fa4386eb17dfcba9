"""A node of eight emulated MI355X: a HIP runtime of ours under the unmodified wheels cupy-rocm-7-0 and hip-python.

memory.cpp, streams.cpp, modules.cpp, properties.cpp, record.cpp: libamdhip64; kernels run in the emulator. hiprtc.cpp
and hiprtc.py: the run-time compiler. code_objects.py: reading and translating code objects. stubs.py, symbols.py,
libraries.py: what else the wheels want, and building it all. preload.py: loading it before CuPy. options.py:
KOSMOS_EMULATOR.
"""

from .options import NodeOptions
from .preload import Node, build, preload, read_log, why_unavailable

__all__ = ["Node", "NodeOptions", "build", "preload", "read_log", "why_unavailable"]
