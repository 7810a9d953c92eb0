"""Records: facts are added, and nothing of the record itself is changed."""

import pytest
import torch

from dlcft import Learner
from dlcft.learner.records import Adopted, Forgotten, Learned, read_record
from tests.learner.test_learner import backbone, data, make

RECORDS = [
    Learned(0, ["main"], 3, "d", [1.0], None, 0.1, 0.2, {"accuracy": 0.5}),
    Forgotten(1, ["main"], 2, "d"),
    Adopted(0, ["main"], 4, 0, None, 1.0, 2.0),
]


@pytest.mark.parametrize("record", RECORDS)
def test_they_come_back_from_json(record):
    assert read_record(record.to_dict()) == record


def test_facts_are_saved_and_replace_no_field(tmp_path):
    learner = make("ridge")
    with pytest.raises(ValueError, match="no record of a task"):
        learner.annotate(accuracy=1.0)
    learner.learn(data([0, 1]))
    learner.annotate(accuracy=0.9, predicted_increase=0.25)
    for fact in ({"kind": "x"}, {"task": 3}, {"data": "x"}, {"notes": {}}):
        with pytest.raises(ValueError, match="is part of the record itself"):
            learner.annotate(**fact)
    with pytest.raises(TypeError, match="the header holds"):
        learner.annotate(x=torch.ones(2))
    learner.save(tmp_path)
    loaded = Learner.load(tmp_path, backbone())
    assert loaded.history == learner.history
    assert loaded.history[0].notes == {"accuracy": 0.9}
    assert loaded.history[0].predicted_increase == 0.25
