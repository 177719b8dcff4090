"""A layer by the fast Fourier transform: torch has none of these in half precision."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from backpack_core import View
from backpack_core.testing import RuleCase, check_case
from backpack_products import ParametricRule


class SpectralConv(nn.Module):
    """The lowest modes of ``[N, C, L]`` are mixed by a matrix each."""

    def __init__(self, channels: int, modes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, modes, channels, channels) / channels)

    def forward(self, x: Tensor) -> Tensor:
        low = torch.fft.rfft(x)[..., : self.weight.shape[1]]
        mixed = torch.einsum("nik,kio->nok", low, torch.complex(self.weight[0], self.weight[1]))
        return torch.fft.irfft(mixed, n=x.shape[-1])


def transposed_irfft(mat: Tensor, modes: int) -> Tensor:
    """For the lowest modes: all but the constant one, and the highest, count twice."""
    length = mat.shape[-1]
    factor = mat.new_full((modes,), 2.0 / length)
    factor[0] = 1.0 / length
    if 2 * (modes - 1) == length:
        factor[-1] = 1.0 / length
    return torch.fft.rfft(mat)[..., :modes] * factor


class SpectralConvRule(ParametricRule):
    module_types = (SpectralConv,)
    params = ("weight",)
    linear_in_params = ("weight",)
    hessian_is_zero = True
    jacobian_is_constant = True

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        weight = torch.complex(*view.parameter("weight"))
        modes, length = len(weight), mat.shape[-1]
        back = torch.einsum("vnok,kio->vnik", transposed_irfft(mat, modes), weight.conj())
        whole = torch.nn.functional.pad(back, (0, length - modes))
        return torch.fft.ifft(whole).real * length

    def _param_jac_t_mat_prod(self, view: View, name: str, mat: Tensor) -> Tensor:
        modes = view.parameter("weight").shape[1]
        low = torch.fft.rfft(view.input)[..., :modes].conj()
        found = torch.einsum("vnok,nik->vnkio", transposed_irfft(mat, modes), low)
        return torch.stack([found.real, found.imag], 2)


def test_spectral_convolution() -> None:
    for modes, length in ((2, 5), (3, 4)):
        make = lambda modes=modes: SpectralConv(2, modes)  # noqa: E731
        draw = lambda n, length=length: torch.randn(n, 2, length)  # noqa: E731
        results = check_case(RuleCase(make, draw, rule=SpectralConvRule))
        assert [result for result in results if not result.ok] == []
        names = {result.check for result in results}
        assert "float32" in names
        assert "bfloat16" not in names  # torch has no such transform


def test_others_are_checked_in_half_precision() -> None:
    results = check_case(RuleCase(lambda: nn.Linear(4, 2), lambda n: torch.randn(n, 4)))
    assert "bfloat16" in {result.check for result in results}
