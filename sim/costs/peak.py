"""Peak figures of devices: FLOPs per second and bytes per second, from the vendors' data sheets.

A profile has them under `peak`, with their source. `sim calibrate fit` writes those of the devices that are known here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Optional

HALF_PRECISION = ("float16", "bfloat16")


class Peak(NamedTuple):
    """What a device can do at best."""

    flops: float  # per second, of dense matrix products
    bandwidth: float  # of its memory, bytes per second
    source: str


HALF_PRECISION_PEAKS = {  # part of the name of the device -> peak of 16-bit values
    "H200": Peak(989e12, 4.8e12, "NVIDIA H200 data sheet, SXM: BF16 Tensor Core without sparsity, HBM3e"),
    "H100 80GB HBM3": Peak(989e12, 3.35e12, "NVIDIA H100 data sheet, SXM: BF16 Tensor Core without sparsity, HBM3"),
    "A100-SXM4-80GB": Peak(312e12, 2.039e12, "NVIDIA A100 data sheet, SXM 80 GB: BF16 Tensor Core without sparsity"),
    "910B4": Peak(
        280e12, 0.8e12,
        "Huawei MindStudio, specification Atlas800I-A2-32G-280T of the 910B4: 280 TFLOP/s in FP16; "
        "HBM 0.8 TB/s as in Huawei's roofline configuration of the 910B4",
    ),
}  # fmt: skip


def known_peak(about: Mapping[str, Any]) -> Optional[Peak]:
    """Return the peak of the device and data type in a description, None if it is not known."""
    if str(about.get("dtype")) not in HALF_PRECISION:
        return None
    device = str(about.get("device"))
    return next((peak for name, peak in HALF_PRECISION_PEAKS.items() if name in device), None)


def stored_peak(peak: Optional[Peak]) -> Optional[dict[str, Any]]:
    """Return a peak as the key of a profile."""
    return None if peak is None else peak._asdict()


def peak_of(about: Mapping[str, Any]) -> Optional[Peak]:
    """Return the peak that a profile states."""
    peak = about.get("peak")
    return None if not peak else Peak(float(peak["flops"]), float(peak["bandwidth"]), str(peak.get("source", "")))
