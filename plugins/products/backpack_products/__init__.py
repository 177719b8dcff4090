"""Products for backpack-core plugins: columns, and forms of individual Jacobians."""

from backpack_core.errors import add_library_folder

add_library_folder(__file__)
