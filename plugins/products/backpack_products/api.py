"""All public names; import them from :mod:`backpack_products`."""

from backpack_products.affine import AffineProduct as AffineProduct
from backpack_products.column_propagator import ColumnPropagator as ColumnPropagator
from backpack_products.columns import Columns as Columns
from backpack_products.derivatives import SecondOrderRule as SecondOrderRule
from backpack_products.elementwise import ElementwiseRule as ElementwiseRule
from backpack_products.extensions import FirstOrderExtension as FirstOrderExtension
from backpack_products.extensions import SecondOrderExtension as SecondOrderExtension
from backpack_products.lookup import LookupProduct as LookupProduct
from backpack_products.loss import HessianLossRule as HessianLossRule
from backpack_products.open_functions import OpenFunction as OpenFunction
from backpack_products.open_functions import Operation as Operation
from backpack_products.parametric import AffinePairsRule as AffinePairsRule
from backpack_products.parametric import AffineRule as AffineRule
from backpack_products.parametric import ParametricRule as ParametricRule
from backpack_products.parametric import ProductRule as ProductRule
from backpack_products.product import DenseProduct as DenseProduct
from backpack_products.product import SampleProduct as SampleProduct
from backpack_products.product import SumProduct as SumProduct
from backpack_products.scale import ScaleProduct as ScaleProduct
