"""The plain gradient as a sum of products that are read anyway, or no gradient at all.

Autograd spends a third of a plain pass on gradients of weights, and per-sample gradients contain
them. So autograd is told, by ``inputs=``, to reach every call, and every leaf except those whose
gradient is the sum of a product. At the end of the pass, these sums go through autograd's engine,
which calls hooks and accumulates ``.grad``.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils.checkpoint import CheckpointFunction

from backpack_checks._torch import hook_leaf_first
from backpack_checks.sums import SumCheck
from backpack_checks.trust import Trust, known_of
from backpack_core._torch import Node
from backpack_core.contract.observer import Options
from backpack_core.engine.active import Group
from backpack_core.engine.backward import BackwardPass
from backpack_core.errors import BackpackWarning, InternalError, UsageError, warn_once
from backpack_core.graph import Survey, is_leaf
from backpack_core.record.call import Edge
from backpack_operations.observer import PlanObserver
from backpack_operations.order import behind
from backpack_products import operations
from backpack_products.column_propagator import OutputGradient
from backpack_products.extensions import FirstOrderExtension
from backpack_products.product import SampleProduct

Key = tuple[int, str]  # a use: the number of the site in the walk, the name of the parameter there

_REENTRANT: Any = CheckpointFunction._backward_cls  # the nodes of re-entrant checkpoints
_PRECISE = (torch.float32, torch.float64)  # in half precision, autograd's sums are more exact
_Candidate = tuple[Tensor, tuple[Key, ...]]  # a parameter, and the keys of its uses


class WithoutGradients(PlanObserver):
    """Has autograd leave out the gradients of parameters with results (``gradient="none"``)."""

    answers = frozenset({"gradient"})
    needs_visits, needs_survey = False, True

    def __init__(self) -> None:
        self._aside: list[tuple[Tensor, Tensor | None]] = []  # parameters, and their ``.grad``

    def options(self, run: BackwardPass, given: Options) -> Options:
        """The ``inputs=`` of a pass in which parameters with results get no gradient.

        Raises:
            UsageError: The model is inside DistributedDataParallel.
        """
        survey = run.survey
        if any(call.run.is_distributed for call in survey.trained):
            raise UsageError(
                "gradient='none' and 'skipped' leave out what DistributedDataParallel waits for: "
                "use gradient='shared', or call the wrapped model itself (ddp.module)."
            )
        leaves = leaves_to_narrow(survey, given, run.roots)
        if leaves is None:
            return {}
        compared = _compared(run)
        self._aside = [(parameter, parameter.grad) for parameter in compared.values()]
        for parameter in compared.values():
            parameter.grad = None
        used = {key: use.parameter for key, use in survey.uses.items() if use.count}
        left = {key: used[key] for key in used.keys() - compared}
        return inputs_without(left, survey, leaves)

    def leave(self) -> None:
        """Put ``.grad`` back; called at the end of the pass, also after an error."""
        for parameter, gradient in self._aside:
            parameter.grad = gradient
        self._aside = []


class GradientSum(FirstOrderExtension):
    """Reads sums over samples that become gradients, or that autograd's are compared with.

    Attributes:
        left: The parameters whose gradient is the sum, by ``id``.
        judged: The ``id`` of those whose sum is compared, if it costs little.
    """

    savefield = "_backpack_gradient"
    needs = (operations.batch_sum,)

    def __init__(self, left: Mapping[int, Tensor], judged: Collection[int]) -> None:
        super().__init__()
        self.left, self.judged = left, judged

    def read(self, product: SampleProduct) -> Tensor | tuple[()]:
        """The sum over samples, if it is wanted."""
        key = id(product.parameter)
        is_wanted = key in self.left or (key in self.judged and operations.has_free_sum(product))
        return operations.batch_sum(product).squeeze(0) if is_wanted else ()

    def take(self, parameter: Tensor) -> Tensor | None:
        """Take what was stored on a parameter away; returns it if it is a sum."""
        value = parameter.__dict__.pop(self.savefield, None)
        return value if isinstance(value, Tensor) else None


class PlainGradient(PlanObserver):
    """The parameters of a pass that get the sum of their product as gradient, and these sums.

    A parameter is trusted after the sum has equalled autograd's gradient in an earlier pass.

    Attributes:
        kept: What earlier passes of this structure showed.
        needs_visits: Whether sums are compared in this pass.
    """

    answers = frozenset({"gradient"})
    needs_survey = True
    kept: Trust | None = None

    def __init__(self) -> None:
        self._sum = GradientSum({}, ())
        self._sums: dict[int, Tensor] = {}
        self._summed: set[Hashable] = set()
        self._judged: dict[int, _Candidate] = {}
        self._left: dict[int, Tensor] = {}
        self._read: list[Tensor] = []  # all parameters of the pass
        self._handles: list[Any] = []

    def goes_by(self, kept: Trust | None) -> bool:
        """Take over what earlier passes showed; a plan may always be used."""
        self.kept, self.needs_visits = kept, kept is None or kept.is_due(after=0)
        return True

    def adds(self, run: BackwardPass) -> Hashable:
        """The parameters whose sums are read."""
        return run.may_narrow and self.kept is not None and frozenset(self.kept.summed)

    def options(self, run: BackwardPass, given: Options) -> Options:
        """The ``inputs=`` of autograd's pass, if any product gives a sum."""
        survey = run.survey
        group = next((g for g in run.context.groups if _has_individual(g)), None)
        leaves = None if group is None else leaves_to_narrow(survey, given, run.roots)
        if group is None or leaves is None:
            return {}
        if given.get("create_graph"):
            _say("create_graph=True asks for gradients with a graph")
            return {}
        self._decide(survey, group)
        self._sum = GradientSum(self._left, self._judged)
        self._read = [use.parameter for use in survey.uses.values()]
        lane = [each.first for each in run.groups].index(group.first)
        own = run.groups[lane]  # to which a check may have been added
        readers, needs = (*own.extensions, self._sum), own.needs.union(self._sum.needs)
        run.groups[lane] = own._replace(extensions=readers, needs=needs)
        run.extensions.append(self._sum)
        if self._judged:
            run.context.seen.add("measured")
        return inputs_without(self._left, survey, leaves) if self._left else {}

    def _decide(self, survey: Survey, group: Group) -> None:
        """Decide which parameters autograd leaves out.

        In the passes 1, 2, 4, 8, … of a structure it leaves out none, and all sums are compared
        with autograd's gradients.
        """
        if self.kept is None or not survey.is_planned:
            self.kept = known_of(survey, group.needs)
        else:
            self.kept.passes += 1
        candidates, self._summed = _candidates(survey), self.kept.summed
        self._judged = candidates if self.kept.is_due() else {}
        self._left = {
            key: parameter
            for key, (parameter, uses) in candidates.items()
            if key not in self._judged and self._summed.issuperset(uses)
        }
        self._handles = [
            hook_leaf_first(parameter, self, PlainGradient._judge)
            for parameter, _ in self._judged.values()
        ]

    def _judge(self, parameter: Tensor, gradient: Tensor) -> None:
        """Compare a sum with autograd's gradient; trust the parameter from then on, or not."""
        total = self._sum.take(parameter)
        uses = self._judged[id(parameter)][1]
        if total is None or not total.numel():
            return
        size = float(gradient.detach().abs().max())
        allowed = size * torch.finfo(gradient.dtype).eps ** 0.6
        if not float((total - gradient).detach().abs().max()) <= allowed:
            self._summed.difference_update(uses)
        elif size:
            self._summed.update(uses)

    def leave(self) -> None:
        """Take the sums from the parameters, also after an error, and remove the hooks."""
        for handle in self._handles:
            handle.remove()
        for parameter in self._read:
            total = self._sum.take(parameter)
            if total is not None:
                self._sums[id(parameter)] = total

    def stored(self, run: BackwardPass) -> None:
        """Hand the sums to autograd, as a part of this pass: hooks may begin nested passes."""
        self.leave()  # a recording may have stored some at the end
        uses = run.survey.uses
        for key in run.sink.unreached & self._left.keys():
            if uses[key].count == 1:  # autograd would store no gradient
                del self._left[key]
        run.context.passes[-1] = run
        try:
            self._deliver()
        finally:
            run.leave()

    def _deliver(self) -> None:
        """Have autograd call the hooks of parameters, and accumulate the sums into ``.grad``."""
        if not self._left.keys() <= self._sums.keys():
            raise InternalError("A gradient was left out, and nothing was summed for it.")
        parameters = list(self._left.values())
        sums = [self._sums.pop(key) for key in self._left]
        if sums:
            with torch.enable_grad():
                root = _Sums.apply(sums, *parameters)  # type: ignore[no-untyped-call]
            root.backward()


class _Sums(torch.autograd.Function):
    """A number whose gradients in some parameters are given tensors."""

    @staticmethod
    def forward(ctx: Any, sums: list[Tensor], *parameters: Tensor) -> Tensor:
        """Store the gradients."""
        ctx.sums = sums
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the tensors without keeping a reference, so that autograd does not copy them."""
        sums = tuple(ctx.sums)
        ctx.sums.clear()
        return (None, *sums)


def _compared(run: BackwardPass) -> dict[int, Tensor]:
    """The parameters whose gradients a check compares with sums in this pass, by ``id``.

    Autograd computes these, and ``.grad`` is put back. A parameter with hooks of others is left
    out: its hooks are not called in other passes.
    """
    checks = (e for group in run.groups for e in group.extensions if isinstance(e, SumCheck))
    if next(checks, None) is None or run.survey.shards:
        return {}
    bare = run.survey.bare  # these get a gradient in every pass
    uses = {key: use for key, use in run.survey.uses.items() if use.count and not use.unruled}
    used = {key: use.parameter for key, use in uses.items() if key not in bare}
    return {key: p for key, p in used.items() if p.is_leaf and not _has_other_hooks(p)}


def _has_other_hooks(parameter: Any) -> bool:
    """Whether anything but the check listens to the gradient of a parameter."""
    return len(parameter._backward_hooks or ()) > 1 or bool(parameter._post_accumulate_grad_hooks)


def inputs_without(
    left: Mapping[int, Tensor], survey: Survey, leaves: Sequence[Node]
) -> dict[str, Any]:
    """The ``inputs=`` of a pass that reaches every call, and all leaves except some.

    Args:
        left: The parameters to leave out, by ``id``.
        survey: What is known about the graph.
        leaves: All leaves that autograd would reach.
    """
    inputs = [node for node in leaves if id(node.variable) not in left]  # type: ignore[attr-defined]
    if len(inputs) == len(leaves):
        return {}
    sites = {(site.edge.node, site.edge.output_nr) for site in survey.sites.values()}
    outputs = [*[(node, 0) for node in inputs], *sites]
    return {"inputs": [GradientEdge(node, output_nr) for node, output_nr in outputs]}


def _candidates(survey: Survey) -> dict[int, _Candidate]:
    """Parameters that products read at every use, by ``id``, with their uses."""
    candidates: dict[int, _Candidate] = {}
    sharded = set(map(id, survey.shards))
    for number, (call, index) in enumerate(survey.sites):
        dtype = call.stored.outputs[index].dtype
        for name, parameter, used in survey.trained[call]:
            is_plain = parameter is used and parameter.is_leaf
            if is_plain and parameter.dtype is dtype and dtype in _PRECISE:
                key = id(parameter)
                uses = candidates[key][1] if key in candidates else ()
                candidates[key] = parameter, (*uses, (number, name))
    return {
        key: (parameter, uses)
        for key, (parameter, uses) in candidates.items()
        if len(uses) == survey.uses[key].count
        and not (key in survey.bare or survey.uses[key].unruled or key in sharded)
    }


def _has_individual(group: Group) -> bool:
    """Whether a group forms per-sample gradients of all samples, at once or in pieces."""
    return (
        isinstance(group.propagator, OutputGradient)
        and group.propagator.subsampling is None
        and not group.has_overrides
        and bool(group.needs & {operations.dense, operations.square_sum, operations.squared_norm})
    )


def leaves_to_narrow(
    survey: Survey, options: Mapping[str, Any], edges: Sequence[Edge]
) -> list[Node] | None:
    """All leaves behind some edges; ``None`` if ``inputs=`` cannot be set, or the user set it."""
    if options.get("inputs") is not None:
        return None
    if survey.viewed:
        _say("the output of a module was changed in place behind a view of it")
    elif not survey.is_readable:
        _say("autograd saves tensors through hooks (a checkpoint does)")
    else:
        roots = [edge.node for edge in edges]
        nodes = behind(roots).union(roots)
        if not any(type(node) is _REENTRANT for node in nodes):
            return [node for node in nodes if is_leaf(node)]
        _say("re-entrant checkpoints take no inputs=")
    return None


def _say(why: str) -> None:
    """Warn, once for each reason, that autograd computes every gradient."""
    warn_once(
        ("gradient", why),
        "Autograd computes every gradient, though backpack(gradient=...), or private training, "
        f"does not need all: {why}. The other results are the same.",
        BackpackWarning,
    )
