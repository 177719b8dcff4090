"""The smallest recipes of faults that random nets have shown, by cause."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.nets.recipe import Plan, Recipe, Request, Settings, Shape, Source, Step, Term
from tests.nets.verdict import Prepared, judge

Called = tuple[str, Settings]
GRADIENTS = (Request("BatchGrad"),)
DIAGONAL = (Request("DiagGGNExact"),)
ONE_BY_ONE = (Request("DiagGGNExact", {"chunk_size": 1}),)
CLIPPED = (Request("ClippedSumGrad", {"factor": 0.3, "clipping": "flat", "normaliser": "loss"}),)


def chain(
    *calls: Called,
    shape: Shape = (3,),
    batch: int = 2,
    ask: tuple[Request, ...] = GRADIENTS,
    also: tuple[str, ...] = (),
    **plan: Any,
) -> Recipe:
    """Operations one behind the other, and squared distances of the last value.

    Args:
        calls: Kinds and settings. ``v0``, ``v1``, … are their first outputs.
        shape: That of a sample.
        batch: Number of samples.
        ask: The extensions.
        also: Further values that have a loss.
        plan: How the pass is run.
    """
    steps, before = [], "x"
    for k, (kind, settings) in enumerate(calls):
        inputs = (before, "x") if kind in {"merge_into", "assign"} else (before,)
        inputs = (before, before) if kind == "product" else inputs
        steps.append(Step(kind, inputs, (f"v{k}", f"v{k}b"), settings, f"p{k}"))
        before = f"v{k}"
    terms = [Term(value, "MSE", {"reduction": "sum"}) for value in (before, *also)]
    return Recipe(0, batch, {"x": Source(shape)}, tuple(steps), tuple(terms), ask, Plan(**plan))


def linear(out: int = 3, bias: bool = True) -> Called:
    return "Linear", {"out": out, "bias": bias}


def in_place(name: str) -> Called:
    return "InplaceActivation", {"name": name}


def recurrent(name: str, take: str, **options: Any) -> Called:
    given = {"hidden": 3, "layers": 1, "bias": True, "bidirectional": False, **options}
    return "Recurrent", {"name": name, "take": take, **given}


ATTENTION = (
    "Attention",
    {"heads": 1, "bias": True, "weights": "none", "bias_kv": False, "mask": 0},
)
LAYER_NORM = ("LayerNorm", {"axes": 1, "affine": True, "bias": True})
DROPOUT = ("Dropout", {"p": 0.5})
INSTANCE_NORM = ("InstanceNorm", {"affine": True})

FOUND: dict[str, Recipe] = {
    # Columns in chunks
    "chunks-in-place": chain(linear(), in_place("Mish"), ask=ONE_BY_ONE),
    "chunks-dropout": chain(linear(4), ("Activation", {"name": "ReLU"}), DROPOUT, ask=ONE_BY_ONE),
    "chunks-create-graph": chain(linear(4), DROPOUT, ask=ONE_BY_ONE, passes="differentiable"),
    "chunks-budget": chain(linear(), in_place("SiLU"), shape=(4, 3), ask=DIAGONAL, budget=64),
    "chunks-head": chain(
        linear(1, False), linear(2, False), shape=(1,), batch=1, ask=DIAGONAL, budget=1
    ),
    # Views that are overwritten
    "view-linear": chain(linear(), in_place("ReLU"), shape=(4, 3)),
    "view-part": chain(
        linear(), ("rewrite_part", {"name": "mul_", "axis": 1, "length": 1}), shape=(4, 3)
    ),
    "view-of-view": chain(INSTANCE_NORM, ("rewrite_view", {"name": "mul_"}), shape=(4, 3)),
    "view-residual": chain(linear(), ("merge_into", {"name": "add_"}), shape=(4, 3)),
    "view-assign": chain(INSTANCE_NORM, ("assign", {}), shape=(4, 3)),
    "view-attention": chain(ATTENTION, in_place("ELU"), shape=(4, 3)),
    "view-recurrent": chain(recurrent("LSTM", "sequence"), in_place("ELU"), shape=(4, 3)),
    "view-curvature": chain(linear(), in_place("ReLU"), shape=(4, 3), ask=DIAGONAL),
    "view-turned": chain(
        linear(),
        ("Turned", {}),
        ("rewrite", {"name": "mul_"}),
        linear(),
        shape=(3, 3),
        ask=DIAGONAL,
    ),
    "view-clipping": chain(linear(), linear(), in_place("ELU"), shape=(4, 3), ask=CLIPPED),
    # Outputs that depend on each other
    "outputs-gradients": chain(("Stages", {})),
    "outputs-curvature": chain(("Stages", {}), ask=DIAGONAL),
    "outputs-cell": chain(("Cell", {"name": "LSTMCell", "hidden": 2})),
    "outputs-net": chain(("NetParameter", {}), linear(), also=("v0",)),
    # Values of the forward pass
    "forward-other-weights": chain(linear(), passes="with_other_weights"),
    "forward-replaced": chain(linear(), passes="then_replaced"),
    "forward-eps": chain(LAYER_NORM, passes="then_changed"),
    "forward-statistics": chain(("BatchNorm", {"affine": True}), passes="then_changed"),
    "forward-dropout": chain(linear(), DROPOUT, ask=DIAGONAL, passes="then_changed"),
    "forward-inside": chain(("Twice", {}), in_place("Mish"), ask=DIAGONAL, passes="then_replaced"),
    "forward-inside-stages": chain(
        ("GatedStages", {}), in_place("SELU"), ask=CLIPPED, passes="then_replaced"
    ),
    "forward-inside-weights": chain(("Gated", {}), in_place("Mish"), passes="with_other_weights"),
    "forward-inside-statistics": chain(
        ("BatchNorm", {"affine": False}), ("NetParameter", {}), batch=1, passes="then_changed"
    ),
    "forward-alpha": chain(linear(), in_place("CELU"), ask=DIAGONAL, passes="then_changed"),
    # Samples left out, and final states
    "states-first": chain(
        recurrent("GRU", "last"),
        shape=(2, 3),
        ask=(Request("BatchDiagGGNExact", {"subsampling": [0]}),),
    ),
    "states-second": chain(
        recurrent("LSTM", "last"), shape=(2, 3), ask=(Request("GGNMP", {"subsampling": [1]}),)
    ),
    "states-bidirectional": chain(
        recurrent("RNN", "states", bidirectional=True),
        shape=(2, 3),
        ask=(Request("DiagGGNExact", {"subsampling": [0]}),),
    ),
    # What another pass leaves behind
    "left-memo": chain(
        linear(), linear(), ask=DIAGONAL, passes="after_failure_on_one_graph", hook_acts_at=2
    ),
    "left-frozen": chain(
        ("Linear", {"out": 3, "bias": True, "frozen": "weight"}), passes="after_thawing"
    ),
    "left-updates": chain(
        recurrent("RNN", "sequence"), shape=(2, 3), ask=CLIPPED, passes="with_updates"
    ),
    "left-inside": chain(linear(), ask=CLIPPED, passes="around_another"),
    # Single causes
    "memory-fields": chain(
        linear(), ask=(*GRADIENTS, Request("BatchGrad", {"savefield": "second"}))
    ),
    "memory-gradient": chain(("Positions", {}), batch=1, passes="by_grad"),
    "number-first": chain(linear(), ("blend", {}), ask=DIAGONAL),
    "subclass": chain(("StandardizedConv", {}), shape=(2, 4)),
    "with-a-graph": chain(recurrent("RNN", "last"), shape=(2, 3), ask=(Request("GGNMP"),)),
    "cdist": chain(linear(), ("product", {"name": "cdist"}), shape=(2, 3), ask=DIAGONAL),
    "linear-by-value": chain(
        linear(), ("scan", {"name": "logcumsumexp", "axis": 1}), ask=(Request("GGNMP"),)
    ),
    "name-of-a-node": chain(
        linear(), ("elementwise", {"name": "clamp_in_name_only"}), ask=(Request("DiagHessian"),)
    ),
    "replayed-attention": chain(
        ("NetParameter", {}), ATTENTION, shape=(2, 3), ask=(Request("GGNMP"),)
    ),
    "checkpoint-columns": chain(
        linear(1, bias=False), ("HalvedLinear", {"checkpoint": True}), shape=(1, 1, 1), ask=DIAGONAL
    ),
    "checkpoint-view": chain(
        ("Linear", {"out": 4, "bias": True, "checkpoint": True}),
        in_place("CELU"),
        shape=(2, 3),
        ask=(Request("GGNMP"),),
    ),
    "checkpoint-operand": chain(
        ("NetParameter", {"checkpoint": True}), shape=(1,), batch=1, ask=(Request("SqrtGGNExact"),)
    ),
    "hessian-for-some": chain(
        linear(1, False),
        in_place("Hardswish"),
        shape=(1, 1),
        batch=1,
        ask=(Request("DiagHessian"),),
        passes="for_some",
    ),
    "one-output-for-some": chain(
        ("GatedStages", {"frozen": "bias"}), also=("v0b",), passes="for_some"
    ),
    "unused-part": chain(linear(4), ("chunk", {"axis": 1})),
    "replayed-prelu": chain(
        ("NetParameter", {}),
        ("PReLU", {"many": False}),
        shape=(1,),
        batch=3,
        ask=(Request("GGNMP", {"subsampling": [2, 1]}),),
    ),
    # What a parameter gets is what is sent, unchanged
    "product-of-identity": chain(("Positions", {}), batch=1, ask=(Request("GGNMP"),)),
    # Parameters that operations use
    "hessian-two-forms": chain(
        ("Outside", {"name": "both"}), shape=(1,), ask=(Request("BatchDiagHessian"),)
    ),
    "hessian-frozen-factors": chain(
        ("StandardizedConv", {"frozen": "weight"}), shape=(1, 2), ask=(Request("DiagHessian"),)
    ),
    "view-complex": chain(
        ("Wrapped", {"name": "complex"}), ("merge_into", {"name": "sub_"}), shape=(1, 2)
    ),
}


# The second output is overwritten.
FOUND["forward-inside-stages"] = FOUND["forward-inside-stages"].with_(
    steps=tuple(
        replace(step, inputs=(name,))
        for step, name in zip(FOUND["forward-inside-stages"].steps, ("x", "v0b"), strict=True)
    )
)
# Losses that read one tensor, or one another's model, and of which some are not known.
SOME_OF_HESSIAN = (Request("HMP", {"subsampling": [1]}),)
FOUND["losses-of-one-tensor"] = chain(linear(), also=("v0",), ask=SOME_OF_HESSIAN)
FOUND["losses-in-a-row"] = chain(
    linear(), ("Activation", {"name": "Tanh"}), linear(), also=("v0",), ask=SOME_OF_HESSIAN
)
FOUND["loss-of-an-input"] = chain(linear(), also=("x",), ask=(Request("GGNMP"), *SOME_OF_HESSIAN))
FOUND["loss-of-an-input"] = FOUND["loss-of-an-input"].with_(
    sources={"x": Source((3,), requires_grad=True)}
)
for name, reduction in [("loss-unknown", "sum"), ("loss-unknown-unreduced", "none")]:
    FOUND[name] = chain(linear(), also=("v0",), ask=(Request("GGNMP"),))
    own = Term("v0", "Own", {"reduction": reduction}, by_hand="sum", part="own")
    FOUND[name] = FOUND[name].with_(terms=(FOUND[name].terms[0], own))
# One module, called twice.
FOUND["left-memo"] = FOUND["left-memo"].with_(
    steps=tuple(replace(step, part="p") for step in FOUND["left-memo"].steps)
)
# The input wants a gradient as well.
FOUND["checkpoint-view"] = FOUND["checkpoint-view"].with_(
    sources={"x": Source((1, 2, 3), requires_grad=True)}
)
# A checkpoint in what is run again, which saves what the module's parameters ask for.
FOUND["checkpoint-replayed"] = Recipe(
    8101487,
    1,
    {"x": Source((1, 1))},
    (
        Step("NetParameter", ("x",), ("v0",), {}, "p0"),
        Step("Chain", ("v0",), ("v1",), {"name": "ReLU", "inplace": True}, "p1"),
        Step("Mapping", ("v1", "v0"), ("v2", "v2b"), {"checkpoint": True}, "p2"),
    ),
    (Term("v2b", "MSE", {"reduction": "sum"}),),
    DIAGONAL,
    Plan(),
)
# A module reads the half that the loss does not depend on.
FOUND["unused-part"] = FOUND["unused-part"].with_(
    steps=(*FOUND["unused-part"].steps, Step("Identity", ("v1b",), ("v2",), {}, "p2"))
)
# A number that is made of weights, beside a batch of one.
FOUND["penalty-of-one"] = chain(linear(1, bias=False), shape=(1, 1), batch=1)
FOUND["penalty-of-one"] = FOUND["penalty-of-one"].with_(
    terms=(Term("v0", "weight_penalty"), *2 * FOUND["penalty-of-one"].terms)
)
# An argument that is not used, and as many arguments as merged rows.
FOUND["unused-argument"] = Recipe(
    5328,
    1,
    {"x0": Source((1, 1)), "x1": Source((2, 1))},
    (Step("MergedHead", ("x1",), ("v1",), {"merge": "flatten", "out": 1, "bias": False}, "p"),),
    (Term("v1", "MSE", {"reduction": "sum"}),),
    (Request("SqrtGGNExact"), Request("BatchGrad")),
    Plan(),
)
# States of a frozen layer, of as many layers as samples, have their samples behind those.
FROZEN = recurrent("RNN", "states", layers=2, hidden=1, bias=False, frozen="all")[1]
FOUND["frozen-states"] = Recipe(
    8000370,
    2,
    {"x0": Source((1, 1))},
    (
        Step("Recurrent", ("x0",), ("v0",), FROZEN, "p0"),
        Step("MergedHead", ("v0",), ("v1",), {"merge": "behind", "out": 1, "bias": False}, "p1"),
    ),
    (Term("v1", "MSE", {"reduction": "sum"}),),
    (Request("SqrtGGNExact"),),
    Plan(),
)
# A loss of as many entries as the net has arguments; and a pass whose graph was left in part.
PICKED = {"smoothing": 0.2, "picked": "pairs", "reduction": "sum"}
FOUND["as-many-picked-as-arguments"] = Recipe(
    8000789,
    3,
    {"x0": Source((1, 1)), "x1": Source((1, 1))},
    (
        Step("of_sequences", ("x1",), ("v0",), {"name": "gathered"}),
        Step("MergedHead", ("v0",), ("v1",), {"merge": "behind", "out": 2, "bias": False}, "p1"),
    ),
    (Term("v1", "CrossEntropy", PICKED),),
    (Request("Variance"),),
    Plan(),
)
FOUND["picked-in-a-late-walk"] = Recipe(
    8000436,
    1,
    {"x0": Source((1, 1))},
    (Step("Linear", ("x0",), ("v0",), {"out": 1, "bias": False}, "p0"),),
    (
        Term("v0", "MSE", {"reduction": "sum"}, part="loss0"),
        Term("v0", "CrossEntropy", {"picked": "flat", "reduction": "sum"}, part="loss1"),
    ),
    (Request("Variance"),),
    Plan("around_another"),
)
# Of one sample, a module that is gone through behind both of its outputs.
AVERAGED = {"heads": 1, "bias": False, "weights": "averaged", "bias_kv": False, "mask": False}
FOUND["attention-weights-of-one"] = Recipe(
    20010332,
    1,
    {"x0": Source((1, 1))},
    (
        Step("Attention", ("x0",), ("v0", "v0b"), AVERAGED, "p0"),
        Step("cat", ("v0", "v0b"), ("v1",), {"axis": 2}),
    ),
    (Term("v1", "MSE", {"reduction": "sum"}),),
    (Request("SqrtGGNExact"), Request("BatchGrad")),
    Plan(),
)
# Picks of one entry of each sample in another order; and of what nothing is known of.
FOUND["picked-in-another-order"] = Recipe(
    20230089,
    4,
    {"x0": Source((2,))},
    (
        Step("reshape", ("x0",), ("v0",), {"shape": [-1, 1, 2]}),
        Step("MergedHead", ("v0",), ("v1",), {"merge": "pixels", "out": 2, "bias": False}, "p1"),
    ),
    (
        Term("v1", "CrossEntropy", {"picked": "pairs", "reduction": "sum"}, part="loss0"),
        Term("v0", "functional", {"reduction": "sum"}, part="loss1"),
    ),
    GRADIENTS,
    Plan(),
)
FOUND["picked-of-an-ensemble"] = Recipe(
    20230609,
    2,
    {"x0": Source((2, 2))},
    (Step("Wrapped", ("x0",), ("v0",), {"name": "ensemble"}, "p0"),),
    (Term("v0", "CrossEntropy", {"picked": "pairs", "reduction": "sum"}),),
    (Request("SqrtGGNExact"),),
    Plan(),
)
# The spread of a row of zeros has no derivative.
WRITTEN = {"name": "joined", "of": "one", "at": 1, "fill": 0.0, "is_stacked": False, "part": "net"}
FOUND["written-row-standardised"] = Recipe(
    20220218,
    2,
    {"x0": Source((2, 1))},
    (
        Step("Linear", ("x0",), ("v0",), {"out": 1, "bias": False}, "p0"),
        Step("Written", ("v0",), ("v1",), WRITTEN, "p1"),
        Step("along", ("v1",), ("v2",), {"name": "standardize", "axis": 1}),
        Step("Linear", ("v2",), ("v3",), {"out": 1, "bias": True}, "p3"),
    ),
    (Term("v3", "MSE", {"reduction": "sum"}),),
    GRADIENTS,
    Plan(),
)

# All rows of a view that is overwritten are one sample's; its base has another axis in front.
FOUND["told-view"] = chain(
    INSTANCE_NORM,
    ("rewrite_part", {"name": "tanh_", "axis": 1, "length": 1}),
    shape=(1, 2),
    ask=(Request("BatchGrad"), Request("BatchDiagGGNExact")),
    passes="told",
).with_(seed=70009675)
FOUND["told-view-behind-positions"] = chain(
    ("Positions", {}),
    INSTANCE_NORM,
    ("rewrite", {"name": "tanh_"}),
    shape=(2, 2),
    passes="told",
).with_(seed=70009675)
# A weight that is scaled by a number has as many rows as the user's index.
FOUND["told-scaled-weight"] = chain(
    ("HalvedLinear", {}),
    ("MergedHead", {"merge": "pixels", "out": 1, "bias": False}),
    shape=(1, 1, 1),
    batch=3,
    ask=(Request("BatchGrad"), Request("BatchDiagGGNExact")),
    passes="told",
).with_(seed=901422)
# A layer inside is small enough to be a table, and is added to data.
FOUND["told-small-layer"] = chain(
    ("Gated", {}),
    ("MergedHead", {"merge": "pixels", "out": 2, "bias": False}),
    shape=(1, 2, 1),
    batch=3,
    ask=(Request("SumGradSquared"),),
    passes="told",
).with_(seed=1133379)
# What a module returned unchanged is written into what it received.
FOUND["view-with-strides"] = Recipe(
    70010803,
    2,
    {"x0": Source((1, 1))},
    (
        Step("Recurrent", ("x0",), ("v0",), recurrent("GRU", "states", hidden=1)[1], "p0"),
        Step("DropoutOff", ("v0",), ("v1",), {"p": 0.2}, "p1"),
        Step("merge_into", ("v1", "v0"), ("v2",), {"name": "sub_"}),
    ),
    (Term("v2", "MSE", {"reduction": "sum"}),),
    GRADIENTS,
    Plan(),
)
# A layer of a derivative meets a parameter that is updated before it is read.
DERIVED = {"name": "layer", "heads": 1, "bias": False, "first": False, "attached": False}
FOUND["updated-while-it-waits"] = Recipe(
    80016702,
    1,
    {"x0": Source((2, 2))},
    (Step("Derivative", ("x0",), ("v0",), DERIVED, "p1"),),
    (Term("v0", "MSE", {"reduction": "sum"}),),
    (Request("SqrtGGNExact"),),
    Plan("with_updates"),
)
# A derivative of gradients that have crossed a normalisation.
FOUND["differentiated-normalisation"] = Recipe(
    70016073,
    2,
    {"x0": Source((2,), tokens=4)},
    (
        Step("Embedding", ("x0",), ("v0",), {"tokens": 4, "width": 1, "padding": 0}, "p0"),
        Step("Wrapped", ("v0",), ("v1",), {"name": "instance_norm", "sequence": True}, "p1"),
    ),
    (Term("v1", "MSE", {"reduction": "sum"}),),
    GRADIENTS,
    Plan("differentiable"),
)
# Items of one length each, in a model that returns its loss, for which no rule is known.
FOUND["items-inside"] = Recipe(
    90001363,
    2,
    {"x0": Source((1,), lengths=(4, 4))},
    (Step("Bags", ("x0",), ("v0",), {"join": "centred", "pool": "indexed"}, "p0"),),
    (Term("v0", "Own", {"reduction": "sum"}, part="loss0"),),
    GRADIENTS,
    Plan(is_inside=True),
)
# Nothing is left to travel after chunks, where rows of items are in no order.
FOUND["chunks-of-items"] = Recipe(
    91001332,
    2,
    {"x0": Source((1,), lengths=(4, 2, 2, 1, 4))},
    (
        Step("Bags", ("x0",), ("v0",), {"join": "centred", "pool": "added"}, "p0"),
        Step("Linear", ("v0",), ("v3",), {"out": 2, "bias": False}, "p1"),
        Step("Linear", ("v3",), ("v4",), {"out": 2, "bias": False}, "p4"),
        Step("Softmax", ("v4",), ("v9",), {"axis": 1}, "p9"),
    ),
    (Term("v9", "MSE", {"reduction": "sum"}),),
    (Request("BatchDiagHessian"),),
    Plan(budget=300),
)
IGNORED = {"ignored": 1, "picked": "pairs", "reduction": "sum"}
# A sample that is chosen twice, and of which nothing is picked.
for name, chosen in {"twice": (0, 0), "twice-and-another": (-2, 1, 0)}.items():
    FOUND[f"nothing-picked-{name}"] = Recipe(
        911069,
        2,
        {"x0": Source((1, 1))},
        (
            Step("Linear", ("x0",), ("v3",), {"out": 2, "bias": False}, "p3"),
            Step("Flatten", ("v3",), ("v5",), {"start": 1}, "p5"),
        ),
        (Term("v5", "CrossEntropy", IGNORED, part="loss0"),),
        tuple(
            Request(kind, {"subsampling": [*chosen]})
            for kind in ("SqrtGGNExact", "BatchDiagGGNExact", "BatchDiagHessian", "BatchGrad")
        ),
        Plan(),
    )
# Rows that were picked in an order that a checkpoint elsewhere in the net kept from being read.
FOUND["picked-beside-a-checkpoint"] = Recipe(
    1205893,
    2,
    {"x0": Source((1, 4, 1))},
    (
        Step("scan", ("x0",), ("v0",), {"name": "copies", "axis": 2}),
        Step("Linear", ("v0",), ("v2",), {"out": 3, "bias": False, "checkpoint": True}, "p2"),
        Step("MergedHead", ("v2",), ("v3",), {"merge": "pixels", "out": 2, "bias": False}, "head3"),
    ),
    (Term("v3", "CrossEntropy", {"picked": "pairs", "reduction": "sum"}, part="loss0"),),
    (Request("BatchGrad"),),
    Plan(),
)
# A parameter that was expanded to as many rows as an item of the list has.
FOUND["items-beside-an-expanded-parameter"] = Recipe(
    1207852,
    4,
    {"x0": Source((1,), lengths=(4, 2, 3, 4, 4))},
    (
        Step("Bags", ("x0",), ("v0",), {"join": "joined", "pool": "means"}, "p0"),
        Step("Bags", ("x0",), ("v3",), {"join": "centred", "pool": "sums"}, "p3"),
        Step("Actor", ("v3",), ("v7", "v7b"), {}, "p7"),
    ),
    (
        Term("v7b", "MSE", {"reduction": "sum"}, part="loss1"),
        Term("v0", "functional", {"reduction": "sum"}, part="loss2"),
    ),
    (Request("SumGradSquared"), Request("BatchGrad")),
    Plan(),
)
# A table with a row for each step, and as many steps as samples.
FOUND["as-many-angles-as-samples"] = Recipe(
    8102103,
    4,
    {"x0": Source((4, 2))},
    (
        Step("Uses", ("x0",), ("v0",), {"name": "rotated", "sequence": True}, "p0"),
        Step("MergedHead", ("v0",), ("v4",), {"merge": "behind", "out": 1, "bias": False}, "h4"),
    ),
    (Term("v4", "MSE", {"reduction": "sum"}),),
    (Request("BatchGrad"),),
    Plan(),
)
# Two arguments are no two samples, although the loss has two rows of the only one.
FOUND["two-arguments-and-one-sample"] = Recipe(
    9103101,
    1,
    {"x0": Source((4, 2)), "x1": Source((4, 2))},
    (
        Step("Halves", ("x0",), ("v1", "v1b"), {}, "p1"),
        Step("Dense", ("v1",), ("v6",), {"out": 1, "frozen": "all"}, "p6"),
        Step("MergedHead", ("v6",), ("v7",), {"merge": "view", "out": 1, "bias": False}, "head7"),
    ),
    (Term("v7", "MSE", {"reduction": "sum"}),),
    (Request("BatchGrad"),),
    Plan(),
)
# A layer received samples on axis 1, and a view of what it returned, with samples in front, was
# overwritten.
SQUEEZED = ("Called", {"name": "squeezed"})
SCALED = ("rewrite", {"name": "mul_"})
FOUND["samples-behind-an-overwritten-view"] = chain(SQUEEZED, SCALED)
FOUND["checked-behind-an-overwritten-view"] = chain(
    ("Wrapped", {"name": "both_sides"}), ("merge_into", {"name": "lerp_"})
)
# Samples that were sorted before the first layer seem to be in order there.
SORTED = ("Called", {"name": "sorted"})
FOUND["sorted-data-and-an-index"] = chain(SORTED, batch=5, passes="told")
FOUND["sorted-data-and-merged-rows"] = chain(
    SORTED, ("MergedHead", {"merge": "view", "out": 1, "bias": False}), shape=(2, 2), batch=4
)
# Two views of the batch, one behind the other, and an index for each row of the model's input.
FOUND["two-views-and-an-index"] = chain(("Called", {"name": "siamese"}), batch=5, passes="told")
# Rows behind the axis of several nets, and an index that is a permutation.
FOUND["members-and-an-index"] = chain(("Uses", {"name": "ensemble"}), batch=2, passes="told")
# Nets of which a refusal would be a step back.
EXACT = {"chunks-of-items", "picked-beside-a-checkpoint", "items-beside-an-expanded-parameter"}
EXACT |= {"as-many-angles-as-samples", "two-arguments-and-one-sample"}
EXACT |= {"samples-behind-an-overwritten-view", "checked-behind-an-overwritten-view"}


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> None:
    """Every net is judged by itself for what it leaves."""


@pytest.mark.usefixtures("without_cudnn")
@pytest.mark.parametrize("name", FOUND)
def test_found(name: str) -> None:
    verdict = judge(Prepared(FOUND[name]))
    assert verdict.passes, f"{verdict.what}\n{verdict.details}"
    assert verdict.outcome == "exact" or name not in EXACT, verdict.details
