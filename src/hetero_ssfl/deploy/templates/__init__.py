"""The texts of a deployment's files, with {names} for values."""

from importlib import resources


def fill(template: str, **values: object) -> str:
    return resources.files(__package__).joinpath(template).read_text().format(**values)
