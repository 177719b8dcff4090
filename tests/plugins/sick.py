"""Sources of plugins, sound and sick, and what ``backpack doctor`` has to say about each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from backpack_core import plugins
from backpack_core.cli.inspection import report
from backpack_core.cli.reports import Report
from backpack_core.discovery import Plugin

SCALE = """
import torch
from backpack_products import ParametricRule

class ScaleModule(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([2.0]))
    def forward(self, x):
        return x * self.weight

class ScaleRule(ParametricRule):
    module_types = (ScaleModule,)
    params = ("weight",)
    def _jac_t_mat_prod(self, view, mat):
        return mat * view.parameter("weight")
    def _param_jac_t_mat_prod(self, view, name, mat):
        return torch.einsum("vnd,nd->vn", mat, view.input).unsqueeze(-1)
"""

NORM = """
from backpack_products import FirstOrderExtension
from backpack_products.operations import squared_norm

class GradNorm(FirstOrderExtension):
    savefield = "grad_norm"
    needs = (squared_norm,)
    def read(self, product):
        return squared_norm(product).squeeze(0).sqrt()
"""

LINEAR = """
import torch
from backpack_core import LayerRule

class LinearRule(LayerRule):
    module_types = ("{spelling}",)
    def _jac_t_mat_prod(self, view, mat):
        return mat @ view.parameter("weight")
"""

HALF = """
from backpack_core import hookimpl
from backpack_products import FirstOrderExtension

class Half(FirstOrderExtension):
    savefield = "half_way"
    def read(self, product):
        return product.samples

@hookimpl
def backpack_extensions():
    yield Half
    raise RuntimeError("no second one")
"""


@dataclass(frozen=True)
class Sick:
    """An installation with a fault.

    Attributes:
        distributions: Keyword arguments of the fake distributions.
        problem: Part of what the doctor finds.
        remedy: Part of what the doctor advises.
        error: Part of the warning in a process that loads it; empty where it loads.
        severity: How the doctor ranks it.
    """

    distributions: tuple[dict[str, Any], ...]
    problem: str
    remedy: str
    error: str = ""
    severity: str = "fault"
    who: str = "backpack-plugin-sick"


def one(source: str | None, target: str = "GradNorm", **more: Any) -> tuple[dict[str, Any], ...]:
    """A single distribution with a single plugin."""
    return (
        {
            "name": "backpack-plugin-sick",
            "entry_points": {"sick": f"sick_module:{target}" if target else "sick_module"},
            "modules": {} if source is None else {"sick_module": source},
            **more,
        },
    )


def two(first: str, second: str, names: tuple[str, str], target: str) -> tuple[dict[str, Any], ...]:
    """Two distributions with a plugin each."""
    sources = (first, second)
    return tuple(
        {
            "name": f"backpack-plugin-{which}",
            "entry_points": {name: f"{which}_module:{target}"},
            "modules": {f"{which}_module": source},
        }
        for which, name, source in zip(("one", "two"), names, sources, strict=True)
    )


SICK = {
    "import error": Sick(
        one("import no_such_package"),
        "No module named 'no_such_package'",
        "Install what it needs",
        "ModuleNotFoundError",
    ),
    "raises at import": Sick(
        one("x = 1\nraise ValueError('rotten')"),
        "ValueError: rotten",
        "Update or uninstall",
        "ValueError: rotten",
    ),
    "SystemExit": Sick(
        one("raise SystemExit(0)"), "SystemExit: 0", "BACKPACK_BLOCK_PLUGINS=sick", "SystemExit"
    ),
    "points nowhere: module": Sick(one(None), "points nowhere", "force-reinstall", "sick_module"),
    "points nowhere: attribute": Sick(
        one(NORM, "Missing"), "points nowhere", "force-reinstall", "no 'Missing'"
    ),
    "points nowhere: misspelt": Sick(
        one(NORM, "GradNrom"),
        "no 'GradNrom': did you mean 'GradNorm'?",
        "force-reinstall",
        "did you mean 'GradNorm'?",
    ),
    "wrong type": Sick(one("x = 3", "x"), "3 provides nothing", "Update", "provides nothing"),
    "wrong type from a hook": Sick(
        one(
            "from backpack_core import hookimpl\n"
            "@hookimpl\ndef backpack_layer_rules():\n    return [int]\n",
            "",
        ),
        "backpack_layer_rules returned <class 'int'>",
        "Update",
        "backpack_layer_rules",
    ),
    "unknown hook": Sick(
        one(
            "from backpack_core import hookimpl\n@hookimpl\ndef backpack_magic():\n    return []",
            "",
        ),
        "backpack_magic is not a hook",
        "Update",
        "backpack_magic is not a hook",
    ),
    "abstract class": Sick(
        one("from backpack_core import Extension as E\nclass A(E):\n    savefield = 'a'", "A"),
        "does not implement read",
        "Update",
        "does not implement read",
    ),
    "half-way failure": Sick(one(HALF, ""), "no second one", "Update", "no second one"),
    "old interface": Sick(
        one(f"backpack_api = 99\n{NORM}"),
        "version 99 of the plugin interface",
        "Update or uninstall backpack-plugin-sick",
        "version 99",
    ),
    "two with one name": Sick(
        two(NORM, NORM.replace("GradNorm", "OtherNorm"), ("same", "same"), "GradNorm"),
        "claim the name 'same': backpack-plugin-one 0.1 and backpack-plugin-two 0.1",
        "BACKPACK_PREFER=same=backpack-plugin-one",
        "Several plugins claim the name 'same'",
        who="backpack-plugin-one 0.1 and backpack-plugin-two 0.1",
    ),
    "two with one key": Sick(
        two(
            LINEAR.format(spelling="torch.nn.Bilinear"),
            LINEAR.format(spelling="torch.nn.modules.linear.Bilinear"),
            ("first", "second"),
            "LinearRule",
        ),
        "claim the layer rule for 'torch.nn.modules.linear.Bilinear': backpack-plugin-",
        "BACKPACK_PREFER=torch.nn.modules.linear.Bilinear=backpack-plugin-",
        who="backpack-plugin-",
    ),
    "no entry points": Sick(
        ({"name": "backpack-plugin-sick"},), "declares no plugin", "project.entry-points.backpack"
    ),
    "another group": Sick(
        one(NORM, group="backpacks"),
        "it has no entry points in [backpack], but in [backpacks]",
        "Authors: name it in [project.entry-points.backpack]",
    ),
    "requires what is absent": Sick(
        one(NORM, requires=("torch>=99", "absent; extra == 'x'", "absent; sys_platform == 'x'")),
        "it requires torch>=99, and 2.",
        "pip install 'torch>=99'.",
        severity="warning",
        who="backpack-plugin-sick 0.1",
    ),
    "no metadata": Sick(
        one(NORM, metadata=False), "no metadata", "force-reinstall", who="backpack-plugin-sick"
    ),
    "declares what it does not implement": Sick(
        one(
            "from backpack_products import ElementwiseRule\n"
            "class R(ElementwiseRule):\n"
            "    module_types = ('torch.nn.modules.activation.SiLU',)\n"
            "    def derivative(self, view):\n        return view.input\n",
            "R",
        ),
        "R is an ElementwiseRule without second_derivative",
        "Tell the authors",
    ),
    "prints": Sick(
        one(f"print('hello')\n{NORM}"),
        "prints at import: 'hello'",
        "Tell the authors",
        severity="warning",
    ),
    "slow import": Sick(
        one(f"import time\ntime.sleep(2.5)\n{NORM}"),
        "its import takes",
        "on first use",
        severity="warning",
    ),
}

# What only another process sees, and one of each kind besides; all others may be loaded here.
ELSEWHERE = {"prints", "slow import", "SystemExit", "import error", "two with one name"}


def loaded_here(installed: list[Plugin], limit: float) -> list[Report]:
    """What another process would report of plugins, without its start."""
    reports: list[Report] = []
    plugins.load_all(lambda plugin: reports.append(report(plugin)))
    return reports


# What no process that loads them survives: only the doctor meets these.
DEADLY = {
    "hangs": Sick(
        one("import time\ntime.sleep(600)"),
        "did not end in 5 s",
        "If the machine is busy: backpack doctor --limit 50. Otherwise: update or uninstall",
    ),
    "ends the process": Sick(
        one("import os\nos._exit(7)"), "ended the process with exit code 7", "Update or uninstall"
    ),
}
