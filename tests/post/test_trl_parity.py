"""The losses are TRL's, and so are their gradients, on shared logits, masks, advantages and reference probabilities.

TRL's losses are methods of its trainers. They run here on a stand-in with the attributes that they read.
"""

import collections
import contextlib
import os
import types

import jax
import numpy as np
import pytest

from jaxgpt.batch import Batch
from tests.helpers import import_pages

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # a warning would be an error here
torch = pytest.importorskip("torch")
trl = pytest.importorskip("trl", reason="TRL is installed with the oldest Python only")
from trl.experimental.gkd import GKDTrainer  # noqa: E402
from trl.experimental.server_distillation import server_distillation_trainer as sparse  # noqa: E402
from trl.trainer.utils import nanstd, selective_log_softmax_and_entropy  # noqa: E402

distillation, dpo, grpo = import_pages("post", "distillation", "dpo", "grpo")
SAME = 1e-5  # relative: sums of float32 in another order
V, PROMPT, SIZES = 11, 3, (5, 2, 4, 1)  # tokens of each completion
N, C = len(SIZES), max(SIZES)
L = PROMPT + C
BETA, LOW, HIGH, MOST = 0.3, 0.2, 0.28, 7

rng = np.random.default_rng(0)
TOKENS = rng.integers(0, V, (N, L))
LOGITS = rng.normal(size=(N, L - 1, V)).astype(np.float32)
OF_COMPLETION = np.arange(L) < PROMPT + np.array(SIZES)[:, None]
MASK = OF_COMPLETION & (np.arange(L) >= PROMPT)
OLD, REFERENCE = (
    np.take_along_axis(np.asarray(jax.nn.log_softmax(LOGITS)), TOKENS[:, 1:, None], axis=-1)[..., 0]
    + rng.normal(size=(N, L - 1)).astype(np.float32) * scale
    for scale in (0.4, 0.7)
)
ADVANTAGES = np.array([1.3, -0.7, 0.4, -1.0], np.float32)


class Model:
    """Return the shared logits' outputs, by TRL's function for them."""

    training = True

    def __init__(self):
        self.logits = torch.tensor(LOGITS, requires_grad=True)

    def __call__(self, *, labels, **_):
        counted, zeros = labels[:, 1:] != -100, torch.zeros(N, L - 1)
        found = selective_log_softmax_and_entropy(self.logits, labels[:, 1:].clamp(min=0), row_mask=counted)
        outputs = dict(zip(("log_probs", "entropy"), found, strict=True))
        return types.SimpleNamespace(**outputs, mean_logits=zeros, is_top1=zeros.bool(), log_sum_sq_probs=zeros)


def stand_in(model, **fields):
    same = lambda x, **_: x  # noqa: E731
    accelerator = types.SimpleNamespace(
        device="cpu",
        is_main_process=True,
        num_processes=1,
        gather=same,
        gather_for_metrics=same,
        reduce=same,
        autocast=contextlib.nullcontext,
    )
    metrics = collections.defaultdict(lambda: collections.defaultdict(list))
    return types.SimpleNamespace(
        accelerator=accelerator, model=model, aux_loss_enabled=False, _metrics=metrics, beta=BETA, **fields
    )


def packed(order, **extras):
    """Rows of two texts each, `order` [rows, 2], with arrays [N, L - 1] as extras, and noise where nothing counts."""

    def pair(x):
        return x[order].reshape(len(order), -1, *x.shape[2:])

    segments = np.where(OF_COMPLETION[:, 1:], 1, 0)
    segments_BT = pair(segments) * np.repeat([1, 2], L - 1)[None]
    mask_BT = pair(MASK[:, 1:])
    extras = {name: np.where(mask_BT, pair(x), 1e3).astype(np.float32) for name, x in extras.items()}
    batch = Batch(pair(TOKENS[:, :-1]), pair(TOKENS[:, 1:]), mask_BT, segments_BT.astype(np.int32), extras)
    return pair(LOGITS), batch


def compare(config, logits_BTV, batch, order, theirs, model):
    """Hold a mean and its gradient equal to TRL's."""

    def mean(logits_BTV):
        total, count, _ = config.sum_loss(logits_BTV, batch)
        return total / count

    loss, gradient = jax.jit(jax.value_and_grad(mean))(logits_BTV)
    theirs.backward()
    assert float(loss) == pytest.approx(theirs.item(), rel=SAME)
    expected = model.logits.grad.numpy()[order].reshape(gradient.shape)
    assert np.abs(expected).max() > 1e-3
    np.testing.assert_allclose(gradient, expected, rtol=SAME, atol=SAME * np.abs(expected).max())


DPO = {
    "sigmoid": {},
    "sigmoid_norm": {"normalise_length": True},
    "ipo": {"loss": "ipo", "normalise_length": True},
    "aot": {"label_smoothing": 0.1},  # of one pair, which there is nothing to sort: the smoothed sigmoid
}


@pytest.mark.parametrize("name", DPO)
def test_dpo(name):
    pairs = 1 if name == "aot" else 2
    order = np.array([[0, 2], [1, 3]])[:pairs]
    model, kept = Model(), order.T.ravel()
    tokens, mask = torch.tensor(TOKENS[kept]), torch.tensor(MASK[kept]).long()
    sums = torch.tensor((REFERENCE * MASK[:, 1:]).sum(axis=1)[kept]).chunk(2)
    inputs = {"input_ids": tokens, "attention_mask": torch.tensor(OF_COMPLETION[kept]).long(), "completion_mask": mask}
    inputs |= {"ref_chosen_logps": sums[0], "ref_rejected_logps": sums[1]}
    trainer = stand_in(
        model, ld_alpha=None, precompute_ref_logps=True, f_divergence_type="reverse_kl", loss_types=[name]
    )
    trainer.loss_weights, trainer.label_smoothing, trainer.use_weighting = [1.0], 0.1, False
    trainer._total_train_tokens, trainer._tp_size = 0, 1

    def forward(*, labels, **more):
        whole = torch.full((N, L), -100)
        whole[kept] = labels
        return types.SimpleNamespace(**{name: x[kept] for name, x in vars(model(labels=whole)).items()})

    forward.training = True
    theirs = trl.DPOTrainer._compute_loss(trainer, forward, inputs, False)
    logits_BTV, batch = packed(order, reference_logprobs_BT=REFERENCE)
    compare(dpo.DPOConfig(beta=BETA, **DPO[name]), logits_BTV, batch, order, theirs, model)


@pytest.mark.parametrize("beta", [0.0, BETA])
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo", "dr_grpo"])
def test_grpo(loss_type, beta):
    model, order = Model(), np.arange(N).reshape(2, 2)
    inputs = {
        "prompt_ids": torch.tensor(TOKENS[:, :PROMPT]),
        "prompt_mask": torch.ones(N, PROMPT, dtype=torch.long),
        "completion_ids": torch.tensor(TOKENS[:, PROMPT:]),
        "completion_mask": torch.tensor(MASK[:, PROMPT:]).long(),
        "advantages": torch.tensor(ADVANTAGES),
        "old_per_token_logps": torch.tensor(OLD[:, PROMPT - 1 :]),
        "ref_per_token_logps": torch.tensor(REFERENCE[:, PROMPT - 1 :]),
        "num_items_in_batch": torch.tensor(float(MASK.sum())),
    }
    trainer = stand_in(model, top_entropy_quantile=1.0, off_policy_mask_threshold=None, loss_type=loss_type)
    vars(trainer).update(
        importance_sampling_level="token", epsilon_low=LOW, epsilon_high=HIGH, use_vllm=False, beta=beta
    )
    vars(trainer).update(
        current_gradient_accumulation_steps=1, max_completion_length=MOST, _entropy_bonus_enabled=False
    )
    trainer.args = types.SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1)
    find = trl.GRPOTrainer._get_per_token_logps_and_entropies
    trainer._get_per_token_logps_and_entropies = types.MethodType(find, trainer)
    theirs = trl.GRPOTrainer._compute_loss(trainer, model, inputs)
    normalise = {"grpo": "sequence", "dr_grpo": "constant"}.get(loss_type, "token")
    config = grpo.GRPOConfig(clip_low=LOW, clip_high=HIGH, kl=beta, normalise=normalise, max_tokens=MOST)
    above = np.repeat(ADVANTAGES[:, None], L - 1, axis=1)
    logits_BTV, batch = packed(order, advantages_BT=above, old_logprobs_BT=OLD, reference_logprobs_BT=REFERENCE)
    compare(config, logits_BTV, batch, order, theirs, model)
    if normalise == "token":
        _, count, metrics = config.sum_loss(logits_BTV, batch)
        ours = {name: float(x / count) for name, x in metrics.items()}
        logged = {name: x[0] for name, x in trainer._metrics["train"].items()}
        assert 0 < ours["clipped"] == pytest.approx(logged["clip_ratio/region_mean"])
        assert ours["entropy"] == pytest.approx(logged["entropy"], rel=SAME)
        assert not beta or ours["kl"] == pytest.approx(logged["kl"], rel=SAME)


@pytest.mark.parametrize("scale", [False, True])
def test_advantages(scale):
    rewards = torch.tensor(rng.normal(size=(3, 4)))
    above = rewards - rewards.mean(dim=1, keepdim=True)
    theirs = above / (nanstd(rewards, dim=1, keepdim=True) + 1e-4) if scale else above
    np.testing.assert_allclose(grpo.advantages(rewards.numpy(), scale), theirs, rtol=SAME)


@pytest.mark.parametrize("top_k", [None, 4])
@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_distillation(direction, top_k):
    temperature, beta = 1.7, float(direction == "reverse")
    teacher = 2 * rng.normal(size=LOGITS.shape).astype(np.float32)
    config = distillation.DistillationConfig(direction=direction, temperature=temperature, top_k=top_k)
    student, mask_BT = torch.tensor(LOGITS, requires_grad=True), MASK[:, 1:]
    if top_k is None:
        labels = torch.tensor(np.where(mask_BT, TOKENS[:, 1:], -100))
        loss = GKDTrainer.generalized_jsd_loss(
            student, torch.tensor(teacher), labels, beta=beta, temperature=temperature
        )
    else:
        both = [torch.log_softmax(x / temperature, dim=-1) for x in (student, torch.tensor(teacher))]
        kept = torch.tensor(teacher).topk(top_k).indices
        valid = torch.ones(kept.shape, dtype=torch.bool)
        (ours, is_valid), (theirs, _) = (sparse._add_tail_bucket(x.gather(-1, kept), valid) for x in both)
        loss = sparse._jsd_divergence(ours, theirs, beta, is_valid).sum(dim=-1)[torch.tensor(mask_BT)].mean()

    def mean(logits_BTV):
        return config.compare(teacher, logits_BTV).mean(where=mask_BT)

    found, gradient = jax.jit(jax.value_and_grad(mean))(LOGITS)
    loss.backward()
    assert float(found) == pytest.approx(loss.item(), rel=SAME)
    np.testing.assert_allclose(gradient, student.grad, rtol=SAME, atol=SAME * float(student.grad.abs().max()))
