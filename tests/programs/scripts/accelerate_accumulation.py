r"""A sentence-pair classifier with `accelerator.accumulate`, a linear schedule, and metrics gathered for evaluation.

packages = ["accelerate", "transformers"]
ranks = 2

[[fault]]
name = "the evaluation does not call model.eval()"
old = "        model.eval()\n"
new = ""
codes = ["RCP805"]

[[fault]]
name = "the model is not given to accelerator.prepare"
old = "    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(\n        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler\n    )\n"
new = "    optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(\n        optimizer, train_dataloader, eval_dataloader, lr_scheduler\n    )\n"
codes = ["SYNC208"]
"""
import torch
from _report import report
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup


def sentence_pairs(count, seed):
    """Two halves are a paraphrase when the second holds the first's words."""
    g = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        first = torch.randint(4, 20, (5,), generator=g)
        label = int(torch.randint(0, 2, (1,), generator=g))
        second = first[torch.randperm(5, generator=g)] if label else torch.randint(20, 36, (5,), generator=g)
        ids = torch.cat([torch.tensor([1]), first, torch.tensor([2]), second, torch.tensor([2])])
        rows.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": label})
    return rows


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(42)
    config = BertConfig(vocab_size=36, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
                        max_position_embeddings=16, num_labels=2)
    model = BertForSequenceClassification(config)
    train_dataloader = DataLoader(sentence_pairs(320, 1), shuffle=True, batch_size=8)
    eval_dataloader = DataLoader(sentence_pairs(64, 2), shuffle=False, batch_size=16)
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=1e-3)
    lr_scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=4, num_training_steps=len(train_dataloader) * 3 // 2)
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    losses = []
    for epoch in range(3):
        model.train()
        for batch in train_dataloader:
            with accelerator.accumulate(model):
                output = model(**batch)
                accelerator.backward(output.loss)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            losses.append(output.loss.detach())
        model.eval()
        right = seen = 0
        for batch in eval_dataloader:
            with torch.no_grad():
                outputs = model(**batch)
            predictions, references = accelerator.gather_for_metrics((outputs.logits.argmax(dim=-1), batch["labels"]))
            right, seen = right + int((predictions == references).sum()), seen + len(references)
        accelerator.print(f"epoch {epoch}: accuracy {right / seen:.4f}")
    report([accelerator.unwrap_model(model)], [], losses)
    accelerator.end_training()


if __name__ == "__main__":
    main()
