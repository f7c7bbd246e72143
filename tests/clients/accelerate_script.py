"""A script that `accelerate launch` starts, sharded by FSDP2 or by shardkit."""

from __future__ import annotations

import argparse
import contextlib
import typing

import torch

STEPS = 4
ACCUMULATE = 2


class Script:
    """What is trained, as Accelerate's settings want it."""

    def __init__(self) -> None:
        from accelerate import Accelerator
        from torch.utils.data import DataLoader
        from zoo import ZOO, draw_tokens

        self.accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATE)
        torch.manual_seed(0)
        model = ZOO["tied_llama"].make().train()
        batches = self.accelerator.num_processes * STEPS * ACCUMULATE
        rows = draw_tokens(torch.Generator().manual_seed(1), 3 * batches)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * STEPS)
        self.model, self.optimizer, self.schedule, self.loader = self.accelerator.prepare(
            model, optimizer, schedule, DataLoader(rows, batch_size=3)
        )

    def epoch(self) -> dict[str, typing.Any]:
        """Train; return the losses, the norms of gradients, and the whole parameters on rank 0."""
        losses, norms = [], []
        for rows in self.loader:
            with self.accelerator.accumulate(self.model):
                loss = self.model(input_ids=rows, labels=rows).loss
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                    norms.append(float(norm))
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            losses.append(float(self.accelerator.reduce(loss.detach(), "mean")))
        return {
            "losses": losses,
            "norms": norms,
            "parameters": self.accelerator.get_state_dict(self.model),
            "class": type(next(self.model.parameters())).__name__,
        }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("sharder", choices=["fsdp2", "shardkit"])
    parser.add_argument("results")
    parser.add_argument("--save", help="train two epochs, and save the state after the first one")
    parser.add_argument("--load", nargs="*", default=[], help="train on from each of these states")
    arguments = parser.parse_args()
    using: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if arguments.sharder == "shardkit":
        import shardkit

        shardkit.install()
    else:
        from accelerate_runs import fsdp2

        using = fsdp2()
    with using:
        script = Script()
    epochs = []
    if arguments.save:
        epochs.append(script.epoch())
        script.accelerator.save_state(arguments.save)
        epochs.append(script.epoch())
    for state in arguments.load:
        script.accelerator.load_state(state)
        epochs.append(script.epoch())
    if script.accelerator.is_main_process:
        torch.save(epochs, arguments.results)
    script.accelerator.end_training()


if __name__ == "__main__":
    main()
