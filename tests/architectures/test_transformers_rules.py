"""The conformance kit, applied to the rules for layers of the transformers package."""

from __future__ import annotations

import ast
import importlib
import pathlib
import re
import sys

import pytest
import torch
from torch import nn

from backpack_core.plugins.registry import registry
from backpack_core.testing import RuleCase, Tolerances, parametrize_checks

transformers = pytest.importorskip(
    "transformers", reason="the package whose layers these are is not installed"
)

from backpack_transformers import names  # noqa: E402

# These norms compute in single precision, whatever they are given.
SINGLE = Tolerances(float64=1e-5)


def _class(family: str, name: str) -> type[nn.Module]:
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    found: type[nn.Module] = getattr(module, name)
    return found


def _gain(family: str, name: str, *arguments: object, **options: object) -> RuleCase:
    """A norm over four features, with random parameters."""
    shape = options.pop("shape", (2, 4))
    fails = options.pop("fails", {})
    kind = _class(family, name)

    def make() -> nn.Module:
        module = kind(*arguments, **options)
        for parameter in module.parameters():
            parameter.data.uniform_(0.5, 1.5)
        return module

    return RuleCase(
        make,
        lambda n: torch.randn(n, *shape),
        name=name,
        tolerances=SINGLE,
        expected_failures=fails,
    )


def _falcon() -> nn.Module:
    return _class("falcon", "FalconLinear")(4, 2)


def _conv1d() -> nn.Module:
    return transformers.pytorch_utils.Conv1D(2, 4)


def _ids(*shape: int):
    return lambda n: torch.randint(1, 5, (n, *shape))


CASES = [
    RuleCase(_conv1d, lambda n: torch.randn(n, 4)),
    RuleCase(_conv1d, lambda n: torch.randn(n, 5, 4), name="Conv1D, positions"),
    RuleCase(_falcon, lambda n: torch.randn(n, 5, 4)),
    _gain("llama", "LlamaRMSNorm", 4),
    _gain("gemma", "GemmaRMSNorm", 4),
    _gain("t5", "T5LayerNorm", 4),
    _gain("deberta", "DebertaLayerNorm", 4),
    _gain("cohere", "CohereLayerNorm", 4),
    _gain("convnext", "ConvNextLayerNorm", 4, data_format="channels_first", shape=(4, 2, 2)),
    RuleCase(lambda: _class("bart", "BartScaledWordEmbedding")(5, 2, 0, embed_scale=3.0), _ids(4)),
    RuleCase(
        lambda: _class("bart", "BartLearnedPositionalEmbedding")(5, 2),
        lambda n: torch.randn(n, 4),
        constants=(0,),
        name="BartLearnedPositionalEmbedding",
        expected_failures={
            "float32": "all samples look up the same rows: their variance is rounding"
        },
    ),
]


@pytest.mark.grid(8)
@parametrize_checks(CASES)
def test_layer(check):
    check()


# Their parameter is no gain of the output, or belongs to other axes than the last.
OTHERWISE = {
    "Emu3VQVAEGroupNorm",
    "Gemma3nAudioCumulativeGroupNorm",
    "GradiumPhononTTSTimestepNorm",
    "MuseSparkTextInputScaledRMSNorm",
    "PeAudioMaskedGroupNorm",
    "PeAudioVideoMaskedGroupNorm",
    "PeVideoMaskedGroupNorm",
    "PocketTTSTimestepNorm",
    "T5Gemma2TextScaledWordEmbedding",
    "VitDetLayerNorm",
}


NORMS = ("Norm", "NormGated")
ENDS = ("LayerScale", "ScaledWordEmbedding", "LearnedPositionalEmbedding")


def _written(path: pathlib.Path) -> list[str]:
    """Norms, scales and embeddings of a file that have a forward pass and a parameter."""
    found = []
    # Parsed class by class, and only those whose name counts: whole files take ten times as long.
    for block in re.split(r"^(?=\S)", path.read_text(encoding="utf-8"), flags=re.MULTILINE):
        if not re.match(rf"class \w*({'|'.join((*NORMS, *ENDS))})\b", block):
            continue
        (node,) = ast.parse(block).body
        assert isinstance(node, ast.ClassDef)
        forward = [m for m in node.body if getattr(m, "name", "") == "forward"]
        text = ast.unparse(forward[0]) if forward else ""
        uses = any(word in text for word in ("self.weight", "data_format", "super().forward"))
        is_norm = node.name.endswith(NORMS) and uses
        if is_norm or (forward and node.name.endswith(ENDS)):
            found.append(f"transformers.models.{path.parent.name}.{path.stem}.{node.name}")
    return found


def test_the_names_are_those_of_the_installed_version():
    root = pathlib.Path(transformers.__file__).parent
    written = {name for path in root.glob("models/*/modeling_*.py") for name in _written(path)}
    listed = {*names.GAINS, *names.EMBEDDINGS}
    assert listed - written == set()
    assert {name.rpartition(".")[2] for name in written - listed} == OTHERWISE


def test_a_class_that_computes_something_else_raises(monkeypatch):
    from backpack_core import backpack, extend
    from backpack_core.errors import UnsupportedError
    from backpack_core.extensions import BatchGrad
    from backpack_transformers import gain

    known = _class("llama", "LlamaRMSNorm")
    members = {"forward": lambda self, x: x * self.weight.square(), "__module__": known.__module__}
    # A new class: one that was seen before would lose its rule.
    kind = type(known.__name__, (known,), members)
    monkeypatch.setattr(gain, "_known", set())
    monkeypatch.setattr(sys.modules[known.__module__], known.__name__, kind)
    model, lossfunc = extend(nn.Sequential(kind(4))), extend(nn.MSELoss())
    loss = lossfunc(model(torch.randn(3, 4)), torch.randn(3, 4))
    with backpack(BatchGrad()), pytest.raises(UnsupportedError, match="was a gain"):
        loss.backward()


def test_a_rule_does_not_speak_for_a_subclass():
    kind = _class("llama", "LlamaRMSNorm")

    class Other(kind):
        def forward(self, x):
            return x

    assert registry.resolve(Other(4)).is_fallback
    assert not registry.resolve(kind(4)).is_fallback
