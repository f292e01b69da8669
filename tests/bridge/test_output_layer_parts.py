"""The output layer and the losses that stand in its place, in a process of the host: no run."""

from types import SimpleNamespace

import parts
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode


class OutputLayer(torch.nn.Linear):
    """Called as the host calls its output layer."""

    def forward(self, input_, weight=None, runtime_gather_output=None):
        return input_ @ (self.weight if weight is None else weight).T, None


def tap_on(kind, **config):
    """On an output layer of that class, or with that mix-in as the host extends one with it."""
    from megatron.bridge.models.gemma.modules import extend_instance
    from megatron.core.tensor_parallel import ColumnParallelLinear

    from megatron_kd.host.output_layer import OutputLayerTap

    model = torch.nn.Module()
    is_mix_in = "gemma" in kind.__module__
    plain = ColumnParallelLinear if is_mix_in else kind
    layer = model.output_layer = plain.__new__(plain)
    torch.nn.Module.__init__(layer)
    layer.config = SimpleNamespace(**config)
    if is_mix_in:
        extend_instance(layer, kind)
    return OutputLayerTap.install(model)


def capping_mix_ins():
    """Those that this version of the host has."""
    from importlib import import_module

    from megatron_kd.host.output_layer import CAPPING_FORWARDS

    for name, field in CAPPING_FORWARDS.items():
        module, kind, _ = name.rsplit(".", 2)
        try:
            yield getattr(import_module(module), kind), field
        except ModuleNotFoundError:
            continue


def check_an_output_layer_that_does_more_than_its_product_is_known_or_refused(folder):
    from megatron.core.tensor_parallel import ColumnParallelLinear

    class Plain(ColumnParallelLinear):
        pass

    class Doubled(ColumnParallelLinear):
        def forward(self, *args, **kwargs):
            return 2 * super().forward(*args, **kwargs)

    class Gemma2OutputLayer(ColumnParallelLinear):  # of this name, but not the host's
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    assert tap_on(Plain).logit_options() == {"logit_softcap": None}
    for kind in (Doubled, Gemma2OutputLayer):
        with pytest.raises(ValueError, match=f"calls .*{kind.__name__}.forward, which does more"):
            tap_on(kind).logit_options()
    mix_ins = list(capping_mix_ins())
    assert mix_ins[0][0].__name__ == "Gemma2OutputLayer"
    for kind, field in mix_ins:
        assert tap_on(kind, **{field: 30.0}).logit_options() == {"logit_softcap": 30.0}
        for nothing in (None, 0.0):
            assert tap_on(kind, **{field: nothing}).logit_options() == {"logit_softcap": None}


def check_the_hosts_caps_are_what_is_made_of_them(folder):
    """The host's own forward over a product, and the transform that its name stands for."""
    from megatron.core.tensor_parallel import ColumnParallelLinear

    from megatron_kd.losses.logit_transform import LogitTransform

    product = torch.linspace(-40, 40, 81, dtype=torch.float64)
    plain_forward, ColumnParallelLinear.forward = (
        ColumnParallelLinear.forward,
        lambda self, x: (x, None),
    )
    try:
        for kind, field in capping_mix_ins():
            layer = tap_on(kind, **{field: 5.0}).layer
            capped, _ = type(layer).forward(layer, product)
            torch.testing.assert_close(LogitTransform(1.0, 5.0).logits(product), capped)
            assert capped.abs().max() <= 5
    finally:
        ColumnParallelLinear.forward = plain_forward


def check_a_capturing_stage_caps_what_it_projects(folder):
    from megatron_kd.host.megatron_engine.model import _logit_transform, _Stage
    from megatron_kd.teacher.engines.base import EngineError

    mix_in, field = next(capping_mix_ins())
    stage = _Stage.__new__(_Stage)
    stage._tap = SimpleNamespace(weight=torch.randn(7, 3) * 5, bias=None)
    stage._transform = _logit_transform(tap_on(mix_in, **{field: 2.0}))
    hidden = torch.randn(4, 3)
    product = hidden @ stage._tap.weight.T
    assert product.abs().max() > 3
    torch.testing.assert_close(stage._logits(hidden), 2 * torch.tanh(product / 2))
    stage._transform = _logit_transform(tap_on(mix_in, **{field: None}))
    torch.testing.assert_close(stage._logits(hidden), product)
    with pytest.raises(EngineError, match="another engine than megatron"):
        _logit_transform(tap_on(OutputLayer))


def check_a_tap_hands_through_and_knows_the_weight(folder):
    from megatron_kd.host.output_layer import OutputLayerTap, hands_input_through

    layer = OutputLayer(3, 5, bias=False)
    model = torch.nn.Module()
    model.output_layer = layer
    assert OutputLayerTap.of(layer) is None and not hands_input_through(layer)
    tap = OutputLayerTap.install(model)
    assert OutputLayerTap.install(model) is tap and not hands_input_through(layer)
    hooked = []
    layer.register_forward_pre_hook(lambda module, arguments: hooked.append(arguments[0]))
    x, tied = torch.randn(2, 3), torch.randn(5, 3)
    torch.testing.assert_close(layer(x)[0], x @ layer.weight.T)
    assert tap.weight is layer.weight
    tap.hands_input_through = True
    assert hands_input_through(layer)
    assert layer(x, weight=tied)[0] is x and tap.weight is tied
    assert layer(x)[0] is x and tap.weight is layer.weight
    tap.hands_input_through = False
    torch.testing.assert_close(layer(x, weight=tied)[0], x @ tied.T)
    assert len(hooked) == 4


class ToyModel(torch.nn.Module):
    """Calls its output layer and its language-model loss as the host's model does: once for each
    further token, then for the next one.
    """

    def __init__(self, further_tokens=0):
        from megatron_kd.host.output_layer import PLAIN_FORWARDS

        super().__init__()
        self.config = SimpleNamespace(mtp_num_layers=further_tokens or None)
        self.pg_collection = SimpleNamespace(tp=torch.distributed.group.WORLD)
        self.output_layer = OutputLayer(4, 11, bias=False)
        PLAIN_FORWARDS.add(OutputLayer.forward)
        self.output_layer.sequence_parallel = False

    def compute_language_model_loss(self, labels, logits):
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.t().flatten(), reduction="none"
        )
        return loss.view(logits.shape[:2]).t()

    def forward(self, hidden, labels):
        losses = []
        for _ in range((self.config.mtp_num_layers or 0) + 1):
            output, _ = self.output_layer(hidden)
            losses.append(self.compute_language_model_loss(labels, output))
        return losses


def offline_loss(model, impl):
    from megatron_kd.config import HiddenStatesConfig, LossConfig
    from megatron_kd.host.step.hidden_states import LossWeights
    from megatron_kd.host.step.offline import OfflineLoss

    return OfflineLoss(model, LossConfig(impl=impl), 11, LossWeights(HiddenStatesConfig()))


def loss_inputs():
    from megatron_kd.host.step.micro_batch import LossInputs

    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 1.0]])  # [b, s]
    ids = torch.arange(2).expand(2, 3, 2).to(torch.int32)
    logprobs = torch.tensor([0.5, 0.25]).log().expand(2, 3, 2)
    index = mask.t().reshape(-1).nonzero().squeeze(-1)
    return LossInputs(ids, logprobs, None, None, None, mask, index)


def check_the_model_is_the_hosts_outside_a_step(folder):
    from megatron_kd.host.step.distillation_loss import DistillationLoss

    hidden, labels = torch.randn(3, 2, 4), torch.randint(11, (2, 3))
    for impl in ("dense", "sparse_chunked", "fused_chunked"):
        model = ToyModel()
        (before,) = model(hidden, labels)
        loss = offline_loss(model, impl)
        assert DistillationLoss.of(model) is loss
        torch.testing.assert_close(model(hidden, labels)[0], before)
        loss.begin(loss_inputs())
        assert not torch.allclose(model(hidden, labels)[0], before)
        assert set(loss.end()) == {"kd loss", "lm loss", "student mass", "teacher mass"}
        torch.testing.assert_close(model(hidden, labels)[0], before)
        assert loss.end() == {}


def check_further_tokens_keep_cross_entropy(folder):
    hidden, labels = torch.randn(3, 2, 4), torch.randint(11, (2, 3))
    for impl in ("dense", "fused_chunked"):
        model = ToyModel(further_tokens=2)
        expected = model(hidden, labels)[0]
        loss = offline_loss(model, impl)
        for _ in range(2):  # the count starts anew with each micro-batch
            loss.begin(loss_inputs())
            first, second, next_token = model(hidden, labels)
            report = loss.end()
            torch.testing.assert_close(first, expected)
            torch.testing.assert_close(second, expected)
            mask = loss_inputs().loss_mask
            torch.testing.assert_close(next_token * mask, report["kd loss"] * mask)
            assert not torch.allclose(next_token, expected)


class ToyPair(ToyModel):
    """As ModelOpt's distillation model: the teacher inside, both outputs captured."""

    def __init__(self):
        super().__init__()
        self.teacher_model = ToyModel().requires_grad_(False)

    def compute_kd_loss(self, skip_balancer, loss):
        return {"output layers": loss.between_outputs(self.output, self.teacher_output)}

    def forward(self, hidden, labels):
        self.teacher_output, _ = self.teacher_model.output_layer(hidden.detach())
        self.output, _ = self.output_layer(hidden)
        return self.compute_language_model_loss(labels, self.output)


class MatrixProducts(TorchDispatchMode):
    """Counts the matrix products that run inside, forward and backward."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        aten = torch.ops.aten
        self.count += function.overloadpacket in (aten.mm, aten.addmm, aten.addmm_)
        return function(*args, **(kwargs or {}))


def check_online_takes_as_few_products_as_its_gradient_mode_needs(folder):
    """Left to itself the student's three and one of the teacher; recomputing one more of each."""
    from megatron_kd.config import HiddenStatesConfig, LossConfig
    from megatron_kd.host.online.criteria import OnlineLoss
    from megatron_kd.host.step.hidden_states import LossWeights

    hidden, labels = torch.randn(3, 2, 4), torch.randint(11, (2, 3))
    weights, gradients = ToyPair().state_dict(), {}
    for mode, products in (("auto", 4), ("in_forward", 4), ("recompute", 6)):
        fresh = ToyPair()
        fresh.load_state_dict(weights)
        config = LossConfig(impl="fused_online", gradient=mode)
        loss = OnlineLoss(fresh, config, 11, LossWeights(HiddenStatesConfig()))
        x = hidden.clone().requires_grad_()
        loss.begin(loss_inputs())
        with MatrixProducts() as seen:
            (fresh(x, labels) * loss_inputs().loss_mask).sum().backward()
        assert set(loss.end()) == {"kd loss", "lm loss"}
        assert seen.count == products, mode
        gradients[mode] = x.grad, fresh.output_layer.weight.grad
    assert gradients["recompute"][1].abs().max() > 0
    for mode in ("auto", "in_forward"):
        torch.testing.assert_close(gradients[mode], gradients["recompute"])


CHECKS = parts.names_of(globals())


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return parts.results_of(__name__, tmp_path_factory.mktemp("parts"))


@pytest.mark.parametrize("name", CHECKS)
def test_part(results, name):
    assert results[name] is None, results[name]
