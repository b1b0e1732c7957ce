"""Experiments in a forked copy: what they find. That the real run never notices is in ``test_experiments_isolation.py``."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from osler.core.facts import Location
from osler.watch.experiments import Capture, obstacle, start

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def capture_of(root: nn.Module, *args: Any, target: torch.Tensor | None = None, loaders: Any = (), **kwargs: Any) -> Capture:
    output = root(*[a.clone() if isinstance(a, torch.Tensor) else a for a in args], **kwargs)
    return Capture(root, 0, {id(m): name for name, m in root.named_modules()}, lambda m: Location("built.py", 1, type(m).__name__), args, kwargs, output,
                   target, None, list(enumerate(loaders)))


def finish(job: Any, patience: float = 30.0) -> list[dict[str, Any]]:
    assert job is not None
    end = time.monotonic() + patience
    while (facts := job.poll()) is None:
        assert time.monotonic() < end
        time.sleep(0.01)
    return facts


def experiment(capture: Capture, seconds: float = 20.0) -> dict[str, dict[str, Any]]:
    """Facts by name; the second pass-repeat (training mode) as ``pass-repeat train``."""
    assert obstacle(capture) is None
    facts = finish(start(capture, seconds))
    return {f["name"] + (" train" if f.get("mode") == "train" else ""): f for f in facts}


@dataclass
class Line:
    """Finds the line of this file that holds a marker."""

    marker: str

    def __eq__(self, at: Any) -> bool:
        with open(__file__) as file:
            number = next(i for i, text in enumerate(file, 1) if text.rstrip().endswith(f"# {self.marker}"))
        return bool(at) and at[0].endswith("test_experiments.py") and at[1] == number


class Rows(nn.Module):
    """A recurrent, attention or pooling layer on [samples, steps, features], then a classifier of the last step."""

    def __init__(self, layer: nn.Module, width: int = 16):
        super().__init__()
        self.inner, self.head = layer, nn.Linear(width, 3)

    def forward(self, x):
        out = self.inner(x)  # inner
        out = out[0] if isinstance(out, tuple) else out
        return self.head(out[:, -1])


class Attend(nn.Module):
    def __init__(self, batch_first):
        super().__init__()
        self.mha = nn.MultiheadAttention(16, 2, batch_first=batch_first)

    def forward(self, x):
        return self.mha(x, x, x)[0]  # mha


class Positions(nn.Module):
    """Sinusoids added along the axis ``axis``."""

    def __init__(self, axis):
        super().__init__()
        self.axis = axis
        self.register_buffer("table", torch.sin(torch.arange(64.0)[:, None] * torch.arange(1.0, 17.0)))

    def forward(self, x):
        table = self.table[:x.shape[self.axis]]
        return x + (table[:, None] if self.axis == 0 else table)  # positions


class Mlp(nn.Sequential):
    def __init__(self, *extra):
        super().__init__(nn.Linear(8, 12), nn.ReLU(), *extra, nn.Linear(12, 3))


class Apply(nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.first, self.fn = nn.Linear(8, 12), fn

    def forward(self, x):
        return self.fn(self.first(x))


def sequences(n=20, steps=9, width=16):
    return torch.randn(n, steps, width), torch.randint(0, 3, (n,))


def flat(n=20, width=8):
    return torch.randn(n, width), torch.randint(0, 3, (n,))


MIXING = {
    "lstm": (lambda: Rows(nn.LSTM(16, 16)), sequences, "lstm", "rnn", "inner", "inner"),
    "gru-large": (lambda: Rows(nn.GRU(16, 16, num_layers=2)), lambda: sequences(40, 12), "gru", "rnn", "inner", "inner"),
    "encoder-layer": (lambda: Rows(nn.TransformerEncoderLayer(16, 2, 32)), sequences, "multi_head_attention_forward", "attention", "inner", "inner"),
    "encoder": (lambda: Rows(nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32), 2, enable_nested_tensor=False)), sequences,
                "multi_head_attention_forward", "attention", "inner.layers.0", "inner"),
    "mha": (lambda: Rows(Attend(False)), sequences, "multi_head_attention_forward", "attention", "inner.mha", "mha"),
    "log-softmax": (lambda: Apply(lambda h: F.log_softmax(h, dim=0)), flat, "log_softmax", "softmax", "", "log-softmax"),  # log-softmax
    "mean": (lambda: Apply(lambda h: h - h.mean()), flat, "mean", "mean", "", "batch-mean"),  # batch-mean
    "reshape": (lambda: Rows(Apply2(lambda h: h.reshape(h.shape[1], len(h), -1).transpose(0, 1))), sequences, "reshape", "reshape", "inner", "re"),  # re
    "batch-statistics": (lambda: Mlp(nn.BatchNorm1d(12, track_running_stats=False)), flat, "batch_norm", "batch_norm", "2", None),
}


class Apply2(nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, x):
        return self.fn(x)


@pytest.mark.parametrize("case", MIXING)
def test_mixing_is_found_and_located(case):
    torch.manual_seed(0)
    build, data, op, kind, module, line = MIXING[case]
    x, y = data()
    fact = experiment(capture_of(build(), x, target=y))["batch-mixing"]
    assert fact["mixed"] is True and fact["effect"] > 1e-4 and "unclear" not in fact
    assert (fact["first_op"], fact["kind"], fact["first_module"]) == (op, kind, module)
    assert fact["at"] is None if line is None else fact["at"] == Line(line)
    assert fact["module_at"][0] == "built.py"


SEPARATE = {
    "mlp": (Mlp, flat), "dropout": (lambda: Mlp(nn.Dropout(0.5)), flat), "batch-norm": (lambda: Mlp(nn.BatchNorm1d(12)), flat),
    "cnn": (lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3)),
            lambda: (torch.randn(16, 1, 8, 8), torch.randint(0, 3, (16,)))),
    "lstm": (lambda: Rows(nn.LSTM(16, 16, batch_first=True)), sequences), "mha": (lambda: Rows(Attend(True)), sequences),
    "encoder": (lambda: Rows(nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)), sequences),
    "positions": (lambda: Rows(Positions(1)), sequences), "group-norm": (lambda: Mlp(nn.GroupNorm(3, 12)), flat),
    "as-long-as-wide": (lambda: Rows(nn.LSTM(16, 16, batch_first=True)), lambda: sequences(16, 16)),
    "few": (Mlp, lambda: flat(2)),
}


@pytest.mark.parametrize("case", SEPARATE)
def test_separate_samples_stay_separate(case):
    torch.manual_seed(0)
    build, data = SEPARATE[case]
    x, y = data()
    facts = experiment(capture_of(build(), x, target=y))
    mixing = facts["batch-mixing"]
    assert mixing["mixed"] is False and mixing["order"] is True and mixing["inside"] is False and mixing["effect"] == 0.0
    assert facts["pass-repeat"]["same"] and facts["pass-repeat train"]["same"] and not facts["input-mutated"]["mutated"]
    assert facts["input-independence"]["spread"] > 0.01 and facts["input-independence"]["zeroed"] > 0.01
    assert "causality" not in facts


def test_positions_along_the_batch_depend_on_the_order():
    fact = experiment(capture_of(Rows(Positions(0)), sequences()[0], target=torch.zeros(20, dtype=torch.long)))["batch-mixing"]
    assert fact["mixed"] is False and fact["order"] is False and fact["first_op"] == "add" and fact["at"] == Line("positions")


def test_time_first_layouts_are_not_called_mixing():
    torch.manual_seed(0)
    x = torch.randn(9, 20, 16)

    class Last(Rows):
        def forward(self, x):
            return self.head(self.inner(x)[0][-1])

    by_target = experiment(capture_of(Last(nn.LSTM(16, 16)), x, target=torch.randint(0, 3, (20,))))["batch-mixing"]
    assert by_target["mixed"] is False and by_target["axis"] == 1

    class Every(Rows):
        def forward(self, x):
            return self.head(self.inner(x)[0])

    nothing_tells = experiment(capture_of(Every(nn.LSTM(16, 16)), x, target=torch.randn(9, 20, 3)))["batch-mixing"]
    assert nothing_tells["unclear"] is True
    loader = DataLoader(TensorDataset(torch.zeros(40, 1)), batch_size=9)
    told = experiment(capture_of(Every(nn.LSTM(16, 16)), x, target=torch.randn(9, 20, 3), loaders=[loader]))["batch-mixing"]
    assert told["mixed"] is True and told["axis_by"] == "loader" and "unclear" not in told


def test_graphs_and_similarities_are_marked():
    torch.manual_seed(0)
    x, adjacency = torch.randn(20, 8), torch.rand(20, 20)

    class Graph(Mlp):
        def forward(self, x, a):
            return super().forward(a @ x)

    fact = experiment(capture_of(Graph(), x, adjacency, target=torch.randint(0, 3, (20,))))["batch-mixing"]
    assert fact["mixed"] is True and fact["square_input"] is True

    class Held(Mlp):
        def __init__(self):
            super().__init__()
            self.register_buffer("adjacency", adjacency)

        def forward(self, x):
            return super().forward(self.adjacency @ x)

    fact = experiment(capture_of(Held(), x, target=torch.randint(0, 3, (20,))))["batch-mixing"]
    assert fact["mixed"] is True and fact["square_input"] is True and fact["fixed_size"] is True
    pairs = experiment(capture_of(Apply(lambda h: h @ h.T), x, target=torch.arange(20)))["batch-mixing"]
    assert pairs["square_output"] is True


def test_mixing_that_never_reaches_the_output_is_seen_inside():
    class Query(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.layer = nn.Parameter(torch.zeros(1, 1, 16)), nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0)

        def forward(self, x):
            return self.layer(torch.cat([self.query.expand(len(x), -1, -1), x], 1))[:, 0]  # query

    facts = experiment(capture_of(Query(), sequences()[0], target=torch.randn(20, 16)))
    assert facts["batch-mixing"]["inside"] is True and facts["batch-mixing"]["at"] == Line("query")
    assert facts["input-independence"]["spread"] == 0.0


class Gpt(nn.Module):
    def __init__(self, attend, vocabulary=16, width=16):
        super().__init__()
        self.token, self.place, self.qkv = nn.Embedding(vocabulary, width), nn.Embedding(16, width), nn.Linear(width, 3 * width)
        self.head, self.attend = nn.Linear(width, vocabulary), attend

    def forward(self, t):
        h = self.token(t) + self.place.weight[:t.size(1)]
        b, s, d = h.shape
        q, k, v = self.qkv(h).view(b, s, 3, 2, d // 2).permute(2, 0, 3, 1, 4)
        return self.head(h + self.attend(q, k, v).transpose(1, 2).reshape(b, s, d))


def by_hand(mask):
    def attend(q, k, v):
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        if mask:
            scores = scores.masked_fill(torch.triu(torch.ones(scores.shape[-2:], dtype=torch.bool), mask), float("-inf"))
        return torch.softmax(scores, -1) @ v  # by-hand

    return attend


class Encoder(nn.Module):
    def __init__(self, masked):
        super().__init__()
        self.token, self.head, self.masked = nn.Embedding(16, 16), nn.Linear(16, 16), masked
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2, enable_nested_tensor=False)

    def forward(self, t):
        mask = nn.Transformer.generate_square_subsequent_mask(t.size(1)) if self.masked else None
        return self.head(self.encoder(self.token(t), mask=mask))  # encoder


class CharLstm(nn.Module):
    def __init__(self, both):
        super().__init__()
        self.token, self.lstm = nn.Embedding(16, 16), nn.LSTM(16, 8, batch_first=True, bidirectional=both)
        self.head = nn.Linear(16 if both else 8, 16)

    def forward(self, t):
        return self.head(self.lstm(self.token(t))[0]).flatten(0, 1)  # char-lstm


class Causal(nn.Module):
    def __init__(self, left):
        super().__init__()
        self.token, self.conv, self.left = nn.Embedding(16, 16), nn.Conv1d(16, 16, 3), left

    def forward(self, t):
        return self.conv(F.pad(self.token(t).transpose(1, 2), (self.left, 2 - self.left)))  # conv


LANGUAGE = {
    "sdpa": (lambda: Gpt(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)), None, None),
    "sdpa-open": (lambda: Gpt(lambda q, k, v: F.scaled_dot_product_attention(q, k, v)), "scaled_dot_product_attention", None),
    "by-hand": (lambda: Gpt(by_hand(1)), None, None), "by-hand-open": (lambda: Gpt(by_hand(0)), "softmax", "by-hand"),
    "by-hand-one-too-far": (lambda: Gpt(by_hand(2)), "softmax", "by-hand"),
    "encoder": (lambda: Encoder(True), None, None), "encoder-open": (lambda: Encoder(False), "multi_head_attention_forward", "encoder"),
    "lstm": (lambda: CharLstm(False), None, None), "lstm-both-ways": (lambda: CharLstm(True), "lstm", "char-lstm"),
    "conv": (lambda: Causal(2), None, None), "conv-centred": (lambda: Causal(1), "pad", "conv"),
}


@pytest.mark.parametrize("case", LANGUAGE)
def test_a_leak_from_the_future_is_found_and_located(case):
    torch.manual_seed(0)
    build, op, line = LANGUAGE[case]
    text = torch.randint(0, 16, (20, 17))
    facts = experiment(capture_of(build(), text[:, :-1], target=text[:, 1:].flatten()))
    fact = facts["causality"]
    assert fact["target_is_shifted_input"] is True and fact["shift"] == 1
    assert (fact["leak"], fact["first_op"]) == (op is not None, op), fact
    assert line is None or fact["at"] == Line(line)
    assert facts["batch-mixing"]["mixed"] is False and facts["batch-mixing"]["axis_by"] == "shift"


def test_a_final_state_is_no_sequence_of_outputs():
    class Stateful(CharLstm):
        def forward(self, t):
            outputs, state = self.lstm(self.token(t))
            return self.head(outputs), state

    for steps in (4, 8, 16):  # they divide the width of the state
        text = torch.randint(0, 16, (20, steps + 1))
        fact = experiment(capture_of(Stateful(False), text[:, :-1], target=text[:, 1:].flatten()))["causality"]
        assert fact["shift"] == 1 and fact["leak"] is False, fact


def test_a_zero_head_hides_nothing():
    net = Gpt(by_hand(0))
    nn.init.zeros_(net.head.weight)
    text = torch.randint(0, 16, (20, 17))
    facts = experiment(capture_of(net, text[:, :-1], target=text[:, 1:].flatten()))
    assert facts["causality"]["leak"] is True
    assert facts["input-independence"]["woken"] == 1 and facts["input-independence"]["spread"] > 0.01
    assert not net.head.weight.any()


def test_an_unmoved_target_is_told_and_other_tasks_are_not_judged():
    text = torch.randint(0, 16, (20, 17))
    copied = experiment(capture_of(CharLstm(False), text, target=text.clone().flatten()))["causality"]
    assert copied["shift"] == 0 and copied["target_is_shifted_input"] is False and copied["target_equals_input"] == 1.0 and not copied["leak"]
    masked = torch.where(torch.rand(20, 17) < 0.2, text, -100)
    assert "causality" not in experiment(capture_of(Encoder(False), torch.where(masked >= 0, 3, text), target=masked.flatten()))


def test_labels_among_the_arguments_and_continuous_series():
    class Both(CharLstm):
        def forward(self, t, labels):
            logits = super().forward(t)
            return F.cross_entropy(logits, labels.flatten()), logits

    text = torch.randint(0, 16, (20, 17))
    fact = experiment(capture_of(Both(True), text[:, :-1], text[:, 1:], target=text[:, 1:].flatten()))["causality"]
    assert fact["leak"] is True and fact["shift"] == 1

    class Translator(CharLstm):
        def forward(self, source, labels):
            return self.head(self.lstm(self.token(labels.roll(1, 1)))[0] + self.token(source).mean((1, 2))[:, None, None])

    source = torch.randint(0, 16, (20, 16))
    assert "causality" not in experiment(capture_of(Translator(False), source, labels=text[:, 1:], target=text[:, 1:].flatten()))
    series = torch.randn(12, 31, 1)
    lstm = Apply2(nn.Sequential(nn.LSTM(1, 1, batch_first=True, bidirectional=True)))
    fact = experiment(capture_of(lstm, series[:, :-1], target=series[:, 1:]))["causality"]
    assert fact["leak"] is True and fact["first_op"] == "lstm"


@pytest.mark.parametrize(("fn", "random", "kind"), [
    (lambda h: F.dropout(h, 0.3), True, "dropout"),  # repeat
    (lambda h: h + torch.randn_like(h), True, "random"),  # repeat
    (lambda h: nn.Linear(12, 3)(h), True, "built in forward"),  # repeat
])
def test_two_passes_that_differ(fn, random, kind):
    facts = experiment(capture_of(Apply(fn), *flat()[:1], target=flat()[1]))
    fact = facts["pass-repeat"]
    assert fact["same"] is False and fact["random"] is random and fact["kind"] == kind and fact["at"][1] > 0
    assert facts["pass-repeat train"]["same"] is True
    assert facts["batch-mixing"]["mixed"] is False and facts["batch-mixing"]["order"] is None


def test_memory_between_passes():
    class Counter(Apply):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return self.first(x) * self.calls

    facts = experiment(capture_of(Counter(None), *flat()[:1], target=flat()[1]))
    assert facts["pass-repeat"]["same"] is False and facts["pass-repeat"]["random"] is False
    assert facts["pass-repeat train"]["same"] is False and facts["batch-mixing"]["unclear"] is True


def test_inputs_written_in_place():
    net = Mlp()
    whole = torch.randn(60, 8)
    change = Apply2(lambda x: net(x.sub_(4.0).div_(6.0)))  # sub
    fact = experiment(capture_of(change, whole[:20], target=flat()[1]))["input-mutated"]
    assert fact["mutated"] is True and fact["view"] is True and fact["first_op"] == "sub_" and fact["at"] == Line("sub")
    fact = experiment(capture_of(change, whole[:20].clone(), target=flat()[1]))["input-mutated"]
    assert fact["mutated"] is True and fact["view"] is False


class Items(Dataset):
    def __init__(self, how):
        self.x, self.how, self.rng = torch.randn(30, 8) * 3 + 5, how, np.random.default_rng(0) if how == "own" else None

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        x = self.x[i]
        if self.how == "in-place":
            x -= 5.0
            x /= 3.0
        if self.how == "numpy":
            x = x + torch.tensor(np.random.randn(8))
        if self.how == "own":
            x = x + torch.tensor(self.rng.normal(size=8))
        return {"x": x, "name": "n"}, 1


@pytest.mark.parametrize(("how", "same", "random", "uses"), [
    ("plain", True, False, []), ("in-place", True, False, []), ("numpy", True, True, ["numpy"]), ("own", True, True, [])])
def test_items(how, same, random, uses):
    x, y = flat()
    loader = DataLoader(Items(how), batch_size=10)
    fact = experiment(capture_of(Mlp(), x, target=y, loaders=[loader]))["item-repeat"]
    assert fact["dataset"] == "Items" and fact["uses"] == uses and fact["own_generator"] is (how == "own")
    if how == "in-place":
        assert fact["same"] is False and fact["change"] < 0.5 and fact["moved"] < -0.5 and fact["at"][2] == "__getitem__"
        assert abs(float(loader.dataset.x.mean()) - 5) < 1.0
    else:
        assert (fact["same"], fact["random"]) == (same, random)
