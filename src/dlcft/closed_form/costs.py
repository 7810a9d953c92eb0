"""What a number of features costs in closed form: bytes on disk, and in memory."""

from __future__ import annotations

from dataclasses import dataclass

from dlcft.closed_form.sums import EIGEN_LIMIT


@dataclass(frozen=True)
class Costs:
    """Bytes of the sums and the head in one version on disk; and in memory at the peak of an update."""

    disk: int
    memory: int


def costs(features: int, classes: int) -> Costs:
    """The costs of an update beside those of the network, of its samples and of Python.

    On disk lie G's triangle, the class sums and counts in float64, and the head in float32. At the peak there are the
    sums with and without the new task, the standardised matrix, and its Cholesky factor; with few features its
    eigenvectors and a work space of two matrices. Nine matrices of classes × features were
    measured. With few samples it takes less.

    >>> costs(5000, 10)
    Costs(disk=100620120, memory=803600000)
    """
    head = classes * (features + 1)
    squares = 6 if features <= EIGEN_LIMIT else 4
    disk = 8 * (features * (features + 1) // 2 + head) + 4 * head
    return Costs(disk, 8 * features * (squares * features + 9 * classes))
