"""Activations that a checkpoint names as classes of torch.nn, on tensors and on scores."""

import pytest
import torch
from torch import nn

from rose.kernels.activation import activate
from rose.models.output import activate_scores
from rose.models.recipe_modules import TORCH_ACTIVATIONS, torch_activation


@pytest.mark.parametrize("kind", sorted(TORCH_ACTIVATIONS))
def test_activations_are_those_of_torch_s_modules(kind):
    name, x = TORCH_ACTIVATIONS[kind], torch.linspace(-50, 50, 4001, dtype=torch.float64)
    expected = getattr(nn, kind)().eval()(x)
    torch.testing.assert_close(activate(x, name), expected)
    torch.testing.assert_close(torch.from_numpy(activate_scores(x.numpy(), name)), expected)


@pytest.mark.parametrize("kind", ["PReLU", "Softmax", "GLU", "Threshold"])
def test_an_activation_with_weights_or_settings_is_refused_by_name(kind):
    name = f"torch.nn.modules.activation.{kind}"
    with pytest.raises(ValueError, match=rf"^2_Dense/config.json: '{name}' is not supported"):
        torch_activation(name, "2_Dense/config.json")
