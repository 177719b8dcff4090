"""The commands ``backpack attribute``. Imports typer; each command imports what it needs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from backpack_attribution.scores import Found, Scores
    from backpack_attribution.texts import Texts

app = typer.Typer(
    no_args_is_help=True,
    help="Which training texts shaped what a language model says.",
)

Model = Annotated[Path, typer.Argument(help="Folder of a causal model of transformers.")]
# Paths that do not exist are told before the model is read, which may take minutes.
Data = Annotated[
    Path,
    typer.Argument(exists=True, help="Training texts: .jsonl, .json, .csv, .txt, datasets."),
]
Queries = Annotated[
    Path, typer.Argument(exists=True, help="Texts to explain, in one of the same forms.")
]
Store = Annotated[Path, typer.Argument(help="Folder of the store.")]
Text = Annotated[str, typer.Option("--text", help="Field with the text, or the completion.")]
Prompt = Annotated[
    str | None, typer.Option("--prompt", help="Field before it that does not count in the loss.")
]
Id = Annotated[str, typer.Option("--id", help="Field that names a text; or: row, content.")]
Size = Annotated[int, typer.Option("--batch-size", "-b", min=1, help="Texts at a time.")]
Length = Annotated[
    int, typer.Option("--length", min=2, help="Most tokens of a text; at most the model's limit.")
]
Parameters = Annotated[
    str | None,
    typer.Option("--parameters", help="Regular expression for the names of parameters to use."),
]
Count = Annotated[int, typer.Option("--count", "-k", min=1, help="Texts to show for each query.")]
_GONE = "(no longer in the data)"
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


@app.command()
def build(
    model: Model,
    data: Data,
    store: Store,
    text: Text = "text",
    prompt: Prompt = None,
    name: Id = "row",
    batch_size: Size = 8,
    length: Length = 512,
    parameters: Parameters = None,
    dim: Annotated[int, typer.Option(min=1, help="Numbers for each parameter and text.")] = 64,
    kind: Annotated[str, typer.Option(help="kronecker, gaussian, rademacher, sparse.")] = (
        "kronecker"
    ),
    seed: Annotated[int, typer.Option(help="Seed of the projection.")] = 0,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float64.")] = "float32",
) -> None:
    """Store projected gradients of training texts. If run again, add what is missing.

    Example: `backpack attribute build gpt2/ train.jsonl gradients/`
    """
    from dataclasses import asdict

    from backpack_attribution.filling import fill
    from backpack_attribution.manifest import DTYPES
    from backpack_attribution.store import GradientStore
    from backpack_core.errors import UsageError
    from backpack_firstorder import Projection

    if dtype not in DTYPES:
        raise UsageError(f"--dtype must be one of {', '.join(DTYPES)}. Got {dtype!r}.")
    projection = Projection(dim, kind, seed)  # type: ignore[arg-type]
    net, texts = _loaded(model, data, parameters, text, prompt, name, batch_size, length)
    about = {
        "model": str(model.resolve()),
        "data": str(data.resolve()),
        "fields": {"text": text, "prompt": prompt, "id": name, "length": length},
        "parameters": parameters,
        "projection": asdict(projection),
    }
    found = GradientStore(store, dtype=DTYPES[dtype], about=about)
    fill(found, net, _loss(), texts, projection, identities=texts.identities())
    typer.echo(_coverage(net, [*found.shapes]))
    typer.echo(f"{found!r}")


@app.command()
def query(
    store: Store,
    queries: Queries,
    method: Annotated[str, typer.Option("--method", "-m", help="logra, dot or cosine.")] = "logra",
    count: Count = 10,
    lowest: Annotated[bool, typer.Option("--lowest", help="Texts that speak against it.")] = False,
    batch_size: Size = 8,
    as_json: Json = False,
) -> None:
    """Find the texts of a store with the highest scores for each query.

    Example: `backpack attribute query gradients/ questions.jsonl -k 5`
    """
    from backpack_attribution.filling import preconditioned
    from backpack_attribution.store import GradientStore
    from backpack_attribution.texts import read_records
    from backpack_core.errors import UsageError

    if method not in ("logra", "dot", "cosine"):
        raise UsageError(f"--method must be logra, dot or cosine. Got {method!r}.")
    if not store.is_dir():
        raise UsageError(
            f"There is no store at {store}: build one with `backpack attribute build`."
        )
    found = GradientStore(store)
    if "projection" not in found.about:
        raise UsageError(f"{store} was not made by `backpack attribute build`.")
    projected, asked = _projected(found.about, queries, batch_size)
    gradients = preconditioned(found, projected) if method == "logra" else projected
    best = found.search(gradients, count, largest=not lowest, cosine=method == "cosine")
    try:
        known = _texts_of(found.about, read_records(found.about["data"]))
    except UsageError as error:  # scores and identities are in the store
        typer.echo(f"The training texts cannot be shown. {error.args[0]}", err=True)
        known = {}
    _show(best, [asked.shown(r) for r in asked.records], known, as_json)


@app.command()
def score(
    model: Model,
    data: Data,
    queries: Queries,
    method: Annotated[
        str, typer.Option("--method", "-m", help="dot, cosine, kfac, ekfac, ekfac-cg, trak, logra.")
    ] = "ekfac",
    text: Text = "text",
    prompt: Prompt = None,
    name: Id = "row",
    batch_size: Size = 8,
    length: Length = 512,
    parameters: Parameters = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write all: .safetensors or .csv.")
    ] = None,
    count: Count = 10,
    as_json: Json = False,
) -> None:
    """Score all training texts for all queries, without a store.

    Example: `backpack attribute score gpt2/ train.jsonl questions.jsonl -m ekfac -o scores.csv`
    """
    from backpack_attribution.influence import influence
    from backpack_core.errors import UsageError

    if output is not None and output.suffix not in (".safetensors", ".csv"):
        raise UsageError(f"--output must end with .safetensors or .csv. Got {output.name!r}.")
    if output is not None and (output.is_dir() or not output.parent.is_dir()):
        raise UsageError(f"--output must be a file in a folder that exists. Got {output}.")
    settings = (text, prompt, name, batch_size, length)
    net, texts = _loaded(model, data, parameters, *settings)
    asked = _texts(queries, texts.tokenizer, *settings[:-1], texts.length)
    scores = influence(
        net,
        _loss(),
        texts,
        asked,
        method,
        identities=texts.identities(),
        query_identities=asked.identities(),
    )
    typer.echo(_coverage(net, _reached(net, texts)), err=as_json)
    if output is not None:
        _write(scores, output)
        typer.echo(f"{scores!r} in {output}", err=as_json)
    known = {n: texts.shown(r) for n, r in zip(scores.train, texts.records, strict=True)}
    _show(scores.top(count), [asked.shown(r) for r in asked.records], known, as_json)


def _loss() -> Any:
    from backpack_layers.language import CausalLMLoss

    return CausalLMLoss()


def _texts(data: Path, tokenizer: Any, *settings: Any) -> Texts:
    from backpack_attribution.texts import Texts, read_records

    return Texts(read_records(data), tokenizer, *settings)


def _loaded(
    model: Path, data: Path, parameters: str | None, *settings: Any
) -> tuple[Module, Texts]:
    from backpack_attribution.texts import load_model, longest

    net, tokenizer = load_model(model, parameters)
    *fields, length = settings
    return net, _texts(data, tokenizer, *fields, longest(net, length))


def _projected(about: dict[str, Any], queries: Path, size: int) -> tuple[dict[str, Tensor], Texts]:
    """Gradients of queries, projected like those of a store."""
    from backpack_attribution.projected import project
    from backpack_firstorder import Projection

    fields = about["fields"]
    settings = (fields["text"], fields["prompt"], "row", size, fields["length"])
    net, asked = _loaded(Path(about["model"]), queries, about["parameters"], *settings)
    return project(net, _loss(), asked, Projection(**about["projection"])), asked


def _texts_of(about: dict[str, Any], records: Sequence[Any]) -> dict[Any, str]:
    """The training texts of a store by identity."""
    from backpack_attribution.texts import Texts

    fields = about["fields"]
    texts = Texts(records, None, fields["text"], fields["prompt"], fields["id"])
    return {n: texts.shown(r) for n, r in zip(texts.identities(), records, strict=True)}


def _reached(net: Module, texts: Texts) -> list[str]:
    from backpack_attribution.problem import Problem

    problem = Problem(net, _loss())
    with problem.extended():
        return [*problem.gradients(next(iter(texts)))]


def _coverage(net: Module, covered: list[str]) -> str:
    from backpack_attribution.texts import coverage

    return coverage(net, covered)


def _write(scores: Scores, path: Path) -> None:
    if path.suffix == ".safetensors":
        scores.save(path)
        return
    import csv

    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(["train", *scores.queries])
        for name, row in zip(scores.train, scores.values.tolist(), strict=True):
            table.writerow([name, *row])


def _show(found: Found, asked: list[str], known: dict[Any, str], as_json: bool) -> None:
    rows = [
        {
            "query": question,
            "found": [
                {"score": value, "id": name, "text": known.get(name, _GONE)}
                for value, name in zip(values, names, strict=True)
            ],
        }
        for question, values, names in zip(
            asked, found.values.tolist(), found.identities, strict=True
        )
    ]
    if as_json:
        import json

        typer.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        typer.echo(f"\n{_short(str(row['query']))}")
        for place in row["found"]:
            if isinstance(place, dict):
                typer.echo(f"  {place['score']:11.4g}  {place['id']}  {_short(place['text'])}")


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 80 else f"{line[:77]}..."
