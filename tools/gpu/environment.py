"""What the machine has: versions, the device, and the checkpoints of the other stages."""

import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from tools.gpu import checkpoints
from tools.gpu.stage import Context

PACKAGES = (
    "torch",
    "triton",
    "flashinfer-python",
    "flash-attn",
    "flash-attn-4",
    "transformers",
    "sentence-transformers",
    "numpy",
    "msgspec",
    "pyzmq",
)


def run(context: Context) -> None:
    """Note versions and the device; make the checkpoints."""
    rows = [["python", platform.python_version()], ["CUDA of torch", torch.version.cuda or "none"]]
    rows += [[name, _version(name)] for name in PACKAGES]
    if not context.dry:
        facts = torch.cuda.get_device_properties(0)
        rows.append(["device", f"{facts.name}, {facts.multi_processor_count} SMs"])
        rows.append(["memory", f"{facts.total_memory / 2**30:.0f} GiB"])
    context.report.table("Machine", ["what", "found"], rows)
    checkpoints.make(context.folder, dry=context.dry)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
