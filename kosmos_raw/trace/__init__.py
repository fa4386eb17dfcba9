"""What each WG of a launch did, and when: from the raw marks of the kernels to numbers, a Perfetto file and a picture.

In short:

    trace = decode(raws, ticks_per_second)          # one uint64 array a rank
    print(summarise(trace).text())                  # share of time building, moving, waiting; kinds of work
    write_perfetto(trace, "out.json")               # open in ui.perfetto.dev
    draw_timeline(trace, "out.png", title="ag_gemm")  # needs the extra `plot`

Times are seconds from the first mark of any rank. See `decode` for what the raw marks are.
"""

from .events import RankTrace, Segment, Span, Switch, Trace, WgTrace, decode, decode_rank
from .perfetto import to_perfetto, write_perfetto
from .summary import Summary, summarise
from .timeline import MOE_BACKWARD_PHASES, MOE_FORWARD_PHASES, draw_timeline

__all__ = [
    "MOE_BACKWARD_PHASES",
    "MOE_FORWARD_PHASES",
    "RankTrace",
    "Segment",
    "Span",
    "Summary",
    "Switch",
    "Trace",
    "WgTrace",
    "decode",
    "decode_rank",
    "draw_timeline",
    "summarise",
    "to_perfetto",
    "write_perfetto",
]
