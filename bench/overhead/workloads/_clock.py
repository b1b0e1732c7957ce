"""Times every step of a workload and writes the figures when it is over; before that nothing leaves the process.

Environment: BENCH_OUT file for the figures; BENCH_STEPS number of steps; BENCH_CORE core to run on; BENCH_THREADS threads of torch.
"""
import json
import os
import resource
import time

import numpy as np

if os.environ.get("BENCH_CORE") and hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {int(os.environ["BENCH_CORE"])})

# After the core is chosen, so that all of torch's threads are there.
import torch

torch.set_num_threads(int(os.environ.get("BENCH_THREADS", "1")))
torch.manual_seed(0)


def steps(default):
    return range(int(os.environ.get("BENCH_STEPS") or default))


class Clock:
    """``start`` and ``stop`` around each step: wall time, and processor time of the whole process (all threads)."""

    def __init__(self):
        self.rows, self.ready, self.ready_cpu = [], None, None

    def start(self):
        self.wall, self.cpu = time.perf_counter(), time.process_time()
        if self.ready is None:
            self.ready, self.ready_cpu = self.wall, self.cpu

    def stop(self):
        cpu, wall = time.process_time(), time.perf_counter()
        self.rows.append((self.wall, wall - self.wall, cpu - self.cpu))

    def write(self, **more):
        out = os.environ.get("BENCH_OUT")
        if not out:
            wall = np.array(self.rows)[len(self.rows) // 5:, 1]
            print(f"{len(self.rows)} steps, median {1000 * np.median(wall):.3f} ms")
            return
        np.save(out + ".npy", np.array(self.rows))
        with open(out + ".json", "w") as file:
            json.dump({"ready": self.ready, "ready_cpu": self.ready_cpu, "peak_mib": peak_mib(), "torch": torch.__version__, **more}, file)


def peak_mib():
    try:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1024
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
