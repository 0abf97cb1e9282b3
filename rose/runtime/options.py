"""Options of a request, as the wire carries them and the runtimes read them. Free of torch."""

from typing import Literal, get_args

import msgspec

OutputDtype = Literal["float32", "float16", "int8", "uint8", "binary", "ubinary"]
OUTPUT_DTYPES: tuple[str, ...] = get_args(OutputDtype)

Priority = Literal["online", "bulk"]


class EmbedOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the vectors of one request are finished: cut, normalise, quantise, in this order.

    `dimensions` None is the full width; `normalize` None is what the checkpoint says.
    """

    dimensions: int | None = None
    normalize: bool | None = None
    output_dtype: OutputDtype = "float32"
