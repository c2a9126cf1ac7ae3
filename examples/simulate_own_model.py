"""Will compression hurt my model? Four virtual workers, in this process, on the model below.

    python examples/simulate_own_model.py

The command line makes the same runs: tersegrad simulate none topk4 sidco --model simulate_own_model:factory ...
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import tersegrad

images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
images = images.float() / 16
train, test = TensorDataset(images[:1500], labels[:1500]), (images[1500:], labels[1500:])


def factory(seed: int) -> tersegrad.Training:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def batches(worker: int, workers: int, epoch: int) -> DataLoader:
        sampler = DistributedSampler(train, workers, worker, seed=seed)
        sampler.set_epoch(epoch)
        return DataLoader(train, batch_size=16, sampler=sampler)

    def evaluate(model: nn.Module) -> float:
        return (model(test[0]).argmax(1) == test[1]).float().mean().item()

    return tersegrad.Training(model, optimizer, batches, lambda model, b: cross_entropy(model(b[0]), b[1]), evaluate)


if __name__ == "__main__":
    for run in tersegrad.simulate(factory, ["none", "topk4", "sidco"], workers=4, steps=200):
        print(f"{run.spec:6} accuracy {run.end.score:.1%}, {run.step_sent / 1e3:.1f} kB a step and worker")
