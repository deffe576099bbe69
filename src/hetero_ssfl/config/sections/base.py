"""What all sections share. The text below a setting is its description in `hetero-ssfl list settings`."""

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import core_schema

Fraction = Annotated[float, Field(ge=0, le=1)]
Layer = Literal["encoder", "projector", "predictor"]
Precision = Literal["float32", "bfloat16", "float16"]


class NamedCode:
    """Accept one of the known names, or the name of the user's own callable."""

    def __init__(self, *known: str) -> None:
        self.known = known

    def check(self, value: str) -> str:
        if value not in self.known and not re.fullmatch(r"[\w.]+:[\w.-]+", value):
            choices = f"{', '.join(self.known)} or " if self.known else ""
            raise ValueError(f"should be {choices}package.module:callable")
        return value

    def __get_pydantic_core_schema__(self, kind: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(kind))

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {"type": "string", "examples": [*self.known, "package.module:callable"]}


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)
