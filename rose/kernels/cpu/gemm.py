"""Linear layers whose weights are packed for the CPU kernels.

Shape letters: T tokens, I input channels, O output channels (2 O rows of weights where gated).
"""

import ctypes
from enum import IntEnum

import torch
from torch import Tensor

from rose.kernels.cpu.library import CpuLibrary, LinearStruct
from rose.kernels.cpu.memory import empty
from rose.kernels.quantization import QuantizedWeight, num_groups

# Names of `rose.kernels.activation` that the kernels apply themselves, by their number in C++.
ACTIVATION_NUMBERS = {
    "identity": 0,
    "linear": 0,
    "gelu": 1,
    "gelu_python": 1,
    "gelu_accurate": 2,
    "gelu_fast": 2,
    "gelu_new": 2,
    "gelu_python_tanh": 2,
    "gelu_pytorch_tanh": 2,
    "quick_gelu": 3,
    "relu": 4,
    "silu": 5,
    "swish": 5,
}


class Storage(IntEnum):
    """How the weights of a packed matrix are stored; the values are those of C++."""

    FLOATS = 0
    HALVES = 1  # bfloat16
    BYTES = 2  # int8, with a scale for each group of inputs of an output
    NIBBLES = 3  # 4 bits, with a minimum beside the scale


_BY_BITS = {8: Storage.BYTES, 4: Storage.NIBBLES}
_FACTS = {Storage.BYTES: 1, Storage.NIBBLES: 2}  # in bfloat16, of each group of an output


class PackedMatrix:
    """A weight matrix in panels of columns, with its bias and activation, computed in float32.

    Weights that bfloat16 holds exactly, as those of most checkpoints of LLMs, are stored as such:
    the results are the same, and half as much has to come from memory. Quantised weights are
    multiplied as `rose.kernels.quantization.quantized_linear` says.

    A row of a result is the same to the bit whatever the other rows are, and however many.
    """

    def __init__(
        self,
        library: CpuLibrary,
        weight_OI: Tensor | QuantizedWeight,
        bias_O: Tensor | None = None,
        *,
        activation: str = "identity",
        gated: bool = False,
        storage: Storage | None = None,
    ) -> None:
        """Pack a copy of the weights. `address` is where the kernels find them.

        Args:
            library: the kernels.
            weight_OI: float32 [O, I], contiguous, or quantised; where gated [2 O, I], all gates
                first.
            bias_O: float32 [O], where gated [2 O], or None.
            activation: one of `ACTIVATION_NUMBERS`.
            gated: whether results are act(gate) * up.
            storage: FLOATS or HALVES, which cuts off what does not fit; None is the smaller one
                that holds the weights exactly. Ignored where they are quantised.
        """
        quantized = weight_OI if isinstance(weight_OI, QuantizedWeight) else None
        weight = weight_OI.codes if isinstance(weight_OI, QuantizedWeight) else weight_OI
        rows, self.inputs = weight.shape
        self.outputs, self.gated = rows // 2 if gated else rows, gated
        self.library = library
        if quantized is not None:
            storage = _BY_BITS[quantized.bits]
        elif storage is None:
            exact = library.fit_halves(weight.data_ptr(), weight.numel())
            storage = Storage.HALVES if exact else Storage.FLOATS
        self.storage = storage
        number = ACTIVATION_NUMBERS[activation]
        self._struct = LinearStruct(None, None, None, self.inputs, self.outputs, number)
        self._struct.gated, self._struct.storage = gated, storage
        self.address = ctypes.addressof(self._struct)
        self._allocate(has_bias=bias_O is not None)
        data, bias, threads = weight.data_ptr(), _pointer(bias_O), torch.get_num_threads()
        if quantized is None:
            library.pack(self.address, data, bias, threads)
        else:
            scales, minima = quantized.scales.contiguous(), quantized.minima
            minima = None if minima is None else minima.contiguous()
            places = (scales.data_ptr(), _pointer(minima), bias)
            library.pack_codes(self.address, data, *places, threads)

    def _allocate(self, *, has_bias: bool) -> None:
        panels = self.library.num_panels(self.outputs, self.gated)
        columns = panels * self.library.panel_width()
        self._panels = empty(-(-panels * self.library.panel_bytes(self.address) // 4))
        facts = columns * num_groups(self.inputs) * _FACTS.get(self.storage, 0)
        self._scales = empty(-(-facts // 2)) if self.storage in _FACTS else None
        self._bias = empty(columns) if has_bias else None
        self._struct.panels = self._panels.data_ptr()
        self._struct.scales, self._struct.bias = _pointer(self._scales), _pointer(self._bias)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights."""
        return self._panels.nbytes + (0 if self._scales is None else self._scales.nbytes)

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
