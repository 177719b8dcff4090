"""``backpack attribute``: from a folder of a model and files of texts to what shaped an answer."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from backpack_attribution import GradientStore, Scores, influence
from backpack_attribution.cli import app
from backpack_attribution.texts import Texts, load_model, read_records
from backpack_core.errors import UsageError
from backpack_layers.language import CausalLMLoss

transformers = pytest.importorskip(
    "transformers", reason="the package that models are read with is not installed"
)
testing = pytest.importorskip("typer.testing", reason="the extra of the command is not installed")

TEXTS = ["the cat sees the moon", "a dog likes bread", "the river is red", "my friend finds a fish"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny GPT-2 that reads words, and its data."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    path = tmp_path_factory.mktemp("models")
    words = sorted({word for text in TEXTS for word in text.split()})
    vocabulary = {word: n for n, word in enumerate(["<pad>", "<unk>", *words])}
    tokenizer: Any = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>"
    )
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=len(vocabulary), n_positions=16, n_embd=8, n_layer=1, n_head=2
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    transformers.GPT2LMHeadModel(config).save_pretrained(path / "gpt2")
    torch.set_default_dtype(before)
    fast.save_pretrained(path / "gpt2")
    lines = [json.dumps({"text": text, "key": f"k{n}"}) for n, text in enumerate(TEXTS)]
    (path / "train.jsonl").write_text("\n".join(lines))
    (path / "queries.txt").write_text("the cat likes bread\na red fish")
    return path


def call(*arguments: object) -> str:
    result = testing.CliRunner().invoke(app, [*map(str, arguments)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    output: str = result.stdout
    return output


def test_build_and_query(folder: Path, tmp_path: Path) -> None:
    store, data = tmp_path / "store", folder / "train.jsonl"
    said = call("build", folder / "gpt2", data, store, "--id", "key", "-b", 3, "--dim", 6)
    assert "16 of 16 parameters take part" in said
    assert GradientStore(store).identities == ["k0", "k1", "k2", "k3"]
    again = call("build", folder / "gpt2", data, store, "--id", "key", "-b", 2, "--dim", 6)
    assert "4 samples" in again
    for method in ("dot", "cosine", "logra"):
        found = call("query", store, folder / "queries.txt", "-m", method, "-k", 2, "--json")
        rows = json.loads(found)
        assert [row["query"] for row in rows] == ["the cat likes bread", "a red fish"]
        for row in rows:
            values = [place["score"] for place in row["found"]]
            assert values == sorted(values, reverse=True)
            assert all(p["text"] == TEXTS[int(p["id"][1])] for p in row["found"])
    shown = call("query", store, folder / "queries.txt", "-k", 1, "--lowest")
    assert "the cat likes bread" in shown
    with pytest.raises(UsageError, match="another run"):
        call("build", folder / "gpt2", data, store, "--id", "key", "--dim", 7)


def test_score_is_influence_of_the_texts(folder: Path, tmp_path: Path) -> None:
    data, queries = folder / "train.jsonl", folder / "queries.txt"
    path = tmp_path / "scores.csv"
    said = call("score", folder / "gpt2", data, queries, "-m", "dot", "-o", path, "-b", 3)
    assert "16 of 16 parameters" in said
    table = [*csv.reader(path.read_text().splitlines())]
    assert table[0] == ["train", "0", "1"]
    model, tokenizer = load_model(folder / "gpt2")
    texts, asked = (Texts(read_records(p), tokenizer) for p in (data, queries))
    wanted = influence(model, CausalLMLoss("sum"), texts, asked, "dot")
    found = torch.tensor([[float(value) for value in row[1:]] for row in table[1:]])
    assert torch.allclose(found, wanted.values.to(found), rtol=1e-4, atol=1e-6)
    call("score", folder / "gpt2", data, queries, "-m", "ekfac", "-o", tmp_path / "s.safetensors")
    assert Scores.load(tmp_path / "s.safetensors").method == "ekfac"


def test_padding_and_prompts_do_not_count(folder: Path) -> None:
    model, tokenizer = load_model(folder / "gpt2")
    records = [{"ask": "the cat", "say": "sees the moon"}, {"ask": "a", "say": "dog"}]
    texts = Texts(records, tokenizer, "say", "ask")
    (batch,) = texts
    assert batch["labels"].tolist() == [
        [-100, -100, *tokenizer("sees the moon")["input_ids"]],
        [-100, *tokenizer("dog")["input_ids"], -100, -100, -100],
    ]
    alone = [next(iter(Texts([record], tokenizer, "say", "ask"))) for record in records]
    both = influence(model, CausalLMLoss(), texts, texts, "dot").values
    wanted = influence(model, CausalLMLoss(), alone, alone, "dot").values
    assert torch.allclose(both, wanted, rtol=1e-4, atol=1e-6)
    assert texts.identities() == [0, 1]
    by_content = Texts(records, tokenizer, "say", "ask", "content").identities()
    assert len({*by_content}) == 2


def test_what_a_tokenizer_puts_around_texts_goes_around_prompt_and_text(folder: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    _, tokenizer = load_model(folder / "gpt2")
    inner, pad = tokenizer._tokenizer, tokenizer.pad_token_id
    inner.post_processor = TemplateProcessing(
        single="<pad> $A <unk>", special_tokens=[("<pad>", pad), ("<unk>", tokenizer.unk_token_id)]
    )
    (batch,) = Texts([{"ask": "the cat", "say": "likes bread"}], tokenizer, "say", "ask")
    assert batch["input_ids"].tolist() == [tokenizer("the cat likes bread")["input_ids"]]
    assert batch["labels"][0, :3].tolist() == [-100] * 3
    (batch,) = Texts([{"say": "likes bread"}], tokenizer, "say")
    assert batch["labels"].tolist() == [tokenizer("likes bread")["input_ids"]]
    with pytest.raises(UsageError, match="record 1, ''"):
        list(Texts([{"say": "bread"}, {"say": ""}], tokenizer, "say"))


def test_equal_records_have_names(folder: Path) -> None:
    same = [{"ask": "a", "say": "b"}] * 3
    found = Texts([*same, {"ask": "", "say": "ab"}], None, "say", "ask", "content").identities()
    assert [str(name)[32:] for name in found] == ["", "-1", "-2", ""]
    assert len({*found}) == 4
    with pytest.raises(UsageError, match=r"have 'a' in the field 'ask'.* --id content"):
        Texts(same, None, "say", id="ask").identities()


@pytest.mark.parametrize("value", [["the cat", "a dog"], {"role": "user", "content": "the cat"}])
def test_fields_that_are_no_texts(folder: Path, value: Any) -> None:
    """Their Python form, with brackets and quotes, would be taken for the text."""
    _, tokenizer = load_model(folder / "gpt2")
    records = [{"text": "the moon", "ask": "a"}, {"text": value, "ask": value}]
    with pytest.raises(UsageError, match=r"field 'text' of record 1 is a (list|dict), not a text"):
        Texts(records, tokenizer)
    with pytest.raises(UsageError, match="not a text"):
        Texts([{"text": "the moon", "ask": value}], tokenizer, prompt="ask")


def test_texts_that_were_moved(folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "moved.txt"
    data.write_text("\n\n".join(TEXTS) + "\n\n")  # empty lines are no texts
    call("build", folder / "gpt2", data, tmp_path / "store", "--dim", 4)
    data.unlink()
    rows = json.loads(call("query", tmp_path / "store", folder / "queries.txt", "--json"))
    assert sorted(place["id"] for place in rows[0]["found"]) == [0, 1, 2, 3]


def test_files_of_other_programs(tmp_path: Path) -> None:
    """A mark in front, lines that hold separators of their own, and files that are damaged."""
    table = tmp_path / "table.csv"
    table.write_text('text,key\n"a, b",1\n', encoding="utf-8-sig")
    assert read_records(table) == [{"text": "a, b", "key": "1"}]
    texts = ["one\u2028two", "three\x0cfour"]
    plain, lines = tmp_path / "plain.txt", tmp_path / "lines.jsonl"
    plain.write_text("\n".join(texts) + "\n", encoding="utf-8")
    rows = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    lines.write_text("\r\n".join([*rows, ""]), encoding="utf-8")
    assert [*read_records(plain)] == [*read_records(lines)] == [{"text": text} for text in texts]
    lines.write_text("\n".join([*rows, "{'text': 1}"]), encoding="utf-8")
    with pytest.raises(UsageError, match="line 3 is not JSON"):
        read_records(lines)
    table.write_text("text\n" + 200_000 * "a", encoding="utf-8")
    with pytest.raises(UsageError, match="field larger than field limit"):
        read_records(table)


def test_long_texts_and_wrong_expressions(folder: Path, tmp_path: Path) -> None:
    """Texts are cut where the model has no more places; a wrong expression is named."""
    long = tmp_path / "long.txt"
    long.write_text(" ".join(4 * TEXTS) + "\n")
    assert "1 samples" in call("build", folder / "gpt2", long, tmp_path / "store")
    with pytest.raises(UsageError, match="must be a regular expression"):
        call("build", folder / "gpt2", long, tmp_path / "other", "--parameters", "h.(")


def test_frozen_parameters_are_named(folder: Path, tmp_path: Path) -> None:
    options = ("--parameters", r"mlp|ln_f", "--dim", 4)
    said = call("build", folder / "gpt2", folder / "train.jsonl", tmp_path / "store", *options)
    assert "6 of 16 parameters take part" in said
    assert "Frozen: transformer.wte.weight" in said


def test_data_of_all_kinds(tmp_path: Path) -> None:
    wanted = [{"text": text} for text in TEXTS]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, wanted)))
    (tmp_path / "a.json").write_text(json.dumps(wanted))
    (tmp_path / "a.txt").write_text("\n".join(TEXTS))
    (tmp_path / "a.csv").write_text("text\n" + "\n".join(TEXTS))
    for name in ("a.jsonl", "a.json", "a.txt", "a.csv"):
        assert [*read_records(tmp_path / name)] == wanted
    (tmp_path / "b.jsonl").write_text("{nothing")
    for name, said in (("b.jsonl", "cannot be read"), ("c.txt", "no data at")):
        with pytest.raises(UsageError, match=said):
            read_records(tmp_path / name)
    (tmp_path / "b.xml").touch()
    with pytest.raises(UsageError, match="convert it"):
        read_records(tmp_path / "b.xml")


def test_a_folder_of_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the extra for its folders is not installed")
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(str(tmp_path / "data"))
    assert [record["text"] for record in read_records(tmp_path / "data")] == TEXTS
    splits = datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": TEXTS})})
    splits.save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(UsageError, match=r"splits \['train'\]"):
        read_records(tmp_path / "splits")


def test_refusals(folder: Path, tmp_path: Path) -> None:
    data, queries, store = folder / "train.jsonl", folder / "queries.txt", tmp_path / "store"
    for arguments, said in (
        (("build", tmp_path / "no", data, store), "no folder"),
        (("build", tmp_path, data, store), "holds no causal language model"),
        (("build", folder / "gpt2", data, store, "--text", "words"), "no field 'words'"),
        (("build", folder / "gpt2", data, store, "--id", "name"), "no field 'name'"),
        (("build", folder / "gpt2", data, store, "--kind", "normal"), "kind must be one of"),
        (("build", folder / "gpt2", data, store, "--dtype", "int8"), "--dtype must be one of"),
        (("build", folder / "gpt2", data, store, "--parameters", "xyz"), "No parameter has"),
        (("query", store, queries), "no store at"),
        (("score", folder / "gpt2", data, queries, "-o", "a.txt"), "--output must end with"),
        (("score", folder, data, queries, "-o", tmp_path / "no" / "a.csv"), "folder that exists"),
        (("score", folder / "gpt2", data, queries, "-m", "ekfca"), "did you mean 'ekfac'"),
    ):
        with pytest.raises(UsageError, match=said):
            call(*arguments)
    no_model = ("score", tmp_path / "no", data, tmp_path / "no.jsonl")  # seen before the model
    result = testing.CliRunner().invoke(app, [*map(str, no_model)])
    assert result.exit_code == 2
    assert "does not exist" in " ".join(result.output.replace("│", "").split())
    (tmp_path / "short.txt").write_text("cat")
    with pytest.raises(UsageError, match="no token to predict"):
        call("score", folder / "gpt2", data, tmp_path / "short.txt", "-m", "dot")


def test_backpack_finds_the_commands_of_others(tmp_path: Path) -> None:
    info = tmp_path / "backpack_attribution_test-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: test\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(
        "[backpack.commands]\nattribute = backpack_attribution.cli:app\nbroken = no_module:app\n"
    )
    command = "import sys; sys.argv[0] = 'backpack'; from backpack_core.cli import main; main()"

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
        return subprocess.run(
            [sys.executable, "-c", command, *arguments],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    assert "attribute" in run("--help").stdout
    (queries := tmp_path / "queries.txt").touch()
    wrong = run("attribute", "query", str(tmp_path / "store"), str(queries))
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("backpack: There is no store at")
    broken = run("broken")
    assert broken.returncode == 1
    assert "'broken' (no_module:app) cannot be loaded: No module named 'no_module'" in broken.stderr
