"""Kernels for GPUs in Triton. `rose.kernels.dispatch` lists what they compute.

Each launcher takes the arguments of the torch version and gives its result, rounded at the same
places; it returns None for what it does not cover. On a CPU the kernels run in Triton's interpreter
where TRITON_INTERPRET=1 was set before they were imported.
"""

import os

# A multiplication and the addition behind it may be one instruction. Triton 3.10 changes what it
# does where nobody says; results should not change with it.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
