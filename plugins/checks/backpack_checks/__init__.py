"""Checks for backpack-core: measurements in a backward pass, and its times."""

from backpack_core.errors import add_library_folder

add_library_folder(__file__)
