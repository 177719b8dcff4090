"""The page of the documentation: a table of models and quantities, and the reasons below."""

from __future__ import annotations

import importlib.metadata

from benchmarks.models.judge import QUANTITIES, Cell

_HEAD = """# Models

Tiny models with random weights, in double precision and evaluation mode, with eager attention where
nothing else is said; written by `make models`{versions}.

A ✓ is a quantity that agrees with a loop over single samples (first order), or with the explicit
Jacobian of every output and the Hessian of the loss (all others), at every trained parameter that
the output depends on (others have no quantity, as they have no gradient). The
number beside it is the largest error, relative to the largest entry at the parameter, or to a
thousandth of the largest at any parameter where that is more. 1e-9 is allowed; 1e-4 where the model
computes a part in single precision whatever it is given, as many norms and softmaxes do.

Sampled diagonals are compared for the columns that were drawn. Kronecker factors are those of the
exact loss Hessian, compared with their definition; where a parameter has a single factor, it is
compared with the block. "By block" counts the weights that have no factors, for which
`fail_mode="block"` stores the block itself. Factors of weights that several modules use, or one
module in several calls, are not compared. Products are those with the Gauss-Newton matrix (all
entries) and with the Hessian (one entry for each parameter); of the Hessian diagonal, six entries
of each parameter are compared. Both go through fused attention, of which the comparison takes the
math backend (`torch.nn.attention.sdpa_kernel`), since torch has no second derivative of the kernel.

"By products" is a diagonal of `DiagHMP`, which is exact for every architecture and slow, where
`DiagHessian` refuses.

{count} cells of {all} are exact. The numbers point to reasons below: what the error says.

"""


def page(results: dict[str, dict[str, Cell]]) -> str:
    """The page.

    Args:
        results: By model and quantity.
    """
    reasons: list[str] = []
    lines = [f"| model | {' | '.join(QUANTITIES)} |", "|---" * (len(QUANTITIES) + 1) + "|"]
    right = 0
    for name, cells in results.items():
        shown = [_cell(cells.get(quantity), reasons) for quantity in QUANTITIES]
        right += sum(entry.startswith("✓") for entry in shown)
        lines.append(f"| {name} | {' | '.join(shown)} |")
    head = _HEAD.format(versions=_versions(), count=right, all=len(results) * len(QUANTITIES))
    listed = [f"{number}. {reason}" for number, reason in enumerate(reasons, start=1)]
    return head + "\n".join(lines) + "\n\n## Reasons\n\n" + "\n".join(listed) + "\n"


def _cell(cell: Cell | None, reasons: list[str]) -> str:
    if cell is None:
        return ""
    reason = cell.reason or cell.instead
    if reason and reason not in reasons:
        reasons.append(reason)
    link = f"[{reasons.index(reason) + 1}](#reasons)" if reason else ""
    if cell.reason:
        return link
    return f"✓ {cell.error:.0e}" + (f", {cell.note} {link}".rstrip() if cell.note else "")


def _versions() -> str:
    names = ("torch", "transformers", "peft", "x-transformers", "zuko", "e3nn")
    found = [f"{name} {importlib.metadata.version(name)}" for name in names]
    return f" with {', '.join(found)}"
