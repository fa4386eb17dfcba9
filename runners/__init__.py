"""Programs on many ranks: see README.md."""

import os

# Before NumPy is imported. Ranks share the cores already, and matrices are small: with threads of BLAS beside those of
# all ranks, two hundred steps of train_lm on two cores took 118 s; without, 24 s.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
