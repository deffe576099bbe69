"""Extreme values for every setting of a config, found from its schema, as hypothesis strategies."""

import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from hypothesis import strategies as st
from pydantic import BaseModel

from hetero_ssfl.config import Config

INTEGERS = (0, 1, 2, 3, 7, 64, 1000, 4096, 10**5, 10**6, 10**9, 10**12, 2**53, 2**63, 10**30, 10**300, -1, -(10**9))
FLOATS = (0.0, 1e-308, 1e-30, 1e-9, 0.01, 0.5, 0.999999, 1.0, 2.0, 90.0, 1e3, 1e9, 1e30, 1e308, -1.0, -1e308)
TEXTS = ("", "x", "../../x", "os:system", "x" * 900, "\u202e\x1b[31m", "cuda", "resnet8", "given:x", "digits")


def extremes(annotation: Any) -> st.SearchStrategy[Any]:
    """Values of an annotation's type, valid or not."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return extremes(parts[0])
    if origin is Literal:
        return st.sampled_from([*parts, "../../x"])
    if origin in (Union, types.UnionType):
        return st.one_of(*(extremes(part) for part in parts if part is not type(None)))
    if origin is tuple and parts[-1] is Ellipsis:
        return st.lists(extremes(parts[0]), max_size=3) | st.builds(
            lambda value, count: [value] * count, extremes(parts[0]), st.sampled_from([30, 500])
        )
    if origin is tuple:
        return st.tuples(*map(extremes, parts)).map(list)
    if origin is dict:
        return st.dictionaries(st.sampled_from(TEXTS), extremes(parts[1]), max_size=2)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return st.fixed_dictionaries(
            {}, optional=dict(zip(annotation.model_fields, _of_fields(annotation), strict=True))
        )
    known: dict[Any, st.SearchStrategy[Any]] = {
        bool: st.booleans(),
        int: st.sampled_from(INTEGERS),
        float: st.sampled_from(FLOATS) | st.sampled_from(INTEGERS[:12]),
        str: st.sampled_from(TEXTS),
    }
    return known[annotation]


def _of_fields(section: type[BaseModel]) -> list[st.SearchStrategy[Any]]:
    return [extremes(field.annotation) for field in section.model_fields.values()]


def settings(section: type[BaseModel] = Config, above: str = "") -> dict[str, st.SearchStrategy[Any]]:
    """Return a strategy for every setting, by its key such as `alignment.rank`."""
    found: dict[str, st.SearchStrategy[Any]] = {}
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found |= settings(kind, f"{above}{name}.")
        else:
            found[above + name] = extremes(kind)
    return found


SETTINGS = settings()
changes = st.lists(
    st.sampled_from(sorted(SETTINGS)).flatmap(lambda key: st.tuples(st.just(key), SETTINGS[key])),
    min_size=1,
    max_size=4,
).map(dict)
"""A few settings with extreme values. Together, many of these change every setting."""
