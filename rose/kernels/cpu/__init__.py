"""CPU kernels of ROSE's own: few-row matrix products, norms and attention in C++.

They are compiled at first use with the system's compiler (`build`), called through ctypes on data
pointers (`library`), and optional: without them the same work is done by torch ops.
"""

from rose.kernels.cpu.library import CpuLibrary, load_library

__all__ = ["CpuLibrary", "load_library"]
