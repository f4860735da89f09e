"""Public figures of accelerators, from the data sheets of their vendors. Standard library only, Python 3.9.

The peaks are those of dense matrix products, without sparsity. The link is the sum of both directions, as data sheets
state it: NVLink, else PCIe. The memory is what nvidia-smi, rocm-smi and npu-smi show.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, Optional

MIB = 2**20


class Device(NamedTuple):
    """An accelerator."""

    shown: str  # part of the name that its driver shows
    flops: float  # per second, 16-bit values
    flops_8bit: float  # per second, 8-bit floating-point values; those of 16 bits if it has none
    bandwidth: float  # of its memory, bytes per second
    link: float  # to the other devices of a server, bytes per second; 0: not published
    memory: int  # bytes
    source: str


def nvidia(shown: str, tflops: tuple[float, float], tera: float, giga: float, mib: int, *source: str) -> Device:
    """Return a card of NVIDIA: TFLOP/s (16 and 8 bits), TB/s of the memory, GB/s of the link, MiB, data sheet."""
    sheet, memory = source
    text = f"NVIDIA {sheet}: BF16 Tensor Core without sparsity, {memory}"
    return Device(shown, tflops[0] * 1e12, tflops[1] * 1e12, tera * 1e12, giga * 1e9, mib * MIB, text)


DEVICES = {
    "H200": nvidia("H200", (989, 1979), 4.8, 900, 143_771, "H200 data sheet, SXM", "HBM3e"),
    "H100": nvidia("H100 80GB HBM3", (989, 1979), 3.35, 900, 81_559, "H100 data sheet, SXM", "HBM3"),
    "H100-PCIe": nvidia("H100 PCIe", (756, 1513), 2.0, 600, 81_559, "H100 PCIe product brief", "HBM2e"),
    "H100-NVL": nvidia("H100 NVL", (835.5, 1670.5), 3.9, 600, 95_830, "H100 data sheet, NVL", "HBM3"),
    "A100-80GB": nvidia("A100-SXM4-80GB", (312, 312), 2.039, 600, 81_920, "A100 data sheet, SXM 80 GB", "HBM2e"),
    "A100-80GB-PCIe": nvidia("A100 80GB PCIe", (312, 312), 1.935, 64, 81_920, "A100 data sheet, PCIe 80 GB", "HBM2e"),
    "A100-40GB": nvidia("A100-SXM4-40GB", (312, 312), 1.555, 600, 40_960, "A100 data sheet, SXM 40 GB", "HBM2"),
    "B200": nvidia("B200", (2250, 4500), 8.0, 1800, 183_359, "DGX B200 data sheet, one of 8 GPUs", "HBM3e"),
    "L40S": nvidia("L40S", (362.05, 733), 0.864, 64, 46_068, "L40S data sheet", "GDDR6, PCIe Gen4"),
    "L4": nvidia("L4", (121, 242.5), 0.3, 64, 23_034, "L4 data sheet", "GDDR6, PCIe Gen4"),
    "A10": nvidia("A10", (125, 125), 0.6, 64, 23_028, "A10 data sheet", "GDDR6, PCIe Gen4"),
    "A6000": nvidia("RTX A6000", (154.8, 154.8), 0.768, 112.5, 49_140, "Ampere GA102 white paper", "GDDR6"),
    "RTX-4090": nvidia("RTX 4090", (165.2, 330.3), 1.008, 64, 24_564, "Ada white paper", "GDDR6X, PCIe Gen4"),
    "RTX-PRO-6000": nvidia("RTX PRO 6000", (503.8, 1007.6), 1.792, 128, 97_887, "Blackwell PRO white paper", "GDDR7"),
    "MI300X": Device(
        "MI300X", 1307.4e12, 2614.9e12, 5.3e12, 896e9, 196_592 * MIB,
        "AMD Instinct MI300X data sheet: BF16 without sparsity, HBM3, Infinity Fabric"),
    "910B4": Device(
        "910B4", 280e12, 280e12, 0.8e12, 0.0, 32_768 * MIB,
        "Huawei MindStudio, specification Atlas800I-A2-32G-280T of the 910B4: 280 TFLOP/s in FP16; "
        "HBM 0.8 TB/s as in Huawei's roofline configuration of the 910B4"),
}  # fmt: skip


def device_of(about: Mapping[str, Any]) -> Optional[Device]:
    """Return the public figures of a profile's device, None if it is not known."""
    name = str(about.get("device"))
    return next((known for known in DEVICES.values() if re.search(rf"\b{known.shown}\b", name)), None)
