"""Small functions: Kronecker factors, Hessian-free products, data, parameters."""

from __future__ import annotations

import gzip
import hashlib
import io
import struct
import urllib.error
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack.hessianfree.ggnvp import ggn_vector_product
from backpack.hessianfree.lop import L_op
from backpack.hessianfree.rop import R_op
from backpack.presence import warn_about_incumbent
from backpack.utils import kroneckers, mnist
from backpack.utils.convert_parameters import vector_to_parameter_list
from backpack.utils.errors import batch_norm_raise_error_if_train
from backpack.utils.examples import (
    _autograd_ggn_exact_columns,
    autograd_diag_ggn_exact,
    load_one_batch_mnist,
)
from backpack.utils.subsampling import subsample
from backpack_compat import namesakes
from backpack_core.cli import doctor
from backpack_core.errors import BackpackWarning, MissingPluginError
from tests.oracle import assert_close
from tests.plugins.sick import loaded_here


def factors() -> list[Tensor]:
    made = [torch.randn(size, size) for size in (2, 3)]
    return [factor @ factor.T + torch.eye(len(factor)) for factor in made]


def test_kronecker_products() -> None:
    a, b = factors()
    whole = torch.kron(a, b)
    mat = torch.randn(6, 4)
    assert_close(kroneckers.kfacs_to_mat([a, b]), whole)
    assert kroneckers.kfacs_to_mat([]) is None
    assert_close(kroneckers.apply_kfac_mat_prod([a, b], mat), whole @ mat)
    assert_close(kroneckers.apply_kfac_mat_prod([a, b], mat[:, 0]), whole @ mat[:, 0])
    wide = [torch.randn(2, 3), torch.randn(4, 5)]
    vector = torch.randn(15)
    assert_close(kroneckers.apply_kfac_mat_prod(wide, vector), torch.kron(*wide) @ vector)


@pytest.mark.parametrize(
    ("shift", "numbers"), [(None, (0, 0)), (0.5, (0.5, 0.5)), ([1, 2], (1, 2))]
)
def test_kronecker_inverses(shift: Any, numbers: tuple[float, float]) -> None:
    pair = factors()
    shifted = [f + s * torch.eye(len(f)) for f, s in zip(pair, numbers, strict=True)]
    for found, expected in zip(kroneckers.inv_kfacs(pair, shift), shifted, strict=True):
        assert_close(found, torch.linalg.inv(expected))
    mat = torch.randn(6, 2)
    whole = torch.linalg.inv(torch.kron(*shifted))
    assert_close(kroneckers.apply_inv_kfac_mat_prod(pair, mat, shift), whole @ mat)


def test_kronecker_inverse_is_bounded() -> None:
    assert_close(kroneckers.inv_kfacs([torch.zeros(1, 1)])[0], torch.full((1, 1), 1e8))


def test_orders() -> None:
    assert kroneckers.is_matrix(torch.zeros(1, 1))
    assert kroneckers.is_vector(torch.zeros(1))
    assert list(kroneckers.get_letters(3)) == ["a", "b", "c"]
    with pytest.raises(AssertionError):
        kroneckers.kfacs_to_mat([torch.zeros(1)])


def test_hessian_free() -> None:
    x = torch.randn(3, requires_grad=True)
    y = (x[:2] * x[1:]).exp()
    jacobian = torch.autograd.functional.jacobian(lambda x: (x[:2] * x[1:]).exp(), x)
    v, w = torch.randn(3), torch.randn(2)
    assert_close(R_op(ys=y, xs=x, vs=v)[0], jacobian @ v)
    assert_close(L_op(ys=y, xs=x, ws=w)[0], jacobian.T @ w)


def test_vector_to_parameter_list() -> None:
    parameters = [torch.zeros(2, 2), torch.zeros(3)]
    pieces = vector_to_parameter_list(torch.arange(8.0), parameters)
    assert [p.tolist() for p in pieces] == [[[0, 1], [2, 3]], [4, 5, 6]]
    with pytest.raises(TypeError, match="expected Tensor"):
        vector_to_parameter_list([1.0], parameters)  # type: ignore[arg-type]


def test_subsample() -> None:
    x = torch.arange(6).reshape(2, 3)
    assert subsample(x) is x
    assert subsample(x, dim=1, subsampling=[2, 0]).tolist() == [[2, 0], [5, 3]]


def test_batch_norm_in_train_mode() -> None:
    with pytest.raises(NotImplementedError, match="training mode"):
        batch_norm_raise_error_if_train(nn.BatchNorm1d(1))
    with pytest.warns(UserWarning, match="training mode"):
        batch_norm_raise_error_if_train(nn.BatchNorm1d(1), raise_error=False)
    batch_norm_raise_error_if_train(nn.BatchNorm1d(1).eval())


def test_ggn_columns() -> None:
    model, lossfunc = nn.Linear(2, 2), nn.MSELoss()
    x, y = torch.randn(3, 2), torch.randn(3, 2)
    columns = torch.stack([c for _, c in _autograd_ggn_exact_columns(x, y, model, lossfunc)])
    assert_close(autograd_diag_ggn_exact(x, y, model, lossfunc), columns.diagonal())
    assert_close(autograd_diag_ggn_exact(x, y, model, lossfunc, idx=[4]), columns.diagonal()[4:5])
    output = model(x)
    vector = torch.randn(6)
    parts = vector_to_parameter_list(vector, list(model.parameters()))
    product = ggn_vector_product(lossfunc(output, y), output, model, parts)
    assert_close(torch.cat([p.flatten() for p in product]), columns @ vector)


# MNIST


def idx(array: Tensor) -> bytes:
    head = struct.pack(">HBB", 0, 8, array.dim()) + struct.pack(f">{array.dim()}I", *array.shape)
    return head + bytes(array.to(torch.uint8).flatten().tolist())


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, bytes]:
    """Small files in the format of MNIST; the checksums are theirs."""
    monkeypatch.chdir(tmp_path)
    pixels = torch.arange(2 * 28 * 28).reshape(2, 28, 28) % 256
    contents = dict(zip(mnist.FILES, (idx(pixels), idx(torch.tensor([3, 7]))), strict=True))
    packed = {name: gzip.compress(content, mtime=0) for name, content in contents.items()}
    sums = {n: hashlib.md5(p, usedforsecurity=False).hexdigest() for n, p in packed.items()}
    monkeypatch.setattr(mnist, "FILES", sums)
    monkeypatch.setattr(mnist, "_with_torchvision", lambda root: None)
    return packed


class Answer(io.BytesIO):
    """What ``urlopen`` returns."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self.headers = {"Content-Length": str(len(content))}


def serve(monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes], broken: str = "") -> list[str]:
    asked: list[str] = []

    def urlopen(url: str, timeout: float) -> Answer:
        asked.append(url)
        name = url.rpartition("/")[2].removesuffix(".gz")
        return Answer(b"garbage" if broken and url.startswith(broken) else files[name])

    monkeypatch.setattr(mnist.urllib.request, "urlopen", urlopen)
    return asked


def test_mnist_is_downloaded_once(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = serve(monkeypatch, files)
    monkeypatch.setattr(mnist.sys.stderr, "isatty", lambda: True, raising=False)
    for _ in range(2):
        images, labels = load_one_batch_mnist(batch_size=2, shuffle=False)
    assert len(asked) == 2
    assert "100 %" in capsys.readouterr().err
    assert images.shape == (2, 1, 28, 28)
    assert labels.tolist() == [3, 7]
    assert images[0, 0, 0, 5].item() == pytest.approx((5 / 255 - 0.1307) / 0.3081)
    assert load_one_batch_mnist(2, flat=True)[0].shape == (2, 784)


def test_mnist_next_mirror(monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes]) -> None:
    asked = serve(monkeypatch, files, broken=mnist.MIRRORS[0])
    assert load_one_batch_mnist(2)[0].shape == (2, 1, 28, 28)
    assert [url.startswith(mnist.MIRRORS[1]) for url in asked] == [False, True] * 2


def test_mnist_uncompressed_copy(files: dict[str, bytes]) -> None:
    folder = Path("data/MNIST/raw")
    folder.mkdir(parents=True)
    for name, packed in files.items():
        (folder / name).write_bytes(gzip.decompress(packed))
    assert sorted(load_one_batch_mnist(2)[1].tolist()) == [3, 7]


def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def urlopen(url: str, timeout: float) -> Any:
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr(mnist.urllib.request, "urlopen", urlopen)


def test_without_mnist_digits_stand_in(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes]
) -> None:
    no_network(monkeypatch)
    with pytest.warns(BackpackWarning, match="no copy in data and no network .*scikit-learn"):
        images, labels = load_one_batch_mnist(batch_size=64, shuffle=False)
    assert images.shape == (64, 1, 28, 28)
    assert labels[:10].tolist() == list(range(10))


def test_torchvision_s_dataset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where it is installed, the data come from there."""
    monkeypatch.chdir(tmp_path)
    asked: dict[str, Any] = {}

    def dataset(**settings: Any) -> Any:
        asked.update(settings)
        return [(torch.zeros(1, 28, 28), 5)] * 3

    package, datasets, transforms = (
        ModuleType(n) for n in ("torchvision", "datasets", "transforms")
    )
    datasets.MNIST = dataset  # type: ignore[attr-defined]
    for name in ("Compose", "Normalize", "ToTensor"):
        setattr(transforms, name, lambda *args: args)
    package.transforms, package.datasets = transforms, datasets  # type: ignore[attr-defined]
    package.__spec__ = ModuleSpec("torchvision", None)
    monkeypatch.setitem(mnist.sys.modules, "torchvision", package)
    monkeypatch.setitem(mnist.sys.modules, "torchvision.datasets", datasets)
    assert load_one_batch_mnist(2)[1].tolist() == [5, 5]
    assert (asked["root"], asked["train"], asked["download"]) == ("data", True, True)


def test_broken_copy(monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes]) -> None:
    folder = Path("data/MNIST/raw")
    folder.mkdir(parents=True)
    for name in files:
        (folder / name).write_bytes(b"\1\2\3\4 is no IDX file")
    with pytest.warns(BackpackWarning, match="not an IDX file"):
        load_one_batch_mnist(1)


def test_without_anything(monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes]) -> None:
    no_network(monkeypatch)
    monkeypatch.setitem(mnist.sys.modules, "sklearn.datasets", None)
    with pytest.warns(BackpackWarning), pytest.raises(MissingPluginError, match="scikit-learn"):
        load_one_batch_mnist(1)


# Both packages installed


def test_both_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert namesakes.namesakes() is None
    warn_about_incumbent()
    monkeypatch.setattr(namesakes, "_version", lambda name: "1.7.1")
    ours = namesakes.namesakes()
    assert ours is not None
    assert "gives backpack-compat" in ours[0]
    with pytest.warns(BackpackWarning, match="pip uninstall backpack-for-pytorch"):
        warn_about_incumbent()
    monkeypatch.setattr(namesakes, "_folder", lambda: tmp_path)
    theirs = namesakes.namesakes()
    assert theirs is not None
    assert "gives backpack-for-pytorch" in theirs[0]
    monkeypatch.setattr(namesakes, "_folder", lambda: None)
    neither = namesakes.namesakes()
    assert neither is not None
    assert "neither can be imported" in neither[0]


def test_doctor_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this distribution says through its entry point; plugins are judged elsewhere."""
    monkeypatch.setattr(namesakes, "_version", lambda name: "1.7.1")
    monkeypatch.setattr(doctor, "load_isolated", loaded_here)
    found = [f for f in doctor.examine().findings if "backpack-for-pytorch" in f.who]
    assert [f.severity for f in found] == ["warning"]
