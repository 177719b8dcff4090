"""Directories of other programs: written, read again, and in the form that their source says."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from backpack_attribution import (
    GradientStore,
    read_bergson,
    read_dattri,
    write_bergson,
    write_dattri,
)
from backpack_attribution.shard import Block
from backpack_core.errors import UsageError
from backpack_firstorder import SampleGradients
from tests.attribution.test_store import SHAPES, filled, flat, rows

pytestmark = pytest.mark.host("numpy reads what is written")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_bergson(tmp_path, dtype) -> None:
    store = filled(tmp_path / "store", dtype=dtype)
    write_bergson(store, tmp_path / "bergson")
    info = json.loads((tmp_path / "bergson" / "info.json").read_text())
    assert info["num_grads"] == info["num_items"] == 8
    assert info["grad_sizes"] == {"0.weight": 35, "0.bias": 5, "conv.weight": 48, "scale": 1}
    assert not info["attribute_tokens"]
    if dtype is not torch.bfloat16:  # which numpy knows by ml_dtypes alone
        kind = np.dtype(info["base_dtype"])
        found = np.memmap(tmp_path / "bergson" / "gradients.bin", kind, "r", shape=(8, 89))
        assert np.array_equal(found, flat(rows(8)).to(dtype).numpy())
    blocks = [*read_bergson(tmp_path / "bergson", rows=3)]
    assert [len(names) for names, _ in blocks] == [3, 3, 2]
    assert [name for names, _ in blocks for name in names] == store.identities
    again = torch.cat([block["conv.weight"] for _, block in blocks])
    assert torch.equal(again, rows(8, dtype=dtype)["conv.weight"].flatten(1))
    with GradientStore(tmp_path / "again", dtype=dtype) as copy:
        for names, gradients in blocks:
            copy.append(names, gradients)
    queries = rows(2, 1)
    found = copy.search({name: value.reshape(2, -1) for name, value in queries.items()}, 3)
    assert found.identities == store.search(queries, 3).identities


def test_tokens_of_bergson(tmp_path) -> None:
    store = filled(tmp_path / "store")
    write_bergson(store, tmp_path / "bergson", tokens=[5, 0, 3])
    assert np.load(tmp_path / "bergson" / "offsets.npy").tolist() == [0, 5, 5, 8]
    path = tmp_path / "bergson" / "info.json"
    info = json.loads(path.read_text())
    assert info["attribute_tokens"]
    assert (info["num_items"], info["num_grads"]) == (3, 8)
    del info["identities"]  # as Bergson writes it
    path.write_text(json.dumps(info))
    (block,) = read_bergson(tmp_path / "bergson")
    assert block.identities == [*(f"0:{n}" for n in range(5)), *(f"2:{n}" for n in range(3))]
    with pytest.raises(UsageError, match="adds up to 4"):
        write_bergson(store, tmp_path / "bergson", tokens=[4])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dattri(tmp_path, dtype) -> None:
    store = filled(tmp_path / "store", dtype=dtype)
    write_dattri(store, tmp_path / "dattri")
    blocks = [*read_dattri(tmp_path / "dattri")]
    assert [name for names, _ in blocks for name in names] == store.identities
    for name, value in rows(8, dtype=dtype).items():
        assert torch.equal(torch.cat([block[name] for _, block in blocks]), value)


def test_factors_of_dattri_are_products(tmp_path) -> None:
    """A record as ``_write_group_memmap`` writes it of a factorised linear layer."""
    folder = tmp_path / "dattri"
    folder.mkdir()
    inputs = torch.randn(2, 4, 7, dtype=torch.float32)
    outputs = torch.randn(2, 4, 5, dtype=torch.float32)
    raw = [t.numpy().tobytes() for t in (inputs, outputs)]
    (folder / "batch_000000.mmap.bin").write_bytes(b"".join(raw))
    parts = {
        key: {"byte_off": offset, "nbytes": len(data), "shape": [*t.shape], "dtype": "float32"}
        for key, offset, data, t in (
            ("activation", 0, raw[0], inputs),
            ("pre_activation_grad", len(raw[0]), raw[1], outputs),
        )
    }
    layer = {"kind": "factorized", "parts": parts, "module_kwargs": None, "batch_first": True}
    record = {"input_hash": ["a", "b"], "layer_types": {"0": "nn.Linear"}, "layers": {"0": layer}}
    meta = {"format": 2, "records": [record]}
    torch.save(meta, folder / "batch_000000.mmap.meta")
    (folder / "index.jsonl").write_text('{"file": "batch_000000.mmap", "records": []}\n')
    ((names, gradients),) = read_dattri(folder)
    assert names == ["a", "b"]
    value = gradients["0"]
    assert isinstance(value, SampleGradients)
    assert torch.allclose(value.dense(), torch.einsum("nto,nti->noi", outputs, inputs), atol=1e-5)
    record["layer_types"] = {"0": "nn.Conv2d"}
    torch.save(meta, folder / "batch_000000.mmap.meta")
    with pytest.raises(UsageError, match="materialise"):
        next(read_dattri(folder))


def test_folders_of_something_else(tmp_path) -> None:
    with pytest.raises(UsageError, match="not a directory of gradients of Bergson"):
        next(read_bergson(tmp_path))
    with pytest.raises(UsageError, match="not a store of dattri-LLM"):
        next(read_dattri(tmp_path))
    (tmp_path / "index.jsonl").write_text('{"file": "batch_000000.pt", "records": []}\n')
    with pytest.raises(UsageError, match="pickle"):
        next(read_dattri(tmp_path))
    with pytest.raises(UsageError, match="no samples"):
        write_bergson(GradientStore(tmp_path / "empty"), tmp_path / "bergson")
    write_bergson(filled(tmp_path / "store"), tmp_path / "bergson")
    (tmp_path / "bergson" / "gradients.bin").write_bytes(b"short")
    with pytest.raises(UsageError, match="5 bytes, but its index says 2848"):
        next(read_bergson(tmp_path / "bergson"))


def test_rows_of_low_rank_are_written_out(tmp_path) -> None:
    store = filled(tmp_path / "store", rank=1)
    write_bergson(store, tmp_path / "bergson")
    (block,) = read_bergson(tmp_path / "bergson")
    assert isinstance(block, Block)
    whole = store[store.identities]["0.weight"]
    assert isinstance(whole, SampleGradients)
    assert torch.equal(block.gradients["0.weight"], whole.dense().flatten(1))
    assert [*block.gradients] == [*SHAPES]
