from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from backpack_core.errors import UnsupportedError
from backpack_firstorder import contractions as first
from backpack_firstorder.contractions import norm
from backpack_layers.conv import ConvRule, ConvTransposeRule, DirectPatches
from backpack_products import contractions
from tests import oracle
from tests.layers.execution import check_rule, record

# torch says that it copies the input where "same" is not symmetric.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")

CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
SIZES = {1: (7,), 2: (6, 5), 3: (4, 5, 3)}

CONV_CASES: list[dict[str, Any]] = [
    {"kernel_size": 1},
    {"kernel_size": 1, "stride": 2, "bias": False},
    {"kernel_size": 3},
    {"kernel_size": 2, "stride": 2, "padding": 1},
    {"kernel_size": 3, "stride": 3, "padding": 2},
    {"kernel_size": 2, "dilation": 2, "padding": 1, "groups": 2},
    {"kernel_size": 3, "padding": 1, "groups": 4, "bias": False},
    {"kernel_size": 3, "padding": "valid"},
    {"kernel_size": 3, "padding": "same"},
    {"kernel_size": 2, "padding": "same", "groups": 2},
    {"kernel_size": 2, "dilation": 3, "padding": "same"},
    *(
        {"kernel_size": 2, "padding": padding, "padding_mode": mode, "groups": 2}
        for mode in ("reflect", "replicate", "circular")
        for padding in (1, "same")
    ),
    {"kernel_size": 3, "padding": 1, "stride": 2, "padding_mode": "circular"},
]
TRANSPOSED_CASES: list[dict[str, Any]] = [
    {"kernel_size": 1},
    {"kernel_size": 3, "bias": False},
    {"kernel_size": 3, "stride": 2, "padding": 1, "output_padding": 1},
    {"kernel_size": 2, "stride": 3, "groups": 2},
    {"kernel_size": 2, "padding": 2, "dilation": 2},
    {"kernel_size": 2, "padding": 1, "dilation": 3, "output_padding": 2, "groups": 4},
    {"kernel_size": 3, "padding": 1, "stride": 2, "dilation": 3, "output_padding": 2},
    {"kernel_size": 1, "padding": 1, "stride": 2},
]


def label(case: dict[str, Any]) -> str:
    return "-".join(f"{key}={value}" for key, value in case.items())


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("case", CONV_CASES, ids=label)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_conv(dims: int, case: dict[str, Any], batch: int) -> None:
    module = CONV[dims](4, 8 if case.get("groups") == 4 else 2, **case)
    check_rule(ConvRule(), record(module, torch.randn(batch, 4, *SIZES[dims]).double()))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("case", TRANSPOSED_CASES, ids=label)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_conv_transpose(dims: int, case: dict[str, Any], batch: int) -> None:
    module = TRANSPOSED[dims](4, 8 if case.get("groups") == 4 else 2, **case)
    check_rule(ConvTransposeRule(), record(module, torch.randn(batch, 4, *SIZES[dims]).double()))


def test_settings_that_differ_between_axes() -> None:
    x = torch.randn(2, 2, 6, 5).double()
    conv = nn.Conv2d(2, 3, (3, 2), stride=(1, 2), padding=(0, 1), dilation=(2, 1))
    check_rule(ConvRule(), record(conv, x))
    check_rule(ConvRule(), record(nn.Conv2d(2, 3, (2, 3), padding="same"), x))
    back = nn.ConvTranspose2d(2, 3, (3, 2), (1, 2), (2, 0), output_padding=(0, 1))
    check_rule(ConvTransposeRule(), record(back, x))


def test_output_size() -> None:
    x = torch.randn(2, 2, 4).double()
    module = nn.ConvTranspose1d(2, 3, 3, stride=3)
    check_rule(ConvTransposeRule(), record(module, x, output_size=[14]))


def test_channels_last() -> None:
    x = torch.randn(2, 4, 5, 5).double().contiguous(memory_format=torch.channels_last)
    check_rule(ConvRule(), record(nn.Conv2d(4, 4, 3, groups=2), x))


@pytest.mark.parametrize("rule", [ConvRule(), ConvTransposeRule()], ids=lambda r: type(r).__name__)
def test_patches_are_made_for_the_samples_that_are_asked_for(
    rule: ConvRule | ConvTransposeRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = nn.Conv2d if isinstance(rule, ConvRule) else nn.ConvTranspose2d
    view = record(kind(2, 3, 3, padding=1), torch.randn(4, 2, 5, 5)).view
    made: list[int] = []
    unfold = rule._unfold

    def counted(conv: nn.Module, size: torch.Size, x: torch.Tensor) -> torch.Tensor:
        made.append(len(x))
        return unfold(conv, size, x)

    monkeypatch.setattr(rule, "_unfold", counted)
    with torch.no_grad():
        patches = rule.affine_input(view)
        whole = patches[0:4]
        assert whole.shape == patches.shape == (4, 25, 1, 18)
        assert torch.equal(patches[1:3], whole[1:3])
    assert made == [4, 2]


def test_pointwise_convolutions_copy_nothing() -> None:
    run = record(nn.Conv2d(2, 3, 1), torch.randn(2, 2, 5, 5))
    assert ConvRule().affine_input(run.view)[0:2].data_ptr() == run.view.input.data_ptr()


# Input channels, settings, columns.
DIRECT_CASES: list[tuple[int, dict[str, Any], int]] = [
    (16, {"kernel_size": 3}, 1),
    (16, {"kernel_size": 3, "stride": 2, "padding": 1}, 3),
    (16, {"kernel_size": 3, "padding": 2, "dilation": 2}, 3),
    (16, {"kernel_size": 2, "padding": "same"}, 2),
    (16, {"kernel_size": 3, "padding": 1, "groups": 2}, 1),
    (16, {"kernel_size": 3, "padding": 1, "groups": 2}, 3),
    (16, {"kernel_size": 2, "groups": 16}, 1),
    (16, {"kernel_size": 3, "padding": 1, "padding_mode": "circular"}, 2),
    (3, {"kernel_size": 3}, 13),
    (1, {"kernel_size": 3, "padding": 1}, 12),
]


@pytest.mark.host("a kernel of a CPU")
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="a kernel of oneDNN")
@pytest.mark.parametrize(("channels", "case", "columns"), DIRECT_CASES)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_grouped_kernel_agrees_with_patches(
    dims: int, channels: int, case: dict[str, Any], columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Single precision has a way of its own to the products, in few pieces or in many."""
    x = torch.randn(3, channels, *[(400,), (19, 20), (8, 7, 9)][dims - 1]).float()
    view = record(CONV[dims](channels, 16, **case), x).view
    out = ConvRule().affine_output(view, torch.randn(columns, *view.output_shape).float())
    inp = ConvRule().affine_input(view)
    assert inp.suits(columns, out)
    assert not inp.suits(columns, out.double())
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.mkldnn, "enabled", False)
        assert not inp.suits(columns, out)
    exact = torch.einsum("vnsgo,nsgi->vngoi", out.double(), inp[:].double())
    scale = exact.abs().max()
    with torch.no_grad():
        for size in (contractions.DIRECT, 2**13):
            monkeypatch.setattr(contractions, "DIRECT", size)
            products = contractions.products(out, inp)
            torch.testing.assert_close(products / scale, (exact / scale).float(), atol=1e-6, rtol=0)
            squares, total = contractions.square_sum(out, inp), exact.square().sum((0, 1))
            torch.testing.assert_close(squares, total.float(), atol=1e-6 * scale**2, rtol=1e-5)
            along = first.products_with(out, inp, True, False, False)[1].sums
            for sums in (contractions.sums(out, inp), along):
                size = exact.sum(1).abs().max()
                torch.testing.assert_close(
                    sums / size, (exact.sum(1) / size).float(), atol=3e-6, rtol=0
                )


@pytest.mark.host("a kernel of a CPU")
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="a kernel of oneDNN")
@pytest.mark.parametrize("groups", [1, 2])
def test_grouped_kernel_takes_some_columns_at_a_time(groups: int) -> None:
    x = torch.randn(3, 16, 9, 8).float()
    view = record(nn.Conv2d(16, 16, 3, padding=1, groups=groups), x).view
    out = ConvRule().affine_output(view, torch.randn(47, *view.output_shape).float())
    inp = ConvRule().affine_input(view)
    assert not inp.suits(47, out)
    assert inp.suits(5, out)
    exact = torch.einsum("vnsgo,nsgi->vngoi", out.double(), inp[:].double())
    with torch.no_grad():
        found = contractions.products(out, inp)
    assert torch.allclose(found.double(), exact, atol=1e-6 * float(exact.abs().max()), rtol=0)


@pytest.mark.parametrize(("channels", "case", "columns"), DIRECT_CASES)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_sums_are_gradients_of_the_weight(
    dims: int, channels: int, case: dict[str, Any], columns: int
) -> None:
    x = torch.randn(3, channels, *[(40,), (9, 8), (5, 4, 6)][dims - 1])
    view = record(CONV[dims](channels, 16, **case), x).view
    out = ConvRule().affine_output(view, torch.randn(columns, *view.output_shape))
    inp = ConvRule().affine_input(view)
    with torch.no_grad():
        found = contractions.sums(out, inp)
    oracle.assert_close(found, torch.einsum("vnsgo,nsgi->vgoi", out, inp[:]))


@pytest.mark.parametrize(
    ("rule", "module"),
    [(ConvRule(), nn.Conv1d(2, 2, 1)), (ConvTransposeRule(), nn.ConvTranspose1d(2, 2, 1))],
)
def test_no_batch_axis(rule: ConvRule | ConvTransposeRule, module: nn.Module) -> None:
    with pytest.raises(UnsupportedError, match=r"\[N, C, W\]"):
        rule.check(record(module, torch.randn(2, 5)).view)


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("settings", CONV_CASES, ids=str)
def test_sums_of_patches_without_patches(dims: int, settings: dict[str, Any]) -> None:
    """Sums over positions, and inner products of positions."""
    layer = CONV[dims](4, 8, **settings)
    inp = torch.randn(3, 4, *SIZES[dims])
    patches = DirectPatches(layer, ConvRule._unfold, inp, layer(inp).shape[2:])
    oracle.assert_close(patches.position_sum(), patches[:].sum(1))
    some = patches[1:].transpose(1, 2).flatten(0, 1)
    oracle.assert_close(patches.gram(slice(1, 3)), some @ some.mT)


def test_inner_products_of_pixels_are_chosen() -> None:
    """For wide layers on small maps, and not for narrow ones on large maps, or with strides."""
    sizes = []
    for channels, stride, length in ((256, 1, 8), (512, 1, 4), (64, 1, 32), (256, 2, 8)):
        layer = nn.Conv2d(channels, channels, 3, stride, padding=1, device="meta")
        x = torch.empty(2, channels, length, length, device="meta")
        sizes.append(DirectPatches(layer, ConvRule._unfold, x, layer(x).shape[2:]).gram_size())
    assert sizes == [100**2 + 64**2, 36**2 + 16**2, 0, 0]


@pytest.mark.host("values are looked at")
@pytest.mark.parametrize("size", [1, 10**6], ids=["all samples", "one by one"])
@pytest.mark.parametrize("settings", CONV_CASES, ids=str)
def test_norms_by_pixels(
    settings: dict[str, Any], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In single precision, where inner products are checked afterwards."""
    calls = []
    gram = DirectPatches.gram
    monkeypatch.setattr(DirectPatches, "gram_size", lambda patches: size)
    monkeypatch.setattr(DirectPatches, "gram", lambda *given: calls.append(1) or gram(*given))
    monkeypatch.setattr("backpack_firstorder.contractions.is_gram_cheaper", lambda *given: True)
    layer = nn.Conv2d(4, 8, **settings).float()
    out = layer(x := torch.randn(3, 4, 11, 10, dtype=torch.float32))
    patches = DirectPatches(layer, ConvRule._unfold, x, out.shape[2:])
    columns = torch.randn_like(out).unflatten(1, (layer.groups, -1)).flatten(3).permute(0, 3, 1, 2)
    with torch.no_grad():
        found = norm(columns.unsqueeze(0), patches).value()
    wanted = torch.einsum("nsgo,nsgi->ngoi", columns, patches[:]).flatten(1).norm(dim=1)
    torch.testing.assert_close(found.squeeze(0).to(wanted.dtype), wanted)
    assert len(calls) == (1 if size == 1 else 3)


@pytest.mark.host("the library of the host is asked")
def test_no_weight_is_copied() -> None:
    """Torch copies one whose strides are zero, though nobody reads it."""
    x = torch.randn(3, 8, 6, 6, dtype=torch.float32)
    layer = nn.Conv2d(8, 16, 3, padding=1).float()
    patches = DirectPatches(layer, ConvRule._unfold, x, torch.Size((6, 6)))
    out = torch.randn(1, 3, 36, 1, 16, dtype=torch.float32)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.no_grad(), torch.profiler.profile(activities=activities, record_shapes=True) as seen:
        total = patches.total(out)
    assert total is not None
    copied = [event.input_shapes[0] for event in seen.events() if event.name == "aten::copy_"]
    assert [16, 8, 3, 3] not in copied
    assert any(event.name == "aten::convolution_backward" for event in seen.events())
