"""Families without a score head in transformers get one, which is saved and read again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING as SCORED,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as IN_TRANSFORMERS,
)

from tests.support.families import SPECIAL
from tests.support.tiny import save_model
from tests.support.training import forest_of
from tunesmith.models.score_model import ScoreModel, whole_sequence
from tunesmith.plan.facts.families import families
from tunesmith.plan.facts.model_files import weights_in
from tunesmith.run.assembly.session import load_trained

SEQUENCES = [[5, 6, 7, 8, 9, 10, 11, 12], [5, 6, 7, 11], [12, 13]]
TEXT = [name for name, each in families().items() if not (each.multimodal or each.inner)]
FEW = ("granite",)


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(name, marks=() if name in FEW else pytest.mark.slow)
        for name in TEXT
        if name not in IN_TRANSFORMERS
    ],
)
def test_scores_are_those_of_one_sequence_at_a_time_and_are_read_again(
    tmp_path: Path, model_type: str
) -> None:
    model = ScoreModel.load(
        save_model(tmp_path / "base", model_type, **SPECIAL.get(model_type, {}))
    )
    forest = forest_of([whole_sequence(ids) for ids in SEQUENCES])
    assert model.scores(forest).tolist() == [0.0, 0.0, 0.0]
    torch.manual_seed(0)
    torch.nn.init.normal_(model.head.weight)
    model.save(tmp_path / "rm")
    assert "score.weight" in weights_in(tmp_path / "rm")
    del SCORED._extra_content[type(model.module.config)]  # pyright: ignore  # as elsewhere
    found = ScoreModel.load(tmp_path / "rm").scores(forest)
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm").eval()
    with torch.no_grad():
        expected = [plain(torch.tensor([ids])).logits.item() for ids in SEQUENCES]
    assert found.tolist() == pytest.approx(expected, abs=1e-5)
    assert max(map(abs, expected)) > 0.1


def test_a_trained_one_is_given_out(tmp_path: Path) -> None:
    ScoreModel.load(save_model(tmp_path / "base", "granite")).save(tmp_path / "rm")
    model, tokenizer = load_trained(tmp_path / "rm", scores=True)
    assert model.score.weight.shape == (1, 32)
    assert tokenizer.pad_token_id == 0
