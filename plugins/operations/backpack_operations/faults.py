"""The errors that say why per-sample quantities do not exist in a graph, one function for each."""

from __future__ import annotations

from torch import Tensor

from backpack_core._torch import Node
from backpack_core.errors import (
    BackpackError,
    BridgeError,
    SampleMixingError,
    ShapeError,
    UnsupportedError,
)
from backpack_core.graph import described
from backpack_core.record.call import Call


def mixing(what: str, further: str = "") -> BackpackError:
    """A call, or an operation between calls, mixes samples."""
    return SampleMixingError(
        f"{what} makes every sample of the batch influence every other (a batch normalisation in "
        "train mode does, and a softmax over axis 0), so per-sample quantities do not exist. Call "
        f"model.eval(), or use a layer that treats samples one by one, such as GroupNorm.{further}"
    )


def nested_tensor(where: str, node: Node | None = None) -> BackpackError:
    """A tensor is nested (samples of several lengths) or sparse."""
    error = BridgeError(
        f"{where} is a nested tensor or a sparse one, but rules take dense tensors with an axis of "
        "samples. Make a sparse one dense (to_dense()). Pad a nested one "
        "(torch.nested.to_padded_tensor, or torch.nn.utils.rnn.pad_sequence) and mask the "
        "padding in the loss, or give recurrent layers packed sequences."
    )
    error.node = node
    return error


def other_gradients(node: Node, option: str) -> BackpackError:
    """An option of a look-up makes of its gradient something else than a derivative."""
    reason = {
        "scale_grad_by_freq": "divides gradients by counts over the whole batch",
        "sparse": "makes gradients sparse, but quantities are dense",
    }[option]
    return UnsupportedError(
        f"The operation {described(node)!r} has {option} set, which {reason}: leave {option} out."
    )


def moved_batch(call: Call, size: int, output: Tensor) -> BackpackError:
    """A call returns its samples on another axis, or not at all."""
    return ShapeError(
        f"{call.path} received {size} samples (axis 0 of its input) and returned a tensor "
        f"of shape {list(output.shape)}: it moves or merges the batch axis, so samples "
        "cannot be told apart. Keep samples on axis 0 of every module."
    )


def no_axis(call: Call, axis: object, output: Tensor) -> BackpackError:
    """A rule names an axis for the samples that an output does not have."""
    return ShapeError(
        f"{type(call.rule).__name__}.batch_axis returned {axis!r:.80} for an output of {call.path} "
        f"of shape {list(output.shape)}: return the number of the axis that holds the samples."
    )


def without_axis(call: Call) -> BackpackError:
    """A call received a number, or one sample as a vector."""
    return ShapeError(
        f"{call.path} received a tensor of shape {list(call.stored.inputs[0].shape)}, which has no "
        "axis of samples, so no quantity of single samples exists there. Give it one: "
        "x.unsqueeze(0)."
    )


def reordered() -> BackpackError:
    """Samples come out in another order, or scattered, if the first layer had them in order."""
    return SampleMixingError(
        "Samples come out of the model in another order than they go in, if its first layer "
        "received them in order, which nothing shows: it received changed data, or a copy. Sort "
        "samples behind a layer, hand the model sorted ones, or call requires_grad_() on the data "
        "before the model changes their order, so that it is recorded."
    )


def unknown_order(who: str, rows: int, samples: int) -> BackpackError:
    """A layer and the loss received several rows of each sample, and nothing shows their order."""
    return SampleMixingError(
        f"{who} received {rows} rows that the model computed of {samples} samples without a "
        "graph, and nothing shows which rows belong to which sample. Call requires_grad_() on what "
        "frozen layers return (features.requires_grad_()), so that the graph shows it; or return "
        "rows with an axis of samples in front."
    )


def permuted(call: Call) -> BackpackError:
    """A loss received permuted samples, and it is unknown whether its targets are permuted, too."""
    return SampleMixingError(
        f"{call.path} received a row of each sample, in another order than the model received "
        "samples, and the targets may be in either. Put the input of the model into that order, "
        "not its output."
    )


def turned_batch(call: Call, axis: int, size: int) -> BackpackError:
    """A call received samples on another axis, and axis 0 is as long as the batch, too."""
    where = "received a tensor that has an axis other than that of the samples in front, and"
    if axis:
        where = f"has its samples on axis {axis}, as extend(..., batch_axis=...) was told, and"
    return ShapeError(
        f"{call.path} {where} {size} entries on axis 0 as well: this quantity needs the samples "
        "there. Build the model with batch_first=True, or transpose before the module; if both "
        "axes are samples, as in a contrastive loss, no sample has a loss of its own: use HMP."
    )


def changed_output(call: Call) -> BackpackError:
    """A tensor that a call computes more from was changed in place, or is used outside."""
    return UnsupportedError(
        f"An output of {call.path} was changed in place, or what it computes inside is used "
        "outside, and it computes more from it: gradients that reach it from outside and from "
        "inside cannot be told apart. Use an out-of-place operation, and the module's output."
    )


def uncovered(call: Call) -> BackpackError | None:
    """A trained parameter inside a module that its rule does not know; ``None`` if it knows all."""
    computed = call.stored.computed
    behind = {id(leaf) for leaves in computed.values() for leaf in leaves}
    # Others may be there by now: functional_call() has put its tensors there for the forward only.
    parametrized = tuple(f"parametrizations.{name}." for name in computed)
    for name, parameter in call.module.named_parameters():
        is_known = name in call.stored.parameters or id(parameter) in behind
        is_known |= name.startswith(parametrized)
        if parameter.requires_grad and not is_known:
            return UnsupportedError(
                f"{call.path} has the trained parameter {name!r}, which the rule "
                f"{type(call.rule).__name__} does not know. Put the code that uses it into a "
                "separate module, or freeze the parameter."
            )
    return None


def other_batch(call: Call, size: int, batch_size: int) -> BackpackError:
    """A call received another number of rows than there are samples."""
    cause = "positions were probably merged with samples. Keep them as an extra dimension: "
    cause += "Linear takes [N, T, D], CrossEntropyLoss [N, C, T]."
    if size == 1:
        cause = (
            "the model was probably given one sample. A single sample needs an axis, too: [1, D]."
        )
    elif call.rule.is_loss and size % batch_size:
        cause = "a mask picked some, samples have several entries each, or the model has its "
        cause += "samples on another axis. Pick losses instead of logits (reduction='none', "
        cause += "then [mask]), give the model one more tensor with an entry for each sample, or "
        cause += "say where samples are: extend(model, batch_axis=1). If the mask picks before the "
        cause += "first trained layer, call requires_grad_() on what it picks from."
        if call.stored.inputs[0].dim() == 1:
            cause = f"a single sample needs an axis of samples, too: x.unsqueeze(0). Or {cause}"
    elif size < batch_size:
        cause = "samples probably have several entries each. Add these up by an index (index_add), "
        cause += "or give the model one more tensor with an entry for each sample."
    elif batch_size and size % batch_size:
        cause = "a mask probably picked rows before the first trained layer. Call requires_grad_() "
        cause += "on what it picks from, so that it is recorded, or pick behind the layer."
    return ShapeError(
        f"{call.path} received {size} entries on axis 0, where the model received {batch_size} "
        f"samples: {cause}"
    )


def elsewhere() -> BackpackError:
    """A placeholder for a fault that an earlier pass of the same structure did not raise."""
    return ShapeError("Samples are elsewhere.")


def told_rows(call: Call, rows: int, samples: int) -> BackpackError:
    """A call received rows that ``samples=...`` assigns to another number of samples."""
    return ShapeError(
        f"{call.path} received {rows} rows, which are those of {samples} samples, as samples=... "
        "of backpack(...) says, or a sum in the model: this quantity needs one row for each. "
        "Leave samples=... out; if the model adds up rows, do that after this module."
    )


def other_run(call: Call, size: int, batch_size: int) -> BackpackError:
    """Models were called for several batches of different lengths."""
    return ShapeError(
        f"In one backward pass, {call.path} was called for {size} samples, and another for "
        f"{batch_size}, and nothing says which belong together. Call the model once for all of "
        "them (torch.cat the inputs), or backward() for each loss in a block of its own."
    )


def ragged(call: Call) -> BackpackError:
    """Tensors of several lengths were joined, and it is unknown which rows are samples."""
    return ShapeError(
        f"{call.path} received several inputs of the model that were joined, of different lengths, "
        "and it is not known whether each of them is one sample: give the loss one entry for each. "
        "If one of them is not a list of samples (a memory that all share), give it to another "
        "module."
    )


def unclear_rows(call: Call) -> BackpackError:
    """It is unknown whose the rows are that a module received, before the first trained layer."""
    return ShapeError(
        f"{call.path} received rows of unknown samples. They were picked from what the model "
        "received, not as many of each sample, and equal rows of several samples hide whose they "
        "are: pick behind the module, layer(x)[mask] instead of layer(x[mask]). Or layers without "
        "a graph received rows in another order, and functions changed these before the next one: "
        "call requires_grad_() on the tensor that the first of these layers receives or makes."
    )


def whose_entries(call: Call) -> BackpackError:
    """``subsampling`` cannot choose samples at a loss whose entries belong to unknown samples."""
    return ShapeError(
        f"{call.path} received several entries of each sample on axis 0, and it is not known which "
        "sample each belongs to, so subsampling=... cannot choose samples there: leave it out, and "
        "choose from the result; or keep positions as an extra dimension, [N, T, D]."
    )
