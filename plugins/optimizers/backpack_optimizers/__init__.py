"""Second-order optimizers as ``torch.optim.Optimizer``: K-FAC, EKFAC, Gauss-Newton.

They use only the public interface of the other distributions.
"""

from __future__ import annotations

from backpack_optimizers.damping import LevenbergMarquardt as LevenbergMarquardt
from backpack_optimizers.ekfac import EKFAC as EKFAC
from backpack_optimizers.factored import FactoredOptimizer as FactoredOptimizer
from backpack_optimizers.gauss_newton import GaussNewton as GaussNewton
from backpack_optimizers.kfac import KFAC as KFAC
from backpack_products.computing import declare_only_computes

declare_only_computes(__name__)
