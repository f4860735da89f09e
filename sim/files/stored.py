"""Files that servesim wrote and reads back. A user can edit or damage them, so they are validated like user files.

Unknown keys are kept: a newer version of servesim may have written them.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field
from servesim.core.limits import MAX_NUMBER, MAX_RESULT

from .checked import Keys, expects

StoredNumber = Annotated[float, Field(ge=-MAX_RESULT, le=MAX_RESULT), expects("a number")]
Index = Annotated[int, Field(ge=0, le=int(MAX_NUMBER)), expects("a whole number of at least 0")]


class Stored(Keys):
    """A file of servesim, or a part of one."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
