"""Which quantization a model is served in, and checkpoints that are stored in one. Free of torch.

`rose convert --quantization` writes such a checkpoint: its config.json says so (`CONFIG_KEY`), and
of a matrix `name` that is rounded there are other tensors in its place: of 8 bits its codes and
scales, of 4 bits its nibbles, scales and minima. Version 1 had codes and scales of 4 bits too.
"""

from typing import TYPE_CHECKING, Any

from rose.models.config import CONFIG_FILE, Setting
from rose.models.errors import CheckpointError
from rose.models.weight_files import tensor_names

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from rose.models.plan import Plan

QUANTIZATIONS = ("int8", "int4")
CONFIG_KEY = "quantization_config"
COMPARED = "vectors_compared"  # in it: with those of the original, before it was written
METHOD = "rose"
VERSION = 2
# What follows a matrix's name.
CODES, NIBBLES, SCALES, MINIMA = "_codes", "_nibbles", "_scales", "_minima"
_OLD_INT4 = (
    "the weights are stored in the first format of int4, which had no minima: they are served as "
    "they are, but converting the original model once more loses less"
)
_NOT_COMPARED = (
    "nothing says that vectors of the stored weights were compared with the original's: `rose "
    "convert` does so for a model that does more than generate, by itself or by --task"
)


def choose_quantization(plan: "Plan", option: str | None) -> str | None:
    """Return the option's or the checkpoint's quantization, and note it among the settings.

    Raises:
        ValueError: the option is unknown, or not what the checkpoint is stored in.
    """
    stored = plan.quantization
    if option not in (None, *QUANTIZATIONS):
        known = ", ".join(QUANTIZATIONS)
        raise ValueError(f"--quantization: {option!r} is unknown. Known: {known}.")
    if None not in (option, stored) and option != stored:
        raise ValueError(f"--quantization: {option}, but the checkpoint is stored in {stored}")
    if stored is not None:
        plan.settings.append(Setting("quantization", stored, f"{CONFIG_FILE}: {CONFIG_KEY}"))
        names = tensor_names(plan.files) or ()
        if stored == "int4" and not any(name.endswith(NIBBLES) for name in names):
            plan.warnings.append(_OLD_INT4)
        if set(plan.tasks) != {"generate"} and not _is_compared(plan):
            plan.warnings.append(_NOT_COMPARED)
    elif option is not None:
        plan.settings.append(Setting("quantization", option, "option --quantization"))
    return option or stored


def _is_compared(plan: "Plan") -> bool:
    """Return whether vectors were compared before the weights were stored."""
    noted = (plan.core.json(CONFIG_FILE) or {}).get(CONFIG_KEY)
    return isinstance(noted, dict) and noted.get(COMPARED) is True


def check_quantization(
    quantization: str | None,
    tasks: "tuple[str, ...]",
    dtype: "torch.dtype",
    device: "torch.device",
) -> None:
    """Refuse what cannot be computed, before weights are loaded.

    Raises:
        ValueError: it needs another device or dtype, or the model does more than generate.
    """
    if quantization is None:
        return
    check_tasks(quantization, tasks)
    kind = str(dtype).removeprefix("torch.")
    if (device.type, kind) != ("cpu", "float32"):
        raise ValueError(
            f"--quantization: {quantization} is computed on a CPU from float32, not on "
            f"{device.type} from {kind}"
        )


def check_tasks(quantization: str | None, tasks: "tuple[str, ...]") -> None:
    """Refuse 4 bits for what they are too few for.

    Raises:
        ValueError: the model does more than generate.
    """
    if quantization == "int4" and set(tasks) != {"generate"}:
        other = ", ".join(task for task in tasks if task != "generate")
        raise ValueError(
            f"--quantization: int4 is for models that generate, and too coarse to {other}: use "
            "int8, or --task generate"
        )


def read_quantization(values: "Mapping[str, Any]", file: str) -> str | None:
    """Read the quantization that a checkpoint is stored in.

    Raises:
        CheckpointError: it is not one of ROSE's.
    """
    found = values.get(CONFIG_KEY)
    if not found:
        return None
    if not isinstance(found, dict):
        raise CheckpointError(f"{file}: {CONFIG_KEY}: an object is expected, found {found!r}")
    method = found.get("quant_method") or _unsaid_method(found)
    if method != METHOD:
        raise CheckpointError(
            f"{file}: {CONFIG_KEY}: checkpoints in {method} are not supported, only those that "
            "`rose convert --quantization` writes"
        )
    kind = found.get("kind")
    if kind not in QUANTIZATIONS:
        known = ", ".join(QUANTIZATIONS)
        raise CheckpointError(f"{file}: {CONFIG_KEY}: kind: {kind!r} is unknown. Known: {known}.")
    version = found.get("version", 1)
    if version not in range(1, VERSION + 1):
        raise CheckpointError(
            f"{file}: {CONFIG_KEY}: version: {version!r} is not known to this ROSE, which reads "
            f"versions up to {VERSION}"
        )
    return str(kind)


def _unsaid_method(found: "Mapping[str, Any]") -> str:
    """Return the method of a config without quant_method: the older bitsandbytes wrote none."""
    if any(key.startswith(("load_in_", "bnb_", "llm_int8_")) for key in found):
        return "bitsandbytes"
    return f"an unknown quantization (no quant_method, but {', '.join(sorted(found))})"


def plain_shape(name: str, shape: "tuple[int, ...]", dtype: str) -> "tuple[int, ...]":
    """Return the shape that a stored tensor has once it is read: two codes of 4 bits are a byte."""
    if dtype == "U8" and name.endswith((CODES, NIBBLES)):
        return (*shape[:-1], 2 * shape[-1])
    return shape
