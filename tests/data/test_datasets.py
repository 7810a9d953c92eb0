"""Data sets of torchvision and of Hugging Face, recognised by their columns and names."""

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset

from dlcft import Learner
from dlcft.data.samples import Inputs, Samples
from tests.learner.test_learner import backbone, data
from tests.support.samples import Pairs, write_images


def test_numbers_of_classes_become_their_names():
    pets, birds = Pairs(y=[0, 1, 0, 1, 1, 0], classes=["cat", "dog"]), Pairs(y=[1] * 6, classes=["ant", "owl"])
    assert Samples(pets).labels == ["cat", "dog", "cat", "dog", "dog", "cat"]
    assert Samples(Subset(pets, [1, 0])).labels == ["dog", "cat"]
    assert Samples(ConcatDataset([Subset(pets, [1, 0]), birds])).labels == ["dog", "cat", *["owl"] * 6]
    for other in (["cat"], ["cat", "cat"], [3, 4], "ab"):  # too few, twice the same, no names
        assert Samples(Pairs(y=[0, 1, 0, 1, 1, 0], classes=other)).labels == [0, 1, 0, 1, 1, 0]


@pytest.mark.slow
class TestHuggingFace:
    @pytest.fixture
    def datasets(self):
        return pytest.importorskip("datasets", reason="the extra huggingface is not installed")

    @pytest.fixture
    def pets(self, datasets, tmp_path):
        folder = write_images(tmp_path / "pets")
        return folder, datasets.load_dataset(
            "imagefolder", data_dir=str(folder), cache_dir=str(tmp_path), split="train"
        )

    def test_images_with_the_names_of_their_classes(self, pets):
        folder, table = pets
        samples, plain = Samples(table), Samples(folder)
        assert samples.labels == plain.labels == ["cat", "cat", "dog", "dog"]
        assert torch.equal(samples.fetch(torch.arange(4)), plain.fetch(torch.arange(4)))
        assert torch.equal(Inputs(table).fetch(torch.tensor([2])), plain.fetch(torch.tensor([2])))
        assert torch.equal(Inputs(table.remove_columns("label")).fetch(torch.arange(4)), plain.fetch(torch.arange(4)))
        renamed = table.rename_column("label", "species").rename_column("image", "photo")
        assert Samples(renamed).labels == plain.labels

    def test_texts_and_columns_of_numbers(self, datasets):
        table = datasets.Dataset.from_dict({"id": ["x", "y"], "text": ["one", "three"], "label": ["a", "b"]})
        samples = Samples(table, tokenizer=lambda texts: torch.tensor([[float(len(text))] for text in texts]))
        assert samples.fetch(torch.arange(2)).tolist() == [[3.0], [5.0]]
        numbers = datasets.Dataset.from_dict({"x": np.eye(3).tolist(), "label": [4, 5, 6]})
        samples = Samples(numbers)
        assert samples.labels == [4, 5, 6]
        assert torch.equal(samples.fetch(torch.arange(3)), torch.eye(3))

    def test_tables_without_one_label_column_are_refused(self, datasets):
        names = datasets.ClassLabel(names=["a", "b"])
        features = datasets.Features({"x": datasets.Value("float32"), "fine": names, "coarse": names})
        rows = {"x": [0.0, 1.0], "fine": [0, 1], "coarse": [1, 1]}
        with pytest.raises(ValueError, match="x, fine, coarse; rename one to label"):
            Samples(datasets.Dataset.from_dict(rows, features=features))
        with pytest.raises(ValueError, match=r"parts train, test; give one of them, data\['train'\]"):
            Samples(
                datasets.DatasetDict(
                    {"train": datasets.Dataset.from_dict(rows), "test": datasets.Dataset.from_dict(rows)}
                )
            )
        with pytest.raises(ValueError, match="column label alone"):
            Samples(datasets.Dataset.from_dict({"label": [1]}))
        features = datasets.Features({"x": datasets.Value("float32"), "label": names})
        hidden = datasets.Dataset.from_dict({"x": [0.0, 1.0], "label": [0, -1]}, features=features)
        with pytest.raises(ValueError, match="the label -1"):
            Samples(hidden)

    def test_a_streamed_table_is_learned_as_the_table(self, datasets):
        x, y = data([0, 1, 2], n=40, seed=3)
        names = datasets.ClassLabel(names=["a", "b", "c"])
        features = datasets.Features({"x": datasets.Array3D(tuple(x.shape[1:]), "float32"), "label": names})
        table = datasets.Dataset.from_dict({"x": x.numpy(), "label": y.tolist()}, features=features).with_format(
            "torch"
        )
        whole, streamed = (Learner(backbone(), "ridge", device="cpu") for _ in range(2))
        whole.learn(table, progress=False)
        streamed.learn(table.to_iterable_dataset(num_shards=4), progress=False)
        assert whole.labels() == streamed.labels() == ["a", "b", "c"]
        torch.testing.assert_close(whole.outputs(x), streamed.outputs(x), atol=1e-4, rtol=1e-4)
        first = Learner(backbone(), "ridge", device="cpu")
        first.learn((x, ["abc"[label] for label in y.tolist()]), progress=False)
        torch.testing.assert_close(first.outputs(x), streamed.outputs(x), atol=1e-4, rtol=1e-4)
