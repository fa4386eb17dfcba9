"""The same histories on real threads under ThreadSanitizer: make tsan.

The forced interleavings play a weak memory on a model; here the CPU device's own code runs as its users run it, with a
thread for each workgroup of each rank, and every access to data is checked. Partial results of gemm_rs are atomics,
which are never a race: of their protocol values alone are checked.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # so that it runs as a script in a checkout

from tqdm import tqdm  # noqa: E402

from kosmos_raw.build import cache, params, sources, zig  # noqa: E402
from tests.forced.forced import policies  # noqa: E402

FLAGS = (
    *("-x", "c++", "-std=c++20", "-march=native", "-O2", "-g1", "-ffp-contract=fast", "-pthread"),
    *("-fno-exceptions", "-fno-rtti", "-fsanitize=thread", "-fno-sanitize=undefined"),
)
RANKS = (2, 3, 8)
RACE, BAD = 66, 1  # exit statuses

# What is broken, by operator, and must end as a race or as wrong values.
MUTATIONS = {
    "ag_gemm": "NO_RELEASE NO_ACQUIRE COUNTS_BEFORE_RELEASE FIRST_PULL_REPORTS_READS NEVER_DRAINS ONE_SLICE_TOO_FEW",
    "ag_gemm_dgrad": "NO_RELEASE NO_ACQUIRE SUMS_TOO_EARLY COUNTS_PARTS_BEFORE_RELEASE NEVER_DRAINS",
    "bulk_ag": "NO_RELEASE NO_ACQUIRE PULLS_BEFORE_START NEVER_DRAINS",
    "bulk_rs": "NO_RELEASE NO_ACQUIRE REDUCES_BEFORE_START FIRST_REDUCE_REPORTS SUMS_TOO_EARLY",
    "moe_forward": "NO_RELEASE PUSH_BEFORE_SORT GEMM1_BEFORE_ROWS PUSH_WITHOUT_CREDIT FOLD_BEFORE_ROWS",
    "moe_backward": "NO_RELEASE PUSHES_BEFORE_START WGRAD2_BEFORE_DGRAD2 PUSHES_INTO_USED_SLOTS FOLDS_BEFORE_ROWS",
    "gemm_rs_push": "NO_RELEASE NO_ACQUIRE PUSHES_BEFORE_START ADDS_BEFORE_ARRIVAL SIGNALS_BEFORE_RELEASE ONE_SLOT",
    "gemm_rs": "POISONS_WITHOUT_WAIT REDUCES_BEFORE_START STORES_INTO_CACHES",
}


def program(op: str) -> Path:
    """The player of one operator. The first one builds the sanitizer too: a minute."""
    source = HERE / f"forced_{op}.cpp"
    texts = [path.read_text() for path in (source, *sorted(HERE.glob("*.h")))]
    key = [zig.version(), zig.cpu_identity(), sources.digest(), *FLAGS, *texts]
    return cache.cached(f"threads_{op}", key, lambda to: zig.run(["c++", *FLAGS, "-o", str(to), str(source)]))


def play(op: str, ranks: int, policy: str, histories: int, seed: int = 0, mutation: str = "NONE") -> tuple[int, str]:
    """Exit status, and what was printed."""
    policy_number = str(params.POLICIES.index(policy))
    done = subprocess.run(
        [program(op), str(ranks), policy_number, str(seed), str(histories), mutation],
        env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    return done.returncode, done.stdout + done.stderr


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ops", nargs="*", metavar="OP", help=f"{', '.join(MUTATIONS)} (default: all)")
    parser.add_argument("--histories", type=int, default=100, help="of each count of ranks and policy (default: 100)")
    a = parser.parse_args()
    wrong = 0
    for op in a.ops or MUTATIONS:
        todo = [(ranks, policy) for ranks in RANKS for policy in policies(op)]
        for ranks, policy in tqdm(todo, desc=op, disable=None, leave=False):
            status, said = play(op, ranks, policy, a.histories if ranks < 8 else a.histories // 4)
            if status:
                wrong += 1
                print(f"{op}, {ranks} ranks, {policy}: status {status}\n{said[:4000]}")
        mutations = MUTATIONS[op].split()
        caught = [m for m in mutations if play(op, 3, "one_way", a.histories, mutation=m)[0] in (RACE, BAD)]
        wrong += len(mutations) - len(caught)
        missed = ", ".join(sorted(set(mutations) - set(caught)))
        print(f"{op:14} {len(caught)} of {len(mutations)} mutations noticed" + (f", not {missed}" if missed else ""))
    print(f"{wrong} wrong" if wrong else "no race, every value right")
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
