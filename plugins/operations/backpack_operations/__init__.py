"""Operations between modules for backpack-core: the autograd graph, and where samples lie in it."""

from backpack_core.errors import add_library_folder

add_library_folder(__file__)
