"""
An exact curvature diagonal in little memory
============================================

The exact diagonal of the generalised Gauss-Newton matrix carries one column for each output of the model.
An auto-encoder has as many outputs as inputs: 3072 here. All columns at once need gigabytes. ``chunk_size`` says
how many travel together. By default, it follows from ``memory_budget()``. The numbers are the same.
"""

import subprocess
import sys

import torch
from matplotlib import pyplot as plt

# %%
# Peak memory belongs to a process, so every setting runs in a separate one. This is the program.
# ``VmHWM`` is the peak memory of a Linux process.
PROGRAM = """
import sys, time
from pathlib import Path
import torch
from torch import nn
from backpack_core import backpack, extend
from backpack_core.extensions import DiagGGNExact

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024

torch.set_num_threads(1)
torch.manual_seed(0)
chunk_size = int(sys.argv[1]) or None
encoder = nn.Sequential(nn.Conv2d(3, 10, 3), nn.Sigmoid())
decoder = nn.Sequential(nn.ConvTranspose2d(10, 3, 3), nn.Flatten())
model, lossfunc = extend(nn.Sequential(encoder, decoder)), extend(nn.MSELoss())
images = torch.rand(4, 3, 32, 32)

def run(images):
    loss = lossfunc(model(images), images.flatten(1))
    with backpack(DiagGGNExact(chunk_size=chunk_size), check="never"):
        loss.backward()

run(images[..., :6, :6])  # what the first pass loads for good is not counted
before, start = peak(), time.perf_counter()
run(images)
print(peak() - before, time.perf_counter() - start)
print(*(v for p in model.parameters() for v in p.diag_ggn_exact.flatten().tolist()))
"""


def measure(chunk_size: int) -> tuple[float, float, torch.Tensor]:
    """Additional megabytes, seconds, and the diagonal, from a separate process."""
    command = [sys.executable, "-c", PROGRAM, str(chunk_size)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    figures, diagonal = printed.splitlines()
    memory, seconds = map(float, figures.split())
    return memory, seconds, torch.tensor([float(v) for v in diagonal.split()])


# %%
# Zero means "chosen by the budget".
sizes = [12, 48, 192, 768, 3072]
results = {size: measure(size) for size in [*sizes, 0]}
for size, (memory, seconds, _) in results.items():
    print(f"chunk_size={size or None!s:5} {memory:7.0f} MiB {seconds:6.2f} s")
reference = results[3072][2]
for _, _, diagonal in results.values():
    assert torch.allclose(diagonal, reference, rtol=1e-3, atol=1e-8)
assert results[0][0] < results[3072][0] / 2

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
for axis, place, label in ((left, 0, "peak memory [MiB]"), (right, 1, "time [s]")):
    axis.plot(sizes, [results[size][place] for size in sizes], "o-", color="#0b6e63")
    axis.axhline(results[0][place], ls="--", color="#c2571a", label="left to the memory budget")
    axis.set(xscale="log", xlabel="columns that travel together", ylabel=label)
    axis.set_xticks(sizes, [str(size) for size in sizes])
    axis.minorticks_off()
left.set_yscale("log")
right.set_ylim(bottom=0)
left.legend()
plt.show()
