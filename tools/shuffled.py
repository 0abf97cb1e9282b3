"""A language model with its channels in another order, which computes the same.

Checkpoints that come from files of 4 bits lie on grids of 16 steps, group by group of neighbouring
inputs. Rounding them to 4 bits again says nothing about other checkpoints. Once channels have
changed places no group lies on a grid, and the weights are like those that were never rounded.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FILE = "model.safetensors"
_READERS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
_WRITERS = ("o_proj", "down_proj", "norm")  # of the hidden state, or its norms


def shuffle_channels(source: Path, out: Path, seed: int = 0) -> Path:
    """Write a Llama once more, with hidden, MLP and value channels in another order.

    Raises:
        ValueError: the model type is another one.
    """
    config = json.loads((source / "config.json").read_text())
    if config["model_type"] != "llama":
        raise ValueError(f"model_type {config['model_type']!r}: llama is expected")
    draw = torch.Generator().manual_seed(seed)
    tensors = load_file(source / FILE)
    hidden = torch.randperm(config["hidden_size"], generator=draw)
    for name, tensor in tensors.items():
        if any(part in name for part in _WRITERS):
            tensors[name] = tensor[hidden]
        elif any(part in name for part in _READERS):
            tensors[name] = tensor[:, hidden]
    for layer in range(config["num_hidden_layers"]):
        _shuffle_layer(tensors, f"model.layers.{layer}", config, draw)
    shutil.copytree(source, out, ignore=shutil.ignore_patterns(FILE))
    plain = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(plain, out / FILE, metadata={"format": "pt"})
    return out


def _shuffle_layer(
    tensors: dict[str, Tensor], layer: str, config: dict[str, int], draw: torch.Generator
) -> None:
    def change(name: str, make: Callable[[Tensor], Tensor]) -> None:
        tensors[f"{layer}.{name}.weight"] = make(tensors[f"{layer}.{name}.weight"])

    inner = torch.randperm(config["intermediate_size"], generator=draw)
    for name in ("mlp.gate_proj", "mlp.up_proj"):
        change(name, lambda weight: weight[inner])
    change("mlp.down_proj", lambda weight: weight[:, inner])
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    order = torch.randperm(width, generator=draw)
    change("self_attn.v_proj", lambda weight: _by_heads(weight, width, order))
    change("self_attn.o_proj", lambda weight: _by_heads(weight.T, width, order).T)


def _by_heads(rows: Tensor, width: int, order: Tensor) -> Tensor:
    """Put the rows of every head in one order."""
    return rows.unflatten(0, (-1, width))[:, order].flatten(0, 1)
