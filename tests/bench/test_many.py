"""Many experiments: wherever they run, the results are those of one after another."""

from dataclasses import replace

import pytest

from dlcft.bench import many as module
from dlcft.bench.experiment import Experiment
from dlcft.bench.many import each, run_all

SMALL = Experiment(dataset="digits", tasks=2, size=8, classes=4, per_class=6, method="ridge")
THREE = [replace(SMALL, seed=seed) for seed in range(3)]


def histories(results):
    return [[entry["accuracy"] for entry in result.history] for result in results]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return histories(run_all(THREE, tmp_path_factory.mktemp("one"), report=lambda line: None))


@pytest.mark.parametrize("how", [{"jobs": 2}, {"executor": "local"}], ids=["joblib", "submitit"])
def test_the_same_results_in_the_same_order(how, expected, tmp_path):
    lines = []
    run_all(THREE[1:2], tmp_path, report=lambda line: None)
    results = run_all(THREE, tmp_path, report=lines.append, **how)
    assert [result.experiment for result in results] == THREE
    assert histories(results) == expected
    assert len(lines) == 2, "what was there already is not run again"
    assert all(line.startswith("ridge, data-il: ") for line in lines)


def test_two_processes_of_a_job_learn_together(expected, tmp_path):
    cluster = {"tasks_per_node": 2}
    results = run_all(THREE[:1], tmp_path, report=lambda line: None, executor="local", cluster=cluster)
    assert results[0].environment["workers"] == 2
    assert histories(results) == expected[:1]
    assert [path.suffix for path in tmp_path.iterdir() if path.is_file()].count(".json") == 1
    assert not list(tmp_path.glob(f".{THREE[0].key}"))


def test_submitit_s_parameters(tmp_path):
    with pytest.raises(ValueError, match="submitit refuses: Unknown argument 'partitoin'"):
        run_all(THREE, tmp_path, executor="local", cluster={"slurm_partitoin": "gpu"})
    with pytest.raises(ValueError, match=r"submitit refuses: .*slurm"):
        run_all(THREE, tmp_path, executor="slurm")
    with pytest.raises(ValueError, match="'timeout_min' is for an executor"):
        run_all(THREE, tmp_path, cluster={"timeout_min": 5})


def test_a_failure_elsewhere_is_told_with_its_log(tmp_path):
    absent = replace(SMALL, dataset="seq-cifar100")
    with pytest.raises(ValueError, match=r"seq-cifar100-.* failed \(FileNotFoundError: .*\); its log is .*logs"):
        run_all([absent], tmp_path, data=tmp_path, executor="local")
    with pytest.raises(ValueError, match=r"seq-cifar100-.* failed \(FileNotFoundError: .*\); its log is .*logs"):
        run_all([absent], tmp_path, data=tmp_path, executor="local", cluster={"tasks_per_node": 2})


def test_a_job_that_is_cut_off_is_queued_again_as_it_was():
    alone = module._Alone(abs, None)
    again = alone.checkpoint(3, -5)
    assert (again.function, again.args) == (alone, (3, -5))
    assert again.result() == (3, 5)


def test_each_tells_the_place():
    assert dict(each(abs, [-1, 2, -3])) == {0: 1, 1: 2, 2: 3}
    with pytest.raises(ValueError, match="jobs is 0"):
        dict(each(abs, [1], 0))


def test_one_may_be_asked_for_twice(expected, tmp_path):
    results = run_all([THREE[0], THREE[0]], tmp_path, jobs=2, report=lambda line: None)
    assert histories(results) == [expected[0], expected[0]]
