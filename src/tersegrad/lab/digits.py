"""scikit-learn's bundled handwritten digits and a small network for them: real data with no download."""

from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn


@dataclass(frozen=True)
class Digits:
    """1,797 images of 8x8 pixels in 10 classes; every fifth is for testing."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor

    @staticmethod
    def load() -> "Digits":
        """Pixels scaled to [0, 1]."""
        images, labels = load_digits(return_X_y=True)
        x = torch.tensor(images, dtype=torch.float32) / 16.0
        y = torch.tensor(labels, dtype=torch.int64)
        test = torch.arange(len(y)) % 5 == 0
        return Digits(x[~test], y[~test], x[test], y[test])

    def epoch(self, epoch: int, rank: int, size: int, batch: int) -> list[tuple[Tensor, Tensor]]:
        """This worker's batches of one epoch: the same shuffle on all workers, every size-th image each."""
        order = torch.randperm(len(self.train_y), generator=torch.Generator().manual_seed(epoch))
        mine = order[rank : len(order) - len(order) % size : size]
        return [(self.train_x[i], self.train_y[i]) for i in mine.split(batch) if len(i) == batch]


def network() -> nn.Module:
    """A multilayer perceptron of 300,000 parameters, the same on every worker."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def accuracy(model: nn.Module, digits: Digits) -> float:
    """Fraction of test images that are classified correctly."""
    with torch.no_grad():
        return float((model(digits.test_x).argmax(1) == digits.test_y).float().mean())
