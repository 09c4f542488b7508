"""Time a matrix product by torch's own benchmark."""

import torch
from torch.utils.benchmark import Timer

one, other = torch.rand(512, 512), torch.rand(512, 512)
timer = Timer("one @ other", globals={"one": one, "other": other}, num_threads=torch.get_num_threads())
print(f"matmul: {timer.blocked_autorange(min_run_time=1).median * 1e6:.2f}")
