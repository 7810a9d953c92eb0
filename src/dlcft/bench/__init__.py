"""The reproduction of the paper: data, streams, backbones, experiments. The library itself does not need it."""
