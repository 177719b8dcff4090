"""Operations derived from a layer rule, open to faster versions.

Each operation is a function with ``functools.singledispatch`` on the type of the rule. They are not
methods of the rule, so that someone who needs a new operation is not second class: write the
generic definition through ``param_jac_t_mat_prod``, and register a contraction for the rule types
that allow one. Axis letters: ``V`` columns, ``N`` samples, ``S`` shared positions, ``G`` groups,
``I``, ``O``.
"""

from backpack_core.ops import affine as affine
from backpack_core.ops.generic import MaterializedRule as MaterializedRule
from backpack_core.ops.generic import gram as gram
from backpack_core.ops.generic import memory_budget as memory_budget
from backpack_core.ops.generic import moments as moments
from backpack_core.ops.generic import per_sample as per_sample
from backpack_core.ops.generic import per_sample_square_sum as per_sample_square_sum
from backpack_core.ops.generic import per_sample_sum as per_sample_sum
from backpack_core.ops.generic import set_memory_budget as set_memory_budget
from backpack_core.ops.generic import shared as shared
from backpack_core.ops.generic import shared_moments as shared_moments
from backpack_core.ops.generic import square_sum as square_sum
from backpack_core.ops.generic import squared_norm as squared_norm
from backpack_core.ops.kronecker import corrected_eigenbasis as corrected_eigenbasis
from backpack_core.ops.kronecker import kronecker_factors as kronecker_factors
from backpack_core.ops.signed import diagonal_square_sum as diagonal_square_sum
from backpack_core.ops.signed import signed_square_sum as signed_square_sum
