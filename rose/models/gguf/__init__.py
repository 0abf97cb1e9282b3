"""GGUF files into Hugging Face folders: `convert_gguf`.

`reader` opens the file, `config` and `tensors` say what its metadata and tensors become,
`tokenizer` rebuilds the tokenizer, and `convert` writes the folder.
"""

from rose.models.errors import ConvertError
from rose.models.gguf.convert import convert_gguf

__all__ = ["ConvertError", "convert_gguf"]
