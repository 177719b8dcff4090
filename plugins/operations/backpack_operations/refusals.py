"""What a backward pass refuses, or warns of, before it computes anything.

An error in the middle of a pass would leave half of the results behind.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import Module

from backpack_core import _hooks, errors
from backpack_core._torch import Node, class_of
from backpack_core.contract.extension import Extension
from backpack_core.contract.propagator import Propagator
from backpack_core.graph import Survey, described, name_of
from backpack_core.plugins.registry import registry
from backpack_core.record.call import Call, Edge
from backpack_core.record.models import owners_of
from backpack_operations import faults, nodes, presumed
from backpack_operations.alignment import Alignment
from backpack_operations.order import behind, calls_at
from backpack_operations.owners import Owners
from backpack_operations.parameter_owners import name_of_parameter, owned_by_models
from backpack_operations.paths import is_factor
from backpack_operations.survey import GraphSurvey, edges_behind


def refuse_bare(survey: GraphSurvey, extensions: Sequence[Extension]) -> None:
    """Refuse parameters that functions use, if an extension cannot be computed for them.

    Warn about parameters that belong to no extended model.

    Args:
        survey: What is known about the graph.
        extensions: What was asked for.

    Raises:
        UnsupportedError: An extension that needs such a parameter cannot be computed for it.
    """
    at_leaves = set(map(id, survey.alignment.leaves.values()))
    owned = owned_by_models()
    for key, (parameter, node, _) in survey.bare.items():
        is_known = key in at_leaves
        missing = [e for e in extensions if not (is_known and e.propagator.keeps_apart)]
        uses = survey.uses[key].count if key in survey.uses else 0
        if not missing:
            continue
        problem, advice = _describe_use(parameter, node, survey)
        for extension in missing:
            tolerates = key not in owned or extension.fail_mode in ("warning", "silent")
            # If a module uses it as well, the result would lack a part.
            if extension.needs_every_parameter or not tolerates or uses > is_known:
                raise errors.UnsupportedError(
                    f"{problem}, so {registry.describe(extension)} cannot be computed. {advice}"
                )
        if any(key not in owned or e.fail_mode == "warning" for e in missing):
            text = f"{problem}: it gets no quantity. {advice}"
            errors.warn_once((id(parameter), text), text, errors.UncoveredParameterWarning)


def _describe_use(parameter: Tensor, node: Node, survey: GraphSurvey) -> tuple[str, str]:
    """Two sentences for messages: what uses a parameter, and what to do about it."""
    use = survey.uses.get(id(parameter))
    if use is not None and not use.call.rule.covers(use.call.module, use.name):
        kind = class_of(use.call.module).__name__
        advice = f"Write a layer rule for {kind}, or freeze the parameter."
        return f"No layer rule covers {use.name!r} of {use.call.path}", advice
    outsider = _not_extended(parameter, [call.module for call, _ in survey.sites])
    if nodes.is_compiled(node):
        advice = (
            "That part of the graph was compiled by torch.compile, which hides modules: run the "
            "forward pass inside the block of backpack(...), where compiled code runs eagerly."
        )
    elif outsider:
        advice = (
            f"{outsider} is not an extended part of its model: it was put there, or wrapped, after "
            "extend(model), or unextended. Call extend(model) again."
        )
    else:
        verb = "Call" if id(parameter) in owned_by_models() else "Extend"
        advice = (
            f"{verb} the module that it belongs to, make it a parameter of the module whose "
            "forward() uses it, or freeze it."
        )
    name = named(survey, parameter)
    used = f"{name[0].upper()}{name[1:]} is used by the operation {name_of(node)!r}"
    if use is not None and use.count and not (outsider or nodes.is_compiled(node)):
        return (
            f"{used} besides its module (the model returns a derivative of itself, by "
            "torch.autograd.grad(..., create_graph=True), or a weight is tied)",
            "Use an extension that follows operations, such as KFAC, DiagGGNExact or BatchGrad.",
        )
    return f"{used} outside any extended module that owns it", advice


def named(survey: Survey, parameter: Tensor) -> str:
    """A parameter with its name and shape, for messages."""
    name = name_of_parameter([call.module for call, _ in survey.sites], parameter)
    which = "a parameter" if name is None else f"the parameter {name}"
    return f"{which} of shape {list(parameter.shape)}"


def refuse_misaligned(
    survey: GraphSurvey, alignment: Alignment, propagators: Sequence[Propagator]
) -> None:
    """Raise an error if samples are not on axis 0 at a tensor, and a quantity needs them there.

    Args:
        survey: What is known about the graph.
        alignment: Where samples lie in it.
        propagators: The propagators that were asked for.

    Raises:
        BackpackError: A quantity needs the samples on axis 0, and they are elsewhere.
    """
    for propagator in propagators:
        if not propagator.per_sample:
            continue
        for call in survey.unclear:
            raise faults.unclear_rows(call)
        ends = _ends(survey, alignment)
        if _ends_reordered(survey, ends):
            raise faults.reordered()
        unknown = presumed.of_unknown_order(survey, ends) if survey.tells_samples else None
        if unknown is not None:
            raise faults.unknown_order(unknown.who, len(unknown.data), alignment.batch_size)
        for (call, index), fault in alignment.faults.items():
            if propagator.only_at_losses and not call.rule.is_loss:
                continue
            if _is_one(survey, call):
                raise faults.without_axis(call)
            site = survey.sites[call, index]
            positions = alignment.positions_of(site)
            # Between the samples and backward(), axis 0 is another one: a rule must not read it.
            is_before = (site.edge.node, site.edge.output_nr) in alignment.before
            is_known = not survey.axes[call, index] or alignment.owned_at(site.edge) is not None
            is_known &= not (is_before and survey.trained[call])
            if call.rule.is_loss:
                edge = call.edges[0]
                is_known = not call.stored.inputs[0].shape[:1].numel() % alignment.batch_size
                # A declared axis does not say in which order the entries of a loss are.
                is_known &= not survey.is_declared or alignment.batch_size == 1
                owners, is_owned = Owners(survey), edge and alignment.owned_at(edge) is not None
                if not is_owned and owners.received_permuted(call):
                    raise faults.permuted(call)
                is_known &= not owners.received_elsewhere(call)
                is_known |= bool(is_owned)
            if not propagator.keeps_apart or not is_known:
                raise fault
            is_chosen = call.rule.is_loss and propagator.subsampling is not None
            is_chosen &= propagator.travels or propagator.only_at_losses
            if is_chosen and positions > 1 and (call, index) not in survey.loss_owners:
                raise faults.whose_entries(call)
        if alignment.beside and propagator.keeps_apart:
            raise _beside(survey, *alignment.beside[0])


def _is_one(survey: GraphSurvey, call: Call) -> bool:
    """Whether a call received all that the model did, as a vector: one sample, without an axis.

    A vector beside other inputs may be one for all samples.
    """
    vector, sizes = call.stored.inputs[0], call.run.sizes
    is_vector = vector.dim() == 1 and vector.is_floating_point() and sizes == (len(vector),)
    return is_vector and sizes != (1,) and call.receives_input > 1 and not survey.is_told


def _ends(survey: GraphSurvey, alignment: Alignment) -> list[Edge]:
    """What losses received, or what there is in front of operations of one."""
    losses = [call for call, _ in survey.received if call.rule.is_loss]
    ends = [edge for call in losses for edge in call.edges[:1] if edge is not None]
    return ends + [edge for node, _ in alignment.before for _, edge in edges_behind(node)]


def _ends_reordered(survey: GraphSurvey, ends: list[Edge]) -> bool:
    """Whether samples seem to come out of the net in another order, as far as lengths tell."""
    owners = Owners(survey)
    if not (survey.guessed and owners.are_moved):
        return presumed.contradicts(survey, ends)
    guesses = [ids for each in survey.guessed if (ids := survey.sample_ids.get(each)) is not None]
    if any(sum(length > 1 for length in ids.shape) > 1 for ids in guesses):
        return True  # along two axes, as no net has its samples
    is_other = any(owners.are_reordered(edge[:2]) for edge in ends)
    return is_other or presumed.contradicts(survey, ends)


def refuse_other_order(survey: GraphSurvey, extensions: Sequence[Extension]) -> None:
    """Raise an error if a model puts all of its data into another order, before any layer.

    Results of single samples could then be in either order; sums over samples are the same in both.
    It does not raise if other data are in the order of the samples (positives beside permuted
    negatives).

    Args:
        survey: What is known about the graph.
        extensions: What was asked for.

    Raises:
        SampleMixingError: All data are permuted, and an extension has results of single samples.
    """
    is_known = survey.is_told or survey.depth is not None or not survey.alignment.faults
    if is_known or all(e.over_batches == "sum" or not e.propagator.per_sample for e in extensions):
        return
    owners = Owners(survey)
    fresh = [c for c, _ in survey.sites if not (c.rule.is_loss or c.is_released or any(c.edges))]
    of_data = [c for c in fresh if c.receives_input or owners.ids.of_input(c) is not None]
    if of_data and all(map(owners.received_permuted, of_data)):
        raise faults.permuted(of_data[0])


def refuse_beside(survey: GraphSurvey, extensions: Sequence[Extension]) -> None:
    """Raise an error if a term in ``beside=`` depends on module outputs or an extension needs it.

    Args:
        survey: What is known about the graph.
        extensions: What was asked for.

    Raises:
        UnsupportedError: A term depends on such an output, so that the gradient there is not the
            gradient of the loss; or an extension is about everything that is differentiated.
    """
    if not survey.beside:
        return
    for extension in extensions:
        if extension.is_of_everything:
            raise errors.UnsupportedError(
                f"{registry.describe(extension)} is of all that backward() is called on, and the "
                "second derivative of a term that was handed over in beside=[...] is not known to "
                "any rule. Call backward() on the term outside the block and add its second "
                "derivative yourself, or use products with the Hessian (HMP), which have it."
            )
    ends = {node for node, _ in survey.beside}
    reached = ends | behind(ends)
    for site in survey.sites.values():
        if site.edge.node in reached:
            raise errors.UnsupportedError(
                f"A term that was handed over in beside=[...] depends on the output of "
                f"{site.call.path}, whose gradient is the sum of both: what belongs to the loss "
                "alone is not known. Leave the term out of beside=[...], which adds it to the "
                "gradients of samples if it is a sum over them; or call backward() on it outside "
                "of the block."
            )


def _beside(survey: GraphSurvey, parameter: Tensor, node: Node) -> errors.UnsupportedError:
    """The error for a parameter that the loss depends on, by an operation, without any sample."""
    depends = (
        f"The number that backward() is called on depends on {named(survey, parameter)} by the "
        f"operation {described(node)!r}"
    )
    owners = Owners(survey)
    further = [n for n, _ in survey.between if n is node or node in behind([n])]
    if any(owners.are_elsewhere((n, 0)) for n in further):
        return errors.UnsupportedError(
            f"{depends}, and what comes of it has its samples on an axis other than the first: "
            "they cannot be told apart there. Have the model return samples in front, as in "
            "output.transpose(0, 1)."
        )
    if nodes.is_function(node) and any(map(calls_at, behind([node]))):
        return errors.UnsupportedError(
            f"{depends}, which takes the outputs of all samples, too, as a fused loss does: its "
            "backward pass returns the gradient of the parameter summed over samples. Take the "
            "loss that is not fused, nn.CrossEntropyLoss on the output of the head for example; "
            "F.linear_cross_entropy is not fused with options=None."
        )
    if is_factor(survey, parameter):
        return errors.UnsupportedError(
            f"The number that backward() is called on is a loss times a factor that depends on "
            f"{named(survey, parameter)}, as exp(-s) * loss is with a trained s: the loss was "
            "added up before, so what each sample has in the gradient of the factor is not known. "
            "Take the sum last, (exp(-s) * losses).mean() with reduction='none', and hand over "
            "what is added, beside=[s]; or keep the factor out, exp(-s).detach() * loss."
        )
    return errors.UnsupportedError(
        f"{depends}, and not by way of any sample: a term beside the "
        "loss, such as a penalty on weights. Its gradient belongs to no sample. Hand it over, "
        "backpack(..., beside=[term]), and quantities are those of the other terms; or call "
        "backward() on it outside the block. A single sample needs an axis of samples, too: "
        "model(x.unsqueeze(0))."
    )


def _not_extended(parameter: Tensor, modules: list[Module]) -> str:
    """The unextended module in an extended model that owns a parameter, in words; or empty."""
    for model in owners_of(modules):
        for path, part in model.named_modules():
            own = any(parameter is other for other in part._parameters.values())
            if own and not _hooks.are_installed(part):
                return f"{type(part).__name__} {path!r}"
    return ""


def refuse_loss_alone(survey: GraphSurvey, extensions: Sequence[Extension]) -> None:
    """Raise an error if only losses are extended, although trained parameters lie behind them.

    Args:
        survey: What is known about the graph.
        extensions: What was asked for.

    Raises:
        NotExtendedError: Nothing would be computed.
    """
    calls = [call for call, _ in survey.sites]
    if any(nodes.is_compiled(bare.node) for bare in survey.bare.values()):
        return  # compiled code hides its modules, which may be extended
    if survey.bare and not survey.uses and all(call.rule.is_loss for call in calls):
        losses = ", ".join(dict.fromkeys(call.path for call in calls))
        names = ", ".join(type(extension).__name__ for extension in extensions)
        raise errors.NotExtendedError(
            f"Only the loss ({losses}) is extended, and {len(survey.bare)} trained parameters "
            f"behind it belong to no extended module: {names} would compute nothing. Call "
            "model = extend(model) before the forward pass."
        )
