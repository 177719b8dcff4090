"""Checks for backpack-core: what a pass measures of itself, and what it cost."""

from backpack_core.errors import add_library_folder

add_library_folder(__file__)
