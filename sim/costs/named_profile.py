"""A profile by the names of a model and a device, derived from a measured one when it is used.

    profile: {model: llama-3.1-8b, device: H100, tensor_parallel: 2, precision: fp8}

A model that is published with quantised weights has their precision, unless another one is given. What else is not
given is as in the measured profile. Models with grouped heads are derived from a measured one that has
them too: attention kernels of both kinds differ.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, Optional

from pydantic import BeforeValidator, Field
from servesim.core import BadInput
from servesim.files.checked import Duration, Int, Keys, validate

from .derivation import LAUNCH, Setting, derive_profile, setting_of
from .model_arithmetic import Model, model_of
from .model_config import config_path, read_model, stored_precision
from .profile import Profile
from .public_models import QUANTISED, find_device, find_model

MEASURED, GROUPED = "h200-llama2-7b", "h200-llama3.1-8b"  # defaults of `measured`: one KV head per head, or fewer
NAMES = ("model", "device", "tensor_parallel", "pipeline_parallel", "precision", "eager")
MAX_DEGREE = 64
SHORT_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp8": "float8"}


def long_name(precision: Any) -> Any:
    """Return bf16, fp16 or fp8 by the name that profiles use; other values unchanged."""
    return SHORT_NAMES.get(precision.lower(), precision) if isinstance(precision, str) else precision


Precision = Annotated[Literal["bfloat16", "float16", "float8", "int8", "mxfp4"], BeforeValidator(long_name)]


class NamedProfile(Keys):
    """The keys of a profile by name."""

    model: Optional[str] = Field(None, description="public model (`sim models`), or its config.json or folder")
    device: Optional[str] = Field(None, description="device (`sim models`), such as H100 or L40S")
    tensor_parallel: Optional[Int] = Field(None, ge=1, le=MAX_DEGREE, description="devices that share the model")
    pipeline_parallel: Optional[Int] = Field(
        None, ge=1, le=MAX_DEGREE, description="stages of the model, each on as many devices"
    )
    precision: Optional[Precision] = Field(
        None, description="precision of the weights, such as bf16 or fp8 (default: as the model is published)"
    )
    front_end: Optional[Duration] = Field(
        None, description="seconds of a request outside of the steps: HTTP, tokeniser"
    )
    eager: bool = Field(False, description="server without CUDA graphs: the host launches every kernel")
    measured: Optional[str] = Field(None, description="measured profile from which the times are derived")

    @property
    def title(self) -> str:
        """The name of the profile in results."""
        degree = None if self.tensor_parallel in (None, 1) else f"tp{self.tensor_parallel}"
        stages = None if self.pipeline_parallel in (None, 1) else f"pp{self.pipeline_parallel}"
        eager = "eager" if self.eager else None
        model = None if self.model is None else self.model.rstrip("/").removesuffix("/config.json").rsplit("/", 1)[-1]
        return "-".join(
            str(part) for part in (self.device, degree, stages, model, self.precision, eager) if part
        ).lower()

    def setting(self, old: Setting, where: str) -> Setting:
        """Return the model and the devices that are named; what is not given is as before."""
        model, device = old.model, old.device
        if self.model is not None:
            model = model_by_name(self.model, old.dtype, f"{where}model")
        if self.device is not None:
            device = find_device(self.device, f"{where}device")
        stages = self.pipeline_parallel or old.stages
        return Setting(model, device, self.precision or old.dtype, self.tensor_parallel or old.degree, stages=stages)


def published_precision(name: str, where: str) -> Optional[str]:
    """Return the precision of the quantised weights of a public model, or of a config.json; None: they have 16 bits."""
    path = config_path(name)
    return QUANTISED.get(find_model(name, where).name) if path is None else stored_precision(path)


def model_by_name(name: str, dtype: str, where: str) -> Model:
    """Return a public model, or that of a config.json or folder."""
    read = read_model(name)
    sizes = None if isinstance(read, str) else model_of({"model": {**(read or {}), "dtype": dtype}})
    return sizes or find_model(name, where)


def measured_for(names: Mapping[str, Any], where: str = "profile.") -> str:
    """Return the measured profile for a profile by name: the given one, or that with the same kind of heads."""
    given, model = names.get("measured"), names.get("model")
    if given is not None or not isinstance(model, str):
        return MEASURED if given is None else str(given)
    sizes = model_by_name(model, "", f"{where}model")
    return GROUPED if sizes.kv_heads < sizes.heads else MEASURED


def is_named(profile: Any) -> bool:
    """Whether the key `profile` of a scenario names a model, a device, or how the model runs on it."""
    return isinstance(profile, Mapping) and any(key in profile for key in NAMES)


def merge_profile(old: Any, names: Mapping[str, Any]) -> dict[str, Any]:
    """Return a profile by name over that of a scenario: what is not named is as in the scenario."""
    if isinstance(old, str):  # both defaults are of one device
        return dict(names) if old in (MEASURED, GROUPED) and "model" in names else {"measured": old, **names}
    return {**(old if is_named(old) else {}), **names}


def derive_named(tree: Mapping[str, Any], measured: Profile, where: str = "profile.") -> Profile:
    """Return the profile that is named, with the efficiencies of a measured one. `where` begins the name of a key."""
    try:
        keys = validate(NamedProfile, tree, "profile")
    except BadInput as bad:
        raise BadInput(str(bad).replace("profile: ", where, 1)) from None
    if keys.model is not None and keys.precision is None:
        keys = keys.model_copy(update={"precision": published_precision(keys.model, f"{where}model")})
    setting = keys.setting(setting_of(measured), where)
    profile = derive_profile(measured, setting, keys.title, where)
    further: dict[str, Any] = {} if keys.front_end is None else {"front_end": {"seconds": keys.front_end}}
    if keys.eager:
        further["launch"] = {"seconds": LAUNCH * setting.kernels}
    digest = hashlib.sha256(json.dumps([measured.digest, keys.model_dump()]).encode()).hexdigest()[:16]
    return replace(profile, about={**profile.about, **further}, digest=digest)
