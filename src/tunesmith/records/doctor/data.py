"""Lines that were left out, duplicates, held-out data from the training data, and too little of
either."""

from __future__ import annotations

import math

from tunesmith.records.doctor.columns import UNKNOWN
from tunesmith.records.doctor.rules import Change, Evidence, Rules, explains
from tunesmith.records.doctor.signs import Signs

RULES = Rules[Signs]()


@RULES.add("warning", 'data.too_long = "truncate_left"')
def too_long_left_out(run: Signs) -> Evidence:
    """data.too_long = "skip" drops the long examples, which are the hardest, from training.

    They stay, shortened; a higher limit keeps them whole.
    """
    if run.facts.too_long > 0.05:
        yield f"{run.facts.too_long:.0%} of the training data was left out because it is too long"


@RULES.add("warning")
def bad_lines_left_out(run: Signs) -> Evidence:
    """Their columns or values are not what the task needs; the run lists them at its start.

    Repaired, they count.
    """
    if run.facts.bad > 0.05:
        yield f"{run.facts.bad:.0%} of the training data was left out because it cannot be used"


@RULES.add("note", 'data.train = [{ path = "...", weight = 1.0 }, { path = "...", weight = 1.0 }]')
def one_source_dominates(run: Signs) -> Evidence:
    """The others hardly count: the sources' weights, or their sizes where they have none.

    Each source is sampled as often as its weight says.
    """
    share = run.facts.source_share
    if share is not None and share > 0.9:
        yield f"{share:.0%} of the samples come from one of the sources in data.train"


@RULES.add("warning")
def seen_in_training(run: Signs) -> Evidence:
    """The evaluation measures memory.

    Take it out of data.train.
    """
    if run.facts.seen > 0.01:
        yield f"{run.facts.seen:.0%} of the held-out data is in the training data"


@RULES.add("note")
@explains("seen_in_training")
def evaluated_on_training(run: Signs) -> Evidence:
    """The evaluation shows how well these are learned, not how the policy does on others.

    Fine if there are no others; else hold some out.
    """
    if run.facts.seen >= 1 and run.settings.get("environment.path") is not None:
        yield f"{run.facts.seen:.0%} of the evaluation's episodes begin like episodes of training"


@RULES.add("note")
def repeated_data(run: Signs) -> Evidence:
    """Duplicates count several times in every epoch.

    Without them the run is shorter, and all examples count equally.
    """
    if run.facts.repeated > 0.1:
        yield f"{run.facts.repeated:.0%} of the training data are duplicates"


@RULES.add("note", "train.epochs = 3")
def many_epochs(run: Signs) -> Evidence:
    """Supervised training memorises after a few epochs.

    A shorter run; more data helps more.
    """
    epochs = run["epoch"].last
    if not run.rl and epochs > 5:
        yield f"the data was seen {epochs:.1f} times"


@RULES.add(
    "note", Change[Signs]("eval.max_prompts", lambda run: str((run.facts.eval_size or 0) * 4))
)
def eval_too_small(run: Signs) -> Evidence:
    """Too few held-out prompts to tell an improvement from noise.

    Half the uncertainty, if there is more held-out data.
    """
    accuracy = run["eval/accuracy"]
    size = run.facts.eval_size or UNKNOWN
    variance = max(accuracy.mean * (1 - accuracy.mean), 1 / size)
    error = 2 * math.sqrt(2 * variance / size)  # two standard errors of a difference
    if accuracy.count >= 2 and error > 0.1:
        chance = f"differs by up to {error:.2f} by chance"
        yield f"with {size} held-out prompts an accuracy of {accuracy.last:.2f} {chance}"
