"""The catalogue: every rule, listed by hand, and what each cause means.

A rule file under ``osler/rules/`` that is not imported here does not exist; a test compares the two.
"""

from __future__ import annotations

import difflib
import re

from osler.core.errors import UsageError
from osler.core.rule import Rule
from osler.diagnose.meanings import BY_GROUP, GROUP, MEANINGS
from osler.rules.data import (
    class_imbalance_metric,
    corrupt_sample_spike,
    drop_last_data_loss,
    group_leak,
    label_misaligned,
    label_noise,
    no_shuffle_sorted,
    preprocessing_leak,
    target_leak_feature,
    temporal_leak,
    train_val_overlap,
)
from osler.rules.distributed import (
    ddp_no_sampler,
    ddp_params_unsynced,
    ddp_set_epoch_missing,
    ddp_unused_parameters,
)
from osler.rules.evaluation import (
    early_stop_misconfigured,
    eval_mode_missing,
    loss_stairs,
    metric_unequal_batches,
    overfit,
    snapshot_aliased,
    splits_apart,
    train_mode_not_restored,
    val_augmented,
    val_preprocessing_mismatch,
)
from osler.rules.memory import (
    loss_graph_retained,
    no_grad_missing,
    python_memory_leak,
)
from osler.rules.numerics import (
    division_by_zero,
    infeasible_target,
    log_of_zero,
    loss_nan,
    nonfinite_input,
    singular_gradient,
)
from osler.rules.optimization import (
    class_weighting,
    grad_clip_misuse,
    loss_cliff,
    loss_crawl,
    loss_diverged,
    loss_jitter,
    loss_plateau,
    loss_sawtooth,
    loss_scale,
    loss_sign,
    loss_spikes,
    lr_schedule,
    lr_too_high,
    lr_too_low,
    optimizer_hyperparams,
    sample_weights_unnormalised,
)
from osler.rules.precision import (
    amp_scaler_not_updated,
    amp_unscale_missing,
    fp16_overflow,
    fp16_underflow,
    low_precision_updates_lost,
)
from osler.rules.reproducibility import (
    checkpoint_rng_mismatch,
    nondeterminism,
    resume_state_missing,
    worker_seed_duplicate,
)
from osler.rules.signal import (
    bad_init,
    dead_units,
    embedding_collapse,
    exploding_gradients,
    gradient_collapse,
    half_frozen,
    high_initial_loss,
    input_scale,
    logit_growth,
    output_range,
    posterior_collapse,
    target_scale,
    vanishing_gradients,
)
from osler.rules.throughput import (
    no_workers,
    per_step_sync,
    slow_dataset,
)
from osler.rules.wiring import (
    attention_mask,
    batchnorm_misuse,
    double_activation,
    dropout_misuse,
    freeze_without_effect,
    frozen_params,
    grad_cleared_before_step,
    grad_not_cleared,
    graph_broken,
    hidden_state_not_detached,
    inplace_mutation,
    label_mask,
    loss_expects_log_probs,
    loss_head_mismatch,
    optimizer_wrong_params,
    shadow_weights_stale,
    shape_broadcast,
    step_missing_or_rare,
    tied_weights_broken,
    unregistered_params,
    unused_module,
    weights_not_loaded,
    wrong_dim,
)

RULES: tuple[Rule, ...] = (
    # wiring
    attention_mask.check, batchnorm_misuse.check, double_activation.check, dropout_misuse.check, freeze_without_effect.check,
    frozen_params.check, grad_cleared_before_step.check, grad_not_cleared.check, graph_broken.check,
    hidden_state_not_detached.check, inplace_mutation.check, label_mask.check, loss_expects_log_probs.check,
    loss_head_mismatch.check, optimizer_wrong_params.check, shadow_weights_stale.check, shape_broadcast.check,
    step_missing_or_rare.check, tied_weights_broken.check, unregistered_params.check, unused_module.check,
    weights_not_loaded.check, wrong_dim.check,
    # numerics
    division_by_zero.check, infeasible_target.check, log_of_zero.check, loss_nan.check, nonfinite_input.check,
    singular_gradient.check,
    # data
    class_imbalance_metric.check, corrupt_sample_spike.check, drop_last_data_loss.check, group_leak.check, label_misaligned.check, label_noise.check, no_shuffle_sorted.check,
    preprocessing_leak.check, target_leak_feature.check, temporal_leak.check, train_val_overlap.check,
    # evaluation
    early_stop_misconfigured.check, eval_mode_missing.check, metric_unequal_batches.check, snapshot_aliased.check,
    train_mode_not_restored.check, val_augmented.check, val_preprocessing_mismatch.check,
    # distributed
    ddp_no_sampler.check, ddp_params_unsynced.check, ddp_set_epoch_missing.check, ddp_unused_parameters.check,
    # optimization
    class_weighting.check,
    loss_diverged.check, loss_plateau.check, loss_scale.check, loss_sign.check, grad_clip_misuse.check, lr_schedule.check, optimizer_hyperparams.check, lr_too_high.check, lr_too_low.check, sample_weights_unnormalised.check,
    # shapes of curves
    gradient_collapse.check, splits_apart.check, loss_cliff.check, loss_crawl.check, loss_jitter.check, loss_sawtooth.check, loss_spikes.check, loss_stairs.check, overfit.check,
    # signal
    bad_init.check, dead_units.check, embedding_collapse.check, exploding_gradients.check, half_frozen.check,
    high_initial_loss.check, input_scale.check, logit_growth.check, output_range.check, posterior_collapse.check, target_scale.check, vanishing_gradients.check,
    # precision
    amp_scaler_not_updated.check, amp_unscale_missing.check, fp16_overflow.check, fp16_underflow.check,
    low_precision_updates_lost.check,
    # reproducibility
    checkpoint_rng_mismatch.check, nondeterminism.check, resume_state_missing.check, worker_seed_duplicate.check,
    # memory and throughput
    loss_graph_retained.check, no_grad_missing.check, python_memory_leak.check, no_workers.check, per_step_sync.check, slow_dataset.check,
)


SECTIONS = ("What it is", "How it is seen", "Why it matters", "What to do", "When this is wrong", "Source")
HEAD = re.compile(rf"\n*^(?:\*\*)?({'|'.join(SECTIONS)})[.:](?:\*\*)?\s+([a-z]+[ ,])?", re.MULTILINE)


def rule_for(cause: str) -> Rule | None:
    return next((r for r in RULES if r.cause == cause), None)


def known() -> frozenset[str]:
    """Every id that a finding may carry: the vocabulary and whatever the rules add."""
    return frozenset(MEANINGS) | {r.cause for r in RULES}


def groups() -> frozenset[str]:
    return frozenset(BY_GROUP) | {r.group for r in RULES}


def groups_of(cause: str) -> frozenset[str]:
    """A symptom is in the group of that name and in the one of its rule."""
    found = rule_for(cause)
    return frozenset({GROUP.get(cause, "")} | ({found.group} if found else set())) - {""}


def nearest(word: str, choices: frozenset[str] | set[str]) -> str:
    """`` Did you mean 'x'?`` or nothing."""
    close = difflib.get_close_matches(word, sorted(choices), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def meaning(cause: str) -> str:
    """One line; for a rule outside the vocabulary the first sentence of its docstring."""
    if cause in MEANINGS:
        return MEANINGS[cause]
    found = rule_for(cause)
    return found.text.split("\n\n")[0].replace("\n", " ").rstrip(".") if found else ""


def text(rule: Rule) -> str:
    """The docstring with every section as a paragraph of its own, whether it is written ``What it is:`` or ``**What it is.**``."""
    return HEAD.sub(lambda m: f"\n\n**{m.group(1)}.** {(m.group(2) or '').capitalize()}", rule.text).strip()


def explain(cause: str) -> str:
    """The page of a cause as Markdown.

    Raises:
        UsageError: nothing of that name is in the catalogue.
    """
    found = rule_for(cause)
    if found is None and cause not in MEANINGS:
        raise UsageError(f"no cause is called {cause!r}.{nearest(cause, known())} Try: osler explain --list")
    if found is None:
        return f"# {cause}\n\n{MEANINGS[cause].capitalize()}.\n\nGroup: {GROUP[cause]}. There is no rule yet that looks for it.\n"
    options = "".join(f"| `{name}` | `{default!r}` |\n" for name, default in found.options.items())
    table = f"\n**Options**\n\n| option | default |\n|---|---|\n{options}" if options else ""
    return f"# {found.cause}\n\n{text(found)}\n\nGroup: {found.group}. Status: {found.status}.\n{table}"
