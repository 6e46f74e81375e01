"""The ladder's harness: contracts, checks, timing, records and the commands over them. Importable without a GPU.

Triton decides at import whether its kernels are compiled or interpreted, so the choice is made here, before anything
imports it.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else torch's profiler announces its start and stop on stderr
    # Cases for a CPU are tiny: a second thread gains nothing, and where cores are busy its waiting costs tenfold.
    torch.set_num_threads(1)
