"""A profile for another model, precision, tensor-parallel degree or device, by arithmetic from a measured one.

Every term of the measured cost model is scaled with the work that it stands for: bytes of weights and KV cache over the
bandwidth, FLOPs over the peak. So the efficiencies are those of the measured profile. The time of a model call without
attention is

    fixed + max(read the weights, compute the tokens) + rest

- The share of the bandwidth is that of the measured reads of the KV cache. The weights are read with the same share.
- The fixed time is the rest of a decode step of one row. It grows with the kernels of the model, and falls with the
  peak of the device: most of it is the time of small kernels, not of their launch.
- The time to compute a token is the shortest one on the measured curve. The rest, of small batches and padding, grows
  with it.
- Tensor parallelism divides weights, FLOPs and KV cache, and adds two all-reduces per layer.
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
from .public_models import find_model
from .terms import terms_of, with_terms
from .uncertainty import has_parameters, parameters, with_parameters

KERNELS, MOE_KERNELS = 9, 14  # of a layer: norms, projections, rotary, attention, MLP; router, sort, sum of experts
SHARES = (0.6, 0.95)  # of the bandwidth: a fit to few runs can be outside
ALL_REDUCE = 5e-6  # seconds of a small all-reduce between two devices; each doubling of the devices adds as much
LINK_SHARE = 0.7  # of the link's bandwidth in one direction that large all-reduces reach
MANY_TOKENS = 1e6  # a call that uses all experts
EXPECTED_ERRORS = {"e2el": 0.037, "ttft": 0.05, "tpot": 0.037}  # of means: medians of 25 runs of others, docs/proof.md
SPREAD = 0.1  # standard deviation of all times of a derived profile: benchmarks/proof_derive.py has the errors
CURVES = ("prefill.tokens", "decode.rows")
SCALED = {  # factor of a Change: terms of cost models that it scales
    "compute": ("prefill_token", "decode_row"),
    "attention": (
        "prefill_square", "prefill_cross", "prefill.square", "prefill.cross", "prefill.cross_root",
        "prefill.paged_square", "prefill.padded_square",
    ),
    "cache": ("context", "decode.context", "decode.context_root", "mixed.context"),
    "copy": ("swap_block", "swap.block"),
    "kernels": ("prefill_row", "decode_live", "prefill.row", "decode.live", "mixed.step", "mixed.row"),
}  # fmt: skip
KEPT = (
    "backend", "kernels", "block_size", "row_buckets", "token_buckets", "date", "front_end", "first_use", "noise",
    "grid",
)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """A model in some precision on one or more devices. All times are those at the peak of the devices."""

    model: Model
    device: Device
    dtype: str  # of the weights
    degree: int = 1  # tensor parallelism

    @property
    def flops(self) -> float:
        """FLOPs per second of all devices."""
        eight_bit = BYTES_PER_VALUE[self.dtype] == 1
        return self.degree * (self.device.flops_8bit if eight_bit else self.device.flops)

    @property
    def token(self) -> float:
        """Seconds to compute a token without attention."""
        return 2 * self.model.active_weights / self.flops

    @property
    def pair(self) -> float:
        """Seconds of a pair of query and key."""
        return self.model.flops_per_pair / (self.degree * self.device.flops)

    @property
    def cached(self) -> float:
        """Seconds to read a cached token."""
        return self.kv_bytes / self.device.bandwidth

    @property
    def kv_bytes(self) -> float:
        """Bytes of a cached token on each device, which has at least one of the key and value heads."""
        return max(2, BYTES_PER_VALUE[self.dtype]) * self.model.kv_values / min(self.degree, self.model.kv_heads)

    @property
    def kernels(self) -> float:
        """What the fixed time of a step is proportional to."""
        per_layer = MOE_KERNELS if self.model.experts else KERNELS
        return self.model.layers * per_layer / self.device.flops

    def read(self, tokens: float) -> float:
        """Return the seconds to read the weights for a call with these tokens."""
        size = BYTES_PER_VALUE[self.dtype]
        return size * self.model.weights_read(tokens) / (self.degree * self.device.bandwidth)

    def exchange(self, tokens: float) -> float:
        """Return the seconds of the all-reduces of a call: two per layer."""
        if self.degree == 1:
            return 0.0
        sent = 2 * self.model.hidden * tokens * 2 * (self.degree - 1) / self.degree
        large = sent / (LINK_SHARE * self.device.link / 2)
        return 2 * self.model.layers * (ALL_REDUCE * (self.degree.bit_length() - 1) + large)


@dataclass(frozen=True)
class Change:
    """From one setting to another, with the efficiencies of a measured cost model."""

    old: Setting
    new: Setting
    share: float  # of the bandwidth
    fixed: float  # seconds of a decode step that do not read the weights
    token: float  # measured seconds to compute a token
    # Factors of times, by what determines them
    compute: float  # FLOPs of the weights
    attention: float  # FLOPs of the attention
    cache: float  # bytes of the KV cache that are read
    copy: float  # bytes of the KV cache that are copied to the host
    kernels: float

    def without_attention(self, seconds: float, tokens: float) -> float:
        """Return the new seconds of a call without attention that took `seconds`."""
        old, new = self.old, self.new
        rest = seconds - self.fixed - max(old.read(tokens) / self.share, self.token * tokens) - old.exchange(tokens)
        call = max(new.read(tokens) / self.share, self.token * self.compute * tokens) + new.exchange(tokens)
        return self.fixed * self.kernels + call + rest * self.compute

    def curve(self, points: Sequence[Sequence[float]]) -> Any:
        """Return a curve over tokens or rows; it still rises. Further values are times per cached token."""
        seconds = accumulate((self.without_attention(point[1], point[0]) for point in points), max)
        return tuple(
            (point[0], max(0.0, value), *(self.cache * more for more in point[2:]))
            for point, value in zip(points, seconds)
        )


def change_of(cost: StepCost, old: Setting, new: Setting) -> Change:
    """Return the change between two settings, with the efficiencies of the cost model of the old one."""
    if isinstance(cost, PartsCost):
        decode, context, tokens = cost.decodes.terms(1)[0], cost.decodes.terms(1)[2], cost.prefill.tokens
    else:
        assert isinstance(cost, LinearCost)
        decode, context = cost.base + cost.decode_step + cost.decode_row, cost.context
        tokens = ((1.0, cost.base + cost.prefill + cost.prefill_token), (1e4, 1e4 * cost.prefill_token))
    low, high = SHARES
    share = min(high, max(low, old.cached / context)) if context > 0 else high
    decode = max(1e-9, decode - old.exchange(1))
    read = min(decode, old.read(1) / share)
    fixed = decode - read
    token = min((max(0.0, y - fixed - old.exchange(x)) / x for x, y in tokens if x > 0), default=0.0)
    factors = (new.token / old.token, new.pair / old.pair, new.cached / old.cached, new.kv_bytes / old.kv_bytes)
    return Change(old, new, old.read(1) / read, fixed, token, *factors, new.kernels / old.kernels)


def derive_cost(cost: StepCost, old: Setting, new: Setting) -> StepCost:
    """Return the cost model of a setting from that of another one."""
    change, terms = change_of(cost, old, new), terms_of(cost)
    changed = {name: change.curve(terms[name]) for name in CURVES if name in terms}
    for factor, names in SCALED.items():
        changed |= {name: terms[name] * getattr(change, factor) for name in names if name in terms}
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
    dtype = str(about.get("dtype") or model.dtype)
    if dtype not in BYTES_PER_VALUE:
        raise BadInput(f"{name}: dtype: expected one of {', '.join(BYTES_PER_VALUE)}, got {dtype!r}")
    return Setting(model, device, dtype, int(about.get("tensor_parallel") or 1))


def derive_profile(profile: Profile, new: Setting, name: str, where: str = "profile.") -> Profile:
    """Return the profile of another setting, marked as derived; its intervals are wide.

    `where` begins the names of keys in errors.
    """
    old = setting_of(profile)
    if new.model.heads % new.degree:
        raise BadInput(f"{where}tensor_parallel: expected a divisor of the {new.model.heads} heads, got {new.degree}")
    if new.degree > 1 and not new.device.link:
        raise BadInput(f"{where}tensor_parallel: expected 1: the link between {new.device.shown} is not in the table")
    changed = changes(old, new)
    how = ", ".join(f"other {what}" for what in changed) or "nothing changed"
    sizes = {key: size for key, size in asdict(new.model).items() if size}
    stored = profile.uncertainty
    draws = [parameters(derive_cost(with_parameters(profile.cost, draw), old, new)) for draw in stored.draws]
    about = {key: profile.about[key] for key in KEPT if key in profile.about} | {
        "name": name,
        "device": new.device.shown,
        "model": new.model.name if MODELS.get(new.model.name) == new.model else sizes,
        "dtype": new.dtype,
        "kv_dtype": "bfloat16" if BYTES_PER_VALUE[new.dtype] < 2 else None,
        "tensor_parallel": new.degree,
        "device_memory": new.device.memory or None,
        "how": f"derived by arithmetic from {profile.name} ({how})",
        "derived": {"profile": profile.name, "digest": profile.digest, "changed": changed},
        "peak": stored_peak(Peak(new.flops, new.degree * new.device.bandwidth, new.device.source)),
        "sampling": derived_sampling(profile, old, new),
        "uncertainty": {"session": max(stored.session, SPREAD) if changed else stored.session, "draws": draws},
    }
    return Profile(name, derive_cost(profile.cost, old, new), {k: v for k, v in about.items() if v is not None})


def changes(old: Setting, new: Setting) -> list[str]:
    """Return what differs between two settings."""
    names = ("model", "device", "precision", "tensor parallelism")
    before, after = (
        (replace(s.model, dtype=""), s.device, BYTES_PER_VALUE[s.dtype], s.degree) for s in (old, new)
    )  # fmt: skip
    return [name for name, first, second in zip(names, before, after) if first != second]


def derived_sampling(profile: Profile, old: Setting, new: Setting) -> Any:
    """Return the times to select tokens: those of a row grow with the vocabulary, and fall with the peak."""
    factor = new.model.vocab / old.model.vocab * old.device.flops / new.device.flops
    terms = {name: {"step": term.step, "row": term.row * factor} for name, term in profile.sampling.items()}
    return {**profile.about["sampling"], "terms": terms} if terms else None
