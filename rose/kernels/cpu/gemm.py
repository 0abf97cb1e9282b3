"""Linear layers whose weights are packed for the CPU kernels.

Shape letters: T tokens, I input channels, O output channels (2 O rows of weights where gated).
"""

import ctypes

import torch
from torch import Tensor

from rose.kernels.cpu.library import CpuLibrary, LinearStruct
from rose.kernels.cpu.memory import empty

# Names of `rose.kernels.activation` that the kernels apply themselves, by their number in C++.
ACTIVATION_NUMBERS = {
    "identity": 0,
    "linear": 0,
    "gelu": 1,
    "gelu_fast": 2,
    "gelu_new": 2,
    "gelu_pytorch_tanh": 2,
    "quick_gelu": 3,
    "relu": 4,
    "silu": 5,
    "swish": 5,
}


class PackedMatrix:
    """A float32 weight matrix in panels of columns, with its bias and activation.

    A row of a result is the same to the bit whatever the other rows are, and however many.
    """

    def __init__(
        self,
        library: CpuLibrary,
        weight_OI: Tensor,
        bias_O: Tensor | None = None,
        *,
        activation: str = "identity",
        gated: bool = False,
    ) -> None:
        """Pack a copy of the weights. `address` is where the kernels find them.

        Args:
            library: the kernels.
            weight_OI: float32 [O, I], contiguous; where gated [2 O, I], all gates first.
            bias_O: float32 [O], where gated [2 O], or None.
            activation: one of `ACTIVATION_NUMBERS`.
            gated: whether results are act(gate) * up.
        """
        rows, inputs = weight_OI.shape
        outputs = rows // 2 if gated else rows
        self.library = library
        self.inputs, self.outputs, self.gated = inputs, outputs, gated
        self._panels = empty(library.panel_floats(inputs, outputs, gated))
        self._bias = None
        if bias_O is not None:
            self._bias = empty(library.bias_floats(outputs, gated))
        self._struct = LinearStruct(
            self._panels.data_ptr(),
            _pointer(self._bias),
            inputs,
            outputs,
            ACTIVATION_NUMBERS[activation],
            gated,
        )
        self.address = ctypes.addressof(self._struct)
        library.pack(
            weight_OI.data_ptr(),
            _pointer(bias_O),
            self.address,
            self._panels.data_ptr(),
            _pointer(self._bias),
            torch.get_num_threads(),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights."""
        return self._panels.nbytes

    def __call__(self, x_TI: Tensor) -> Tensor:
        """Return act(x W^T + b), or act(gate) * up: float32 [..., O]."""
        if x_TI.dim() != 2 or x_TI.stride(1) != 1:
            return self(x_TI.reshape(-1, self.inputs).contiguous()).view(
                *x_TI.shape[:-1], self.outputs
            )
        assert x_TI.dtype == torch.float32
        assert x_TI.shape[1] == self.inputs
        rows = x_TI.shape[0]
        y_TO = x_TI.new_empty((rows, self.outputs))
        self.library.linear(
            self.address,
            x_TI.data_ptr(),
            x_TI.stride(0),
            y_TO.data_ptr(),
            self.outputs,
            rows,
            torch.get_num_threads(),
        )
        return y_TO

    def rows(self, ids_T: Tensor) -> Tensor:
        """Return rows of the weight matrix, [T, I]; ids are int64 and in range."""
        assert not self.gated
        ids_T = ids_T.contiguous()
        y_TI = self._panels.new_empty((ids_T.shape[0], self.inputs))
        self.library.panel_rows(
            self.address,
            ids_T.data_ptr(),
            y_TI.data_ptr(),
            ids_T.shape[0],
            torch.get_num_threads(),
        )
        return y_TI


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
