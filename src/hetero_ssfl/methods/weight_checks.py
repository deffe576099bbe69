"""Which replies of weights do not fit those of the other clients of a round.

A client that sends N T - (N - 1) W replaces the mean of N replies by T. Its norm may be small; its distance from the
global model W is not. So the distance of a reply is compared with that of the others:

    |W_k - W| <= MAX_MOVE * max(1, steps_k / steps) * |W' - W|

where W' is the reply with the median distance of the other clients, and steps are those of a round. Clients with other
images move the weights in other directions, but not MAX_MOVE times as far per step, and no distance grows faster than
the steps. BatchNorm's statistics are compared as scales of activations, sqrt(mean^2 + variance), since images of other
classes change each mean, but not that scale.

Of two replies nobody can say which one is wrong: a comparison needs three.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import median_high

from torch import Tensor

from ..errors import ProtocolError

STATISTICS = ("running_mean", "running_var")
MIN_REPLIES = 3
MAX_MOVE = 8.0  # times as far from the global model as the other replies, per step; honest ones stay below 5
MAX_SCALE = 10.0  # times the scale of activations of the global model and of the others
MAX_BATCHES = 10**9  # by which a round can raise a counter of batches: more would overflow it in the end


def parameters(weights: Mapping[str, Tensor]) -> list[str]:
    """Return the names of what is trained: not BatchNorm's statistics and counters, which grow with activations."""
    return [key for key, w in weights.items() if w.is_floating_point() and not key.endswith(STATISTICS)]


def distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Return ||W_a - W_b|| over all parameters."""
    return math.sqrt(sum(float((a[key].double() - b[key].double()).square().sum()) for key in parameters(a)))


def check_statistics(weights: Mapping[str, Tensor], current: Mapping[str, Tensor], sender: str) -> None:
    """Raise ProtocolError for BatchNorm buffers that no training gives. `current` is empty before the first round."""
    for key, value in weights.items():
        if key.endswith("running_var") and bool((value < 0).any()):
            raise ProtocolError(
                f"{sender} sent '{key}' with a variance of {float(value.min()):.3g}, expected 0 or more."
            )
        if not value.is_floating_point() and value.numel():
            most = MAX_BATCHES + (int(current[key].max()) if key in current else 0)
            if not 0 <= int(value.min()) <= int(value.max()) <= most:
                wrong = int(value.min()) if int(value.min()) < 0 else int(value.max())
                raise ProtocolError(f"{sender} sent '{key}' with a value of {wrong}, expected 0 to {most}.")


def scales(weights: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the root mean square of the activations before each BatchNorm, from its running statistics."""
    means = {key: w.double().square() for key, w in weights.items() if key.endswith("running_mean")}
    variances = {key: weights.get(key.removesuffix("mean") + "var") for key in means}
    moments = {key: square if (v := variances[key]) is None else square + v for key, square in means.items()}
    return {key: math.sqrt(float(moment.mean())) for key, moment in moments.items()}


def misfits(
    current: Mapping[str, Tensor], replies: Mapping[str, Mapping[str, Tensor]], steps: Mapping[str, int]
) -> dict[str, str]:
    """Return why a reply does not fit the others, for each client of which that is so. `steps` are those of a round."""
    if len(replies) < MIN_REPLIES:
        return {}
    moved = {name: distance(weights, current) for name, weights in replies.items()}
    usual, known = scales(current), {name: scales(weights) for name, weights in replies.items()}
    reasons = {}
    for name in replies:
        others = sorted((moved[other], steps[other]) for other in replies if other != name)
        far, of_steps = others[len(others) // 2]  # the higher one of two: a reply that did not move says nothing
        limit = MAX_MOVE * max(1.0, steps[name] / of_steps) * far
        if moved[name] > limit:
            reasons[name] = (
                f"{name} sent weights at a distance of {moved[name]:.3g} from the global model, expected at most "
                f"{limit:.3g}: the other replies are at {far:.3g}."
            )
            continue
        for key, scale in known[name].items():
            at_most = MAX_SCALE * max(usual[key], median_high(_of_others(known, name, key)))
            if scale > at_most:
                reasons[name] = (
                    f"{name} sent BatchNorm statistics of scale {scale:.3g} in '{key}', expected at most "
                    f"{at_most:.3g}, {MAX_SCALE:g} times that of the global model and of the others."
                )
                break
    return reasons


def _of_others(known: Mapping[str, Mapping[str, float]], name: str, key: str) -> Sequence[float]:
    return [values[key] for other, values in known.items() if other != name]
