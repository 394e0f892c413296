"""One thread a rank: ranks are threads of the test process."""

import torch

torch.set_num_threads(1)
