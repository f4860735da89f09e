"""A profile for another model, precision, tensor-parallel degree or device, by arithmetic from a measured one.

Every term of the measured cost model is scaled with the work that it stands for: bytes of weights and KV cache over the
bandwidth, FLOPs over the peak. So the efficiencies are those of the measured profile. The time of a model call without
attention is

    fixed + max(read the weights, compute the tokens) + rest

- The fixed time is that of the kernels of a decode step of one row; reading the weights is the rest of the step. Both
  were told apart by shards of models on an H200. The fixed time falls with the peak of the device: most of it is the
  time of small kernels, not of their launch.
- A kernel that does not reach the bandwidth of a fast memory comes nearer to that of a slower one.
- The time to compute a token is the shortest one on the measured curve. The rest, of small batches and padding, grows
  with it. Norms and residuals of a token take time of their own, which tensor parallelism does not divide.
- The products of experts have few tokens each: what they compute is not hidden by the reading of their weights.
- A row has programs of the attention kernels for each layer and KV head; a mixed step has one more kernel per layer.
- Tensor parallelism divides weights, FLOPs, KV cache and heads, and adds two all-reduces per layer: an exchange of all
  data at once, or of parts and then of their sums, whichever is faster. Each one also computes the norm after it.
- Pipeline parallelism: the time of a step is that of the slowest stage, times the stages. Each stage has the work of a
  server beside its kernels, and sends hidden states and residuals to the next one.
- A probe measures kernels. A server has more work in each step, pads steps to other sizes, and compiles the kernels of
  experts when it first uses them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any

from servesim.core import BadInput, StepCost

from .linear import LinearCost
from .model_arithmetic import BYTES_PER_VALUE, MODELS, Model, Peak, model_of, peak_of, stored_peak
from .model_config import model_name
from .parts import PartsCost
from .profile import Profile
from .public_devices import Device, device_of
from .public_models import QUANTISED, find_model
from .terms import terms_of, with_terms
from .uncertainty import TTFT_SPREAD, has_parameters, parameters, with_parameters

KERNELS, MOE_KERNELS = 9, 14  # of a layer: norms, projections, rotary, attention, MLP; router, sort, sum of experts
SHARES = (0.6, 0.95)  # of the bandwidth: a fit to few runs can be outside
KERNEL_FLOPS = 5e9  # what a device could compute in the time of a small kernel: 5 us on an H200, by its TP shards
VALUES = 12  # of the hidden state that norms and residuals of a layer read and write for a token
ALL_REDUCE = 5e-6  # seconds of a small all-reduce between two devices
MORE_DEVICES = 2.5e-6  # added by each further doubling of the devices, from open runs with 4 and 8: 0 to 5, 3.6 to 7.6
NORMS = 2  # of a layer: kernels that tensor parallelism saves, by open runs with 2 to 8 devices
SERVER_STEP = 0.3e-3  # seconds of a step of vLLM beside its kernels, by open runs; without any one model 0.27 to 0.31
SERVER_BUCKETS = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))  # rows or tokens of vLLM's CUDA graphs
COMPILE = 3.1  # seconds to compile kernels of experts in a new server: its first 10 s in two runs of Mixtral
LAUNCH = 36e-6  # seconds of the host to launch a kernel: two models without CUDA graphs had 33 and 40 us
LINK_SHARE = 0.7  # of the link's bandwidth in one direction that large all-reduces reach
# Of the 16-bit peak: kernels that unpack weights of four bits. gpt-oss-120b on an H200, up to 16 open requests.
UNPACKED = 1 / 3
FOUR_BIT = ("B200", "RTX PRO 6000")  # devices that compute with such weights
MANY_TOKENS = 1e6  # a call that uses all experts
EXPECTED_ERRORS = {"e2el": 0.018, "ttft": 0.046, "tpot": 0.018}  # of means: medians of 25 runs of others, docs/proof.md
MXFP4_ERRORS = {"e2el": 0.055, "ttft": 0.27, "tpot": 0.06}  # the same of 38 loads of gpt-oss-120b
SPREAD = 0.1  # standard deviation of all times of a derived profile: benchmarks/proof_derive.py has the errors
CURVES = ("prefill.tokens", "decode.rows")
SCALED = {  # factor of a Change: terms of cost models that it scales
    "compute": ("prefill_token", "decode_row", "draft_token", "decode.draft"),
    "attention": (
        "prefill_square", "prefill_cross", "prefill.square", "prefill.cross", "prefill.cross_root",
        "prefill.paged_square", "prefill.padded_square",
    ),
    "cache": ("context", "decode.context", "mixed.context"),
    "copy": ("swap_block", "swap.block"),
    "rows": ("prefill_row", "decode_live", "prefill.row", "decode.live", "decode.context_root", "mixed.row"),
    "layers": ("mixed.step", "decode.longest"),
}  # fmt: skip
WINDOW_TERMS = {  # of a row: per cached token. A row reads its sliding windows in addition to all cached tokens
    "decode_live": "context", "decode.live": "decode.context", "mixed.row": "mixed.context",
}  # fmt: skip
KEPT = (
    "backend", "kernels", "block_size", "date", "front_end", "first_use", "noise", "grid",
)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """A model in some precision on one or more devices. All times are those at the peak of the devices."""

    model: Model
    device: Device
    dtype: str  # of the weights
    degree: int = 1  # tensor parallelism
    server: bool = True  # steps of a server; False: those of a probe, kernels alone
    stages: int = 1  # pipeline parallelism

    @property
    def flops(self) -> float:
        """FLOPs per second of all devices."""
        eight_bit = BYTES_PER_VALUE[self.dtype] == 1
        return self.degree * (self.device.flops_8bit if eight_bit else self.device.flops)

    @property
    def token(self) -> float:
        """Seconds to compute a token without attention."""
        unpacks = self.dtype == "mxfp4" and self.device.shown not in FOUR_BIT
        return 2 * self.model.active_weights / (self.flops * (UNPACKED if unpacks else 1.0))

    @property
    def pair(self) -> float:
        """Seconds of a pair of query and key."""
        return self.model.flops_per_pair / (self.degree * self.device.flops)

    @property
    def cached(self) -> float:
        """Seconds to read a cached token, in the layers that read all of them."""
        return self.kv_bytes * self.model.reading_layers / self.model.layers / self.device.bandwidth

    @property
    def kv_bytes(self) -> float:
        """Bytes of a cached token on each device, which has at least one of the key and value heads."""
        return max(2, BYTES_PER_VALUE[self.dtype]) * self.model.kv_values / min(self.degree, self.model.kv_heads)

    @property
    def kernels(self) -> int:
        """Kernels of a step."""
        return self.model.layers * (MOE_KERNELS if self.model.experts else KERNELS)

    @property
    def fixed(self) -> float:
        """Seconds of the kernels of a step."""
        fused = NORMS * self.model.layers if self.degree > 1 else 0
        return KERNEL_FLOPS * (self.kernels - fused) / self.device.flops

    @property
    def added(self) -> float:
        """Seconds of a step that are not those of its kernels."""
        return self.stages * SERVER_STEP if self.server else 0.0

    @property
    def layer(self) -> float:
        """What the time of one more small kernel in each layer is proportional to."""
        return self.model.layers / self.device.flops

    @property
    def row(self) -> float:
        """What the time of the attention kernels for a row is proportional to: their programs."""
        return self.layer * self.model.kv_heads / min(self.degree, self.model.kv_heads)

    @property
    def hidden(self) -> float:
        """Seconds of the norms and residuals of a token; every device computes all of them."""
        return 2 * VALUES * self.model.hidden * self.model.layers / self.device.bandwidth

    def read(self, tokens: float) -> float:
        """Return the seconds to read the weights for a call with these tokens."""
        size = BYTES_PER_VALUE[self.dtype]
        return size * self.model.weights_read(tokens) / (self.degree * self.device.bandwidth)

    def exchange(self, tokens: float) -> float:
        """Return the seconds of the all-reduces of a call, two per layer, and of what stages send."""
        size, seconds = 2 * self.model.hidden * tokens, 0.0
        if self.degree > 1:
            seconds = 2 * self.model.layers * all_reduce(size, self.degree, self.device.link)
        if self.stages > 1:  # two tensors, of which each device sends its part
            sent = 2 * size / self.degree / (LINK_SHARE * self.device.link / 2)
            seconds += (self.stages - 1) * (ALL_REDUCE + sent)
        return seconds

    @property
    def as_slowest(self) -> Setting:
        """The same, with all stages as slow as the slowest one, which has most layers."""
        factor = -(-self.model.layers // self.stages) * self.stages / self.model.layers
        device = self.device
        speeds = {name: getattr(device, name) / factor for name in ("flops", "flops_8bit", "bandwidth")}
        return self if factor == 1 else replace(self, device=device._replace(**speeds))


def all_reduce(size: float, degree: int, link: float) -> float:
    """Return the seconds of an all-reduce of `size` bytes; `link` is the sum of both directions, as in Device."""
    seconds, others = size / (LINK_SHARE * link / 2), degree - 1
    latency = ALL_REDUCE + MORE_DEVICES * (degree.bit_length() - 2)
    return latency + min(others * seconds, latency + 2 * others / degree * seconds)


@dataclass(frozen=True)
class Change:
    """From one setting to another, with the efficiencies of a measured cost model."""

    old: Setting
    new: Setting
    share: float  # of the bandwidth, old
    new_share: float
    fixed: float  # seconds of a decode step that do not read the weights
    token: float  # measured seconds to compute a token
    # Factors of times, by what determines them
    compute: float  # FLOPs of the weights
    attention: float  # FLOPs of the attention
    cache: float  # bytes of the KV cache that are read
    copy: float  # bytes of the KV cache that are copied to the host
    kernels: float
    rows: float  # programs of the attention for a row
    layers: float

    def without_attention(self, seconds: float, tokens: float) -> float:
        """Return the new seconds of a call without attention that took `seconds`."""
        old, new = self.old, self.new
        before = products(old, old.read(tokens) / self.share, self.token * tokens)
        after = products(new, new.read(tokens) / self.new_share, self.token * self.compute * tokens)
        rest = seconds - self.fixed - old.added - before - old.hidden * tokens - old.exchange(tokens)
        fixed = self.fixed * self.kernels + new.added
        return fixed + after + new.hidden * tokens + new.exchange(tokens) + rest * self.compute

    def curve(self, points: Sequence[Sequence[float]]) -> Any:
        """Return a curve over tokens or rows; it still rises. Further values are times per cached token."""
        seconds = accumulate((self.without_attention(point[1], point[0]) for point in points), max)
        return tuple(
            (point[0], max(0.0, value), *(self.cache * more for more in point[2:]))
            for point, value in zip(points, seconds)
        )


def products(setting: Setting, read: float, compute: float) -> float:
    """Return the seconds of the matrix products from those to read the weights and to compute the tokens.

    With experts, the shorter one is not hidden: layer times of vLLM's experts on an RTX PRO 6000 are such a sum.
    """
    longer = max(read, compute)
    return longer + read * compute / (read + compute) if setting.model.experts and longer > 0 else longer


def share_on(share: float, old: Setting, new: Setting) -> float:
    """Return the share of the bandwidth on another device: higher if its bandwidth is lower."""
    return max(share, min(SHARES[1], share * max(1.0, old.device.bandwidth / new.device.bandwidth)))


def change_of(cost: StepCost, old: Setting, new: Setting) -> Change:
    """Return the change between two settings, with the efficiencies of the cost model of the old one."""
    if isinstance(cost, PartsCost):
        decode, context, tokens = cost.decodes.terms(1)[0], cost.decodes.terms(1)[2], cost.prefill.tokens
    else:
        assert isinstance(cost, LinearCost)
        decode, context = cost.base + cost.decode_step + cost.decode_row, cost.context
        tokens = ((1.0, cost.base + cost.prefill + cost.prefill_token), (1e4, 1e4 * cost.prefill_token))
    low, high = SHARES
    decode = max(1e-9, decode - old.exchange(1) - old.hidden - old.added)
    share = min(high, max(low, old.read(1) / (decode - old.fixed))) if decode > old.fixed else high
    read = min(decode, old.read(1) / share)
    fixed = decode - read
    per_token = [(y - fixed - old.added - old.exchange(x)) / x - old.hidden for x, y in tokens if x > 0]
    token = max(0.0, min(per_token, default=0.0))
    share = old.read(1) / read
    kv = min(1.0, old.cached / context) if context > 0 else 1.0
    cache = new.cached / old.cached * kv / share_on(kv, old, new)
    factors = (new.token / old.token, new.pair / old.pair, cache, new.kv_bytes / old.kv_bytes, new.fixed / old.fixed)
    return Change(old, new, share, share_on(share, old, new), fixed, token, *factors, new.row / old.row,
                  new.layer / old.layer)  # fmt: skip


def derive_cost(cost: StepCost, old: Setting, new: Setting) -> StepCost:
    """Return the cost model of a setting from that of another one."""
    change, terms = change_of(cost, old.as_slowest, new.as_slowest), terms_of(cost)
    changed = {name: change.curve(terms[name]) for name in CURVES if name in terms}
    for factor, names in SCALED.items():
        changed |= {name: terms[name] * getattr(change, factor) for name in names if terms.get(name) is not None}
    window = new.model.window_tokens - old.model.window_tokens
    for row, token in WINDOW_TERMS.items() if window > 0 else ():
        if terms.get(row) is not None:
            changed[row] += window * changed[token]
    if new.server and not old.server:
        changed |= {name: SERVER_BUCKETS for name in ("prefill.buckets", "decode.buckets") if terms.get(name)}
        changed |= {name: True for name in ("decode.split",) if name in terms}
    if isinstance(cost, LinearCost):
        changed |= changed_linear(cost, change)
    derived: StepCost = with_terms(cost, changed)
    return derived


def changed_linear(cost: LinearCost, change: Change) -> dict[str, float]:
    """Return the fixed terms of another setting, which change as a decode step of one row does, and its experts."""
    fixed = cost.base + cost.decode_step
    ratio = change.without_attention(fixed, 1) / fixed if fixed > 0 else change.kernels
    terms = {name: getattr(cost, name) * ratio for name in ("base", "prefill", "decode_step")}
    if cost.experts:
        model = change.new.model
        terms["experts"] = cost.experts * (change.new.read(MANY_TOKENS) / change.old.read(MANY_TOKENS))
        terms["expert_share"] = model.experts_per_token / model.experts if model.experts else 1.0
    return terms


def setting_of(profile: Profile) -> Setting:
    """Return the setting of a measured profile, or raise BadInput if one of its figures is not known."""
    about = profile.about
    name = f"profile {profile.name}"
    if not has_parameters(profile.cost):
        raise BadInput(f"--from: {name} has tables of another tool; expected costs of kind linear or parts")
    model = model_of(about) or find_model(model_name(about.get("model")), f"{name}: model")
    device, peak = device_of(about), peak_of(about)
    if device is None and peak is not None:
        device = Device(str(about.get("device")), peak.flops, peak.flops, peak.bandwidth, 0.0, 0, peak.source)
    if device is None:
        raise BadInput(f"--from: {name} has no known device; expected `peak` in it (flops, bandwidth, source)")
    dtype = str(about.get("dtype") or QUANTISED.get(model.name) or model.dtype)
    if dtype not in BYTES_PER_VALUE:
        raise BadInput(f"{name}: dtype: expected one of {', '.join(BYTES_PER_VALUE)}, got {dtype!r}")
    probed = about.get("backend") == "torch" and not profile.section("derived").get("changed")
    stages = int(about.get("pipeline_parallel") or 1)
    return Setting(model, device, dtype, int(about.get("tensor_parallel") or 1), server=not probed, stages=stages)


def derive_profile(profile: Profile, new: Setting, name: str, where: str = "profile.") -> Profile:
    """Return the profile of another setting, marked as derived; its intervals are wide.

    `where` begins the names of keys in errors.
    """
    old = setting_of(profile)
    if new.model.heads % new.degree:
        raise BadInput(f"{where}tensor_parallel: expected a divisor of the {new.model.heads} heads, got {new.degree}")
    if new.stages > new.model.layers:
        raise BadInput(f"{where}pipeline_parallel: expected at most {new.model.layers} (layers), got {new.stages}")
    for key, devices in (("tensor_parallel", new.degree), ("pipeline_parallel", new.stages)):
        if devices > 1 and not new.device.link:
            raise BadInput(f"{where}{key}: expected 1: the link between {new.device.shown} is not in the table")
    changed = changes(old, new)
    new = new if changed else old
    how = ", ".join(f"other {what}" for what in changed) or "nothing changed"
    sizes = {key: size for key, size in asdict(new.model).items() if size}
    stored = profile.uncertainty
    spreads = {"session": stored.session, **({"ttft": stored.ttft} if stored.ttft else {})}
    if changed:
        spreads = {"session": max(stored.session, SPREAD), "ttft": TTFT_SPREAD}
    draws = [parameters(derive_cost(with_parameters(profile.cost, draw), old, new)) for draw in stored.draws]
    about = {key: profile.about[key] for key in KEPT if key in profile.about} | {
        "name": name,
        "device": new.device.shown,
        "model": new.model.name if MODELS.get(new.model.name) == new.model else sizes,
        "dtype": new.dtype,
        "kv_dtype": "bfloat16" if BYTES_PER_VALUE[new.dtype] < 2 else None,
        "tensor_parallel": new.degree,
        "pipeline_parallel": new.stages if new.stages > 1 else None,
        "device_memory": new.device.memory or None,
        "how": f"derived by arithmetic from {profile.name} ({how})",
        "derived": {"profile": profile.name, "digest": profile.digest, "changed": changed},
        "cold": {"prefill": COMPILE, "decode": 0.0} if new.model.experts else None,
        "peak": stored_peak(
            Peak(new.stages * new.flops, new.stages * new.degree * new.device.bandwidth, new.device.source)
        ),
        "sampling": derived_sampling(profile, old, new),
        "uncertainty": {**spreads, "draws": draws},
    }
    return Profile(name, derive_cost(profile.cost, old, new), {k: v for k, v in about.items() if v is not None})


def changes(old: Setting, new: Setting) -> list[str]:
    """Return what differs between two settings."""
    names = ("model", "device", "precision", "tensor parallelism", "pipeline parallelism")
    before, after = (
        (replace(s.model, dtype=""), s.device, BYTES_PER_VALUE[s.dtype], s.degree, s.stages) for s in (old, new)
    )  # fmt: skip
    return [name for name, first, second in zip(names, before, after) if first != second]


def derived_sampling(profile: Profile, old: Setting, new: Setting) -> Any:
    """Return the times to select tokens: those of a row grow with the vocabulary, and fall with the peak."""
    factor = new.model.vocab / old.model.vocab * old.device.flops / new.device.flops
    terms = {name: {"step": term.step, "row": term.row * factor} for name, term in profile.sampling.items()}
    return {**profile.about["sampling"], "terms": terms} if terms else None
