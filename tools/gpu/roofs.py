"""The machine's own limits: the rate of matrix products, and of copies in memory."""

import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from tools.gpu.stage import Context

FILE = "limits-of-the-machine.json"


@dataclass(frozen=True)
class Roofs:
    """Operations a second in the models' dtype, and bytes a second, read and written."""

    flops: float
    bytes: float


def run(context: Context) -> None:
    """Measure both and leave them for the other stages."""
    size, copied = (256, 1 << 20) if context.dry else (8192, 4 << 30)
    dtype = getattr(torch, context.dtype)
    a, b = (torch.randn(size, size, device=context.device, dtype=dtype) for _ in range(2))
    product = statistics.median(context.milliseconds(lambda: a @ b, 10)) / 1e3
    source = torch.empty(copied, dtype=torch.uint8, device=context.device)
    target = torch.empty_like(source)
    copy = statistics.median(context.milliseconds(lambda: target.copy_(source), 10)) / 1e3
    roofs = Roofs(2 * size**3 / product, 2 * copied / copy)
    (context.folder / FILE).write_text(json.dumps(asdict(roofs)))
    rows = [
        [f"{context.dtype} matrix product of {size}", f"{roofs.flops / 1e12:.1f} TFLOP/s"],
        [f"copy of {copied >> 20} MiB, bytes read and written", f"{roofs.bytes / 1e9:.0f} GB/s"],
    ]
    context.report.table("Limits of the machine", ["what", "rate"], rows)


def read(folder: Path) -> Roofs:
    """Return what this stage measured."""
    return Roofs(**json.loads((folder / FILE).read_text()))
