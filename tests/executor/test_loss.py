"""The loss counts tokens, not sequences, and asks a model for its own loss only when told to."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.slow


def test_summed_loss_leaves_out_ignored_labels() -> None:
    """The sum is that of the counted tokens alone, in float32 at least, whatever stands at the others."""
    import torch

    from strategist.executor.loss import IGNORED, summed_token_loss

    logits = torch.randn(2, 3, 5, dtype=torch.bfloat16)
    labels = torch.tensor([[1, IGNORED, 4], [IGNORED, IGNORED, 0]])
    chosen = [(0, 0, 1), (0, 2, 4), (1, 2, 0)]
    expected = sum(-logits[b, t].float().log_softmax(-1)[label] for b, t, label in chosen)
    total = summed_token_loss(logits, labels)
    assert total.dtype == torch.float32
    assert float(total) == pytest.approx(float(expected), rel=1e-6)


def test_a_classifier_of_samples_has_one_label_each() -> None:
    """Logits of whole samples, (B, V), count as those of one token each."""
    import torch

    from strategist.executor.loss import IGNORED, summed_token_loss

    logits, labels = torch.randn(4, 5), torch.tensor([1, IGNORED, 0, 4])
    expected = sum(-logits[b].log_softmax(-1)[labels[b]] for b in (0, 2, 3))
    assert float(summed_token_loss(logits, labels)) == pytest.approx(float(expected), rel=1e-6)
    assert torch.equal(summed_token_loss(logits, labels), summed_token_loss(logits[:, None], labels[:, None]))


def test_own_loss_gives_the_labels_to_the_model() -> None:
    """With own_loss the model sees the labels and its mean is weighted by the labels that count; otherwise it does not."""
    import torch

    from strategist.executor.loss import IGNORED, Objective, own_loss

    seen: list[set[str]] = []

    class Talker(torch.nn.Module):
        def forward(self, **batch: torch.Tensor) -> SimpleNamespace:
            seen.append(set(batch))
            return SimpleNamespace(loss=torch.tensor(2.0), logits=torch.zeros(1, 4, 7))

    batch = {"input_ids": torch.zeros(1, 4, dtype=torch.long), "labels": torch.tensor([[1, 2, 3, IGNORED]])}
    assert float(Objective(own_loss).summed(Talker(), batch)) == 2.0 * 3
    assert float(Objective().summed(Talker(), batch)) == pytest.approx(3 * torch.tensor(7.0).log().item())
    assert seen == [{"input_ids", "labels"}, {"input_ids"}]
