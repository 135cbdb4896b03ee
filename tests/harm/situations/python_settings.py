"""Print options, seterr, precision, threads, switch interval stay as set.

slow: yes
"""

import decimal
import gc
import locale
import sys
import threading
import time

import numpy as np
import torch
from _report import batches, report, start, train
from torch import nn

start()
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.01)


def look():
    return (
        np.geterr(),
        np.get_printoptions()["precision"],
        torch._tensor_str.PRINT_OPTS.precision,
        torch.get_num_threads(),
        torch.get_num_interop_threads(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_warn_always_enabled(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        sys.getswitchinterval(),
        decimal.getcontext().prec,
        gc.get_threshold(),
        gc.isenabled(),
        gc.get_debug(),
        locale.setlocale(locale.LC_ALL),
        threading.stack_size(),
        torch.is_autocast_enabled("cpu"),
        torch._C._get_cublas_allow_tf32(),
        torch.backends.mkldnn.enabled,
        torch.is_anomaly_enabled(),
        torch.autograd.is_multithreading_enabled()
        if hasattr(torch.autograd, "is_multithreading_enabled")
        else 0,
        torch.get_rng_state().sum().item(),
        torch.__config__.parallel_info()[:80],
        torch.overrides._get_current_function_mode_stack(),
        torch._C._len_torch_dispatch_stack(),
        torch.multiprocessing.get_sharing_strategy(),
        torch.multiprocessing.get_start_method(True),
        torch._C._get_default_mobile_cpu_allocator if 0 else 0,
    )


a = look()
losses = train(model, optimizer, batches(30))
b = look()
np.seterr(all="raise")
sys.setswitchinterval(0.0007)
torch.set_printoptions(2)
decimal.getcontext().prec = 5
threading.stack_size(64 * 1024 * 3)
gc.set_threshold(17, 3, 3)
losses += train(model, optimizer, batches(30))
x = torch.zeros(8, 16)
x[0, 0] = float("inf")
model(x).sum().backward()
optimizer.zero_grad()
losses += train(model, optimizer, batches(30))
time.sleep(1.1)
losses += train(model, optimizer, batches(3))
report([model], [optimizer], losses, a=a, b=b, c=look())
