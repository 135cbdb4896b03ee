r"""A tiny GPT-2 with adapters of PEFT, trained by Trainer with an optimizer that the script makes.

packages = ["transformers", "accelerate", "peft"]
ranks = 2

[[fault]]
name = "the optimizer is made from the model before the adapters are put in"
old = "    model = get_peft_model(model, lora)\n    optimizer = make_optimizer(model)\n"
new = "    optimizer = make_optimizer(model)\n    model = get_peft_model(model, lora)\n"
codes = ["RCP803", "RCP811"]
"""
import torch
from _report import finish, report
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainingArguments, get_scheduler, set_seed


class Texts(Dataset):
    def __init__(self, count, seed):
        follow = torch.randint(0, 30, (30, 2), generator=torch.Generator().manual_seed(141))
        g = torch.Generator().manual_seed(seed)
        self.rows = []
        for _ in range(count):
            row, c = [], int(torch.randint(0, 30, (1,), generator=g))
            for choice in torch.randint(0, 2, (16,), generator=g).tolist():
                c = int(follow[c, choice])
                row.append(c)
            self.rows.append({"input_ids": torch.tensor(row), "labels": torch.tensor(row)})

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def make_optimizer(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)


def main():
    set_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=30, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    )
    lora = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.05, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)
    model = get_peft_model(model, lora)
    optimizer = make_optimizer(model)
    args = TrainingArguments(
        output_dir="out", num_train_epochs=2, per_device_train_batch_size=8, save_strategy="no", report_to=[],
        disable_tqdm=True, logging_strategy="no", use_cpu=True, ddp_backend="gloo", ddp_find_unused_parameters=False,
    )
    scheduler = get_scheduler("cosine", optimizer, 2, 40)
    trainer = Trainer(model, args, train_dataset=Texts(320, 1), optimizers=(optimizer, scheduler))
    trainer.remove_callback(PrinterCallback)  # it prints times
    trainer.train()
    report([trainer.accelerator.unwrap_model(trainer.model)], [optimizer])


if __name__ == "__main__":
    main()
    finish()
