"""Settings of the whole suite."""

import torch

torch.set_num_threads(1)  # small tensors: more threads only wait for each other
