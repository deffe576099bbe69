"""Tables that show all their columns when they are printed."""

import shutil
from collections.abc import Mapping
from typing import Any

from pandas import DataFrame


class WholeTable(DataFrame):  # type: ignore[misc]
    """A DataFrame whose text has every column: columns that do not fit side by side are continued below.

    pandas would replace the middle ones by dots. What is computed from the table is a plain DataFrame.
    """

    def __repr__(self) -> str:
        width = shutil.get_terminal_size().columns
        return self.to_string(float_format="{:.3g}".format, na_rep="-", line_width=width)

    def _repr_html_(self) -> str:
        table = self.to_html(float_format="{:.3g}".format, na_rep="", border=0)
        return f'<div style="overflow-x: auto">{table}</div>'


def shown_whole(rows: Mapping[str, Mapping[str, Any]]) -> DataFrame:
    """Return a table with one row per client."""
    return WholeTable(DataFrame.from_dict(rows, orient="index").rename_axis("client"))
