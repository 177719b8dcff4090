"""Checks of extensions in small nets against the reference: around a layer, or for one extension.

A check takes the nets of a case. It raises an error, or yields what must be compared.
"""

from __future__ import annotations

import copy
import gc
import inspect
import pickle as pickling
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import Module

from backpack_core.contract.bases import vet
from backpack_core.contract.extension import Extension
from backpack_core.errors import UnsupportedError
from backpack_core.record.call import Call
from backpack_core.testing.compare import Entries, finite, relative_error, require
from backpack_core.testing.nets import Nets, RefusalCheck
from backpack_core.testing.quantities import ALL_NEEDS, installed_extensions
from backpack_products.open_functions import Operation


def _in_net(may_refuse: bool = False, **options: Any) -> Callable[[Nets], None]:
    """A check that runs all extensions in a net with some options.

    Args:
        may_refuse: Whether extensions may raise if the net lacks what they need.
        options: Options of the net.
    """

    def run(nets: Nets) -> None:
        refusals = nets.problem(**options).require_reason if may_refuse else None
        nets.check(net=options, refusals=refusals)

    return run


mean, sum = _in_net(), _in_net(reduction="sum")
batch_of_one = _in_net(samples=1)
shared_positions = _in_net(shape=(1, 2, 2))  # an input ``[N, *S, F]``
single_number = _in_net(single=True)  # a parameter that has no axes
called_twice = _in_net(True, twice=True)  # modules, on two inputs or on their own output
loss_scaled = _in_net(scale=0.25)
residual = _in_net(True, residual=True)  # a functional sum between modules


def frozen_layer(nets: Nets, prefix: str = "layer.") -> None:
    """Freeze the layer's parameters."""
    nets.check(nets.few(), frozen=lambda name: name.startswith(prefix))


# What is before the layer, so that its input requires no gradient.
frozen_surroundings = partial(frozen_layer, prefix="mixes.")


def partly_frozen(nets: Nets) -> None:
    """Freeze every other parameter, then the others instead."""
    names = [*nets.problem().reference.parameters]
    for chosen in (names[::2], names[1::2]):
        nets.check(nets.few(), frozen=chosen.__contains__)


def _coarse(precision: str, needs: tuple[str, ...], **how: Any) -> Callable[[Nets], None]:
    """A check in lower precision; values that it cannot resolve must be finite.

    Args:
        precision: Name of the tolerance.
        needs: Needs that this precision can meet.
        how: Options of ``Problem.run``.
    """
    half = precision == "bfloat16"

    def run(nets: Nets) -> None:
        every = nets.make_extensions()
        pairs = [(e, nets.problem().quantity_for(e)) for e in every]
        met = set(needs).intersection(nets.needs)
        good = [e for e, of in pairs if of and of.needs in met and not (half and of.cancels)]
        allowed = getattr(nets.case.tolerances, precision)
        plain = map(nets.problem().build, (torch.float64, how["dtype"]))
        exact, rounded = (arguments.call(net).detach().double() for net, arguments, _ in plain)
        if not good or relative_error(rounded, exact) > allowed:  # it draws other random numbers
            met = set()
        coarse = half or not nets.is_alone
        nets.check(good or every, allowed=allowed, needs=met, coarse=coarse, **how)

    return run


HALF = ("gradient", "curvature", "sampling", "double backward")
float32 = _coarse("float32", ALL_NEEDS, dtype=torch.float32)
bfloat16 = _coarse("bfloat16", HALF, dtype=torch.bfloat16)
# Parameters in single precision, and operations in half.
autocast = _coarse("bfloat16", HALF, dtype=torch.float32, autocast=True)


def retain_graph(nets: Nets) -> None:
    """Run two passes through one graph, then one of another loss: no old value may stay."""
    extensions = nets.few()
    for passes in ((True,), (True, False)):
        nets.check(extensions, retains=passes)
    nets.check(extensions, net={"reduction": "sum"})


def subsampling(nets: Nets) -> None:
    """Restrict quantities to samples 2 and 0, in this order."""
    chosen = (2, 0)
    extensions = nets.make_extensions(subsampling=list(chosen))
    same = all(extension.subsampling == chosen for extension in extensions)
    require(same, "subsampling is not what was asked for: pass it on, or to the propagator.")
    refusals = None if nets.is_alone else _because_of("subsampling")
    nets.check(extensions, refusals=refusals, reference=nets.problem().reference.restricted(chosen))


def _because_of(word: str) -> RefusalCheck:
    """Raise an error unless an extension refuses a net with a message that contains a word."""

    def require_word(extension: Extension, error: Exception) -> None:
        if not isinstance(error, UnsupportedError):
            raise error
        require(word in str(error), f"{type(extension).__name__} refuses, but: {error}")

    return require_word


def deepcopy(nets: Nets, copied: Callable[[Any], Any] = copy.deepcopy) -> None:
    """Run copies by ``copy.deepcopy``."""
    try:
        copied(nets.problem().build(torch.float64)[0])
    except Exception:
        return  # the layer itself cannot be copied so
    # All extensions miss what was copied wrongly: one of each that every layer has is enough.
    nets.check(nets.few(("gradient", "curvature")), copied=copied)


pickle = partial(deepcopy, copied=lambda module: pickling.loads(pickling.dumps(module)))


def no_live_calls(nets: Nets) -> None:
    """Check that calls are freed by reference counts, after a forward and after a backward pass."""
    problem, extensions, enabled = nets.problem(), nets.few(), gc.isenabled()

    def forward() -> None:
        net, arguments, loss = problem.extended()
        loss(arguments.call(net))

    def backward() -> None:
        forget(problem.run(extensions)[0])

    gc.disable()
    gc.freeze()  # only what is made from here on is looked at
    try:
        for what, run in (("forward pass alone", forward), ("backward pass", backward)):
            run()
            calls = [each for each in gc.get_objects() if type(each) is Call]
            said = f"After a {what}: {len(calls)} records of module calls outlive their graph."
            require(not calls, said)
    finally:
        gc.unfreeze()
        (gc.enable if enabled else gc.disable)()


def forget(net: Module) -> None:
    """Delete stored results from parameters, since one that is a function keeps its call alive."""
    for parameter in net.parameters():
        parameter.__dict__.clear()


def mixing_is_refused(nets: Nets) -> None:
    """Require SampleMixingError from every extension, unless it needs no separate samples."""
    may_refuse = _because_of("sample")
    for extension in installed_extensions():
        if nets.problem().run_usable([extension], may_refuse)[0]:
            whole = not extension.propagator.per_sample
            require(whole, f"{type(extension).__name__} gave a value, though samples mix.")
            nets.check([extension])


def no_samples(nets: Nets) -> None:
    """Run an empty batch, which Poisson sampling may draw: a finite value, or a refusal."""
    (extension,) = nets.make_extensions()
    try:
        _, values = nets.problem(reduction="sum", samples=0).run([extension])
    except UnsupportedError:
        return
    finite(values[extension.savefield], nets.case.label())


def in_chunks(nets: Nets) -> None:
    """Propagate columns one by one, as with little memory, where ``columns_add`` is declared."""
    (extension,) = nets.make_extensions()
    extension.chunk_size = 1
    nets.check([extension])


def savefield(nets: Nets) -> None:
    """Store under another name."""
    extensions = nets.make_extensions(savefield="another_name")
    same = all(extension.savefield == "another_name" for extension in extensions)
    require(same, "savefield is not what was asked for: pass it to super().__init__.")
    nets.check(extensions)


def pickle_extension(nets: Nets) -> None:
    """Check that a pickled extension is of the same kind and gives the same value."""
    (extension,) = nets.make_extensions()
    restored = pickling.loads(pickling.dumps(extension))
    require(type(restored) is type(extension), "The restored extension has another type.")
    require(restored.propagator == extension.propagator, "The propagators differ: make it a value.")
    nets.check([restored])


def beside_others(nets: Nets) -> None:
    """Run all installed extensions in one pass."""
    (extension,) = nets.make_extensions()
    others = [e for e in installed_extensions() if type(e) is not type(extension)]

    def only_others(refusing: Extension, error: Exception) -> None:
        if refusing is extension or not isinstance(error, UnsupportedError):
            raise error

    _, values = nets.problem().run_usable([*others, extension], only_others)
    nets.problem().compare(values, [extension], nets.case.tolerances.float64)


def leaves_gradient_alone(nets: Nets) -> Entries:
    """Check that ``.grad`` is unchanged, and that parameters get stored values and nothing else."""
    (extension,), problem = nets.make_extensions(), nets.problem()
    net, _ = problem.run([extension])
    plain, arguments, loss = problem.build(torch.float64)
    loss(arguments.call(plain)).backward()
    for (name, with_it), without in zip(net.named_parameters(), plain.parameters(), strict=True):
        assert without.grad is not None
        yield f".grad of {name!r}", with_it.grad, without.grad
        added = sorted(set(vars(with_it)) - {extension.savefield})
        require(not added, f"{added} on {name!r}: only the engine writes to parameters.")


def quantity(nets: Nets) -> None:
    """Require that something says what the values have to be."""
    known = [nets.problem().quantity_for(each) for each in nets.make_extensions()]
    require(None not in known, "Nothing says what is right: give ExtensionCase a Quantity.")


def differentiable(nets: Nets) -> None:
    """Check derivatives of values, which ``create_graph=True`` asks for."""
    for extension in nets.few(None if nets.is_alone else ("gradient", "curvature")):
        nets.problem().differentiate(extension, nets.case.tolerances.float64)


def declarations(nets: Nets) -> None:
    """Let judges look at the class attributes of extension and propagator, and at ``needs``."""
    (extension,) = nets.make_extensions()
    seen = inspect.getclosurevars(type(extension).read)
    called = [n for n, f in {**seen.globals, **seen.nonlocals}.items() if isinstance(f, Operation)]
    said = f"read calls {', '.join(called)}: name it in needs, so that extensions share the work."
    # What an option needs may be said by ``__init__``.
    require(bool(extension.needs) or "needs" in vars(extension) or not called, said)
    vet(type(extension))
    vet(type(extension.propagator))
