"""Parameters that a Hugging Face directory does not hold are refused, not left to chance."""

import pytest
import torch

from megatron_kd.host.parameters import complete as weights_complete


class Provider:
    """The host's list of hooks."""

    def __init__(self, load):
        self.hooks = [load]

    def register_pre_wrap_hook(self, hook, prepend=False):
        self.hooks.insert(0 if prepend else len(self.hooks), hook)

    def build(self, model):
        for hook in self.hooks:
            model = hook(model)
        return model


def build(loaded: set[str]):
    def load(model):
        with torch.no_grad():
            for name, parameter in model[0].named_parameters():
                if name in loaded:
                    parameter.fill_(0.5)
        return model

    provider = Provider(load)
    weights_complete.check_loading(provider, "/models/student")
    return provider.build([torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))])


ALL = {"0.weight", "0.bias", "1.weight", "1.bias"}


def test_a_complete_directory_is_loaded():
    (model,) = build(ALL)
    assert all((parameter == 0.5).all() for parameter in model.parameters())


def test_missing_parameters_are_named_with_the_remedy():
    with pytest.raises(weights_complete.MissingWeightsError) as refusal:
        build(ALL - {"1.weight", "0.bias"})
    for part in ("/models/student", "0.bias, 1.weight", "mtp_num_layers=null", "load_weights"):
        assert part in str(refusal.value)


def test_a_parameter_that_is_filled_in_part_is_missing():
    """Rows of a vocabulary that the directory does not have, for one."""

    def load(model):
        with torch.no_grad():
            model[0].weight[:2] = 0.5
        return model

    provider = Provider(load)
    weights_complete.check_loading(provider, "/models/student")
    with pytest.raises(weights_complete.MissingWeightsError, match="weights for weight,"):
        provider.build([torch.nn.Linear(2, 3, bias=False)])


def test_a_teacher_within_the_model_is_left_to_its_own_check():
    model = torch.nn.Module()
    model._teacher_model = torch.nn.Linear(2, 3)
    torch.nn.init.constant_(model._teacher_model.weight, torch.nan)
    before = model._teacher_model.bias.detach().clone()
    provider = Provider(lambda model: model)
    weights_complete.check_loading(provider, "/models/student")
    provider.build([model])  # not refused: its weights come later
    assert (model._teacher_model.bias == before).all()  # and not overwritten
