import torch

torch.set_num_threads(1)  # for small tensors, waking a second thread costs more than it does
