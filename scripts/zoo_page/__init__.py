"""The zoo: training steps of many models, captured and compared with PyTorch's own tracker and counter."""
