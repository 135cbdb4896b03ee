"""A tiny GPT-2 trained by Trainer: warm-up, clipping, evaluation after every epoch, some texts that are mostly padding.

packages = ["transformers", "accelerate"]
ranks = 2

[[fault]]
name = "each text's loss is divided by its number of tokens, which is 0 for an empty text"
old = "keep.sum().clamp(min=1)"
new = "keep.sum()"
codes = ["NUM302"]
where = "total = total +"
"""
import torch
import torch.nn.functional as F
from _report import finish, report
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainingArguments, set_seed


class Texts(Dataset):
    """Chains of characters; every fortieth text is empty, its labels are all -100."""

    def __init__(self, count, seed):
        follow = torch.randint(0, 30, (30, 2), generator=torch.Generator().manual_seed(131))
        g = torch.Generator().manual_seed(seed)
        self.rows = []
        for n in range(count):
            row, c = [], int(torch.randint(0, 30, (1,), generator=g))
            for choice in torch.randint(0, 2, (16,), generator=g).tolist():
                c = int(follow[c, choice])
                row.append(c)
            ids = torch.tensor(row)
            self.rows.append({"input_ids": ids, "labels": torch.full((16,), -100) if n % 40 == 39 else ids.clone()})

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


class TextTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(input_ids=inputs["input_ids"])
        logits, labels = outputs.logits[:, :-1], inputs["labels"][:, 1:]
        total = logits.new_zeros(())
        for row, target in zip(logits, labels):
            keep = target != -100
            total = total + F.cross_entropy(row[keep], target[keep], reduction="sum") / keep.sum().clamp(min=1)
        loss = total / len(labels)
        return (loss, outputs) if return_outputs else loss


def main():
    set_seed(0)
    config = GPT2Config(vocab_size=30, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    args = TrainingArguments(
        output_dir="out", num_train_epochs=2, per_device_train_batch_size=8, per_device_eval_batch_size=16,
        learning_rate=2e-3, warmup_steps=4, eval_strategy="epoch", save_strategy="no", report_to=[], disable_tqdm=True,
        logging_strategy="no", use_cpu=True, ddp_backend="gloo",
    )
    trainer = TextTrainer(GPT2LMHeadModel(config), args, train_dataset=Texts(320, 1), eval_dataset=Texts(39, 2))
    trainer.remove_callback(PrinterCallback)  # it prints times
    trainer.train()
    report([trainer.accelerator.unwrap_model(trainer.model)], [trainer.optimizer])


if __name__ == "__main__":
    main()
    finish()
