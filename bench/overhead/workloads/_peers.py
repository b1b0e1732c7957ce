"""Other ways to watch a loop, each as its own documentation shows it. ``--peer NAME`` on a workload's command line."""
import argparse
import os
import tempfile

import torch

NAMES = ("naive", "tensorboard", "anomaly", "torchmortem", "torch-audit", "torch-audit-each")


class Nobody:
    def before_step(self, step, loss):
        pass

    def after_step(self, step, loss):
        pass


class Naive(Nobody):
    """One norm per parameter, pulled to Python and written out at every step."""

    def __init__(self, model, optimizer):
        self.model, self.file = model, tempfile.TemporaryFile("w")  # noqa: SIM115  open as long as the loop

    def before_step(self, step, loss):
        norms = [p.grad.norm().item() for p in self.model.parameters() if p.grad is not None]
        self.file.write(",".join(map(str, [step, loss.item(), *norms])) + "\n")


class TensorBoard(Nobody):
    """Histograms of all weights and gradients, and the loss, every hundred steps."""

    def __init__(self, model, optimizer):
        from torch.utils.tensorboard import SummaryWriter

        self.model, self.writer = model, SummaryWriter(tempfile.mkdtemp(prefix="bench-tb-"))

    def before_step(self, step, loss):
        if step % 100 == 0:
            self.writer.add_scalar("loss", loss.item(), step)
            for name, p in self.model.named_parameters():
                self.writer.add_histogram("weights/" + name, p, step)
                self.writer.add_histogram("gradients/" + name, p.grad, step)


class Anomaly(Nobody):
    def __init__(self, model, optimizer):
        torch.autograd.set_detect_anomaly(True)


class Torchmortem(Nobody):
    def __init__(self, model, optimizer):
        from torchmortem import Autopsy

        self.autopsy = Autopsy(model, optimizer=optimizer)
        self.autopsy.attach()

    def after_step(self, step, loss):
        self.autopsy.step(loss=loss.item())


class TorchAudit(Nobody):
    def __init__(self, model, optimizer, **settings):
        import torch_audit

        os.environ.setdefault("COLUMNS", "120")
        self.auditor = torch_audit.autopatch(model, optimizer=optimizer, **settings)


def start(model, optimizer):
    parser = argparse.ArgumentParser()
    parser.add_argument("--peer", choices=NAMES)
    name = parser.parse_args().peer
    if name is None:
        return Nobody()
    if name == "torch-audit-each":
        return TorchAudit(model, optimizer, every_n_steps=1)
    return {"naive": Naive, "tensorboard": TensorBoard, "anomaly": Anomaly, "torchmortem": Torchmortem,
            "torch-audit": TorchAudit}[name](model, optimizer)
