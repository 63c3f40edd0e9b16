"""One BLAS thread for this process, whatever the environment says; to be imported before NumPy is.

How OpenBLAS cuts a product over threads changes last bits: of a float32 head of 50,257 rows, 14 logits are others on
two threads than on one. A sweep's runs have one thread as well.
"""

from __future__ import annotations

import os

for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"
