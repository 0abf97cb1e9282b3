"""Which back end "auto" takes, and the table of measured times that it reads."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from rose.kernels.attention import BACKENDS, choice, table
from rose.kernels.attention.base import AttentionBackend, AttentionSpec
from rose.kernels.registry import Registry, UnknownNameError
from rose.models.loader import load
from rose.serving import cli
from tests.tiny import save_decoder

CPU = torch.device("cpu")
SPEC = AttentionSpec(layer=0, num_heads=4, num_kv_heads=2, head_dim=64, scale=0.1, causal=True)


class FakeBackend(AttentionBackend):
    """Serves heads of 64 alone, and pages of at least `least_page` tokens."""

    least_page = 1
    prepared: "list[tuple[str, bool]]" = []  # noqa: RUF012 - shared by all on purpose

    def unsupported(self, spec, dtype, device):
        return [] if spec.head_dim == 64 else [f"head size {spec.head_dim}"]

    def unsupported_paged(self, spec, dtype, device, page_size):
        reasons = self.unsupported(spec, dtype, device)
        return reasons if page_size >= self.least_page else [*reasons, f"page of {page_size}"]

    def prepare(self, specs, dtype, *, paged):
        self.prepared.append((self.name, paged))

    def plan_ragged(self, layout):
        raise AssertionError

    def plan_paged(self, layout, pages):
        raise AssertionError


class First(FakeBackend):
    name = "flashinfer-fa3"
    least_page = 256


class Second(FakeBackend):
    name = "flash-attn-4"


class Other(FakeBackend):
    name = "another"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    FakeBackend.prepared.clear()


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch):
    targets = {kind.name: f"{__name__}:{kind.__name__}" for kind in (First, Second, Other)}
    registry = Registry("attention back end", {})
    monkeypatch.setattr(choice, "BACKENDS", registry)
    monkeypatch.setattr(table, "BACKENDS", registry)
    kinds = {kind.name: kind for kind in (First, Second, Other)}
    monkeypatch.setattr(registry, "load", lambda name: kinds[name])
    for name, target in targets.items():
        registry.register(name, target)
    monkeypatch.setattr(choice, "ORDER", ("flashinfer-fa3", "flash-attn-4"))


def choose(name: str = "auto", page_size: int | None = None, spec: AttentionSpec = SPEC) -> str:
    return choice.choose(name, [spec], torch.bfloat16, CPU, page_size).name


@pytest.mark.usefixtures("backends")
def test_auto_takes_the_first_of_the_order_that_can():
    assert choose() == "flashinfer-fa3"
    assert choose(page_size=16) == "flash-attn-4"
    assert choose(page_size=256) == "flashinfer-fa3"
    assert FakeBackend.prepared == [
        ("flashinfer-fa3", False),
        ("flash-attn-4", True),
        ("flashinfer-fa3", True),
    ]


@pytest.mark.usefixtures("backends")
def test_auto_prefers_what_was_measured_to_be_faster():
    ragged = table.shape_of(SPEC, CPU, paged=False)
    table.write({ragged: {"flashinfer-fa3": 2.0, "flash-attn-4": 1.5, "another": 1.0}})
    assert choose() == "another"
    assert choose(page_size=16) == "flash-attn-4"  # pages were not measured
    table.write({table.shape_of(SPEC, CPU, paged=True): {"another": 1.0}})
    assert choose(page_size=16) == "another"
    assert choose() == "another"


@pytest.mark.usefixtures("backends")
def test_a_measured_one_that_cannot_serve_is_passed_over():
    table.write({table.shape_of(SPEC, CPU, paged=True): {"flashinfer-fa3": 1.0, "another": 2.0}})
    assert choose(page_size=16) == "another"


@pytest.mark.usefixtures("backends")
def test_a_name_is_taken_at_its_word():
    assert choose("another") == "another"
    with pytest.raises(ValueError, match=r"flashinfer-fa3: page of 16$"):
        choose("flashinfer-fa3", page_size=16)
    odd = AttentionSpec(layer=0, num_heads=4, num_kv_heads=2, head_dim=8, scale=1, causal=True)
    with pytest.raises(
        ValueError, match=r"flashinfer-fa3: head size 8 \| flash-attn-4: head size 8"
    ):
        choose(spec=odd)


def test_unknown_names_list_the_known_ones():
    with pytest.raises(UnknownNameError, match="flashinfer-fa2"):
        choose("flashinfer")


def test_every_back_end_has_a_place_in_the_order():
    assert sorted(choice.ORDER) == sorted(BACKENDS)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"version": 1}',
        '{"version": 1, "entries": [{}]}',
        '{"version": 1, "entries": [{"device": "cpu"}]}',
        '{"version": 1, "entries": 3}',
    ],
)
def test_a_damaged_table_is_none(text: str, caplog: pytest.LogCaptureFixture):
    table.path().parent.mkdir(parents=True)
    table.path().write_text(text)
    assert table.read() == {}
    assert str(table.path()) in caplog.text


def test_a_table_of_another_version_is_none():
    table.path().parent.mkdir(parents=True)
    table.path().write_text(json.dumps({"version": 2, "entries": 7}))
    assert table.read() == {}
    assert table.ranking([SPEC], CPU, paged=False) == []


def test_the_table_is_written_by_the_command(tmp_path: Path):
    folder = save_decoder(tmp_path / "model", "qwen3")
    command = ["bench", "attention", str(folder), "--device", "cpu"]
    assert CliRunner().invoke(cli.app, [*command, "--dry-run"]).exit_code == 0
    assert table.read() == {}
    done = CliRunner().invoke(cli.app, command)
    assert done.exit_code == 0, done.output
    assert str(table.path()) in done.output.replace("\n", "")
    assert {shape.paged for shape in table.read()} == {True, False}
    specs = load(folder).backbone.attention_specs
    for paged in (True, False):
        assert table.ranking(specs, CPU, paged=paged)
    ragged = table.ranking(specs, CPU, paged=False)
    assert choice.choose("auto", specs, torch.float32, CPU).name == ragged[0]
