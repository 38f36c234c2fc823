"""Slopes of Student's t by hand, against central differences."""

import pytest
import torch
from gpytorch.likelihoods import StudentTLikelihood
from torch import Tensor, nn

from winnowgp.models.quadrature import student_expectation


class Expectation(nn.Module):
    def __init__(self, noise: float, Y: Tensor) -> None:
        super().__init__()
        self.likelihood, self.Y = StudentTLikelihood().double(), Y
        self.likelihood.noise = Y.new_tensor(noise)

    def forward(self, mean: Tensor, variance: Tensor) -> Tensor:
        return student_expectation(self.likelihood, self.Y, mean, variance)


@pytest.mark.parametrize("noise", [1e-4, 0.7, 50.0])
def test_slopes_of_students_t_are_those_of_central_differences(
    noise: float, generator: torch.Generator
) -> None:
    Y = torch.randn(6, 2, generator=generator, dtype=torch.float64)
    mean, variance = torch.randn(2, 3, 6, 2, generator=generator, dtype=torch.float64)
    model = Expectation(noise, Y)
    names = [name for name, _ in model.named_parameters()]
    parameters = [parameter.detach().clone() for parameter in model.parameters()]

    def nats(mean: Tensor, variance: Tensor, *values: Tensor) -> Tensor:
        named = dict(zip(names, values, strict=True))
        return torch.func.functional_call(model, named, (mean, variance))

    inputs = [part.requires_grad_() for part in (mean, variance.exp(), *parameters)]
    assert len(names) == 2
    assert torch.autograd.gradcheck(nats, inputs)
