"""Bytes per client and round at L = 5000 RAD images, compared with averaging a ResNet-18; target at most 1/10.

Ours      a factor of the client's kernel up and of the consensus down, truncated to `alignment.rank` columns and sent
          as `alignment.wire`. Both are packed and measured as they are sent.
Averaging `fedbyol` with the networks of preset `paper`: a ResNet-18 of full width with BYOL's projector and predictor,
          up and down. A second row leaves the heads out, as if only the encoder were averaged.

Compression must not cost accuracy. `--accuracy` trains the laptop preset, shortened, without truncation and with the
same fraction of columns as here, for the same clients and seeds; "alone" shows how large an effect can be.

    python benchmarks/bytes.py
    HETERO_SSFL_DATA=... python benchmarks/bytes.py --accuracy      # about 10 minutes of CPU, resumable
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from measuring import RESULTS, Row, publish

from hetero_ssfl.config import Config, load_config
from hetero_ssfl.federation.start import start
from hetero_ssfl.federation.wire import content_size, pack
from hetero_ssfl.learning.learner import Learner, build_learner
from hetero_ssfl.methods.averaging import ENCODER, shared_weights
from hetero_ssfl.methods.costs import message_bytes
from hetero_ssfl.report.tables import Result, paired_interval

PAPER = ["clients.models=['resnet18']"]
COMPRESSED = ["alignment.rank=400", "alignment.wire=float16"]
ROWS = 5000
ACCURACY = RESULTS / "bytes_accuracy.json"

SHORTENED = ["rounds=4", "local_epochs=3", "evaluation.every=0", "evaluation.untrained=false"]
ARMS = {
    "uncompressed": [],  # 480 columns of five clients on 500 images, in float32: rank 512 truncates nothing
    "compressed": ["alignment.rank=40", "alignment.wire=float16"],  # 40 columns for 500 images, like 400 for 5000
    "alone": ["method=local"],
}


# --- bytes ------------------------------------------------------------------------------------------


def measured_bytes(ours: Config, averaging: Config) -> dict[str, int]:
    learner = build_learner(averaging.model_of(0), averaging.ssl, 3, 32, averaging.seed)
    sample, whole = torch.zeros(2, 3, 32, 32), ours.model_copy(update={"alignment": uncut(ours)})
    asked = {"ours": ours, "ours, nothing cut": whole, "averaging": averaging}
    found = {name: message_bytes(config, learner, sample) or 0 for name, config in asked.items()}
    return {**found, "averaging the encoder alone": encoder_bytes(learner)}


def uncut(config: Config) -> Any:
    return config.alignment.model_copy(update={"rank": config.rad.size, "wire": "float32"})


def encoder_bytes(learner: Learner) -> int:
    """Return the bytes sent up and down, without projector and predictor."""
    weights = shared_weights(learner, ENCODER[:1])
    return 2 * sum(content_size(pack({key: value})) for key, value in weights.items())


# --- accuracy ---------------------------------------------------------------------------------------


def measure_accuracy(root: Path, seeds: int) -> dict[str, Any]:
    """Train all arms and probe them on the test images, which each run uses once, after its settings were fixed."""
    results: dict[str, list[Result]] = {arm: [] for arm in ARMS}
    for seed in range(seeds):
        for arm, changes in ARMS.items():
            config = load_config("cifar10-laptop", [*SHORTENED, *changes, f"seed={seed}"])
            results[arm].append(Result.read(start(config, root / f"{arm}-seed{seed}", lambda _: None)))
            print(f"  seed {seed}  {arm:12}  {results[arm][-1].results['mean']['linear_all']:.2f}", flush=True)
    return {
        "command": f"python benchmarks/bytes.py --accuracy --seeds {seeds}",
        "settings": ["preset cifar10-laptop", *SHORTENED],
        "arms": ARMS,
        "metric": "linear_all on the test images, mean over the five clients, one value per seed",
        "scores": {arm: [r.results["mean"]["linear_all"] for r in found] for arm, found in results.items()},
        "differences": {
            arm: difference(results["uncompressed"], results[arm]) for arm in ARMS if arm != "uncompressed"
        },
    }


def difference(first: list[Result], second: list[Result]) -> dict[str, Any]:
    """Return the mean difference per client and seed, with a 95 % bootstrap interval."""
    pairs = [b - a for x, y in zip(first, second, strict=True) for a, b in zip(scores(x), scores(y), strict=True)]
    return {"mean": sum(pairs) / len(pairs), "interval": paired_interval(first, second, "linear_all")}


def scores(result: Result) -> list[float]:
    return result.scores("linear_all")


def quoted(found: dict[str, Any]) -> str:
    low, high = found["differences"]["compressed"]["interval"]
    alone = found["differences"]["alone"]["mean"]
    return (
        f"compressed minus uncompressed {found['differences']['compressed']['mean']:+.2f} points "
        f"(95 % {low:+.2f} to {high:+.2f}, {len(found['scores']['compressed'])} seeds x 5 clients); alone {alone:+.2f}"
    )


# --- the table --------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="write nothing")
    parser.add_argument("--accuracy", action="store_true", help="train with and without compression first")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--root", type=Path, default=Path("runs/bytes"))
    options = parser.parse_args()
    if options.accuracy and not options.quick:
        found = measure_accuracy(options.root, options.seeds)
        RESULTS.mkdir(exist_ok=True)
        ACCURACY.write_text(json.dumps(found, indent=2) + "\n")
    ours = load_config("paper", [*PAPER, *COMPRESSED, f"rad.size={ROWS}"])
    measured = measured_bytes(ours, load_config("paper", [*PAPER, "method=fedbyol"]))
    note = quoted(json.loads(ACCURACY.read_text())) if ACCURACY.exists() else "accuracy not measured: run --accuracy"
    rows = [
        Row(
            f"bytes per client and round, L = {ROWS}, {', '.join(COMPRESSED)} ({measured['ours'] / 1e6:.1f} MB)",
            f"{against} ({measured[side] / 1e6:.1f} MB)",
            measured["ours"] / measured[side],
            0.1,
            at_least=False,
            note=remark,
        )
        for side, against, remark in (
            ("averaging", "averaging ResNet-18 with BYOL's heads", note),
            ("averaging the encoder alone", "averaging ResNet-18 without heads", "as above"),
        )
    ]
    publish("bytes", rows, {"bytes": measured, "settings": [*PAPER, *COMPRESSED]}, write=not options.quick)


if __name__ == "__main__":
    main()
