"""The parts of a step and its callbacks one by one, in a process of the host without a run."""

import json
import math
import time
from pathlib import Path
from types import SimpleNamespace

import parts
import pytest
import torch


def context(step=0, train_iters=10, losses=None):
    """What the host hands to a callback, as far as ours look."""
    state = SimpleNamespace(
        train_state=SimpleNamespace(step=step),
        cfg=SimpleNamespace(train=SimpleNamespace(train_iters=train_iters)),
    )
    values = {name: torch.tensor(value) for name, value in (losses or {}).items()}
    return SimpleNamespace(state=state, loss_dict=values, total_loss_dict=values)


def write_metrics(folder: Path, kind: str, losses: dict[int, dict]) -> None:
    lines = [{"kind": kind, "iteration": i, "losses": found} for i, found in losses.items()]
    with open(folder / "metrics.jsonl", "a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))


def check_only_a_clear_improvement_is_a_new_best(folder):
    from megatron_kd.host.callbacks.best_checkpoint import best_of

    history = {10: 2.0, 20: 1.99, 30: 1.5, 40: 1.45, 50: 1.6}
    assert best_of(history, 0.0) == 40
    assert best_of(history, 0.1) == 30
    assert best_of(history, 1.0) == 10


def check_a_resumed_run_selects_as_an_unbroken_one(folder):
    from megatron_kd.config import SelectionConfig
    from megatron_kd.host.callbacks.best_checkpoint import SelectBest

    losses = {0: 0.5, 1: 3.0, 2: 2.0, 3: 2.5, 4: 2.6, 5: 1.0}
    for step, stops in ((3, False), (4, True)):  # what lies beyond the step is repeated
        own = folder / str(step)
        own.mkdir()
        write_metrics(own, "validation", {i: {"kd loss": value} for i, value in losses.items()})
        select = SelectBest(SelectionConfig(keep_best=True, patience=2), own)
        resumed = context(step)
        select.on_train_start(resumed)
        assert select.history == {i: losses[i] for i in range(1, step + 1)}
        assert (resumed.state.cfg.train.train_iters == step) == stops


def check_the_best_is_written_and_patience_ends_the_run(folder):
    from megatron_kd.config import SelectionConfig
    from megatron_kd.host.callbacks.best_checkpoint import SelectBest
    from megatron_kd.host.export import BEST_FILE

    select = SelectBest(SelectionConfig(keep_best=True, patience=2), folder)
    stopped = []
    for step, value in ((0, 0.1), (1, 3.0), (2, 2.0), (3, 2.5), (4, 2.4)):
        now = context(step, losses={"kd loss": value, "total loss": -value})
        select.on_eval_end(now)
        stopped.append(now.state.cfg.train.train_iters == step)
    assert json.loads((folder / BEST_FILE).read_text()) == {"iteration": 2, "kd loss": 2.0}
    assert stopped == [False, False, False, False, True]


def check_a_resumed_run_drops_what_it_repeats(folder):
    from megatron_kd.host.callbacks.metrics import keep_until
    from megatron_kd.metrics_file import read_metrics

    write_metrics(folder, "train", {i: {} for i in range(5)})
    keep_until(folder / "metrics.jsonl", 3)
    assert [record["iteration"] for record in read_metrics(folder)] == [0, 1, 2, 3]
    keep_until(folder / "metrics.jsonl", 0)
    assert read_metrics(folder) == []


def check_the_balance_uses_the_divergence_and_its_magnitude(folder):
    from megatron_kd.config import HiddenStatesConfig
    from megatron_kd.host.callbacks.balance import BalanceWeights
    from megatron_kd.host.step.hidden_states import LossWeights

    pairs = [["final_norm", "final_norm"]]
    weights = LossWeights(HiddenStatesConfig(pairs=pairs, balance=True, weight=0.5))
    balance = BalanceWeights(weights, folder)
    losses = {"kd loss": -3.0, "hidden loss": 2.0, "total loss": 7.0}
    balance.on_train_step_end(context(losses=losses))
    assert weights.hidden == 0.75
    balance.on_train_step_end(context(losses=losses | {"hidden loss": 0.0}))
    assert weights.hidden == 0.75  # nothing to balance
    balance.on_train_step_end(context())  # a stage without losses
    assert weights.hidden == 0.75
    write_metrics(folder, "train", {1: losses, 2: losses | {"kd loss": 1.0}, 3: losses})
    balance.on_train_start(context(2))
    assert weights.hidden == 0.25
    with pytest.raises(ValueError, match="no iteration 4"):
        balance.on_train_start(context(4))


def check_losses_are_mixed_by_their_weights(folder):
    from megatron_kd.config import HiddenStatesConfig
    from megatron_kd.host.step.hidden_states import LossWeights

    logits, hidden = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [-1.0]])
    plain = LossWeights(HiddenStatesConfig())
    assert plain.mix(logits, None) is logits
    pairs = [["final_norm", "final_norm"]]
    mixed = LossWeights(HiddenStatesConfig(pairs=pairs, weight=0.5, logits_weight=3.0))
    assert mixed.mix(logits, hidden).tolist() == [[4.5], [5.5]]
    assert mixed.mix(logits, None).tolist() == [[3.0], [6.0]]


def check_sums_are_over_supervised_tokens(folder):
    from megatron_kd.host.step.forward_step import sum_over_tokens

    losses = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])
    mask = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    seen = []
    total, tokens, report = sum_over_tokens(
        losses, loss_mask=mask, report={"a": 10 * losses}, check=seen.append
    )
    assert (total.item(), tokens.item(), tokens.dtype) == (37.0, 3, torch.int32)
    assert report["a"].tolist() == [370.0, 3.0] and seen == [total]
    total, tokens, report = sum_over_tokens(losses, loss_mask=0 * mask, report={"a": losses})
    assert (total.item(), tokens.item()) == (0.0, 0)
    assert (report["a"][0] / report["a"][1]).item() == 0.0  # as the host divides


def check_sums_of_a_source_are_over_its_own_tokens(folder):
    from megatron_kd.host.step.forward_step import sum_over_tokens

    losses = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])
    mask = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    source = torch.tensor([[3], [0]])
    chosen = {name: source == number for name, number in (("a", 3), ("b", 0), ("c", 1))}
    _, _, report = sum_over_tokens(
        losses, loss_mask=mask, report={"kd loss": losses}, by_source=chosen
    )
    assert report["a"].tolist() == [5.0, 2.0] and report["b"].tolist() == [32.0, 1.0]
    assert (report["c"][0] / report["c"][1]).isnan()  # as the host divides


def check_rows_are_numbered_with_the_sequence_outermost(folder):
    from megatron_kd.host.step.micro_batch import supervised_index

    mask = torch.tensor([[1, 0, 1], [0, 1, 1]])  # [b, s]
    assert supervised_index(mask).tolist() == [0, 3, 4, 5]  # position · 2 + sample


class PinnedMemory:
    """A stand-in for pinned memory: which storages are pinned, and that nothing else is copied."""

    def __init__(self, patch):
        self.storages, self.copied = {}, 0
        patch.setattr(torch.Tensor, "is_pinned", lambda tensor: self.is_pinned(tensor))
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor: self.pin(tensor))
        patch.setattr(torch.Tensor, "cuda", lambda tensor, **how: self.copy(tensor, **how))

    def is_pinned(self, tensor):
        return tensor.untyped_storage().data_ptr() in self.storages

    def pin(self, tensor):
        tensor = tensor.clone()
        self.storages[tensor.untyped_storage().data_ptr()] = tensor  # kept: the address stays its
        return tensor

    def copy(self, tensor, *, non_blocking):
        assert non_blocking and self.is_pinned(tensor), tuple(tensor.shape)
        self.copied += 1
        return tensor.clone()


def check_a_step_copies_from_pinned_memory_alone(folder):
    """Whole samples as the loader pins them, and a context-parallel rank's parts of them."""
    from megatron_kd.host.cpu import backend
    from megatron_kd.host.step.micro_batch import TEACHER_KEYS, DataWait, load

    class Part:
        def __init__(self, ranks):
            self.rank, self.size = lambda: ranks - 1, lambda: ranks

    def sample():
        made = {key: torch.arange(8)[None] for key in ("tokens", "position_ids", "labels")}
        made |= {key: torch.randn(1, 8, 3) for key in TEACHER_KEYS if key != "log_z_tau"}
        made["loss_mask"] = torch.tensor([[1.0, 1, 0, 1, 1, 0, 1, 1]])
        made["cu_seqlens"] = torch.tensor([[0, 4, 8]], dtype=torch.int32)
        return made | {"sample_index": torch.tensor([[5]])}

    for ranks, apart, positions in ((1, False, range(8)), (2, False, range(2, 6)), (2, True, None)):
        model = torch.nn.Module()
        model.config = SimpleNamespace(mtp_num_layers=None)
        model.pg_collection = SimpleNamespace(pp=Part(1), cp=Part(ranks))
        with pytest.MonkeyPatch.context() as patch:
            memory = PinnedMemory(patch)
            patch.setattr(backend, "is_active", lambda: False)
            for name, method in (("get_rank", "rank"), ("get_world_size", "size")):
                patch.setattr(torch.distributed, name, lambda part, m=method: getattr(part, m)())
            loaded = {key: memory.pin(value) for key, value in sample().items()}
            batch = load(iter([loaded]), model, DataWait(), documents_apart=apart)
        assert memory.copied == 8 + apart  # seven tensors, the supervised rows, the bounds
        kept = list(positions or (1, 2, 5, 6))
        assert batch.model_arguments["labels"].tolist() == [kept]
        rows = [row for row, place in enumerate(kept) if place not in (2, 5)]
        assert batch.loss_inputs.supervised_index.tolist() == rows


def check_the_samples_of_a_loss_that_is_not_finite_are_named(folder):
    from megatron_kd.host.step.finite_loss import FILE_NAME, NonFiniteLoss, check_finite

    samples = torch.tensor([[7], [3]])
    check_finite(torch.tensor(1.0), samples, folder)
    assert not (folder / FILE_NAME).exists()
    for value in (math.nan, math.inf, -math.inf):
        with pytest.raises(NonFiniteLoss, match=r"samples are \[7, 3\]"):
            check_finite(torch.tensor(value), samples, folder)
    records = [json.loads(line) for line in (folder / FILE_NAME).read_text().splitlines()]
    assert [record["samples"] for record in records] == [[7, 3]] * 3


def check_waiting_is_counted_once(folder):
    from megatron_kd.host.step.micro_batch import DataWait

    def slow():
        for item in range(3):
            time.sleep(0.05)
            yield item

    wait, items = DataWait(), slow()
    assert [wait.next(items), wait.next(items)] == [0, 1]
    assert wait.take() >= 0.1
    assert wait.take() == 0.0
    assert wait.next(items) == 2 and wait.take() >= 0.05


def check_a_teacher_is_the_one_in_its_directory(folder):
    from safetensors.torch import save_file

    from megatron_kd.host.online.teacher_check import WrongTeacherError, weights_are_loaded

    embedding, norm = torch.randn(40, 8), torch.randn(8)
    stored = {"model.embed_tokens.weight": embedding, "model.norm.weight": norm}
    save_file(stored, folder / "model.safetensors")

    def chunk(rows, final_norm):
        words = SimpleNamespace(weight=rows, vocab_start_index=20)
        return SimpleNamespace(
            pre_process=True,
            post_process=True,
            embedding=SimpleNamespace(word_embeddings=words),
            decoder=SimpleNamespace(final_layernorm=SimpleNamespace(weight=final_norm)),
        )

    weights_are_loaded([chunk(embedding[20:], norm)], hf_path=str(folder))
    for wrong in (chunk(embedding[:20], norm), chunk(embedding[20:], norm + 1)):
        with pytest.raises(WrongTeacherError, match="were not loaded"):
            weights_are_loaded([wrong], hf_path=str(folder))
    save_file({"other": norm}, folder / "model.safetensors")
    with pytest.raises(WrongTeacherError, match="cannot be checked"):
        weights_are_loaded([chunk(embedding[20:], norm)], hf_path=str(folder))


def check_a_teacher_keeps_its_shape_and_is_frozen(folder):
    from megatron_kd.host.online.teacher_check import (
        WrongTeacherError,
        has_shape,
        is_frozen,
        shape_of,
    )

    provider = SimpleNamespace(num_layers=4, hidden_size=64)
    expected = shape_of(provider)
    has_shape([], provider=provider, expected=expected)
    provider.hidden_size = 32
    with pytest.raises(WrongTeacherError, match=r"'hidden_size': \(64, 32\)"):
        has_shape([], provider=provider, expected=expected)
    teacher = torch.nn.Linear(2, 2)
    with pytest.raises(WrongTeacherError, match="2 parameters of the teacher are not frozen"):
        is_frozen(teacher)
    is_frozen(teacher.requires_grad_(False))


def check_layers_to_compare_exist(folder):
    from megatron_kd.config import HiddenStatesConfig
    from megatron_kd.host.checks.online import _check_layers as check_layers
    from megatron_kd.typed_mapping import ConfigError

    student = SimpleNamespace(num_layers=2, recompute_granularity=None)
    teacher = SimpleNamespace(num_layers=4, recompute_granularity=None)
    for pair in ([-2, 3], [1, -4], ["final_norm", "final_norm"]):
        check_layers(HiddenStatesConfig(pairs=[pair]), student, teacher)
    for pair, whose in (([2, 3], "student"), ([-3, 3], "student"), ([1, 4], "teacher")):
        with pytest.raises(ConfigError, match=f"of the {whose}"):
            check_layers(HiddenStatesConfig(pairs=[pair]), student, teacher)
    student.recompute_granularity = "full"
    check_layers(HiddenStatesConfig(pairs=[["final_norm", 3]]), student, teacher)
    with pytest.raises(ConfigError, match="recompute_granularity"):
        check_layers(HiddenStatesConfig(pairs=[[1, 3]]), student, teacher)


CHECKS = parts.names_of(globals())


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return parts.results_of(__name__, tmp_path_factory.mktemp("parts"))


@pytest.mark.parametrize("name", CHECKS)
def test_part(results, name):
    assert results[name] is None, results[name]
