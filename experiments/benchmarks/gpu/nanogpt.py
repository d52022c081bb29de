"""nanoGPT's training step, as its train.py takes it on one GPU."""

import contextlib
from collections.abc import Callable

import torch
from training import load_nanogpt

from gpu.setting import Setting


def nanogpt_steps(setting: Setting, context: int) -> Callable[[int], float]:
    """Return the compiled steps: bfloat16 by autocast, flash attention, fused AdamW, the norm clipped at 1."""
    assert setting.nanogpt
    module = load_nanogpt(setting.nanogpt)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    sizes = {name: getattr(setting, name) for name in ("n_layer", "n_head", "n_embd", "vocab_size")}
    gpt = module.GPT(module.GPTConfig(block_size=context, dropout=0.0, bias=False, **sizes)).to(device)
    optimizer = gpt.configure_optimizers(0.1, 6e-4, (0.9, 0.95), device)
    model = torch.compile(gpt)
    lower = contextlib.nullcontext() if device == "cpu" else torch.autocast(device_type=device, dtype=torch.bfloat16)
    text = torch.randint(0, setting.vocab_size, (100 * (context + 1),))

    def get_batch() -> list[torch.Tensor]:
        starts = torch.randint(len(text) - context, (setting.tokens // context,)).tolist()
        pair = [torch.stack([text[i + shift : i + shift + context] for i in starts]) for shift in (0, 1)]
        return pair if device == "cpu" else [x.pin_memory().to(device, non_blocking=True) for x in pair]

    def run(steps: int) -> float:
        x, y = get_batch()
        for _ in range(steps):
            with lower:
                _, loss = model(x, y)
            x, y = get_batch()  # while the device computes
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return run


def facts() -> dict[str, str]:
    """Return what the worker tells of itself."""
    where = "bfloat16 by autocast" if torch.cuda.is_available() else "float32, on the CPU"
    return {"said": f"torch {torch.__version__}, compiled; {where}"}
