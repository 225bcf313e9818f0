"""What must be set before any test imports torch or triton."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for work this small a second thread mostly waits

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton's kernels run on the CPU
