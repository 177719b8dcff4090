"""Interplay of backpack-core with checkpoints, torch.compile, shards and the plain gradient."""

from backpack_core.errors import add_library_folder

add_library_folder(__file__)
