"""The profiler with schedule, shapes, memory, modules and execution trace."""

import json
import os
import tempfile

import torch
from _report import batches, report, start
from torch import nn
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile, schedule

start()
model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
losses, found = [], []
with tempfile.TemporaryDirectory() as folder:
    observer = ExecutionTraceObserver().register_callback(os.path.join(folder, "execution.json"))

    def ready(profiler):
        profiler.export_chrome_trace(os.path.join(folder, "trace.json"))
        events = json.load(open(os.path.join(folder, "trace.json")))["traceEvents"]
        names = [event["name"] for event in events if event.get("cat") == "cpu_op"]
        found.append((len(names), sorted({name: names.count(name) for name in names}.items())))
        averages = profiler.key_averages(group_by_input_shape=True)
        found.append(sorted((one.key, one.count, str(one.input_shapes)) for one in averages))

    options = {"record_shapes": True, "profile_memory": True, "with_modules": True}
    plan = schedule(wait=2, warmup=1, active=3, repeat=2)
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=plan,
        on_trace_ready=ready,
        execution_trace_observer=observer,
        **options,
    ) as profiler:
        for x in batches(count=14):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            profiler.step()
    trace = json.load(open(os.path.join(folder, "execution.json")))
    found.append(sorted(node["name"] for node in trace["nodes"]))
for x in batches(count=4):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
report([model], [optimizer], losses)
for one in found:
    print(one)
