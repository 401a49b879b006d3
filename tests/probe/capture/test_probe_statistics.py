"""`Probe(log=...)`: figures of each sampled step, of that step alone."""

from __future__ import annotations

import pytest
import torch

import loka
from loka.errors import InputError
from loka.numerics.enums import Format
from loka.numerics.quantize import FORMATS
from tests.support.models import probe_models as models

ROWS = 24


def train(policy, batches, **options):
    """What the callback got in a training of the plain model, whose weights stay as they are."""
    got = []
    model = models.build_plain()
    with loka.Probe(model, policy("plain"), log=lambda *each: got.append(each), **options) as probe:
        models.train(model, batches, probe, lr=0.0)
    return model, got


def rounded_to_zero(x, dim):
    """Share of elements that e4m3 makes zeros with a scale for all (dim None) or for each row; of all elements."""
    amax = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    info = FORMATS[Format.E4M3]
    u = x * (info.max / amax)
    return float((((u.abs() <= info.smallest_subnormal / 2) & (x != 0)).sum()) / x.numel())


def test_figures_are_those_of_the_step(policy):
    batches = models.make_batches(4, ROWS, 12)
    batches[3] = batches[3] * torch.logspace(-9, 0, 12) * 100
    batches[3][:, 3:5] = 0.0
    model, got = train(policy, batches, every=2)
    assert [step for step, _ in got] == [2, 4]
    for (_, figures), x in zip(got, (batches[1], batches[3]), strict=True):
        assert figures["first/input/amax"] == pytest.approx(float(x.abs().max()))
        assert figures["first/input/rms"] == pytest.approx(float(x.square().mean().sqrt()), rel=1e-5)
        assert figures["first/input/zeros"] == pytest.approx(float((x == 0).float().mean()))
        assert figures["first/input/nonfinite"] == 0.0
        assert figures["first/input/underflow_tensorwise"] == pytest.approx(rounded_to_zero(x, None))
        assert figures["first/input/underflow_rowwise"] == pytest.approx(rounded_to_zero(x, 1))
        weight = model.hidden[0].weight.detach()
        assert figures["hidden.0/weight/amax"] == pytest.approx(float(weight.abs().max()))
        assert figures["hidden.0/weight/rms"] == pytest.approx(float(weight.square().mean().sqrt()))
        assert {name.rpartition("/")[0] for name in figures} == {
            f"{site}/{operand}"
            for site in ("first", "hidden.0", "hidden.2", "out")
            for operand in ("input", "weight", "grad_output")
        }
    assert got[1][1]["first/input/underflow_tensorwise"] > 0.2
    assert got[0][1]["first/input/zeros"] == 0.0
    assert got[1][1]["first/input/zeros"] == pytest.approx(2 / 12)


def test_elements_that_are_not_finite_are_counted_in_their_step_alone(policy):
    batches = models.make_batches(3, ROWS, 12)
    batches[1][:3, 5] = float("inf")
    _, got = train(policy, batches, every=1)
    assert [figures["first/input/nonfinite"] for _, figures in got] == [0.0, pytest.approx(3 / (12 * ROWS)), 0.0]
    clean = batches[1][3:]
    assert got[1][1]["first/input/rms"] == pytest.approx(float(clean.square().mean().sqrt()), rel=1e-5)


def test_the_statistics_and_the_training_are_the_same_with_it(policy):
    batches = models.make_batches(4, 600, 3, 12)
    learned, losses = [], []
    for log in (None, lambda step, figures: None):
        model = models.build_forms()
        torch.manual_seed(5)
        with loka.Probe(model, policy("forms"), every=2, rows=16, log=log) as probe:
            losses.append(models.train(model, batches, probe))
            learned.append(probe.stats())
    assert all(torch.equal(one, other) for one, other in zip(*losses, strict=True))
    for one, other in zip(*learned, strict=True):
        assert torch.equal(one.input.values, other.input.values)
        assert torch.equal(one.input.moments.comoment, other.input.moments.comoment)
        assert torch.equal(one.input.call_amax, other.input.call_amax)


@pytest.mark.filterwarnings("ignore::loka.probe.probe.ProbeWarning")
def test_a_step_in_which_nothing_was_seen_has_no_figures(policy):
    got = []
    model = models.build_plain()
    with loka.Probe(model, policy("plain"), every=1, log=lambda *each: got.append(each)) as probe:
        probe.step()
        models.train(model, models.make_batches(1, 8, 12), probe)
    assert [step for step, _ in got] == [2]


def test_what_the_callback_raises_reaches_the_loop(policy):
    def stop(step, figures):
        raise StopIteration(step)

    model = models.build_plain()
    with (
        pytest.raises(StopIteration, match="1"),
        loka.Probe(model, policy("plain"), every=1, log=stop) as probe,
    ):
        models.train(model, models.make_batches(2, 8, 12), probe)
    assert not probe.sampling


def test_it_has_to_be_callable(policy):
    with pytest.raises(InputError, match="probe: log must be callable, not a str"):
        loka.Probe(models.build_plain(), policy("plain"), log="writer")
