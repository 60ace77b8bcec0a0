"""The training loop: evaluate what is due, save what is due, leave when asked, step."""

import time

import torch

from hf_vit.system.errors import UserError
from hf_vit.training.evaluate import evaluate
from hf_vit.training.inputs import Prefetcher, read_while, seed_micro_batch
from hf_vit.training.log import print_main
from hf_vit.training.optimizers import clip_gradients, is_finite, learning_rate, set_learning_rate
from hf_vit.training.run import Run


FIRST_CHECKPOINT, SECONDS_BETWEEN_CHECKPOINTS = 60, 300  # where --checkpointing_steps is not given
MOST_SKIPPED = 10  # steps that are not finite, before a run stops


def fit(run: Run) -> bool:
    """Train to the last step: True; False if a signal stopped the run, whose state is then saved.

    N steps take N + 1 rounds, so that the last evaluation and checkpoint need no second path. How a run goes on:

    1. A checkpoint is written between two steps: it holds weights, optimizers, average, scaler and counters of one step.
    2. Order, augmentation, masks and dropout are functions of (seed, epoch, step, image): no generator is saved.
    3. A round evaluates before it saves, so the checkpoint of step N knows whether step N was evaluated.
    4. A signal is answered at the end of a step, by all processes after the same one. One that comes during an evaluation ends
       it: `evaluated_step` stays behind, the state is saved, and the resumed run evaluates first.
    5. A resumed run cuts metrics.jsonl back to its checkpoint, and writes the lines after it again.
    6. After an error, a run of one process saves its last whole step too.
    """
    plan, state, signals = run.plan, run.state, run.signals
    batches = Prefetcher(run.batches.prepared(state.step))
    saved_at, stopped, checkpoint_is_due = time.monotonic(), False, False
    signals.says = "saving after this step"
    try:
        for step in range(state.step, plan.total_steps + 1):
            is_last = step == plan.total_steps
            if plan.is_evaluation_step(step) and state.evaluated_step < step and not stopped:
                stopped = not state.timed("scoring", lambda: evaluate(run))
            wants_last = is_last and plan.args.checkpointing_steps != 0
            if state.saved_step < step and (stopped or checkpoint_is_due or wants_last):
                run.save()
                saved_at = time.monotonic()
            if stopped or is_last:
                return not stopped
            stopped, checkpoint_is_due = train_step(run, batches, saved_at)
    finally:
        if not stopped or signals.in_notebook:  # a process that leaves need not wait for its workers: they end too
            batches.close()
        run.log.bar.close()
        state.clock()


def train_step(run: Run, batches: Prefetcher, saved_at: float) -> tuple[bool, bool]:
    """One optimizer step: (whether a signal came, whether a checkpoint is due), on any process."""
    plan, args, state = run.plan, run.plan.args, run.state
    began = time.monotonic()
    rate = learning_rate(state.step, plan.total_steps, plan.warmup_steps, args.learning_rate, args.lr_scheduler_type)
    set_learning_rate(state.optimizers, rate)
    sums, norm = forward_backward(run, batches)
    finite, stopped, checkpoint_is_due = sync_flags(run, sums, norm, saved_at, batches)
    if not finite:
        skip_step(run, rate)
    state.is_consistent = False
    optimizer_step(run, sums, finite)
    state.step += 1
    state.is_consistent = True
    state.seconds["step"] += time.monotonic() - began
    run.log.update(rate, norm)
    return stopped, checkpoint_is_due


def forward_backward(run: Run, batches: Prefetcher):
    """Train on the micro-batches of one step: (sums of loss, correct images and images, (3,), gradient norm, ())."""
    args, state, accelerator, task = run.plan.args, run.state, run.accelerator, run.task
    run.model.train()
    for module in run.frozen_modules:
        module.eval()  # no dropout and no drop path in what is frozen
    sums = torch.zeros(3, device=accelerator.device)
    for number in range(run.batches.accumulation):
        batch = state.timed("input", batches.__next__)
        state.epoch = batch.epoch
        seed_micro_batch(args.seed, state.step, number, accelerator.process_index)
        with accelerator.accumulate(run.model):
            loss, outputs = task.loss(run.model, batch)
            accelerator.backward(loss)
        with torch.no_grad():
            correct = task.count_correct(outputs, batch)
            count = torch.full_like(correct, len(batch.inputs))
            sums += torch.stack([loss.detach().float() * len(batch.inputs), correct, count])
    return sums, clip_gradients(accelerator, run.model, args.max_grad_norm)


def sync_flags(run: Run, sums, norm, saved_at: float, batches: Prefetcher) -> tuple[bool, bool, bool]:
    """What all processes decide together: (the step is finite, a signal came, a checkpoint is due)."""
    accelerator, state, every = run.accelerator, run.state, run.plan.args.checkpointing_steps
    if every is None:
        is_due = time.monotonic() - saved_at > (SECONDS_BETWEEN_CHECKPOINTS if state.saved_step else FIRST_CHECKPOINT)
    else:
        is_due = every > 0 and (state.step + 1) % every == 0
    scale = 1.0 if accelerator.scaler is None else accelerator.scaler.get_scale()
    finite = is_finite(sums[0], norm, scale)
    flags = torch.tensor([run.signals.received is not None, is_due and accelerator.is_main_process])
    flags = torch.cat([~finite.view(1), flags.to(finite.device, non_blocking=True)])
    # Images in memory are augmented meanwhile; others may have to be waited for, which must not delay the optimizer.
    prefetch = batches.prefetch if run.data.in_memory else lambda: None
    counts = read_while(accelerator.reduce(flags.float(), "sum"), lambda: state.timed("input", prefetch))
    return counts[0] == 0, counts[1] > 0, counts[2] > 0


def skip_step(run: Run, rate: float):
    """Log a step that is not finite; UserError after too many."""
    state = run.state
    steps = [*state.skipped_steps, state.step + 1]
    if len(steps) > MOST_SKIPPED:
        raise UserError(
            f"the loss or its gradient was not finite in steps {', '.join(map(str, steps))}, at a learning rate of {rate:.3g}: "
            "start a new run with a smaller --learning_rate"
        )
    state.skipped_steps = steps
    print_main(f"step {state.step + 1:,} is skipped: its loss or gradient is not finite")
    run.log.write(step=state.step + 1, epoch=state.epoch + 1, skipped=True, learning_rate=rate)


def optimizer_step(run: Run, sums: torch.Tensor, finite: bool):
    """Update the weights and their average; a step that is not finite leaves them alone.

    An overflow in float16 counts as finite: the scaler skips it, and average and rate go on.
    """
    state = run.state
    if finite:
        for optimizer in state.optimizers:
            optimizer.step()
        if state.ema is not None:
            state.ema.update(state.network)
        state.sums += sums
    elif run.accelerator.scaler is not None:
        run.accelerator.scaler.update()  # which the optimizer's step would have done
    for optimizer in state.optimizers:
        optimizer.zero_grad()
