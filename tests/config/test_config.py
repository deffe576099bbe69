"""A config survives a round trip, and every mistake in it is reported."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from hetero_ssfl.config import Config, ModelConfig, load_config, parse_config, preset_names
from hetero_ssfl.errors import ConfigError


def refusal(*overrides: str, text: str = "") -> str:
    """Return the error message for an invalid config, which is one paragraph."""
    with pytest.raises(ConfigError) as caught:
        parse_config(text, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_survives_a_round_trip(name):
    config = load_config(name)
    assert config.name == name
    assert parse_config(config.to_toml()) == config


def test_every_kind_of_value_survives_a_round_trip():
    config = parse_config(
        """
        [clients]
        count = 3
        per_round = 2
        weights = [1.0, 2.0, 0.5]
        models = ["vit", {encoder = "resnet8(width=8)", projector = [8, 4], predictor = 6}]
        [data]
        source = 'a "quoted" \\path'
        side = 16
        """
    )
    assert parse_config(config.to_toml()) == config
    assert config.to_toml() == parse_config(config.to_toml()).to_toml()


def test_all_presets_exist():
    assert {"demo", "paper", "smoke"} <= set(preset_names())


def test_the_printed_preset_takes_every_formula_as_it_stands() -> None:
    printed, read = load_config("paper-printed"), load_config("paper")
    assert (printed.ssl.normalize, printed.ssl.symmetric) == (False, False)
    alignment = printed.alignment
    assert (alignment.distance, alignment.center, alignment.normalize) == ("literal-cka", False, False)
    assert (alignment.when, alignment.rad_batch) == ("epoch", 0)
    for section in ("data", "partition", "clients", "rad", "optim", "evaluation"):
        assert getattr(printed, section) == getattr(read, section)


def test_the_paper_preset_has_the_papers_settings():
    config = load_config("paper")
    assert (config.method, config.rounds, config.local_epochs) == ("hetero-ssfl", 200, 5)
    assert (config.data.source, config.data.limit, config.data.validation) == ("cifar10", None, 0)
    assert (config.partition.kind, config.partition.classes_per_client) == ("classes", None)
    assert (config.rad.size, config.rad.source, config.rad.in_ssl) == (5000, None, False)
    clients = config.clients
    assert (clients.count, clients.selected_per_round(), clients.weights) == (5, 5, "uniform")
    assert [model.encoder for model in clients.models] == ["resnet18", "resnet34"]
    optim = config.optim
    assert (optim.lr, optim.momentum, optim.batch, optim.schedule) == (0.032, 0.9, 200, "constant")
    assert (optim.weight_decay, optim.clip_norm) == (0.0, None)
    ssl = config.ssl
    assert (ssl.kind, ssl.projector, ssl.predictor, ssl.ema) == ("byol", (4096, 2048), 4096, 0.99)
    evaluation = config.evaluation
    assert (evaluation.epochs, evaluation.lr, evaluation.batch, evaluation.hidden) == (100, 0.003, 512, 0)


def test_the_paper_preset_aligns_as_the_paper_does():
    alignment = load_config("paper").alignment
    assert (alignment.mu, alignment.ramp_rounds, alignment.layer) == (0.5, 0, "predictor")
    assert (alignment.distance, alignment.estimator, alignment.kernel) == ("cka", "biased", "linear")
    assert (alignment.center, alignment.normalize, alignment.leave_one_out) == (True, True, False)
    assert (alignment.power, alignment.row_normalize) == (1.0, False)
    assert (alignment.augment_rad, alignment.memory) == (False, 0)
    assert alignment.rank < load_config("paper").rad.size  # a factor, not the kernel itself


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("rounds=3", lambda c: c.rounds == 3),
        ("alignment.mu=0.25", lambda c: c.alignment.mu == 0.25),
        ("alignment.center=false", lambda c: c.alignment.center is False),
        ("ssl.kind=simsiam", lambda c: c.ssl.kind == "simsiam"),
        ("data.source=/a/b c", lambda c: c.data.source == "/a/b c"),
        (" name = 'two words' ", lambda c: c.name == "two words"),
        ("name=a=b", lambda c: c.name == "a=b"),
        ("views.crop=[0.5, 0.75]", lambda c: c.views.crop == (0.5, 0.75)),
        ("clients.models=['vit', 'resnet8']", lambda c: [m.encoder for m in c.clients.models] == ["vit", "resnet8"]),
        ("clients.weights=size", lambda c: c.clients.weights == "size"),
    ],
)
def test_an_override_is_read(override, read):
    assert not read(Config())
    assert read(parse_config("", [override]))


def test_overrides_take_precedence_over_the_file_and_over_earlier_overrides():
    config = parse_config("rounds = 1\nseed = 1", ["rounds=2", "rounds=3"])
    assert (config.rounds, config.seed) == (3, 1)


def test_per_round_is_a_number_of_clients_or_a_fraction():
    assert parse_config("", ["clients.count=8", "clients.per_round=1"]).clients.selected_per_round() == 1
    assert parse_config("", ["clients.count=8", "clients.per_round=1.0"]).clients.selected_per_round() == 8
    assert parse_config("", ["clients.count=8", "clients.per_round=0.5"]).clients.selected_per_round() == 4
    assert parse_config("", ["clients.count=8", "clients.per_round=0.01"]).clients.selected_per_round() == 1


def test_clients_cycle_through_the_models_and_take_widths_from_ssl():
    config = parse_config('[clients]\nmodels = ["vit", {encoder = "resnet8", projector = [8, 4], predictor = 6}]')
    assert config.model_of(2) == ModelConfig(encoder="vit", projector=(256, 128), predictor=256)
    assert config.model_of(3) == ModelConfig(encoder="resnet8", projector=(8, 4), predictor=6)


@pytest.mark.parametrize(
    ("override", "key", "nearest"),
    [
        ("alignment.muu=1", "alignment.muu", "mu"),
        ("rouns=3", "rouns", "rounds"),
        ("alignmnt.mu=3", "alignmnt", "alignment"),
        ("clients.wieghts=size", "clients.wieghts", "weights"),
        ("clients.models=['vit', {encoder='vit', predicto=3}]", "clients.models.1.predicto", "predictor"),
        ("local-epochs=3", "local-epochs", "local_epochs"),
        ("optim.weight-decay=0.1", "optim.weight-decay", "weight_decay"),
    ],
)
def test_error_for_an_unknown_key_names_the_nearest_key(override, key, nearest):
    message = refusal(override)
    assert f"'{key}'" in message
    assert f"'{nearest}'" in message


def test_error_for_an_unknown_key_without_a_near_one_lists_all_keys():
    assert refusal("partition.zzz=1").endswith(
        "expected one of kind, classes_per_client, alpha, shards_per_client, images."
    )


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["rounds=abc"], ["rounds", "'abc'", "integer"]),
        (["rounds=0"], ["rounds", "0", "greater than 0"]),
        (["name=1"], ["name", "1", "string"]),
        (["alignment=3"], ["alignment", "3"]),
        (["rounds.more=3"], ["rounds", "{'more': 3}", "integer"]),
        (["alignment.mu=-1"], ["alignment.mu", "-1", "greater than or equal to 0"]),
        (["alignment.mu=nan"], ["alignment.mu", "nan"]),
        (["alignment.mu=inf"], ["alignment.mu", "inf"]),
        (
            ["alignment.form=sketch", "alignment.wire=float16", "alignment.normalize=false"],
            ["alignment", "'wire': 'float16'", "normalize = true or wire = 'float32'"],
        ),
        (["alignment.layer=head"], ["alignment.layer", "'head'", "'predictor'"]),
        (["optim.batch=1"], ["optim.batch", "1", "greater than or equal to 2"]),
        (["clients.per_round=6"], ["clients.per_round", "6", "at most 5"]),
        (["clients.per_round=0"], ["clients.per_round", "0", "greater than 0"]),
        (["clients.weights=[1, 2]"], ["clients.weights", "2 values", "5 clients", "'uniform'"]),
        (["clients.weights=[1, 1, -1, 1, 1]"], ["clients.weights.2", "-1", "greater than 0"]),
        (["clients.weights=by_luck"], ["clients.weights", "'by_luck'", "'uniform', 'size' or 'agreement'"]),
        (["clients.models=[]"], ["clients.models", "at least 1"]),
        (["clients.models=[{predictor=3}]"], ["clients.models.0.encoder", "required"]),
        (["views.crop=[0.9, 0.1]"], ["views.crop", "[0.9, 0.1]", "the smaller value first"]),
        (["rad.size=3"], ["3 RAD images", "at least 4"]),
        (["alignment.rad_batch=3"], ["3 RAD images", "at least 4"]),
        (["engine.min_replies=2", "clients.per_round=1"], ["engine.min_replies", "2", "1 clients per round"]),
        (["rounds"], ["'rounds'", "key=value"]),
        (["name=a", "name.x=b"], ["'name.x=b'", "'name'", "Shorten"]),
    ],
)
def test_error_for_an_invalid_setting_names_value_and_expectation(overrides, expected):
    message = refusal(*overrides)
    assert [part for part in expected if part not in message] == []


def test_invalid_toml_names_the_line_and_the_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("rounds = 3\nseed = = 4\n")
    with pytest.raises(ConfigError, match=r"mine\.toml is not valid TOML: .*line 2"):
        load_config(str(path))


def test_a_file_is_a_config_with_overrides(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("rounds = 3\n[alignment]\nmu = 2.0\n")
    assert load_config(str(path), ["alignment.mu=1"]) == parse_config("", ["rounds=3", "alignment.mu=1"])


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read config '.*gone\.toml': No such file"):
        load_config(str(tmp_path / "gone.toml"))


def test_a_binary_file_is_refused(tmp_path):
    path = Path(tmp_path, "image.toml")
    path.write_bytes(b"\x89PNG\xff")
    with pytest.raises(ConfigError, match="not a text file"):
        load_config(str(path))


def test_error_for_an_unknown_preset_names_the_nearest_one():
    with pytest.raises(ConfigError, match=r"unknown preset 'papr', expected 'paper'"):
        load_config("papr")


def test_a_config_is_frozen():
    config = Config()
    with pytest.raises(ValidationError):
        config.rounds = 3
    with pytest.raises(ValidationError):
        config.alignment.mu = 3


@pytest.mark.parametrize(("images", "epochs"), [(20, 100), (300, 50), (1000, 14), (12_800, 1), (60_000, 1)])
def test_a_round_has_about_as_many_steps_for_few_images_as_for_many(images: int, epochs: int) -> None:
    assert Config().epochs_of(images) == epochs
    assert Config(local_epochs=3).epochs_of(images) == 3


def test_a_method_brings_the_loss_it_is_defined_with_unless_the_config_has_another() -> None:
    assert parse_config("", []).ssl.kind == "simclr"
    assert parse_config("", ["method=fedema"]).ssl.kind == "byol"
    assert parse_config("", ["method=fedema", "ssl.projector=[8, 4]"]).ssl.kind == "byol"
    assert parse_config("", ["method=fedsimsiam"]).ssl.kind == "simsiam"
    assert parse_config("", ["method=fedema", "ssl.kind=vicreg"]).ssl.kind == "vicreg"
    assert not parse_config("", ["method=fedavg"]).rad.in_ssl
    assert parse_config("", ["method=fedavg", "rad.in_ssl=true"]).rad.in_ssl
