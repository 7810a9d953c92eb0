"""The Avalanche plugin, with real strategies and benchmarks on handwritten digits."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dlcft import ScaledMSE
from dlcft.integrations.penalty import PastTasks
from tests.support.digits import TASKS, accuracy, forgetting, turned
from tests.support.networks import needs

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # warnings of other libraries


@pytest.fixture
def avalanche():
    needs("avalanche.models", "avalanche")
    needs("avalanche.benchmarks", "avalanche")
    needs("avalanche.training", "avalanche")
    needs("avalanche.logging", "avalanche")
    return needs("avalanche", "avalanche")


def benchmark(avalanche, classes=None, *, by_task=False):
    """Digits turned by a quarter in every experience; or, with classes for each of them, as they are."""
    bm = avalanche.benchmarks

    def dataset(place, held_out):
        x, y = turned(0 if classes else place, held_out)
        kept = torch.isin(y, torch.tensor(classes[place] if classes else range(10)))
        labels = bm.utils.DataAttribute(y[kept].tolist(), "targets")
        tasks = bm.utils.DataAttribute(
            [place if by_task else 0] * len(labels), "targets_task_labels", use_in_getitem=True
        )
        return bm.utils.AvalancheDataset([TensorDataset(x[kept], y[kept])], data_attributes=[labels, tasks])

    count = len(classes) if classes else TASKS
    parts = {name: [dataset(place, name == "test") for place in range(count)] for name in ("train", "test")}
    return bm.with_task_labels(bm.with_classes_timeline(bm.benchmark_from_datasets(**parts)))


def features():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 64), nn.ReLU()
    )


def strategy(avalanche, model, past=None, criterion=None, lr=2e-3, **settings):
    from dlcft.integrations.avalanche import DLCFTPlugin

    plugins = [DLCFTPlugin(past)] if past else []
    return avalanche.training.Naive(
        model=model, optimizer=torch.optim.Adam(model.parameters(), lr=lr), plugins=plugins, train_mb_size=32,
        criterion=criterion or nn.CrossEntropyLoss(), eval_mb_size=256,
        evaluator=avalanche.training.plugins.EvaluationPlugin(loggers=[]), **{"train_epochs": 15} | settings,
    )  # fmt: skip


def learned(stream, cl, answer):
    """The accuracy on the test data of every experience after each of them; `answer` may use its number."""
    table = []
    for experience in stream.train_stream:
        cl.train(experience, eval_streams=[])
        cl.model.eval()
        row = []
        for place, held in enumerate(stream.test_stream):
            x = torch.stack([sample[0] for sample in held.dataset])
            y = torch.tensor([int(sample[1]) for sample in held.dataset])
            with torch.no_grad():
                row.append(accuracy(answer(cl.model, x, place), y))
        table.append(row)
    return table


def plain(model, x, place):
    return model(x)


def tell(seed, past, table):
    """For those who run it with -s: accuracies after the last experience, and forgetting, in per cent."""
    print(
        seed, "with" if past else "without", [round(100 * a, 1) for a in table[-1]], round(100 * forgetting(table), 1)
    )


@pytest.mark.parametrize("seed", range(3))
def test_less_is_forgotten(avalanche, seed):
    tables = []
    for past in (None, PastTasks("exact-tk", strength=30.0)):
        torch.manual_seed(seed)
        model = nn.Sequential(features(), nn.Linear(64, 10))
        tables.append(learned(benchmark(avalanche), strategy(avalanche, model, past), plain))
        tell(seed, past, tables[-1])
    without, kept = tables
    assert forgetting(without) > 0.3
    assert forgetting(kept) < 0.5 * forgetting(without)
    assert sum(kept[-1]) > sum(without[-1]) + 0.2


CLASSES = ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9))


def multi_head(avalanche):
    class Network(avalanche.models.MultiTaskModule):
        def __init__(self):
            super().__init__()
            # its masks of unseen classes do not take the sets of classes that its benchmarks give
            head = avalanche.models.MultiHeadClassifier(64, 10, masking=False)
            self.features, self.classifier = features(), head

        def forward(self, x, task_labels):
            return self.classifier(self.features(x), task_labels)

    return Network()


@pytest.mark.parametrize("seed", range(2))
def test_a_head_for_each_task(avalanche, seed):
    def answer(model, x, place):
        return model(x, place) if str(place) in model.classifier.classifiers else torch.zeros(len(x), 10)

    tables = []
    for past in (None, PastTasks("exact-tk", strength=100.0)):
        torch.manual_seed(seed)
        cl = strategy(avalanche, multi_head(avalanche), past)
        tables.append(learned(benchmark(avalanche, CLASSES, by_task=True), cl, answer))
        tell(seed, past, tables[-1])
    assert {name.split(".")[0] for name in past.memory.anchor} == {"features"}
    without, kept = tables
    assert forgetting(kept) < 0.5 * forgetting(without)


def test_a_head_that_grows(avalanche):
    """New classes, squared loss: the outputs of old classes keep their answers, and the new ones are held at zero."""
    tables, criterion = [], ScaledMSE(1.0)
    for past in (None, PastTasks("exact-tk", loss="mse", strength=30.0)):
        torch.manual_seed(0)
        model = nn.Sequential(features(), avalanche.models.IncrementalClassifier(64, 2, masking=False))
        cl = strategy(avalanche, model, past, criterion=criterion.value, lr=1e-3)
        table = learned(benchmark(avalanche, CLASSES), cl, plain)
        tables.append(table)
        tell(0, past, table)
    assert past.memory.anchor["1.classifier.weight"].shape == (10, 64)
    without, kept = tables
    assert forgetting(without) > 0.9
    assert forgetting(kept) < 0.5
    assert sum(kept[-1]) > sum(without[-1]) + 1.5


def test_the_evaluator_gets_the_penalty(avalanche):
    model = nn.Sequential(features(), nn.Linear(64, 10))
    cl = strategy(avalanche, model, PastTasks("diagonal"), train_epochs=1)
    for experience in benchmark(avalanche).train_stream[:2]:
        cl.train(experience, eval_streams=[])
    assert cl.evaluator.get_last_metrics()["dlcft_penalty"] > 0


def test_several_tasks_in_one_experience(avalanche):
    bm, (x, y), past = avalanche.benchmarks, turned(0), PastTasks("exact-tk")

    def dataset(*tasks):
        labels = bm.utils.DataAttribute(y[:90].tolist(), "targets")
        tasks = bm.utils.DataAttribute(list(tasks) * 30, "targets_task_labels", use_in_getitem=True)
        return bm.utils.AvalancheDataset([TensorDataset(x[:90], y[:90])], data_attributes=[labels, tasks])

    parts = [dataset(0, 1, 1), dataset(2, 3, 2), dataset(4, 1, 4)]
    stream = bm.with_task_labels(bm.with_classes_timeline(bm.benchmark_from_datasets(train=parts)))
    cl = strategy(avalanche, multi_head(avalanche), past, train_epochs=1)
    for experience in stream.train_stream[:2]:
        cl.train(experience, eval_streams=[])
    assert past.memory.weight == 2
    with pytest.raises(ValueError, match="task label 1 comes again, and nothing would keep its head"):
        cl.train(stream.train_stream[2], eval_streams=[])
