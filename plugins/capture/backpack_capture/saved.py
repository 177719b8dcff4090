"""What nodes of autograd have saved, and how tensors lie in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from torch import Size, Tensor, contiguous_format
from torch.autograd.graph import Node
from torch.nn import Parameter

from backpack_capture._torch import may_overlap
from backpack_core.record.call import Site
from backpack_products.values import kernels_of

_ONE: Final = (Tensor, Parameter)
_INSIDE: Final = 100  # most nodes of a call to look at


def looked_up(node: Any, name: str) -> Any:
    """Something that a node has saved; ``None`` if torch says that it was changed, or freed.

    ``"_saved_indices[1]"`` is an item of a list.
    """
    name, _, item = name.partition("[")
    try:
        value = getattr(node, name)
    except RuntimeError:
        return None
    return value[int(item[:-1])] if item else value


def names_of(node: Node) -> list[str]:
    """The names of what a node has saved, except for shapes, which a structure has."""
    names = [name for name in dir(node) if name.startswith("_saved_") and "_sym_" not in name]
    lists = [(name, saved) for name in names if isinstance(saved := looked_up(node, name), tuple)]
    tensors = [
        (name, i) for name, saved in lists for i, v in enumerate(saved) if isinstance(v, Tensor)
    ]
    return [*names, *[f"{name}[{i}]" for name, i in tensors]]


def setting_of(node: Node, name: str) -> Any:
    """A setting that a node has saved; for a tensor with a single number on the host, the number.

    Torch saves a number as a tensor of this kind, but passes it to a formula as a number. The class
    ``Tensor`` stands for other tensors: an operand that may be left out, such as a mask, is there.
    """
    value = looked_up(node, name)
    if isinstance(value, Tensor):
        return value.item() if not value.dim() and value.is_cpu else Tensor
    is_list = isinstance(value, (list, tuple))
    return tuple([Tensor if isinstance(v, Tensor) else v for v in value]) if is_list else value


def inside(site: Site) -> list[Node]:
    """The nodes inside a call, from its output on; the first ones if it has many."""
    ends = {edge.node for edge in site.call.edges if edge is not None}
    found = dict.fromkeys([site.edge.node])
    todo = [site.edge.node]
    while todo and len(found) < _INSIDE:
        for node, _ in todo.pop().next_functions:
            if node is not None and node not in found and node not in ends:
                found[node] = None
                todo.append(node)
    return [*found]


def form_inside(site: Site, number: int) -> tuple[Any, ...]:
    """The types of the nodes inside a call, and the shapes of gradients that one of them gets."""
    nodes: list[Any] = inside(site)
    shapes = [metadata.shape for metadata in nodes[number]._input_metadata]
    return *map(type, nodes), *shapes


def saved_by(
    nodes: Sequence[Node], number: int, name: str, kind: type, shape: Size
) -> Tensor | None:
    """What a node has saved; ``None`` if it was changed in place since, or is something else."""
    node = nodes[number] if number < len(nodes) else None
    if type(node) is not kind:
        return None
    saved = looked_up(node, name)
    return saved if isinstance(saved, Tensor) and saved.shape == shape else None


def layout_of(tensor: Tensor) -> tuple[Any, ...]:
    """How a tensor lies in its memory, and what decides which kernels run; not its shape."""
    return type(tensor) in _ONE, tensor.stride(), tensor.device, kernels_of(tensor)


def is_same(saved: Any, tensor: Tensor) -> bool:
    """Whether something that a node has saved is a tensor, in the form of another object."""
    if not isinstance(saved, Tensor) or layout_of(saved) != layout_of(tensor):
        return False
    if saved.shape != tensor.shape or saved.dtype != tensor.dtype:
        return False
    is_there = saved.untyped_storage()._cdata == tensor.untyped_storage()._cdata
    return is_there and saved.storage_offset() == tensor.storage_offset()


def laid_apart(
    gradients: Sequence[Tensor | None], is_known: Callable[[Tensor], bool]
) -> list[Tensor | None]:
    """Gradients, each an object of its own with memory for every entry.

    So another gradient can have its layout, and two that are one object in this pass only are not
    taken for one.

    Args:
        gradients: The gradients.
        is_known: Whether a gradient was elsewhere before.
    """
    found = list[Tensor | None]()
    for gradient in gradients:
        is_again = gradient is not None and any(gradient is own for own in found)
        if gradient is not None and (is_again or is_known(gradient) or may_overlap(gradient)):
            found.append(gradient.clone(memory_format=contiguous_format))
        else:
            found.append(gradient)
    return found
