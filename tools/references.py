"""The reference libraries that ROSE is held to, offline, quiet and in float32."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import numpy as np
import torch
import transformers
from sentence_transformers import SentenceTransformer

transformers.utils.logging.disable_progress_bar()

Embed = Callable[[Sequence[str]], np.ndarray]


def sentence_transformer(path: Path, max_len: int) -> SentenceTransformer:
    """Load a folder with sentence-transformers, in float32, for texts of `max_len` tokens."""
    model = SentenceTransformer(
        str(path), device="cpu", model_kwargs={"dtype": torch.float32}, local_files_only=True
    )
    model.max_seq_length = max_len
    return model


def embed_by_sentence_transformers(path: Path, max_len: int) -> Embed:
    """Embed as the folder's own files say, but at length 1."""
    model = sentence_transformer(path, max_len)
    return lambda texts: np.asarray(model.encode(list(texts), normalize_embeddings=True))


def embed_by_transformers(path: Path, max_len: int) -> Embed:
    """Embed by a plain forward pass: the mean of the tokens, at length 1."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModel.from_pretrained(path, dtype=torch.float32).eval()

    @torch.inference_mode()
    def embed(texts: Sequence[str]) -> np.ndarray:
        batch = tokenizer(
            list(texts), padding=True, truncation=True, max_length=max_len, return_tensors="pt"
        )
        hidden_BTC = model(**batch).last_hidden_state
        mask_BT1 = batch["attention_mask"][..., None]
        mean_BC = (hidden_BTC * mask_BT1).sum(1) / mask_BT1.sum(1)
        return torch.nn.functional.normalize(mean_BC, dim=1).numpy()

    return embed


def causal_lm(path: Path) -> transformers.PreTrainedModel:
    """Load a causal language model in float32; its end tokens end nothing."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    return model.eval()


def linear_shapes(model: torch.nn.Module) -> list[tuple[int, int]]:
    """(inputs, outputs) of every linear layer that sees every token; a pooler does not."""
    return [
        (module.in_features, module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and "pooler" not in name
    ]
