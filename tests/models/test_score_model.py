"""Score models: new heads start at zero, scores on a forest are those of transformers, and they
come back from disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from tests.support.tiny import save_model
from tests.support.training import forest_of
from tunesmith.config.schema import LoraSection
from tunesmith.errors import ModelError
from tunesmith.models.adapters import attach, merge
from tunesmith.models.score_model import ScoreModel, whole_sequence

SEQUENCES = [[5, 6, 7, 8, 9], [5, 6, 7, 11], [12, 13]]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "mistral"])
def test_scores_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    model = ScoreModel.load(save_model(tmp_path / "base", family))
    forest = forest_of([whole_sequence(ids) for ids in SEQUENCES])
    assert model.scores(forest).tolist() == [0.0, 0.0, 0.0]
    torch.manual_seed(0)
    torch.nn.init.normal_(model.head.weight)
    model.save(tmp_path / "rm")
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm").eval()
    with torch.no_grad():
        expected = [theirs(torch.tensor([ids])).logits.item() for ids in SEQUENCES]
    found = ScoreModel.load(tmp_path / "rm").scores(forest)
    assert found.tolist() == pytest.approx(expected, abs=1e-5)
    assert max(map(abs, expected)) > 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_are_not_rounded_to_the_models_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    model = ScoreModel.load(save_model(tmp_path / "base"), dtype=dtype)
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(0))
    forest = forest_of([whole_sequence(ids) for ids in SEQUENCES])
    with torch.no_grad():
        exact = (model.states(forest).double() @ model.head.weight.double().T).squeeze(1)
        scores = model.scores(forest)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.double(), exact, rtol=1e-5, atol=1e-6)
    assert not scores.equal(scores.to(dtype).float())


def test_a_saved_model_names_the_tokenizers_pad_token_also_where_its_id_is_0(
    tmp_path: Path,
) -> None:
    """transformers looks for a sequence's last token by it; the end of an answer is not padding."""
    model = ScoreModel.load(save_model(tmp_path / "base", pad_token_id=None))
    torch.nn.init.normal_(model.head.weight)
    model.save(tmp_path / "rm")
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm").eval()
    assert theirs.config.pad_token_id == 0
    with torch.no_grad():
        found = model.scores(forest_of([whole_sequence([7, 8, 9, 2])])).item()
        assert theirs(torch.tensor([[7, 8, 9, 2]])).logits.item() == pytest.approx(found, abs=1e-5)


def test_a_model_with_several_labels_is_refused(tmp_path: Path) -> None:
    path = save_model(tmp_path / "base")
    AutoModelForSequenceClassification.from_pretrained(path, num_labels=3).save_pretrained(
        tmp_path / "three"
    )
    ScoreModel.load(path).tokenizer.save_pretrained(tmp_path / "three")
    with pytest.raises(ModelError, match="3 labels"):
        ScoreModel.load(tmp_path / "three")


def test_an_adapter_is_merged_into_a_base_whose_embedding_is_its_head(tmp_path: Path) -> None:
    model = ScoreModel.load(save_model(tmp_path / "base", "qwen2", tie_word_embeddings=True))
    adapter = attach(model, LoraSection(rank=2))
    with torch.no_grad():
        for _, weight in adapter.own_weights():
            weight.normal_()
    model.save(tmp_path / "adapter")
    merge(tmp_path / "adapter", tmp_path / "merged")
    forest = forest_of([whole_sequence(ids) for ids in SEQUENCES])
    merged = ScoreModel.load(tmp_path / "merged").scores(forest)
    torch.testing.assert_close(merged, model.scores(forest))
    assert merged.abs().max() > 0.1


def test_an_adapter_may_bring_new_tokens_to_a_base_without_a_head(tmp_path: Path) -> None:
    model = ScoreModel.load(save_model(tmp_path / "base", "qwen2", tie_word_embeddings=False))
    attach(model, LoraSection(rank=2))
    model.save(tmp_path / "adapter")
    file = tmp_path / "adapter/adapter_model.safetensors"
    rows = torch.randn(304, 32)
    more = {"base_model.model.model.embed_tokens.weight": rows}
    save_file(load_file(file) | more, file, metadata={"format": "pt"})
    merge(tmp_path / "adapter", tmp_path / "merged")
    merged = load_file(tmp_path / "merged/model.safetensors")
    assert merged["model.embed_tokens.weight"].equal(rows)
