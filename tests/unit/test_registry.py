import pytest

from rose.kernels.activation import ACTIVATIONS
from rose.kernels.attention import BACKENDS
from rose.kernels.attention.base import AttentionBackend
from rose.kernels.registry import Registry, UnknownNameError


def make_registry() -> Registry[object]:
    return Registry(
        "shape", {"circle": "math:pi", "square": "math:sqrt", "lost": "no_such_module:x"}
    )


def test_loads_what_a_name_stands_for():
    import math

    assert make_registry().load("square") is math.sqrt


def test_does_not_import_before_it_is_asked():
    registry = make_registry()
    assert "lost" in registry
    with pytest.raises(ModuleNotFoundError):
        registry.load("lost")


def test_iterates_sorted():
    assert list(make_registry()) == ["circle", "lost", "square"]


def test_unknown_name_lists_names_and_the_nearest():
    with pytest.raises(UnknownNameError) as error:
        make_registry().load("sqare")
    assert str(error.value) == (
        "unknown shape 'sqare'. Did you mean 'square'? Known: circle, lost, square."
    )


def test_unknown_name_without_a_near_one():
    with pytest.raises(UnknownNameError, match=r"^unknown shape 'zzz'\. Known: circle"):
        make_registry().load("zzz")


def test_unknown_name_is_a_value_error():
    with pytest.raises(ValueError, match="unknown shape"):
        make_registry().load("")


def test_registers_new_names_once():
    registry = make_registry()
    registry.register("e", "math:e")
    assert registry.load("e") == pytest.approx(2.718281828)
    with pytest.raises(ValueError, match="'e' is registered already: math:e"):
        registry.register("e", "math:pi")


@pytest.mark.parametrize("target", ["math.pi", "math:pi:x", ""])
def test_refuses_targets_of_another_form(target: str):
    with pytest.raises(ValueError, match="not of the form module:attribute"):
        make_registry().register("new", target)


def test_every_back_end_is_one():
    for name in BACKENDS:
        backend = BACKENDS.load(name)
        assert issubclass(backend, AttentionBackend)
        assert backend.name == name


def test_back_end_errors_name_the_nearest():
    with pytest.raises(UnknownNameError, match=r"unknown attention back end.*torch_sdpa"):
        BACKENDS.load("torch-sdpa")


def test_activations_load():
    assert all(callable(ACTIVATIONS.load(name)) for name in ACTIVATIONS)
