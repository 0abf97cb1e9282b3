"""`rose chat` in a terminal, and `rose convert`."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest
from transformers import AutoModelForCausalLM

from rose import Engine, SamplingParams
from rose.serving.cli import main
from rose.serving.commands import chat as chat_command
from tests.tiny import edit_json, edit_tensors, save_decoder
from tests.unit.gguf_files import tiny_model, write_gguf

TEMPLATE = (
    "{% for m in messages %}{% if 'forbidden' in m.content %}{{ raise_exception('not that') }}"
    "{% endif %}{{ m.role }} {{ m.content }}.{% endfor %}"
    "{% if add_generation_prompt %}A {% endif %}"
)
ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|[=>])")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = save_decoder(
        tmp_path_factory.mktemp("models") / "tiny", "llama", seed=7, max_position_embeddings=4096
    )
    edit_json(path / "tokenizer_config.json", chat_template=TEMPLATE)
    edit_tensors(path, never_end)
    return path


def never_end(tensors):
    tensors["lm_head.weight"][0] = 0  # the end token; some other one always has a larger logit
    return tensors


@pytest.fixture(scope="module")
def engine(model):
    with Engine(model, max_num_seqs=1, max_model_len=4096) as engine:
        yield engine


class Terminal:
    """A process at the other end of a pseudo-terminal."""

    def __init__(self, *arguments):
        self.master, follower = pty.openpty()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm", "COLUMNS": "200"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rose", *map(str, arguments)],
            stdin=follower,
            stdout=follower,
            stderr=follower,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: claim_terminal(follower),
        )
        os.close(follower)
        self.text = ""

    def read_until(self, words, timeout=60):
        """Return what came up to `words`, which are taken too."""
        deadline = time.monotonic() + timeout
        while words not in self.text:
            left = deadline - time.monotonic()
            assert left > 0, f"{words!r} did not come; there is {self.text!r}"
            if select.select([self.master], [], [], left)[0]:
                self.text += self.read()
        found, _, self.text = self.text.partition(words)
        return found

    def read(self):
        try:
            raw = os.read(self.master, 1 << 16).decode(errors="replace")
        except OSError:  # the other end is closed
            raise AssertionError(f"the process has ended; there is {self.text!r}") from None
        return ESCAPES.sub("", raw).replace("\r\n", "\n").replace("\r", "")

    def type(self, text):
        os.write(self.master, text.encode())

    def ask(self, question):
        """Type a line at the prompt, which has come, and return the answer."""
        self.type(f"{question}\n")
        self.read_until(f"{question}\n")
        return self.read_until("\n> ")

    def end(self, timeout=30):
        """Wait for the end of the process; returns its exit code and the last words."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if select.select([self.master], [], [], 0.1)[0]:
                try:
                    self.text += self.read()
                except AssertionError:
                    break
        return self.process.wait(timeout), self.text


def claim_terminal(descriptor):
    """Make the terminal the one that Ctrl-C comes from."""
    import fcntl
    import termios

    fcntl.ioctl(descriptor, termios.TIOCSCTTY, 0)


@pytest.fixture
def terminal(model):
    started = []

    def start(*arguments):
        started.append(Terminal("chat", model, *arguments))
        assert f"loading {model} ..." in started[-1].read_until("\n> ")
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()
        os.close(one.master)


def continuation(engine, prompt, max_tokens):
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    return engine.generate(engine._tokenizer.encode([prompt])[0], params)[0].text


def test_a_conversation(terminal, engine):
    session = terminal(
        "--temperature", 0, "--max-tokens", 8, "--system", "hi", "--max-model-len", 256
    )
    first = continuation(engine, "system hi.user Hello.A ", 8)
    assert session.ask("Hello") == first
    history = f"system hi.user Hello.assistant {first}."
    assert session.ask("more") == continuation(engine, f"{history}user more.A ", 8)

    session.type("/reset\n")
    session.read_until("> ")
    assert session.ask("Hello") == first

    session.type("dropped")
    session.read_until("dropped")
    time.sleep(0.1)  # readline misses a signal between its echo and its wait for a key
    session.type("\x03")
    session.read_until("> ")
    assert "error: the chat template fails: not that" in session.ask("forbidden")
    assert "error: the prompt has" in session.ask("x" * 300)
    assert session.ask("more") == continuation(engine, f"{history}user more.A ", 8)

    session.type("/exit\n")
    code, text = session.end()
    assert code == 0
    assert "Traceback" not in text


def test_ctrl_c_ends_an_answer_and_what_has_come_counts(terminal, engine):
    session = terminal("--temperature", 0, "--max-tokens", 4000)
    session.type("kites\n")
    session.read_until("kites\n")
    while len(session.text) < 30:
        session.text += session.read()
    session.type("\x03")
    answer = session.read_until(" (stopped)\n").replace("^C", "")
    session.read_until("> ")
    assert 30 <= len(answer) < 3900
    assert continuation(engine, "user kites.A ", len(answer) + 20).startswith(answer)

    session.type("and\n")
    session.read_until("and\n")
    while len(session.text) < 8:
        session.text += session.read()
    session.type("\x03")
    second = session.read_until(" (stopped)\n").replace("^C", "")
    session.read_until("> ")
    prompt = f"user kites.assistant {answer}.user and.A "
    assert continuation(engine, prompt, 20).startswith(second[:8])

    session.type("\x04")  # Ctrl-D
    code, text = session.end()
    assert code == 0
    assert "Traceback" not in text


def rose(*arguments):
    """Run the command line in this process and return its exit code."""
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    return caught.value.code


def test_questions_may_come_from_a_pipe(model, engine, monkeypatch, capsys):
    lines = iter(["", "Hello", "/exit"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    assert rose("chat", model, "--temperature", 0, "--max-tokens", 8) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == f"{model.name} - {chat_command.HELP}"
    assert out[1] == continuation(engine, "user Hello.A ", 8)


def test_a_model_without_a_template_says_so_at_once(tmp_path, capsys):
    path = save_decoder(tmp_path / "llm", "llama")
    capsys.readouterr()
    assert rose("chat", path) == 1
    assert capsys.readouterr().err == "error: the model has no chat template\n"


# rose convert


def test_convert_makes_a_folder_that_answers_as_the_original(tmp_path, capsys):
    source = write_gguf(tmp_path / "tiny.gguf", "llama", tiny_model("llama"))
    capsys.readouterr()
    assert rose("convert", source, tmp_path / "out", "--dtype", "float32") == 0
    assert capsys.readouterr() == (f"wrote {tmp_path / 'out'}\n", "")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = model.dummy_inputs["input_ids"][:1]
    expected = model.generate(
        ids, attention_mask=ids.new_ones(ids.shape), do_sample=False, max_new_tokens=8
    )
    with Engine(tmp_path / "out", max_num_seqs=1) as engine:
        params = SamplingParams(temperature=0, max_tokens=8)
        (done,) = engine.generate(ids[0].tolist(), params)
    assert done.token_ids == expected[0, ids.shape[1] :].tolist()


def test_convert_says_what_is_wrong_in_one_line(tmp_path, capsys, monkeypatch):
    def error(*arguments):
        assert rose("convert", *arguments) == 1
        out, text = capsys.readouterr()
        assert out == ""
        assert text.count("\n") == 1
        return text.removeprefix("error: ").removesuffix("\n")

    good = write_gguf(tmp_path / "good.gguf", "llama", tiny_model("llama"))
    text, part = tmp_path / "text.gguf", tmp_path / "part.gguf"
    text.write_text("hello")
    part.write_bytes(good.read_bytes()[: good.stat().st_size // 2])
    other = write_gguf(tmp_path / "other.gguf", "mamba")
    (tmp_path / "taken").mkdir()
    out = tmp_path / "out"
    capsys.readouterr()

    assert error(tmp_path / "no.gguf", out) == f"{tmp_path / 'no.gguf'}: there is no such file"
    assert error(text, out).startswith(f"{text}: is not a GGUF file")
    assert str(part) in error(part, out)
    assert "mamba" in error(other, out)
    assert error(good, tmp_path / "taken") == f"{tmp_path / 'taken'}: exists already"
    assert error(good, out, "--dtype", "int8").startswith("dtype 'int8' is not one of")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "rose-engine[gguf]" in error(good, out)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        ["good.gguf", "other.gguf", "part.gguf", "taken", "text.gguf"]
    )


def test_convert_leaves_nothing_behind_at_ctrl_c(tmp_path, monkeypatch, capsys):
    source = write_gguf(tmp_path / "tiny.gguf", "llama", tiny_model("llama"))
    monkeypatch.setattr(
        "rose.models.gguf.convert._write_tensor", lambda *_: signal.raise_signal(signal.SIGINT)
    )
    assert rose("convert", source, tmp_path / "out") == 130
    assert [p.name for p in tmp_path.iterdir()] == ["tiny.gguf"]
