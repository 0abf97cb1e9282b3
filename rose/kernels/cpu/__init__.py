"""CPU kernels of ROSE's own: few-row matrix products, norms and attention in C++.

They are compiled at first use with the system's compiler (`build`), called through ctypes on data
pointers (`library`), and optional: without them the same work is done by torch ops.
"""

from rose.kernels.cpu.gemm import PackedMatrix
from rose.kernels.cpu.library import CpuLibrary, load_library, replaced

__all__ = ["CpuLibrary", "PackedMatrix", "load_library", "replaced"]
