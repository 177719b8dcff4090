"""Stores: what goes in comes out, whole, by identity, in every form."""

from __future__ import annotations

import copy
import pickle
import shutil
from contextlib import suppress
from functools import partial, partialmethod
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
from filelock import FileLock
from torch import Tensor

from backpack_attribution import FaissIndex, GradientStore, content_hash, merge_stores
from backpack_attribution.identities import ByContent, ByPlace, content_hashes, sample_of
from backpack_core.errors import ShapeError, UsageError
from backpack_firstorder import SampleGradients
from tests.attribution.crash import crash

pytestmark = pytest.mark.host("files are read to there")

SHAPES = {"0.weight": (5, 7), "0.bias": (5,), "conv.weight": (4, 3, 2, 2), "scale": ()}


def rows(samples: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(samples, *shape, generator=generator, dtype=torch.float32).to(dtype)
        for name, shape in SHAPES.items()
    }


def flat(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat(
        [gradients[name].reshape(len(gradients[name]), -1).double() for name in SHAPES], 1
    )


def filled(folder: Path, sizes: tuple[int, ...] = (3, 1, 4), **options) -> GradientStore:
    whole, first = rows(sum(sizes)), 0
    store = GradientStore(folder, **options)
    for size in sizes:
        part = slice(first, first + size)
        store.append(
            [f"s{n}" for n in range(first, first + size)], {k: v[part] for k, v in whole.items()}
        )
        store.flush()
        first += size
    return GradientStore(folder)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_scores_and_search_are_products_with_what_was_appended(tmp_path, dtype, bound) -> None:
    store = filled(tmp_path / "store", dtype=dtype)
    assert store.dtype is dtype
    assert len(store) == 8
    queries = rows(2, seed=1)
    wanted = flat(rows(8)) @ flat(queries).T
    scores = store.scores(queries, ["a", "b"])
    assert scores.train == [f"s{n}" for n in range(8)]
    assert (scores.values - wanted).abs().max() < bound * wanted.abs().max()
    for largest in (True, False):
        for size in (1, 3, 100):
            found = store.search(queries, k=3, largest=largest, rows=size)
            assert found.identities == scores.top(3, largest).identities
            assert torch.allclose(found.values, scores.top(3, largest).values)
    assert len(store.search(queries, k=100).identities[0]) == 8


@pytest.mark.parametrize("late", [["store.json"], ["store", "store.json"]])
def test_a_store_that_another_rank_makes_meanwhile(tmp_path, monkeypatch, late: list[str]) -> None:
    """The first answer about a file is that of the moment before it was made."""
    GradientStore(tmp_path / "store", about={"model": "a"})
    asked: set[Path] = set()

    def early(method, path: Path) -> bool:
        is_early = path.name in late and path not in asked
        asked.add(path)
        return not is_early and method(path)

    for name in ("exists", "is_dir"):
        monkeypatch.setattr(Path, name, partialmethod(partial(early, getattr(Path, name))))
    assert GradientStore(tmp_path / "store", about={"model": "a"}).about == {"model": "a"}


def test_the_default_device_does_not_matter(tmp_path) -> None:
    store, queries = filled(tmp_path / "store"), rows(2, seed=1)
    expected = store.search(queries, k=3)
    with torch.device("meta"):
        found = store.search(queries, k=3)
    assert found.identities == expected.identities
    assert torch.equal(found.values, expected.values)


def test_cosines(tmp_path) -> None:
    for options in ({}, {"rank": 1}):
        store = filled(tmp_path / f"store{options}", **options)
        queries = rows(2, seed=1)
        stored = flat(
            {k: torch.cat([_dense(b.gradients[k]) for b in store.blocks()]) for k in SHAPES}
        )
        wanted = (
            torch.nn.functional.normalize(stored) @ torch.nn.functional.normalize(flat(queries)).T
        )
        found = store.scores(queries, cosine=True)
        assert torch.allclose(found.values.double(), wanted, atol=1e-6)
        assert store.search(queries, 3, cosine=True, rows=2).identities == found.top(3).identities


@pytest.mark.parametrize("options", [{}, {"rank": 1}, {"dtype": torch.bfloat16}])
@pytest.mark.parametrize("size", [1e-25, 1e18])
def test_cosines_of_rows_of_any_size(tmp_path, options: Any, size: float) -> None:
    """Squares of small numbers underflow, and a row of zeros would have the cosine zero."""
    found = []
    for number, factor in enumerate((1.0, size)):
        with GradientStore(tmp_path / f"store{number}", **options) as store:
            store.append([*range(8)], {n: factor * v.float() for n, v in rows(8).items()})
        queries = {n: factor * v.float() for n, v in rows(2, seed=1).items()}
        found.append(store.scores(queries, cosine=True).values)
    assert torch.allclose(*found, atol=0.01 if "dtype" in options else 1e-5)


def test_some_parts_and_some_samples(tmp_path) -> None:
    store = filled(tmp_path / "store")
    queries = rows(2, seed=1)
    scores = store.scores({"0.bias": queries["0.bias"]})
    assert torch.allclose(scores.values, rows(8)["0.bias"] @ queries["0.bias"].T)
    found = store[["s6", "s0", "s3"]]
    for name, value in rows(8).items():
        assert torch.equal(found[name], value[[6, 0, 3]])
    assert torch.equal(store["s2"]["0.bias"], rows(8)["0.bias"][2:3])


@pytest.mark.parametrize("rank", [1, 2])
def test_low_rank_is_the_best_approximation(tmp_path, rank: int) -> None:
    store = filled(tmp_path / "store", rank=rank)
    assert store.rank == rank
    (block,) = [b for b in store.blocks() if b.identities[0] == "s4"]
    value, given = block.gradients["0.weight"], rows(8)["0.weight"][4:]
    assert isinstance(value, SampleGradients)
    assert value.shape == given.shape
    u, s, vt = torch.linalg.svd(given)
    best = torch.einsum("noc,nc,nci->noi", u[:, :, :rank], s[:, :rank], vt[:, :rank])
    assert torch.allclose(value.dense(), best, atol=1e-5)
    assert isinstance(block.gradients["0.bias"], Tensor)
    queries = rows(2, seed=1)
    stored = {k: torch.cat([_dense(b.gradients[k]) for b in store.blocks()]) for k in SHAPES}
    assert torch.allclose(
        store.scores(queries).values.double(), flat(stored) @ flat(queries).T, atol=1e-4
    )
    two = store[["s1", "s5"]]
    low = {name: two[name] for name in SHAPES}
    both = flat(stored) @ flat(stored)[[1, 5]].T
    assert torch.allclose(store.scores(low).values.double(), both, atol=1e-4)


def _dense(value) -> Tensor:
    return value.dense() if isinstance(value, SampleGradients) else value


def test_what_is_missing_is_added_by_the_next_run(tmp_path) -> None:
    whole, names = rows(6), [f"s{n}" for n in range(6)]
    store = GradientStore(tmp_path / "store", about={"model": "a"})
    store.append(names[:2], {k: v[:2] for k, v in whole.items()})
    store.flush()
    store.append(names[2:4], {k: v[2:4] for k, v in whole.items()})  # never written
    assert not store.missing(names[:4])
    again = GradientStore(tmp_path / "store", about={"model": "a"})
    with again:
        for first in (0, 2, 4):
            part = slice(first, first + 2)
            if again.missing(names[part]):
                again.append(names[part], {k: v[part] for k, v in whole.items()})
    found = GradientStore(tmp_path / "store")
    assert found.identities == names
    assert found.about == {"model": "a"}
    for name, value in whole.items():
        assert torch.equal(found[names][name], value)


@pytest.mark.parametrize("rank", [None, 2])
def test_what_waits_has_memory_of_its_own(tmp_path, rank) -> None:
    """A buffer may be filled again before its rows are written; an empty batch adds nothing."""
    out, inp = torch.randn(3, 2, 5), torch.randn(3, 2, 7)
    given = {"a": torch.randn(3, 5, 7), "b": SampleGradients.from_factors(out, inp)}
    wanted = {name: _dense(value).clone() for name, value in given.items()}
    with GradientStore(tmp_path / "store", dtype=out.dtype, rank=rank) as store:
        store.append([0, 1, 2], given)
        store.append([], {name: value[:0] for name, value in given.items()})
        for buffer in (given["a"], out, inp):
            buffer.zero_()
    found = store[[0, 1, 2]]
    assert torch.allclose(_dense(found["b"]), wanted["b"], atol=1e-5)
    if rank is None:
        assert torch.equal(found["a"], wanted["a"])
    else:
        assert _dense(found["a"]).any()


def test_shards_are_written_by_size(tmp_path) -> None:
    store = GradientStore(tmp_path / "store", shard_bytes=700)
    for n in range(4):
        store.append([n], rows(1, n))
    store.flush()
    assert store.index()["identity"] == [0, 1, 2, 3]
    assert len({*store.index()["shard"]}) == 2
    assert store.index()["row"] == [0, 1, 0, 1]


def test_several_processes_write_one_folder(tmp_path) -> None:
    whole = rows(6)
    stores = [GradientStore(tmp_path / "store", process=rank) for rank in range(2)]
    for rank, store in enumerate(stores):
        with store:
            store.append([*range(rank, 6, 2)], {k: v[rank::2] for k, v in whole.items()})
    found = GradientStore(tmp_path / "store")
    queries = rows(2, seed=1)
    scores = found.scores(queries).sorted()
    assert scores.train == [*range(6)]
    assert torch.allclose(scores.values.double(), flat(whole) @ flat(queries).T, atol=1e-4)


def test_folders_are_merged(tmp_path) -> None:
    whole = rows(6)
    for rank in range(2):
        with GradientStore(tmp_path / f"r{rank}") as store:
            store.append([*range(rank, 6, 2)], {k: v[rank::2] for k, v in whole.items()})
    GradientStore(tmp_path / "strange", about={"model": "other"})
    with pytest.raises(UsageError, match="settings, parts and shapes"):
        merge_stores([tmp_path / "strange", tmp_path / "r0"], tmp_path / "both")
    GradientStore(tmp_path / "none")  # of a rank without samples
    folders = [tmp_path / name for name in ("none", "r0", "r1")]
    merged = merge_stores(folders, tmp_path / "both")
    assert sorted(merged.identities) == [*range(6)]
    assert torch.equal(merged[[3, 4]]["0.bias"], whole["0.bias"][[3, 4]])
    with pytest.raises(UsageError, match="exists"):
        merge_stores([tmp_path / "r0"], tmp_path / "both")
    with pytest.raises(UsageError, match="Two samples have the identity 0"):
        merge_stores([tmp_path / "r0", tmp_path / "both"], tmp_path / "again")
    filled(tmp_path / "other", dtype=torch.bfloat16)
    with pytest.raises(UsageError, match="settings, parts and shapes"):
        merge_stores([tmp_path / "r0", tmp_path / "other"], tmp_path / "again")


def test_killed_while_it_is_written(tmp_path) -> None:
    assert crash(tmp_path, kills=2, seed=0) >= 1


def test_an_index_of_faiss_finds_the_same(tmp_path) -> None:
    pytest.importorskip("faiss", reason="the extra for faster search is not installed")
    store, queries = filled(tmp_path / "store"), rows(2, seed=1)
    index = FaissIndex(store, rows=3)
    found, wanted = index.search(queries, k=3), store.search(queries, k=3)
    assert found.identities == wanted.identities
    assert torch.allclose(found.values, wanted.values, atol=1e-4)
    cells = FaissIndex(store, "IVF1,Flat").search(queries, k=20)
    assert len(cells.identities[0]) == 8
    with pytest.raises(ShapeError, match="have all of them"):
        index.search({"0.bias": queries["0.bias"]})
    with pytest.raises(UsageError, match="no samples"):
        FaissIndex(GradientStore(tmp_path / "empty"))


def test_the_index_as_an_arrow_table(tmp_path) -> None:
    pytest.importorskip("pyarrow", reason="the extra for tables is not installed")
    store = filled(tmp_path / "store")
    table = store.to_arrow()
    assert table.column_names == ["identity", "shard", "row"]
    assert table.to_pydict() == store.index()


def test_two_writers_of_one_number(tmp_path) -> None:
    """The second is kept out until the first has finished, in other processes, too."""
    store, again = GradientStore(tmp_path / "store"), GradientStore(tmp_path / "store")
    with store:
        with store:  # a loop that calls a function which opens a block
            pass
        with pytest.raises(UsageError, match="Another writer is at work"), again:
            pass
        with GradientStore(tmp_path / "store", process=1) as other:
            other.append(["b"], rows(1))
        store.append(["a"], rows(1))
    with again:
        again.append(["c"], rows(1))
        assert pickle.loads(pickle.dumps(again)).missing(["c"]) == []
    assert sorted(GradientStore(tmp_path / "store").identities) == ["a", "b", "c"]


def test_a_block_that_cannot_begin_lets_others_in(tmp_path) -> None:
    store, again = GradientStore(tmp_path / "store"), GradientStore(tmp_path / "store")
    (tmp_path / "store" / ".x-0000-y.unfinished").mkdir()
    with suppress(OSError), again:
        pass
    (tmp_path / "store" / ".x-0000-y.unfinished").rmdir()
    with store:
        pass


def test_a_block_knows_what_others_have_written(tmp_path) -> None:
    store, again = GradientStore(tmp_path / "store"), GradientStore(tmp_path / "store")
    again.append(["c"], rows(1))
    with store:
        store.append(["a", "b"], rows(2))
    with again:
        assert not again.missing(["a", "b", "c"])
    assert len(GradientStore(tmp_path / "store")) == 3
    again.append(["d"], rows(1))
    with store:
        store.append(["d"], rows(1))
    with pytest.raises(UsageError, match=r"'d' is in .* already"), again:
        pass


def test_folders_that_are_only_read(tmp_path, monkeypatch) -> None:
    store = filled(tmp_path / "store")

    def refused(lock: FileLock) -> None:
        raise PermissionError(lock.lock_file)

    monkeypatch.setattr(type(FileLock(tmp_path / "lock")), "acquire", refused)
    with store:
        assert len(store) == 8


def test_rows_do_not_wait_for_more_than_a_minute(tmp_path, monkeypatch) -> None:
    store, now = GradientStore(tmp_path / "store"), monotonic()
    store.append(["a"], rows(1))
    assert not store.identities
    monkeypatch.setattr("backpack_attribution.store.monotonic", lambda: now + 100)
    store.append(["b"], rows(1))
    assert store.identities == ["a", "b"]
    store.append(["c"], rows(1))
    assert len(GradientStore(tmp_path / "store")) == 2


def test_a_damaged_manifest(tmp_path) -> None:
    filled(tmp_path / "store")
    (tmp_path / "store" / "store.json").write_text('{"dtype": ')
    with pytest.raises(UsageError, match=r"store\.json is damaged"):
        GradientStore(tmp_path / "store")


# Used badly ---------------------------------------------------------------------------------------


def test_refusals(tmp_path) -> None:
    store = GradientStore(tmp_path / "store")
    store.append(["a"], rows(1))
    with pytest.raises(UsageError, match="in the store already"):
        store.append(["a"], rows(1))
    with pytest.raises(UsageError, match="2 identities for 1 samples"):
        store.append(["b", "c"], rows(1))
    with pytest.raises(UsageError, match="Two samples have the identity 'b'"):
        store.append(["b", "b"], rows(2))
    with pytest.raises(UsageError, match="a text or an integer"):
        store.append([1.5], rows(1))  # type: ignore[list-item]
    with pytest.raises(ShapeError, match=r"part '0.bias' has the shape \[5\], but \[4\]"):
        store.append(["b"], {**rows(1), "0.bias": torch.zeros(1, 4)})
    with pytest.raises(ShapeError, match=r"part '0.bias' has the shape \[5\], but nothing"):
        store.append(["b"], {k: v for k, v in rows(1).items() if k != "0.bias"})
    with pytest.raises(ShapeError, match="samples on axis 0"):
        store.append(["b"], {**rows(1), "0.bias": torch.zeros(2, 5)})
    with pytest.raises(UsageError, match=r"'0.bias' is not finite"):
        store.append(["b"], {**rows(1), "0.bias": torch.full((1, 5), torch.nan)})
    assert store.missing(["a", "b"]) == [1]
    with pytest.raises(UsageError, match=r"'a' waits for its shard: call flush\(\)"):
        store["a"]
    store.flush()
    with pytest.raises(UsageError, match="'b' is not stored"):
        store["b"]
    with pytest.raises(UsageError, match="no part 'x'"):
        store.scores({"x": torch.zeros(1, 5)})
    with pytest.raises(ShapeError, match=r"must be \[M, 5\]. Got \[5\]"):
        store.search({"0.bias": torch.zeros(5)})
    with pytest.raises(UsageError, match="Queries must be"):
        store.scores({})
    with pytest.raises(UsageError, match=r"a positive integer\. Got -1"):
        store.search({"0.bias": torch.zeros(1, 5)}, k=-1)


def test_a_store_of_another_run(tmp_path) -> None:
    GradientStore(tmp_path / "store", dtype=torch.bfloat16, about={"seed": 1})
    with pytest.raises(UsageError, match=r"another run: its about is {'seed': 1}"):
        GradientStore(tmp_path / "store", about={"seed": 2})
    with pytest.raises(UsageError, match="its dtype is 'bfloat16'"):
        GradientStore(tmp_path / "store", dtype=torch.float32)
    with pytest.raises(UsageError, match="float32, bfloat16 or float64"):
        GradientStore(tmp_path / "new", dtype=torch.int64)
    with pytest.raises(UsageError, match="make it"):
        GradientStore(tmp_path / "no" / "store")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "text").touch()
    with pytest.raises(UsageError, match="is not a gradient store: it holds text"):
        GradientStore(tmp_path / "other")


def test_a_damaged_shard_and_one_sample_in_two(tmp_path) -> None:
    store = GradientStore(tmp_path / "store")
    store.append(["a"], rows(1))
    store.flush()
    (path,) = (tmp_path / "store").glob("*.safetensors")
    shutil.copyfile(path, path.with_name(f"000001{path.name[6:]}"))
    with pytest.raises(UsageError, match=r"'a' is in .* and in an earlier shard"):
        GradientStore(tmp_path / "store")
    paths = sorted((tmp_path / "store").glob("*.safetensors"))
    paths[1].write_bytes(paths[0].read_bytes()[:-50])
    with pytest.raises(UsageError, match="damaged"):
        GradientStore(tmp_path / "store")


# Identities ---------------------------------------------------------------------------------------


def test_names_by_content_do_not_depend_on_batches() -> None:
    x, y = torch.arange(12).reshape(6, 2), torch.tensor([0, 1, 0, 1, 0, 1])
    whole = ByContent()((x, y), 6)
    names, parts = ByContent(), []
    for part in ((x[:4], y[:4]), (x[4:], y[4:])):
        parts += names(part, len(part[0]))
    assert parts == whole
    assert len({*whole}) == 6
    again = ByContent()((x[[0, 0, 0]], y[[0, 0, 0]]), 3)
    assert again == [whole[0], f"{whole[0]}-1", f"{whole[0]}-2"]


@pytest.mark.parametrize("samples", [0, 1, 3])
def test_names_of_a_batch_are_those_of_its_samples(samples) -> None:
    x, y = torch.randn(2, samples, 4).transpose(0, 1), torch.arange(samples)
    texts, few = [f"text {n}" for n in range(samples)], torch.randn(samples + 1)
    mask = torch.arange(4) <= y[:, None]
    for batch in (
        x,
        (x, y),
        [x.bfloat16(), [y > 0, texts]],
        {"b": texts, "a": (x, few, 0.5), "c": torch.empty(samples, 0), "d": torch.tensor(2)},
        {"labels": y, "in": {"attention_mask": mask, "ids": torch.randn(samples, 4)}},
    ):
        wanted = [content_hash(sample_of(batch, n, samples)) for n in range(samples)]
        assert content_hashes(batch, samples) == wanted


def test_names_by_content_ignore_padding_and_tell_kinds_apart() -> None:
    def padded(length: int) -> dict[str, Tensor]:
        mask = torch.zeros(length, dtype=torch.long)
        mask[:3] = 1
        return {"input_ids": torch.tensor([5, 6, 7] + [0] * (length - 3)), "attention_mask": mask}

    assert content_hash(padded(4)) == content_hash(padded(9))
    seen = [
        torch.zeros(2).float(),
        torch.zeros(2).double(),
        torch.zeros(1, 2),
        [0, 0],
        "00",
        (0.0, 0),
    ]
    assert len({content_hash(value) for value in seen}) == len(seen)
    assert content_hash({"a": 1, "b": 2}) == content_hash({"b": 2, "a": 1})


def test_places_of_ranks_are_dealt_in_turn() -> None:
    names = [ByPlace(rank, 2) for rank in range(2)]
    found = [name for batch in (2, 1) for each in names for name in each(None, batch)]
    assert sorted(found) == [*range(6)]
    assert found[:2] == [0, 2]


def test_samples_that_another_writer_stored_meanwhile_are_not_stored_again(tmp_path) -> None:
    first, second = (GradientStore(tmp_path / "store", process=process) for process in range(2))
    for store, names in ((first, ["a", "b"]), (second, ["c"]), (first, ["d"])):
        store.append(names, rows(len(names)))
        store.flush()
    second.append(["e", "b"], rows(2))
    for store in (second, copy.deepcopy(second)):
        with pytest.raises(UsageError, match=r"'b' is in .* Nothing was written: open the store"):
            store.flush()
    assert sorted(GradientStore(tmp_path / "store").identities) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("wrong", [torch.tensor([True, False, True]), [1.0], slice(0, 2), [None]])
def test_masks_and_places_are_no_identities(wrong, tmp_path) -> None:
    """In Python, True is 1: a mask would pick the rows 1 and 0 again and again."""
    store = GradientStore(tmp_path / "store")
    store.append([0, 1, 2], {"a": torch.randn(3, 2)})
    store.flush()
    scores = store.scores({"a": torch.randn(2, 2)})
    for ask in (store.__getitem__, scores.aligned):
        with pytest.raises(UsageError, match="must be a text or an integer"):
            ask(wrong)


def test_a_store_without_rows_says_so(tmp_path) -> None:
    store = GradientStore(tmp_path / "store")
    for ask in (store.search, store.scores):
        with pytest.raises(UsageError, match="has no rows yet"):
            ask({"a": torch.randn(2, 2)})
