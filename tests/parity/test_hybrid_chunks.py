"""Where states are kept changes no number: a text is cut between chunks of the delta rule."""

import numpy as np
import pytest

from rose.kernels.delta_rule import CHUNK
from rose.models.loader import load
from rose.runtime.options import SamplingParams
from rose.runtime.worker import DeviceWorker
from tests import tiny
from tests.generation_rig import Rig

PROMPT = np.random.default_rng(11).integers(3, 70, 230).tolist()
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=5)


@pytest.fixture(scope="module")
def worker():
    worker = DeviceWorker()
    yield worker
    worker.close()


@pytest.fixture(scope="module", params=["qwen3_next", "qwen3_5_text"])
def model(request, tmp_path_factory):
    folder = tiny.save_decoder(tmp_path_factory.mktemp(request.param), request.param)
    return load(folder, dtype="float32").lm


@pytest.fixture(scope="module")
def whole(model, worker):
    """The prompt alone, in one piece: nothing is kept."""
    (output,) = Rig(model, worker, caching=False, model_len=256).run([(PROMPT, PARAMS)])
    return output


def rig(model, worker, **squeeze):
    return Rig(model, worker, snapshots=9, grid=CHUNK, model_len=256, **squeeze)


def test_a_text_that_is_cut_to_keep_states(model, worker, whole):
    served = rig(model, worker)
    (cold,), (hit,) = (served.run([(PROMPT, PARAMS)]) for _ in range(2))
    assert (cold.cached_tokens, hit.cached_tokens) == (0, 3 * CHUNK)
    assert cold.logprobs == whole.logprobs, "not a bit"
    assert hit.tokens == whole.tokens
    for entry, wanted in zip(hit.logprobs, whole.logprobs, strict=True):
        assert entry.top_logprobs == pytest.approx(wanted.top_logprobs, abs=1e-5)


def test_a_neighbour_that_waits_has_no_say_in_the_chunks(model, worker, whole):
    """It parts after 75 tokens, so that a state is kept before that."""
    served = rig(model, worker, seqs=1)
    served.add("first", PROMPT, PARAMS)
    served.add("second", PROMPT[:75] + [9] * 80, PARAMS)
    outputs = served.drain()
    assert outputs["first"].logprobs == whole.logprobs, "not a bit"
    assert outputs["second"].cached_tokens == CHUNK


@pytest.mark.parametrize("step_tokens", [100, 256])
def test_a_prompt_in_parts_beside_one_that_decodes(model, worker, whole, step_tokens):
    served = rig(model, worker, step_tokens=step_tokens, caching=False)
    served.add("short", PROMPT[:5], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    served.advance()
    served.add("long", PROMPT, PARAMS)
    found = served.drain()["long"]
    assert found.tokens == whole.tokens
    for entry, wanted in zip(found.logprobs, whole.logprobs, strict=True):
        assert entry.top_logprobs == pytest.approx(wanted.top_logprobs, abs=1e-5)
