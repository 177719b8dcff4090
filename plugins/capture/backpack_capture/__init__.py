"""Captured steps for backpack-core: a training step as one recorded graph, without the engine."""

from backpack_capture.entry import capture as capture
from backpack_capture.hosted import Host as Host
from backpack_capture.hosted import HostedStep as HostedStep
from backpack_capture.hosted import Make as Make
from backpack_capture.step import CapturedStep as CapturedStep
from backpack_capture.step import CaptureWarning as CaptureWarning
from backpack_core.errors import add_library_folder

add_library_folder(__file__)  # warnings point at the line that calls a step
