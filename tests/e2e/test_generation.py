"""Chat and completions of a real model, beside an embedder, through the stock client."""

import asyncio
import contextlib
import json
import re
from pathlib import Path

import httpx
import openai
import pytest

from tests.e2e.conftest import Server

pytestmark = pytest.mark.golden

MODEL = "SmolLM2-135M-Instruct"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_chat_whole_and_streamed(client):
    whole = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=32
    )
    choice = whole.choices[0]
    assert choice.message.role == "assistant"
    assert "Paris" in choice.message.content
    assert choice.finish_reason == "stop"
    usage = whole.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            temperature=0,
            max_tokens=32,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert (
        "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        == choice.message.content
    )
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert [reason for reason in reasons if reason] == ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == usage.completion_tokens


def test_the_prompt_is_the_chat_template_token_for_token(client, smollm):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm)
    messages = [{"role": "system", "content": "Be brief."}, *QUESTION]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
    ids = expected["input_ids"] if hasattr(expected, "keys") else expected
    answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1)
    assert answer.usage.prompt_tokens == len(ids)


def test_a_seed_gives_the_same_text_alone_and_in_company(server):
    body = {
        "model": MODEL,
        "prompt": "Once upon a time",
        "max_tokens": 24,
        "seed": 0,
        "temperature": 1,
    }

    async def scenario():
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:

            async def ask(**fields):
                answer = await http.post("/v1/completions", json={**body, **fields})
                return answer.json()["choices"][0]["text"]

            alone = await ask()
            crowd = [ask(seed=seed, prompt=f"Number {seed}:") for seed in range(1, 12)]
            return [alone, (await asyncio.gather(ask(), *crowd))[0], await ask(seed=1)]

    alone, in_company, other = asyncio.run(scenario())
    assert alone == in_company != other


def test_json_schema_holds_at_temperature_1(client):
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    }
    for seed in range(4):
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Describe a person."}],
            response_format={"type": "json_schema", "json_schema": {"name": "p", "schema": schema}},
            temperature=1,
            seed=seed,
            max_tokens=120,
        )
        person = json.loads(answer.choices[0].message.content)
        assert set(person) == {"name", "age", "tags"}
        assert isinstance(person["name"], str)
        assert 0 <= person["age"] <= 150
        assert set(person["tags"]) <= {"red", "green"}


def test_log_probabilities_of_a_prompt_are_those_of_the_reference(client, smollm):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm)
    model = AutoModelForCausalLM.from_pretrained(smollm, dtype=torch.float32)
    ids = tokenizer("The sky is blue", return_tensors="pt").input_ids
    with torch.no_grad():
        logits = model(ids).logits[0].log_softmax(-1)
    expected = [logits[i, token].item() for i, token in enumerate(ids[0, 1:])]
    answer = client.completions.create(
        model=MODEL, prompt="The sky is blue", echo=True, logprobs=1, max_tokens=1, temperature=0
    )
    found = answer.choices[0].logprobs
    assert found.token_logprobs[0] is None
    assert found.token_logprobs[1:4] == pytest.approx(expected, abs=1e-3)
    assert found.text_offset == [0, 3, 7, 10, 15]


def test_an_embedder_and_an_llm_refuse_each_others_work(server):
    cases = [
        ("/v1/embeddings", {"model": MODEL, "input": "a"}),
        ("/v1/chat/completions", {"model": "all-MiniLM-L6-v2", "messages": QUESTION}),
        ("/v1/completions", {"model": "all-MiniLM-L6-v2", "prompt": "a"}),
    ]
    for path, body in cases:
        answer = httpx.post(server.url + path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")


def resident_bytes(pid):
    text = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", text)[1]) * 1024


@contextlib.contextmanager
def smollm_for(task, smollm, log):
    """SmolLM2 served for a task, with little memory for anything but its weights."""
    options = ("--kv-cache-memory", "64MiB", "--max-batch-tokens", "256")
    server = Server(smollm, "--task", task, *options, log=log)
    try:
        server.wait_ready()
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            chat = client.chat.completions.create(
                model=MODEL, messages=QUESTION, temperature=0, max_tokens=16
            )
            assert "Paris" in chat.choices[0].message.content
            yield server, client
    finally:
        server.stop()


def test_one_copy_of_the_weights_generates_and_embeds(smollm, tmp_path):
    weights = 4 * 134_515_008  # float32 parameters
    with smollm_for("generate", smollm, tmp_path / "one") as (server, _):
        alone = resident_bytes(server.children()[0])
    with smollm_for("generate,embed", smollm, tmp_path / "both") as (server, client):
        vector = client.embeddings.create(model=MODEL, input="a red kite").data[0].embedding
        assert len(vector) == 576
        both = resident_bytes(server.children()[0])
    assert both - alone < 0.2 * weights
