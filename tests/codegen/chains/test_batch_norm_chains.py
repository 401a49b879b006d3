"""BatchNorms and dropouts in chains: numbers of torch in every mode, running statistics, what changed since."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from loka.errors import InputError
from tests.support.codegen import chain_plans as chains
from tests.support.codegen.codegen_plans import PlanPackage
from tests.support.models.batch_norm_models import Listed, batch, layer_normed, leaky, seeded, sequential
from tests.support.models.sum_models import SwiGlu

pytestmark = pytest.mark.filterwarnings("ignore::loka.dispatch.dispatch_errors.LokaWarning")  # that this is the CPU

BODIES: dict[str, Callable[[], nn.Module]] = {
    "sequential": sequential,
    "listed": Listed,
    "layer_normed": layer_normed,
    "leaky": leaky,
    "gated": lambda: nn.Sequential(SwiGlu(48, 64, p=0.1), nn.Linear(48, 32)),
}
RECIPES = {"as_is": chains.AS_IS, "fp8": chains.CHAIN, "static": chains.known_chain(x=64.0, dy=64.0)}
LIMITS = {"as_is": 2e-6, "fp8": 2e-2, "static": 0.4}  # of the norm; FP8 against a simulation, static against the model


def norms(model: nn.Module) -> list[nn.BatchNorm1d]:
    return [each for each in model.modules() if isinstance(each, nn.BatchNorm1d)]


def steps(model: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """Two training steps: the results of the second, with all buffers."""
    torch.manual_seed(5)  # of the dropouts
    chains.gradients(model, x, dy)
    return chains.gradients(model, x, dy) | {name: buffer.clone() for name, buffer in model.named_buffers()}


def drawn(model: nn.Module, x: Tensor) -> Tensor:
    """The result by the same random numbers each time."""
    torch.manual_seed(2)
    out: Tensor = model(x)
    return out


def biases_before(model: nn.Module) -> set[str]:
    """The linears' biases whose gradient is zero, and rounding in torch: norms in training subtract them."""
    linears = [name for name, each in model.named_modules() if isinstance(each, nn.Linear)]
    pairs = zip(linears, norms(model), strict=False)
    return {f"{name}.bias" for name, norm in pairs if norm.training}


@pytest.mark.parametrize("mode", ["training", "evaluation", "mixed"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", BODIES)
def test_it_is_the_model_itself(planned: PlanPackage, name: str, recipe: str, mode: str) -> None:
    torch.manual_seed(0)
    body = seeded(BODIES[name]())
    package = planned(chains.chain_plan(body, RECIPES[recipe], batch))
    bound = chains.Holder(copy.deepcopy(body)).train(mode != "evaluation")
    if mode == "mixed":
        for some in (norms(bound)[:1], [each for each in bound.modules() if isinstance(each, nn.Dropout)][1:]):
            for module in some:
                module.eval()
    plain = chains.Holder(chains.simulated(bound.body)) if recipe == "fp8" else copy.deepcopy(bound)
    x, dy = batch(64), torch.randn(64, 32)
    dtype = next(plain.parameters()).dtype
    expected = steps(plain, x.to(dtype), dy.to(dtype))
    with package.apply(bound) as patch:
        found = steps(bound, x, dy)
        patch.verify()
    for key, wanted in expected.items():
        if key in biases_before(plain):
            assert not found[key].any()
        elif wanted.is_floating_point():
            assert chains.error(found[key].float(), wanted.float()) < LIMITS[recipe], key
        else:
            assert torch.equal(found[key], wanted), key
    assert sorted(bound.state_dict()) == sorted(plain.state_dict())
    assert "dropout=" in chains.kernels_text(package)


def test_beside_gemms_that_are_no_chain_they_stay_calls(planned: PlanPackage) -> None:
    torch.manual_seed(0)
    body = seeded(sequential())
    apart = dict.fromkeys(("fprop", "dgrad", "wgrad"), (chains.ROWS, chains.ROWS))
    package = planned(chains.chain_plan(body, apart, batch))
    plain, x, dy = chains.Holder(body), batch(64), torch.randn(64, 32)
    bound = copy.deepcopy(plain)
    with package.apply(bound) as patch:
        found, expected = steps(bound, x, dy), steps(plain, x, dy)
        patch.verify()
    assert chains.error(found["y"], expected["y"]) < 0.2
    assert found["body.1.num_batches_tracked"] == expected["body.1.num_batches_tracked"]


def test_without_gradients_training_moves_the_running_statistics_and_evaluation_reads_them(planned) -> None:
    body = seeded(sequential())
    package = planned(chains.chain_plan(body, chains.AS_IS, batch))
    plain, x = chains.Holder(body), batch(64)
    bound = copy.deepcopy(plain)
    with package.apply(bound), torch.no_grad():
        for training in (True, False):
            found, wanted = drawn(bound.train(training), x), drawn(plain.train(training), x)
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    for (key, found), wanted in zip(bound.state_dict().items(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6, msg=key)


def test_momentum_and_eps_are_read_in_each_call(planned) -> None:
    body = seeded(sequential())
    package = planned(chains.chain_plan(body, chains.AS_IS, batch))
    plain, x = chains.Holder(body), batch(64)
    bound = copy.deepcopy(plain)
    with package.apply(bound):
        for model in (bound, plain):
            norms(model)[0].momentum, norms(model)[1].eps = 0.5, 0.1
        torch.testing.assert_close(drawn(bound, x), drawn(plain, x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(norms(bound)[0].running_var, norms(plain)[0].running_var)


@pytest.mark.parametrize("recipe", ["as_is", "fp8"])
def test_compiled_as_one_graph_it_is_the_eager_one(planned: PlanPackage, recipe: str) -> None:
    body = seeded(sequential())
    package = planned(chains.chain_plan(body, RECIPES[recipe], batch))
    eager, x = chains.Holder(body), batch(64)
    compiled = copy.deepcopy(eager)
    dy = torch.randn(64, 32)
    with package.apply(eager), package.apply(compiled):
        torch.manual_seed(5)
        expected = chains.gradients(eager, x, dy)
        torch.manual_seed(5)
        found = chains.gradients(torch.compile(compiled, fullgraph=True, backend="aot_eager"), x, dy)
    chains.assert_within(found, expected, 1e-5 if recipe == "as_is" else 1e-2)
    for (key, buffer), wanted in zip(compiled.named_buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(buffer, wanted, msg=key)


def _synchronized(body: nn.Sequential) -> None:
    body[1] = nn.SyncBatchNorm(64)


def _hooked(body: nn.Sequential) -> None:
    body[1].register_forward_hook(lambda module, args, result: None)


def _without_running(body: nn.Sequential) -> None:
    body[1].running_mean = body[1].running_var = None


def _untracked(body: nn.Sequential) -> None:
    body[1].track_running_stats = False


def _hooked_dropout(body: nn.Sequential) -> None:
    body[3].register_forward_hook(lambda module, args, result: None)


@pytest.mark.parametrize("change", [_synchronized, _hooked, _without_running, _untracked, _hooked_dropout])
def test_a_norm_that_changed_since_is_refused(planned: PlanPackage, change) -> None:
    body = sequential()
    package = planned(chains.chain_plan(body, chains.AS_IS, batch))
    model = chains.Holder(body)
    with package.apply(model):
        model(batch(8))
        change(model.body)
        with pytest.raises(InputError, match=r"nn\.BatchNorm1d with running statistics, without hooks, and found"):
            model(batch(8))


def test_a_dropout_of_another_p_is_refused_and_none_in_evaluation(planned: PlanPackage) -> None:
    body = sequential()
    package = planned(chains.chain_plan(body, chains.AS_IS, batch))
    model = chains.Holder(body)
    with package.apply(model):
        body[3].p = 0.2
        with pytest.raises(InputError, match=r"p = 0\.1 was planned, and it is 0\.2 now"):
            model(batch(8))
        assert model.eval()(batch(8)).shape == (8, 32)


def test_a_dropout_wider_than_kernels_take_stays_a_call_between_chains(planned: PlanPackage) -> None:
    wide = 16384 + 16
    body = nn.Sequential(nn.Linear(48, wide), nn.ReLU(), nn.Dropout(0.1), nn.Linear(wide, 32))
    package = planned(chains.chain_plan(body, chains.CHAIN, batch))
    model, x = chains.Holder(copy.deepcopy(body)).eval(), batch(8)
    with package.apply(model) as patch:
        found = model(x)
        model.train()
        trained = drawn(model, x)
        trained.sum().backward()
        patch.verify(backward=False)  # the first linear's input needs no gradient
        assert patch.sites == ("body.0", "body.3")
    assert all(each.grad is not None and torch.isfinite(each.grad).all() for each in model.parameters())
    assert not torch.equal(trained, found)
    expected = chains.Holder(chains.simulated(body)).eval()(x)
    chains.assert_within({"y": found}, {"y": expected}, 2e-2)


def test_rows_that_have_no_statistics_are_refused(planned: PlanPackage) -> None:
    body = sequential()
    package = planned(chains.chain_plan(body, chains.AS_IS, batch))
    model = chains.Holder(body)
    before = int(norms(model)[0].num_batches_tracked)
    with package.apply(model):
        with pytest.raises(InputError, match="needs more than one row"):
            model(batch(1))
        counts = [int(norm.num_batches_tracked) for norm in norms(model)]
        assert counts == [before + 1, before, before]  # as torch does
        with pytest.raises(InputError, match=r"takes rows \(M, 48\)"):
            model(torch.randn(2, 64, 48))
        assert model.eval()(batch(1)).shape == (1, 32)
