"""Clients' parts are disjoint, complete, fixed by the seed, and exclude the RAD and validation images."""

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hetero_ssfl.config import Config, load_config, parse_config, preset_names
from hetero_ssfl.data import (
    Images,
    Split,
    assign_classes,
    digest,
    fit_rad,
    fit_to_data,
    kept_apart,
    load_images,
    load_rad,
    partition,
    split_training_images,
)
from hetero_ssfl.errors import ConfigError
from hetero_ssfl.seeding import rng_for

flower = settings(max_examples=5)  # building its tables is slow


def config(kind: str = "classes", clients: int = 5, *overrides: str) -> Config:
    return parse_config("", [f"partition.kind={kind}", f"clients.count={clients}", *overrides])


def random_labels(seed: int, n_classes: int, size: int) -> torch.Tensor:
    return torch.randint(0, n_classes, (size,), generator=rng_for(seed, "labels"))


def parts_of(settings: Config, labels: torch.Tensor, n_classes: int) -> list[torch.Tensor]:
    parts = partition(settings, labels, len(labels), n_classes)
    assert len(parts) == settings.clients.count
    again = partition(settings, labels, len(labels), n_classes)
    assert all(torch.equal(a, b) for a, b in zip(parts, again, strict=True))
    return parts


def rows_of(parts: list[torch.Tensor]) -> list[int]:
    """Return all rows in order; a row that two clients have appears twice."""
    return torch.cat(parts).sort().values.tolist()


def pool(split: Split) -> torch.Tensor:
    """Return the rows of all clients."""
    return torch.cat(split.clients).unique()


def classes_of(parts: list[torch.Tensor], labels: torch.Tensor) -> list[set[int]]:
    return [set(labels[part].tolist()) for part in parts]


@given(seed=st.integers(0, 99), clients=st.integers(1, 12), size=st.integers(0, 90))
def test_iid_parts_are_disjoint_complete_and_nearly_equal(seed, clients, size):
    parts = parts_of(config("iid", clients, f"seed={seed}"), random_labels(seed, 4, size), 4)
    assert rows_of(parts) == list(range(size))
    lengths = [len(part) for part in parts]
    assert max(lengths) - min(lengths) <= 1


@given(seed=st.integers(0, 99), clients=st.integers(1, 12), n_classes=st.integers(1, 12), size=st.integers(0, 90))
def test_class_parts_are_disjoint_and_complete(seed, clients, n_classes, size):
    labels = random_labels(seed, n_classes, size)
    assert rows_of(parts_of(config("classes", clients, f"seed={seed}"), labels, n_classes)) == list(range(size))


@given(seed=st.integers(0, 99), clients=st.integers(1, 12), n_classes=st.integers(1, 12), wanted=st.integers(1, 12))
def test_clients_hold_the_given_number_of_classes_and_all_their_images(seed, clients, n_classes, wanted):
    assume(wanted <= n_classes and (clients * wanted <= n_classes or clients >= n_classes))
    labels = torch.arange(n_classes).repeat(clients * wanted)  # enough of each class for all clients that hold it
    settings = config("classes", clients, f"seed={seed}", f"partition.classes_per_client={wanted}")
    parts = parts_of(settings, labels, n_classes)
    held = classes_of(parts, labels)
    assert {len(classes) for classes in held} == {wanted}
    kept = [row for row, label in enumerate(labels.tolist()) if label in set().union(*held)]
    assert rows_of(parts) == kept
    assert len(set().union(*held)) == min(n_classes, clients * wanted)


@flower
@given(seed=st.integers(0, 99), clients=st.integers(1, 6), n_classes=st.integers(2, 5))
def test_dirichlet_parts_are_disjoint_and_complete(seed, clients, n_classes):
    labels = random_labels(seed, n_classes, 40 * clients)
    parts = parts_of(config("dirichlet", clients, f"seed={seed}", "partition.alpha=10"), labels, n_classes)
    assert rows_of(parts) == list(range(len(labels)))
    assert min(len(part) for part in parts) >= 2


@flower
@given(seed=st.integers(0, 99), clients=st.integers(1, 6), shards=st.integers(1, 3), shard_size=st.integers(1, 5))
def test_shards_are_disjoint_complete_and_hold_few_classes(seed, clients, shards, shard_size):
    labels = torch.arange(clients * shards).repeat(shard_size)  # so that a shard is a class
    parts = parts_of(config("shards", clients, f"seed={seed}", f"partition.shards_per_client={shards}"), labels, 9)
    assert rows_of(parts) == list(range(len(labels)))
    assert {len(classes) for classes in classes_of(parts, labels)} == {shards}


def test_shards_contain_all_images():
    labels = random_labels(0, 10, 97)
    assert rows_of(parts_of(config("shards"), labels, 10)) == list(range(97))


@pytest.mark.parametrize("kind", ["iid", "classes", "dirichlet", "shards"])
def test_another_seed_gives_other_parts(kind):
    labels = random_labels(0, 10, 200)
    one, other = (parts_of(config(kind, 5, f"seed={seed}", "partition.alpha=5"), labels, 10) for seed in (1, 2))
    assert [part.tolist() for part in one] != [part.tolist() for part in other]


def test_a_small_alpha_is_more_unequal_than_a_large_one():
    labels = random_labels(0, 10, 500)

    def spread(alpha: float) -> float:
        parts = parts_of(config("dirichlet", 5, f"partition.alpha={alpha}"), labels, 10)
        counts = torch.stack([labels[part].bincount(minlength=10) for part in parts]).float()
        return float(counts.std(0).mean())

    assert spread(0.3) > 2 * spread(100)


@given(seed=st.integers(0, 99), clients=st.integers(1, 11), n_classes=st.integers(2, 12))
def test_fewer_clients_than_classes_hold_disjoint_classes(seed, clients, n_classes):
    assume(clients < n_classes)
    holders = assign_classes(n_classes, clients, None, seed)
    assert sorted(c for classes in holders for c in classes) == list(range(n_classes))
    lengths = {len(classes) for classes in holders}
    assert lengths <= {n_classes // clients, n_classes // clients + 1}


@given(seed=st.integers(0, 99), clients=st.integers(1, 30), n_classes=st.integers(1, 12))
def test_with_at_least_as_many_clients_as_classes_each_holds_one_and_none_is_missing(seed, clients, n_classes):
    assume(clients >= n_classes)
    holders = assign_classes(n_classes, clients, None, seed)
    assert {len(classes) for classes in holders} == {1}
    times = [sum(label in classes for classes in holders) for label in range(n_classes)]
    assert min(times) >= 1
    assert max(times) - min(times) <= 1


def test_clients_with_the_same_class_divide_its_images_evenly():
    labels = torch.zeros(10, dtype=torch.long)
    assert sorted(len(part) for part in parts_of(config("classes", 3), labels, 1)) == [3, 3, 4]


@pytest.mark.parametrize("kind", ["iid", "classes"])
def test_a_limit_on_one_clients_images_leaves_the_others_as_they_were(kind):
    labels = random_labels(0, 4, 200)
    whole = parts_of(config(kind, 2), labels, 4)
    limited = parts_of(config(kind, 2, "partition.images=[10, 200]"), labels, 4)
    assert len(limited[0]) == 10
    assert set(limited[0].tolist()) < set(whole[0].tolist())
    assert classes_of(limited, labels)[0] == classes_of(whole, labels)[0]
    assert torch.equal(limited[1].sort().values, whole[1].sort().values)


@pytest.mark.parametrize(
    ("clients", "wanted", "message"),
    [
        (6, 2, "6 clients with 2 disjoint classes each need 12 classes, but there are 10. .* at most 1"),
        (2, 11, "classes_per_client = 11, but there are 10 classes. Lower it"),
    ],
)
def test_too_many_classes_per_client_are_refused(clients, wanted, message):
    with pytest.raises(ConfigError, match=message):
        assign_classes(10, clients, wanted, 0)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_too_many_dirichlet_clients_are_refused():
    with pytest.raises(ConfigError, match=r"'dirichlet' cannot divide 20 images among 15 clients: .*partition\.alpha"):
        parts_of(config("dirichlet", 15, "partition.alpha=0.01"), random_labels(0, 4, 20), 4)


def test_more_shards_than_images_are_refused():
    with pytest.raises(ConfigError, match=r"'shards' cannot divide 20 images among 15 clients: .*fewer clients"):
        parts_of(config("shards", 15), random_labels(0, 4, 20), 4)


@pytest.mark.parametrize("kind", ["classes", "dirichlet", "shards"])
def test_without_labels_images_cannot_be_divided_by_class(kind):
    with pytest.raises(ConfigError, match=f"'{kind}' divides by class.*Set partition.kind = 'iid'"):
        partition(config(kind), None, 50, 0)


def test_without_labels_images_can_be_divided_iid():
    assert rows_of(partition(config("iid"), None, 50, 0)) == list(range(50))


def pictures(size: int = 120, n_classes: int = 4, labelled: bool = True) -> Images:
    """Return images of different colours, so that a RAD shows which rows it contains."""
    pixels = torch.arange(size, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 4, 4).contiguous()
    labels = torch.arange(size) % n_classes if labelled else None
    return Images(pixels, labels, tuple(map(str, range(n_classes))) if labelled else ())


@given(
    seed=st.integers(0, 99),
    kind=st.sampled_from(["iid", "classes"]),
    limit=st.integers(60, 130),
    validation=st.integers(0, 20),
    rad=st.integers(4, 20),
)
def test_rad_validation_and_clients_never_overlap(seed, kind, limit, validation, rad):
    sizes = [f"seed={seed}", f"data.limit={limit}", f"data.validation={validation}", f"rad.size={rad}"]
    split = split_training_images(config(kind, 4, *sizes), pictures())
    rows = [
        *split.validation.tolist(),
        *split.rad.tolist(),
        *(row for part in split.clients for row in part.tolist()),
    ]
    assert len(rows) == len(set(rows)) == min(limit, 120)
    assert (len(split.validation), len(split.rad)) == (validation, rad)
    assert sorted(pool(split).tolist()) == sorted(row for part in split.clients for row in part.tolist())


def test_a_limit_is_balanced_over_the_classes():
    lopsided = Images(torch.zeros(100, 1, 4, 4, dtype=torch.uint8), (torch.arange(100) >= 70).long(), ("many", "few"))
    sizes = ["data.limit=40", "data.validation=10", "rad.size=10"]
    split = split_training_images(config("iid", 2, *sizes), lopsided)
    assert lopsided.labels is not None
    for rows in (split.validation, split.rad, pool(split)):
        assert lopsided.labels[rows].sum() * 2 == len(rows)


def test_a_split_is_fixed_by_the_seed():
    sizes = ["data.validation=10", "rad.size=10"]
    first, again = (split_training_images(config("classes", 4, *sizes), pictures()) for _ in range(2))
    other = split_training_images(config("classes", 4, "seed=1", *sizes), pictures())
    assert torch.equal(first.rad, again.rad)
    assert torch.equal(first.clients[2], again.clients[2])
    assert not torch.equal(first.rad, other.rad)
    assert not torch.equal(first.validation, other.validation)


def test_images_without_labels_can_be_split():
    sizes = ["data.validation=10", "rad.size=10"]
    split = split_training_images(config("iid", 4, *sizes), pictures(labelled=False))
    assert len(split.validation) == 0
    assert sum(len(part) for part in split.clients) == len(pictures()) - 10


@pytest.mark.parametrize("changed", [{"rad.size": 107}, {"data.validation": 2}, {"clients.count": 2}])
def test_too_few_images_for_the_clients_are_refused(changed):
    sizes = {"data.limit": 120, "data.validation": 5, "rad.size": 110, "clients.count": 4}

    def split(**changes: int) -> None:
        overrides = [f"{key}={value}" for key, value in {**sizes, **changes}.items()]
        split_training_images(config("iid", 4, *overrides), pictures())

    split(**changed)
    (key, number), *_ = changed.items()
    for wrong in ({}, {key: number + 1}):
        with pytest.raises(ConfigError, match="are too few for"):
            split(**wrong)


@pytest.mark.parametrize(
    ("count", "overrides", "validation", "rad"),
    [
        (120, [], 12, 24),
        (120, ["data.limit=100"], 10, 20),
        (120, ["data.validation=30"], 30, 24),
        (120, ["rad.size=40"], 12, 40),
        (120, ["rad.source=digits"], 12, 0),
        (12, [], 1, 4),
        (3000, [], 200, 300),
    ],
)
def test_default_sizes_fit_small_data_and_set_ones_are_kept(count, overrides, validation, rad):
    labels = torch.arange(count) % 2
    train = Images(torch.zeros(count, 1, 1, 1, dtype=torch.uint8), labels, ("a", "b"))
    assert kept_apart(config("iid", 2, *overrides), train) == (validation, rad)
    split = split_training_images(config("iid", 2, *overrides), train)
    assert (len(split.validation), len(split.rad)) == (validation, rad)
    assert kept_apart(config("iid", 2, *overrides), replace(train, labels=None)) == (0, rad)


def test_a_run_records_the_sizes_that_fit_its_data(caplog):
    chosen = fit_to_data(config("iid", 2, "data.source=digits", "data.limit=100"))
    assert (chosen.data.validation, chosen.rad.size) == (10, 20)
    (message,) = caplog.messages
    assert all(value in message for value in ("'digits'", "100", "data.validation = 10", "rad.size = 20"))
    assert parse_config(chosen.to_toml()) == fit_to_data(chosen) == chosen
    old = config("iid", 2, "data.source=digits", "data.limit=100", "data.validation=200", "rad.size=300")
    assert fit_to_data(old) is old  # a saved config states every number
    assert len(caplog.messages) == 1


def images_in(folder, count):
    from PIL import Image

    folder.mkdir()
    for k in range(count):
        Image.new("L", (8, 8), k).save(folder / f"{k}.png")
    return folder


def test_an_unset_rad_size_takes_what_the_other_source_has(tmp_path, caplog):
    names = ["data.source=digits", f"rad.source={images_in(tmp_path / 'shared', 7)}"]
    chosen = fit_to_data(config("iid", 2, *names))
    assert (chosen.data.validation, chosen.rad.size) == (143, 7)
    (message,) = caplog.messages
    assert all(value in message for value in ("'digits'", "1437", "data.validation = 143"))
    assert "rad.size" not in message, "the RAD takes none of them"
    assert fit_rad(config("iid", 2, *names)).rad.size == 7
    assert fit_rad(config("iid", 2, *names, "rad.size=9")).rad.size == 9  # refused later
    assert fit_rad(config("iid", 2, "data.source=x", "rad.source=digits")).rad.size == 300
    assert fit_rad(config("iid", 2)).rad.size == 300
    with pytest.raises(ConfigError, match=r"has 3 training images, expected at least 4.* Add images"):
        fit_rad(config("iid", 2, f"rad.source={images_in(tmp_path / 'few', 3)}"))


@pytest.mark.parametrize("name", preset_names())
def test_presets_state_their_sizes(name):
    """So their splits do not depend on the rule for small data."""
    preset = load_config(name)
    assert "validation" in preset.data.model_fields_set
    assert "size" in preset.rad.model_fields_set


def test_a_client_without_images_is_refused():
    rare = Images(torch.zeros(60, 1, 4, 4, dtype=torch.uint8), torch.zeros(60, dtype=torch.long), ("a", "b", "c"))
    with pytest.raises(ConfigError, match="images"):
        split_training_images(config("classes", 3, "data.validation=0", "rad.size=10"), rare)


def test_the_rad_contains_the_reserved_images():
    settings = config("iid", 4, "data.validation=10", "rad.size=10")
    split = split_training_images(settings, pictures())
    assert load_rad(settings, pictures(), split)[:, 0, 0, 0].tolist() == split.rad.tolist()


def test_a_rad_from_another_source_has_the_shape_of_the_training_images():
    settings = config("iid", 4, "data.validation=10", "rad.size=30", "rad.source=digits", "data.source=clinic")
    train = Images(torch.zeros(120, 3, 12, 12, dtype=torch.uint8), None)
    split = split_training_images(settings, train)
    assert (len(split.rad), len(pool(split))) == (0, 120)
    rad = load_rad(settings, train, split)
    assert rad.shape == (30, 3, 12, 12)
    digits = load_images(settings.data.model_copy(update={"source": "digits", "side": 12, "channels": 3}), "train")
    assert len({digest(image) for image in rad} & {digest(image) for image in digits.pixels}) == 30
    assert torch.equal(rad, load_rad(settings, train, split))
    assert not torch.equal(rad, load_rad(settings.model_copy(update={"seed": 1}), train, split))


def test_a_rad_larger_than_its_source_is_refused():
    settings = config("iid", 4, "data.validation=10", "rad.size=1438", "rad.source=digits", "data.source=clinic")
    train = Images(torch.zeros(120, 1, 8, 8, dtype=torch.uint8), None)
    with pytest.raises(ConfigError, match=r"rad\.size = 1438 exceeds the 1437 images of 'digits'\. Lower it"):
        load_rad(settings, train, split_training_images(settings, train))


def test_a_rad_from_the_clients_own_data_is_refused():
    settings = config("iid", 4, "data.validation=10", "rad.size=30", "rad.source=digits")
    with pytest.raises(ConfigError, match=r"Leave it out"):
        load_rad(settings, pictures(), split_training_images(settings, pictures()))


def test_a_rad_from_the_clients_own_data_is_refused_under_any_spelling(tmp_path, monkeypatch):
    (tmp_path / "images").mkdir()
    monkeypatch.chdir(tmp_path)
    names = [f"rad.source={tmp_path / 'images'}", "data.source=./images", "data.validation=10", "rad.size=30"]
    settings = config("iid", 4, *names)
    with pytest.raises(ConfigError, match=r"Leave it out"):
        load_rad(settings, pictures(), split_training_images(settings, pictures()))


def test_a_rad_needs_no_labels(tmp_path):
    from PIL import Image

    for k in range(10):
        Image.new("L", (8, 8), k).save(tmp_path / f"{k}.png")
    settings = config("iid", 4, f"rad.source={tmp_path}", "rad.size=4", "data.label_column=y", "data.validation=10")
    train = Images(torch.zeros(120, 1, 8, 8, dtype=torch.uint8), torch.zeros(120, dtype=torch.long), ("a",))
    assert load_rad(settings, train, split_training_images(settings, train)).shape == (4, 1, 8, 8)
