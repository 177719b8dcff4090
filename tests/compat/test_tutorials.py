"""What tutorials show: hooks that compact, chunks of the output, layers of one's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack import backpack, extend, extensions
from backpack.custom_module.slicing import Slicing
from backpack.extensions.firstorder.base import FirstOrderModuleExtension
from backpack.extensions.module_extension import ModuleExtension
from backpack.hessianfree.ggnvp import ggn_vector_product
from backpack.utils.convert_parameters import vector_to_parameter_list
from tests.oracle import assert_close

N, CLASSES, PIXELS = 6, 3, 5


def classifier() -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    model = extend(nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, CLASSES)))
    lossfunc = extend(nn.CrossEntropyLoss())
    return model, lossfunc, torch.randn(N, 1, PIXELS), torch.arange(N) % CLASSES


def test_a_hook_compacts_a_quantity() -> None:
    model, lossfunc, x, y = classifier()
    with backpack(extensions.DiagHessian()):
        lossfunc(model(x), y).backward()
    expected = torch.stack([p.diag_h.sum() for p in model.parameters()]).sum()  # type: ignore[attr-defined]
    found = []

    def add_up(module: nn.Module) -> None:
        for parameter in module.parameters():
            found.append(parameter.diag_h.sum())  # type: ignore[attr-defined]
            del parameter.diag_h  # type: ignore[attr-defined]

    with backpack(extensions.DiagHessian(), extension_hook=add_up):
        lossfunc(model(x), y).backward()
    assert len(found) == 2
    assert_close(torch.stack(found).sum(), expected)
    assert not any(hasattr(p, "diag_h") for p in model.parameters())


@pytest.mark.parametrize("chunks", [1, 3, 6])
def test_the_output_in_chunks(chunks: int) -> None:
    """Each part of the reconstruction has a loss of its own, in one graph."""
    model = extend(
        nn.Sequential(
            nn.Conv2d(1, 2, 2), nn.Sigmoid(), nn.ConvTranspose2d(2, 2, (1, 2)), nn.Flatten()
        )
    )
    lossfunc, x = extend(nn.MSELoss()), torch.rand(4, 1, 3, 3)
    target = torch.rand(4, 12)
    with backpack(extensions.DiagGGNExact()):
        lossfunc(model(x), target).backward()
    expected = [p.diag_ggn_exact.clone() for p in model.parameters()]
    totals = [torch.zeros_like(p) for p in model.parameters()]
    output, size = model(x), 12 // chunks
    for start in range(0, 12, size):
        window = (slice(None), slice(start, start + size))
        loss = lossfunc(extend(Slicing(window))(output), target[window])
        with backpack(extensions.DiagGGNExact(), retain_graph=True):
            loss.backward(retain_graph=True)
        for total, parameter in zip(totals, model.parameters(), strict=True):
            total += parameter.diag_ggn_exact / chunks
    for total, reference in zip(totals, expected, strict=True):
        assert_close(total, reference)


# Extension: shape of the field in front of that of the parameter; of factors, all of them.
FIELDS: list[tuple[Any, str, Any]] = [
    (extensions.BatchGrad(), "grad_batch", (N,)),
    (extensions.SumGradSquared(), "sum_grad_squared", ()),
    (extensions.Variance(), "variance", ()),
    (extensions.DiagGGNExact(), "diag_ggn_exact", ()),
    (extensions.DiagGGNMC(mc_samples=2), "diag_ggn_mc", ()),
    (extensions.BatchDiagGGNExact(), "diag_ggn_exact_batch", (N,)),
    (extensions.BatchDiagGGNMC(mc_samples=2), "diag_ggn_mc_batch", (N,)),
    (extensions.SqrtGGNExact(), "sqrt_ggn_exact", (CLASSES, N)),
    (extensions.SqrtGGNMC(mc_samples=2), "sqrt_ggn_mc", (2, N)),
    (extensions.DiagHessian(), "diag_h", ()),
    (extensions.BatchDiagHessian(), "diag_h_batch", (N,)),
    (extensions.KFAC(mc_samples=1), "kfac", "factors"),
    (extensions.KFLR(), "kflr", "factors"),
    (extensions.KFRA(), "kfra", "factors"),
    (extensions.HMP(), "hmp", "product"),
    (extensions.GGNMP(), "ggnmp", "product"),
    (extensions.PCHMP(savefield="pchmp_clip", modify="clip"), "pchmp_clip", "product"),
    (extensions.PCHMP(savefield="pchmp_abs", modify="abs"), "pchmp_abs", "product"),
]


def test_every_quantity_at_once() -> None:
    model, lossfunc, x, y = classifier()
    loss = lossfunc(model(x), y)
    with backpack(*(extension for extension, _, _ in FIELDS), extensions.BatchL2Grad()):
        loss.backward()
    for parameter, factors in zip(
        model.parameters(),
        ([(CLASSES, CLASSES), (PIXELS, PIXELS)], [(CLASSES, CLASSES)]),
        strict=True,
    ):
        assert parameter.batch_l2.shape == (N,)  # type: ignore[attr-defined]
        for _, name, lead in FIELDS:
            value = getattr(parameter, name)
            if lead == "factors":
                assert [factor.shape for factor in value] == factors
            elif lead == "product":
                vectors = torch.rand(4, *parameter.shape)
                assert value(vectors).shape == vectors.shape
            else:
                assert value.shape == (*lead, *parameter.shape)


class Scale(nn.Module):
    """Multiplies by a number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class ScaleGrad(FirstOrderModuleExtension):
    def __init__(self) -> None:
        super().__init__(params=["weight"])

    def weight(self, ext: Any, module: Any, g_inp: Any, g_out: Any, bpQuantities: None) -> Tensor:
        assert ext.get_subsampling() is None
        assert module.output.shape == module.input0.shape == g_out[0].shape
        products: Tensor = (g_out[0] * module.input0).sum(1, keepdim=True)
        return products


class ScaleDiagGGN(ModuleExtension):
    def __init__(self) -> None:
        super().__init__(params=["weight"])

    def backpropagate(
        self, ext: Any, module: Any, g_inp: Any, g_out: Any, bpQuantities: Any
    ) -> Any:
        assert bpQuantities.shape[1:] == module.output.shape
        return bpQuantities * module.weight

    def weight(self, ext: Any, module: Any, g_inp: Any, g_out: Any, bpQuantities: Tensor) -> Tensor:
        products = (bpQuantities * module.input0).sum(2)  # [V, N]
        return products.square().sum().unsqueeze(0)


def scaled() -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    model = nn.Sequential(Scale(), Scale())
    return model, nn.CrossEntropyLoss(reduction="sum"), torch.randn(N, 4), torch.arange(N) % 2


def test_individual_gradients_of_a_layer_of_one_s_own() -> None:
    model, lossfunc, x, y = scaled()
    extension = extensions.BatchGrad()
    extension.set_module_extension(Scale, ScaleGrad())
    parameters = list(model.parameters())
    single = [torch.autograd.grad(lossfunc(model(x[[n]]), y[[n]]), parameters) for n in range(N)]
    loss = extend(lossfunc)(extend(model)(x), y)
    with backpack(extension):
        loss.backward()
    for parameter, gradients in zip(parameters, zip(*single, strict=True), strict=True):
        assert_close(parameter.grad_batch, torch.stack(gradients))  # type: ignore[attr-defined]


def test_curvature_of_a_layer_of_one_s_own() -> None:
    model, lossfunc, x, y = scaled()
    extension = extensions.DiagGGNExact()
    extension.set_module_extension(Scale, ScaleDiagGGN())
    parameters = list(model.parameters())
    output = model(x)
    loss = lossfunc(output, y)
    columns = [
        ggn_vector_product(loss, output, model, vector_to_parameter_list(unit, parameters))
        for unit in torch.eye(2)
    ]
    loss = extend(lossfunc)(extend(model)(x), y)
    with backpack(extension):
        loss.backward()
    for position, parameter in enumerate(parameters):
        expected = columns[position][position].detach()
        assert_close(parameter.diag_ggn_exact, expected)  # type: ignore[attr-defined]


def test_debugging_prints(capsys: pytest.CaptureFixture[str]) -> None:
    model, lossfunc, x, y = classifier()
    with backpack(extensions.BatchGrad(), debug=True):
        with backpack(extensions.KFLR(), debug=True):
            lossfunc(model(x), y).backward()
        lossfunc(model(x), y).backward()
    assert capsys.readouterr().out.count("[DEBUG] Linear '1'") == 2
    with backpack(extensions.BatchGrad()):
        lossfunc(model(x), y).backward()
    assert "Linear" not in capsys.readouterr().out
